"""Layouts of one tensor on one mesh, as the planner sees them: which axes shard a dim, in which order.

    layout [S(0), R, S(0)] of a 2-dim tensor:  splits = (((0, 0), (2, 0)), ())      dim 0 by axis 0, then by axis 2

Axes of size 1 split nothing and are left out. Everything here is a function of mesh shape, tensor shape and
placements: no rank's coord, and nothing that grows with the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dtensor.comm.communicator import padding_counts
from dtensor.intervals import chunk_size, share_of
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.redistribute.cost_model import CostModel, links_of
from dtensor.redistribute.planner.digits import Pieces, cross, digits
from dtensor.redistribute.step import Layout, Step

__all__ = ["Facts", "Path", "Space", "is_sharded"]

Splits = tuple[tuple[tuple[int, int], ...], ...]
"""Per dim, the (axis, split factor) that shard it, in order; split factor 0 for a plain shard."""
Path = tuple[float, tuple[Step, ...]]
"""Seconds, and the steps that take them."""

_REPLICATE = Replicate()
_CARRIED = frozenset({"all_reduce", "reduce_scatter", "all_to_all_reduce"})


def is_sharded(p: object) -> bool:
    """True for shards, plain and split-factor."""
    return isinstance(p, (Shard, StridedShard))


class Facts:
    """A layout and what follows from it. One object a layout of a `Space`, so that equality is identity.

    Attributes:
        layout: itself.
        splits: which axes shard each dim.
        dims: shape of the largest shard, the one at coord 0.
        nbytes: bytes of the largest shard.
        uneven: True where shards differ in size.
        dim_of: per axis, the dim that it shards, -1 where it shards none.
        pending: the Partial axes of more than one position.
    """

    __slots__ = ("splits", "dim_of", "dims", "layout", "nbytes", "pending", "uneven")

    def __init__(
        self, layout: Layout, splits: Splits, dims: tuple[int, ...], nbytes: int, uneven: bool,
        dim_of: tuple[int, ...], pending: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.layout, self.splits, self.dims, self.nbytes, self.uneven = layout, splits, dims, nbytes, uneven
        self.dim_of, self.pending = dim_of, pending


class Space:
    """The layouts of one tensor: sizes of shards, and what steps between layouts cost.

    Attributes:
        sizes: of the mesh axes.
        shape, itemsize, nbytes_of_all: of the global tensor.
        model, by_seconds: gives the costs, and whether seconds alone decide.
        links: what collectives over some axes cost.
        in_stages: whether pending parts may be reduced some first and the others later.
        shots, moving_axes: what `candidates.shot` and `single_collective.moving_axes` found.
        wire: the dtype in which reductions travel, None for the tensor's.
    """

    __slots__ = (
        "_digits",
        "_facts",
        "_steps",
        "by_seconds",
        "in_stages",
        "itemsize",
        "links",
        "model",
        "nbytes_of_all",
        "shape",
        "shots",
        "sizes",
        "moving_axes",
        "wire",
    )

    def __init__(
        self, sizes: Sequence[int], shape: Sequence[int], itemsize: int, model: CostModel,
        wire: torch.dtype | None = None, in_stages: bool = True,
    ) -> None:  # fmt: skip
        self.sizes, self.shape, self.itemsize, self.model = tuple(sizes), tuple(shape), itemsize, model
        self.wire, self.in_stages, self.by_seconds = wire, in_stages, model.by_seconds
        self.nbytes_of_all = itemsize * math.prod(self.shape)
        self.links = links_of(model, self.sizes)
        self._facts: dict[tuple[int, ...], Facts] = {}
        self._steps: dict[tuple[object, ...], Path] = {}
        self.shots: dict[tuple[Facts, Facts], Path] = {}
        self.moving_axes: dict[tuple[Facts, Facts], tuple[tuple[int, ...], bool]] = {}
        self._digits: dict[tuple[int, tuple[tuple[int, int], ...]], dict[int, Pieces] | None] = {}

    def floor(self, launches: int, nbytes: float) -> float:
        """Seconds that no plan of `launches` collectives which receives `nbytes` takes less than. Linear in both."""
        return launches * self.links.launch + nbytes * self.links.pace

    def facts(self, layout: Layout) -> Facts:
        """What follows from `layout`: one object for equal layouts.

        Kept by the identity of its placements, which have a slow hash; the layout, kept too, keeps them alive.
        """
        key = tuple(map(id, layout))
        found = self._facts.get(key)
        if found is None:
            found = self._facts[key] = self._new(layout)
        return found

    def _new(self, layout: Layout) -> Facts:
        sizes, shape = self.sizes, self.shape
        splits: list[tuple[tuple[int, int], ...]] = [()] * len(shape)
        dim_of = [-1] * len(layout)
        dims, uneven = list(shape), False
        pending: tuple[int, ...] = ()
        for axis, p in enumerate(layout):
            k = sizes[axis]
            if isinstance(p, Shard):
                dim_of[axis] = d = p.dim
                if k > 1:
                    splits[d] += ((axis, 0),)
                    n = dims[d]
                    dims[d] = chunk_size(n, k)
                    uneven = uneven or n % k != 0
            elif isinstance(p, StridedShard):
                dim_of[axis] = d = p.dim
                if k > 1:
                    factor = p.split_factor
                    splits[d] += ((axis, factor if factor > 1 else 0),)
                    n = dims[d]
                    dims[d] = share_of(n, k, 0, factor)
                    uneven = uneven or dims[d] * k != n
            elif k > 1 and isinstance(p, Partial):
                pending += (axis,)
        nbytes = self.itemsize
        for n in dims:
            nbytes *= n
        return Facts(layout, tuple(splits), tuple(dims), nbytes, uneven, tuple(dim_of), pending)

    def put(self, facts: Facts, axes: Sequence[int], p: Placement) -> Facts:
        """The layout of `facts` with `p` on `axes`."""
        return self.facts(tuple([p if a in axes else q for a, q in enumerate(facts.layout)]))

    def put_from(self, facts: Facts, axes: Sequence[int], other: Facts) -> Facts:
        """The layout of `facts` with the placements of `other` on `axes`."""
        return self.facts(tuple([q if a in axes else p for a, (p, q) in enumerate(zip(facts.layout, other.layout))]))

    def digits(self, n: int, splits: tuple[tuple[int, int], ...]) -> dict[int, Pieces] | None:
        """`digits` on this mesh."""
        key = (n, splits)
        if key in self._digits:
            return self._digits[key]
        found = self._digits[key] = digits(n, splits, self.sizes)
        return found

    def kept(self, have_all: Facts, want_all: Facts) -> int:
        """Bytes of the second layout's shard that the rank lacking most holds in the first: none where splits cross.

        Where axes that only split the first have no say in the second, the rank of the largest shard may hold least.
        """
        n = self.itemsize
        cut = {axis for splits in want_all.splits for axis, _ in splits}
        for size, s, t, one, other in zip(self.shape, have_all.splits, want_all.splits, have_all.dims, want_all.dims):
            if not s or not t:
                if s and not any(axis in cut for axis, _ in s):
                    one = self._smallest(size, s, 0)
                n *= min(one, other)
                continue
            if s == t:
                n *= one
                continue
            have, want = self.digits(size, s), self.digits(size, t)
            if have is not None and want is not None:
                m = one
                for axis, pieces in want.items():
                    if have.get(axis) == pieces:
                        continue
                    if any(cross(pieces, p) for p in have.values()):
                        return 0
                    for _, k in pieces:
                        m //= k
                n *= m
                continue
            if s[: len(t)] != t[: len(s)]:
                return 0
            if len(s) > len(t) and not any(axis in cut for axis, _ in s[len(t) :]):
                one = self._smallest(size, s, len(t))
            n *= min(one, other)
        return n

    def _smallest(self, n: int, splits: tuple[tuple[int, int], ...], largest: int = 0) -> int:
        """A dim of the last shard, of the first one along the `largest` first splits. Split factors count as plain."""
        for i, (axis, _) in enumerate(splits):
            k = self.sizes[axis]
            n = share_of(n, k, 0 if i < largest else k - 1)
        return n

    def ranks(self, axes: Sequence[int]) -> int:
        """Positions on `axes` together."""
        k = 1
        for a in axes:
            k *= self.sizes[a]
        return k

    def step(self, kind: str, axes: tuple[int, ...], have: Facts, want: Facts) -> Path:
        """A step with the bytes that the rank receives which receives most, and its cost."""
        key = kind, axes, have, want
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._step(kind, axes, have, want)
        return found

    def _step(self, kind: str, axes: tuple[int, ...], have: Facts, want: Facts) -> Path:
        if kind == "all_to_all":
            n = want.nbytes - self.kept(have, want)
            cost = self.links.over(axes).all_to_all(n)
        elif kind == "all_gather":
            link = self.links.over(axes)
            n = have.nbytes * (link.size - 1)
            if have.uneven:
                exact = want.nbytes - self.kept(have, want)
                n = exact if padding_counts(n, exact) else n
            cost = link.all_gather(n)
        elif kind == "all_reduce":
            link = self.links.over(axes)
            n = self.carried(have.nbytes)
            cost, n = link.all_reduce(n), 2 * n * (link.size - 1) // link.size
        elif kind == "reduce_scatter":
            link = self.links.over(axes)
            n = self.carried(self.put_from(want, axes, have).nbytes)
            cost, n = link.reduce_scatter(n), n * (link.size - 1) // link.size
        elif kind == "all_to_all_reduce":
            reduced = [a for a in have.pending if have.layout[a] is not want.layout[a]]
            whole, parts = self.put(have, reduced, _REPLICATE), self.ranks(reduced)
            n = self.carried(want.nbytes * parts - self.kept(whole, want), self.itemsize)
            cost = self.links.over(axes).all_to_all(n) + self.model.local_copy(n) + parts * self.model.kernel
        else:  # a slice is a view, copied only where nothing follows
            n = want.nbytes
            cost = 0.0 if kind == "slice" else self.model.local_copy(n)
        wire = self.wire if kind in _CARRIED else None
        return cost, (Step(kind, axes, have.layout, want.layout, n, 1.0, wire),)

    def spread_step(self, axes: tuple[int, ...], have: Facts, want: Facts, nbytes: int, passes: int) -> Path:
        """A spread_reduce of so many all-to-alls, in which the rank that receives most receives `nbytes`.

        They follow each other, and no rank need receive much in all of them: the last ones bring what is wanted.
        """
        link = self.links.over(axes)
        n, wanted = self.carried(nbytes), self.carried(want.nbytes)
        in_turn = max(n, (n - wanted) + (passes - 1) * wanted)
        cost = (passes - 1) * link.exchange + link.all_to_all(in_turn) + self.model.local_copy(n)
        return cost, (Step("spread_reduce", axes, have.layout, want.layout, n, 1.0, self.wire, passes),)

    def carried(self, nbytes: int, most: int = 16) -> int:
        """`nbytes` of the tensor as a reduction sends them, in items of at most `most` bytes."""
        return nbytes if self.wire is None else nbytes // self.itemsize * min(self.wire.itemsize, most)

    def extends(self, have: Facts, want: Facts) -> bool:
        """True when every rank's shard of `want` lies inside its shard of `have`, whose splits come first."""
        return all(t[: len(s)] == s for s, t in zip(have.splits, want.splits))
