"""Layouts of one tensor on one mesh, as the planner sees them: which axes cut a dim, in which order.

    layout [S(0), R, S(0)] of a 2-dim tensor:  cuts = (((0, 0), (2, 0)), ())      dim 0 by axis 0, then by axis 2

Axes of size 1 cut nothing and are left out. Everything here is a function of mesh shape, tensor shape and
placements: no rank's coord, and nothing that grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtensor.cost import CostModel
from dtensor.placement import Shard, StridedShard
from dtensor.reshard_step import Layout, Step

__all__ = ["Path", "Space", "is_cut", "one_shot"]

Cuts = tuple[tuple[tuple[int, int], ...], ...]
"""Per dim, the (axis, split factor) that cut it, in order; split factor 0 for a plain shard."""
Path = tuple[float, tuple[Step, ...]]
"""Seconds, and the steps that take them."""

_EVEN = 1.05
"""Shards of several axes are gathered up to this many times the bytes that are wanted."""


def is_cut(p: object) -> bool:
    """True for shards, plain and split-factor."""
    return isinstance(p, (Shard, StridedShard))


class Space:
    """The layouts of one tensor: sizes of shards, and what steps between layouts cost.

    Attributes:
        sizes: of the mesh axes.
        shape, itemsize: of the global tensor.
        model: gives the costs.
    """

    __slots__ = ("_cuts", "_dims", "itemsize", "model", "shape", "sizes")

    def __init__(self, sizes: Sequence[int], shape: Sequence[int], itemsize: int, model: CostModel) -> None:
        self.sizes, self.shape, self.itemsize, self.model = tuple(sizes), tuple(shape), itemsize, model
        self._cuts: dict[Layout, Cuts] = {}
        self._dims: dict[Layout, tuple[int, ...]] = {}

    def cuts(self, layout: Layout) -> Cuts:
        """Which axes cut each dim."""
        found = self._cuts.get(layout)
        if found is None:
            lists: list[tuple[tuple[int, int], ...]] = [()] * len(self.shape)
            for axis, p in enumerate(layout):
                if self.sizes[axis] == 1:
                    continue
                if isinstance(p, Shard):
                    lists[p.dim] += ((axis, 0),)
                elif isinstance(p, StridedShard):
                    lists[p.dim] += ((axis, p.split_factor if p.split_factor > 1 else 0),)
            found = self._cuts[layout] = tuple(lists)
        return found

    def dims(self, layout: Layout) -> tuple[int, ...]:
        """Shape of the largest shard: the one at coord 0."""
        found = self._dims.get(layout)
        if found is None:
            found = self._dims[layout] = tuple(map(self._largest, self.shape, self.cuts(layout)))
        return found

    def _largest(self, n: int, cuts: tuple[tuple[int, int], ...]) -> int:
        for axis, factor in cuts:
            k = self.sizes[axis]
            if factor and n:
                outer = -(-n // factor)
                n = n // outer * -(-outer // k) + -(-(n % outer) // k)
            else:
                n = -(-n // k)
        return n

    def nbytes(self, layout: Layout) -> int:
        """Bytes of the largest shard."""
        n = self.itemsize
        for size in self.dims(layout):
            n *= size
        return n

    def ranks(self, axes: Sequence[int]) -> int:
        """Positions on `axes` together."""
        k = 1
        for a in axes:
            k *= self.sizes[a]
        return k

    def step(self, kind: str, axes: tuple[int, ...], src: Layout, dst: Layout) -> Path:
        """A step with its bytes and its cost."""
        k, model = self.ranks(axes), self.model
        if kind == "all_gather":
            n = self.nbytes(src)
            cost, n = model.all_gather(k, n, axes), n * (k - 1)
        elif kind == "all_to_all":
            n = self.nbytes(dst)
            cost, n = model.all_to_all(k, n, axes), n * (k - 1) // k
        elif kind == "reduce_scatter":
            n = self.nbytes(dst)
            cost, n = model.reduce_scatter(k, n * k, axes), n * (k - 1)
        elif kind == "all_reduce":
            n = self.nbytes(src)
            cost, n = model.all_reduce(k, n, axes), 2 * n * (k - 1) // k
        else:
            n = self.nbytes(dst)
            cost = model.local_copy(n)
        return cost, (Step(kind, axes, src, dst, n),)

    def extends(self, src: Layout, dst: Layout) -> bool:
        """True when every rank's shard of `dst` lies inside its shard of `src`: the cuts of `src` come first."""
        return all(t[: len(s)] == s for s, t in zip(self.cuts(src), self.cuts(dst)))


def one_shot(space: Space, src: Layout, dst: Layout) -> Path:
    """At most one collective (and a slice) between layouts whose Partial axes agree.

    The axes `over` that must communicate follow from the cuts alone. Where the cuts of a dim begin alike in
    `src` and `dst`, these axes keep apart what they kept apart; every other axis that cuts `src` has data
    that ranks elsewhere on it want. Axes that only cut `dst` need none: each position takes its part.
    Within the ranks along `over` the shards of `src` are disjoint and together hold all that any of them
    wants, so each element has one source, and every rank receives just what it lacks.

        [S(0), R] -> [R, S(0)]       over = {0}: each takes its part of the axis-0 row
        [S(0), S(0)] -> [S(0), S(1)] over = {1}: axis 0 comes first in both
        [S(0), S(0)] -> [R, S(0)]    over = {0, 1}

    Input: layouts with the same Partial axes. Returns: no steps where the layouts cut alike; a slice where
    `over` is empty; an all-gather (after a slice) where all ranks along `over` want all that they hold together,
    unless shards are so uneven that this, which sends the largest size, costs more (on one axis: by a launch) or
    moves more (on several axes); else an all-to-all with split sizes.
    """
    over: set[int] = set()
    pure = True
    cut_src, cut_dst = space.cuts(src), space.cuts(dst)
    for s, t in zip(cut_src, cut_dst):
        same = 0
        for one, other in zip(s, t):
            if one != other:
                break
            same += 1
        if same < len(s):
            over.update(axis for axis, _ in s[same:])
            pure = pure and same == len(t)
    if not over:
        if cut_src == cut_dst:
            return 0.0, () if src == dst else (Step("keep", (), src, dst),)
        return space.step("slice", tuple(a for a, p in enumerate(src) if p is not dst[a]), src, dst)
    axes = tuple(sorted(over))
    if pure and not any(is_cut(dst[a]) for a in axes):
        mid = tuple(p if a in over else dst[a] for a, p in enumerate(src))
        cost, first = (0.0, ()) if space.cuts(mid) == cut_src else one_shot(space, src, mid)
        gather, second = space.step("all_gather", axes, mid if first else src, dst)
        exchange, third = space.step("all_to_all", axes, src, dst)
        grace = space.model.floor(1, 0) if len(axes) == 1 else 0.0
        if cost + gather > exchange + grace or (len(axes) > 1 and second[0].nbytes > _EVEN * third[0].nbytes):
            return exchange, third
        return cost + gather, first + second
    return space.step("all_to_all", axes, src, dst)
