"""Layouts of one tensor on one mesh, as the planner sees them: which axes cut a dim, in which order.

    layout [S(0), R, S(0)] of a 2-dim tensor:  cuts = (((0, 0), (2, 0)), ())      dim 0 by axis 0, then by axis 2

Axes of size 1 cut nothing and are left out. Everything here is a function of mesh shape, tensor shape and
placements: no rank's coord, and nothing that grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor.comm import padding_counts
from dtensor.cost import CostModel
from dtensor.placement import Partial, Replicate, Shard, StridedShard
from dtensor.reshard_step import Layout, Step

__all__ = ["Facts", "Path", "Space", "is_cut"]

Pieces = tuple[tuple[int, int], ...]
"""Digits of an index, major first, as (stride, size)."""
Cuts = tuple[tuple[tuple[int, int], ...], ...]
"""Per dim, the (axis, split factor) that cut it, in order; split factor 0 for a plain shard."""
Path = tuple[float, tuple[Step, ...]]
"""Seconds, and the steps that take them."""

_REPLICATE = Replicate()


def is_cut(p: object) -> bool:
    """True for shards, plain and split-factor."""
    return isinstance(p, (Shard, StridedShard))


class Facts:
    """What follows from a layout.

    Attributes:
        layout: itself.
        cuts: which axes cut each dim.
        dims: shape of the largest shard, the one at coord 0.
        nbytes: bytes of the largest shard.
        uneven: True where shards differ in size.
    """

    __slots__ = ("cuts", "dims", "layout", "nbytes", "uneven")

    def __init__(self, layout: Layout, cuts: Cuts, dims: tuple[int, ...], nbytes: int, uneven: bool) -> None:
        self.layout, self.cuts, self.dims, self.nbytes, self.uneven = layout, cuts, dims, nbytes, uneven


class Space:
    """The layouts of one tensor: sizes of shards, and what steps between layouts cost.

    Attributes:
        sizes: of the mesh axes.
        shape, itemsize: of the global tensor.
        model: gives the costs.
        launch: seconds that a collective takes at least.
        in_stages: whether pending parts may be reduced some first and the others later.
        shots, talkers, speeds: what `reshard_ways.shot`, `reshard_shot.talkers` and `reshard_ways.by_speed` found.
        wire: the dtype in which reductions travel, None for the tensor's.
    """

    __slots__ = (
        "_digits",
        "_facts",
        "_pace",
        "_seen",
        "_steps",
        "in_stages",
        "shots",
        "itemsize",
        "launch",
        "model",
        "shape",
        "sizes",
        "speeds",
        "talkers",
        "wire",
    )

    def __init__(
        self, sizes: Sequence[int], shape: Sequence[int], itemsize: int, model: CostModel,
        wire: torch.dtype | None = None, in_stages: bool = True,
    ) -> None:  # fmt: skip
        self.sizes, self.shape, self.itemsize, self.model = tuple(sizes), tuple(shape), itemsize, model
        self.wire, self.in_stages = wire, in_stages
        self.launch, self._pace = model.floor(1, 0), model.floor(0, 1 << 20) / (1 << 20)
        if model.axis_bandwidth and type(model).floor is CostModel.floor:  # of the axes that there are
            long = [a for a, k in enumerate(self.sizes) if k > 1] or [0]
            self._pace = min([model.transfer(1.0, (a,)) for a in long])
            self.launch = min([model.launch((a,)) for a in long])
        self._facts: dict[tuple[int, ...], Facts] = {}
        self._seen: dict[int, tuple[Layout, Facts]] = {}
        self._steps: dict[tuple[object, ...], Path] = {}
        self.shots: dict[tuple[Facts, Facts], Path] = {}
        self.talkers: dict[tuple[Facts, Facts], tuple[tuple[int, ...], bool]] = {}
        self.speeds: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._digits: dict[tuple[int, tuple[tuple[int, int], ...]], dict[int, Pieces] | None] = {}

    def floor(self, launches: int, nbytes: float) -> float:
        """`CostModel.floor`, which is linear, for the axes of this mesh."""
        return launches * self.launch + nbytes * self._pace

    def facts(self, layout: Layout) -> Facts:
        """What follows from `layout`: one object for equal layouts.

        Kept by the identity of the tuple, which stays alive here, and of its placements, which have a slow hash.
        """
        seen = self._seen.get(id(layout))
        if seen is not None:
            return seen[1]
        key = tuple(map(id, layout))
        found = self._facts.get(key)
        if found is None:
            lists: list[tuple[tuple[int, int], ...]] = [()] * len(self.shape)
            for axis, p in enumerate(layout):
                if self.sizes[axis] == 1:
                    continue
                if isinstance(p, Shard):
                    lists[p.dim] += ((axis, 0),)
                elif isinstance(p, StridedShard):
                    lists[p.dim] += ((axis, p.split_factor if p.split_factor > 1 else 0),)
            dims, nbytes, uneven = list(self.shape), self.itemsize, False
            for d, cuts in enumerate(lists):
                if cuts:
                    dims[d] = n = self._largest(dims[d], cuts)
                    uneven = uneven or n * self.ranks([a for a, _ in cuts]) != self.shape[d]
                nbytes *= dims[d]
            found = self._facts[key] = Facts(layout, tuple(lists), tuple(dims), nbytes, uneven)
        self._seen[id(layout)] = layout, found
        return found

    def cuts(self, layout: Layout) -> Cuts:
        """Which axes cut each dim."""
        return self.facts(layout).cuts

    def dims(self, layout: Layout) -> tuple[int, ...]:
        """Shape of the largest shard: the one at coord 0."""
        return self.facts(layout).dims

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
        return self.facts(layout).nbytes

    def digits(self, n: int, cuts: tuple[tuple[int, int], ...]) -> dict[int, Pieces] | None:
        """What each axis fixes of the index of a dim of `n`: its digits. None where the cuts leave uneven shards.

            16 by axis 0 (2), axis 1 (4)             index = 8 * a + 2 * b + c         {0: ((8, 2),), 1: ((2, 4),)}
            16 by axis 1 (4) with split factor 2     index = 8 * a + 2 * b + c         {1: ((2, 4),)}

        So a cut that skips what another axis would have cut first is seen to be the same cut.
        """
        key = (n, cuts)
        if key in self._digits:
            return self._digits[key]
        free: Pieces | None = ((1, n),)
        out: dict[int, Pieces] | None = {}
        for axis, factor in cuts:
            split = _split_digits(free or (), factor or 1)
            rest = None if split is None else _split_digits(split[1], self.sizes[axis])
            if split is None or rest is None:
                out = None
                break
            assert out is not None
            out[axis] = rest[0]
            free = _joined(split[0] + rest[1])
        self._digits[key] = out
        return out

    def kept(self, have_all: Facts, want_all: Facts) -> int:
        """Bytes of the second layout's shard that the rank lacking most holds in the first: none where cuts cross.

        Where the axes that only cut the first have no say in the second, the rank of the largest shard may hold least.
        """
        n = self.itemsize
        cut = {axis for cuts in want_all.cuts for axis, _ in cuts}
        for size, s, t, one, other in zip(self.shape, have_all.cuts, want_all.cuts, have_all.dims, want_all.dims):
            if not s or not t:
                if s and not any(axis in cut for axis, _ in s):
                    one = self._smallest(size, s, 0)
                n *= min(one, other)
                continue
            have, want = self.digits(size, s), self.digits(size, t)
            if have is not None and want is not None:
                m = one
                for axis, pieces in want.items():
                    if have.get(axis) == pieces:
                        continue
                    if any(_cross(pieces, p) for p in have.values()):
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

    def _smallest(self, n: int, cuts: tuple[tuple[int, int], ...], largest: int = 0) -> int:
        """A dim of the last shard, of the first one along the `largest` first cuts. Split factors count as plain."""
        for i, (axis, _) in enumerate(cuts):
            k = self.sizes[axis]
            n = -(-n // k) if i < largest else max(n - (k - 1) * -(-n // k), 0)
        return n

    def ranks(self, axes: Sequence[int]) -> int:
        """Positions on `axes` together."""
        k = 1
        for a in axes:
            k *= self.sizes[a]
        return k

    def step(self, kind: str, axes: tuple[int, ...], src: Layout, dst: Layout) -> Path:
        """A step with the bytes that the rank receives which receives most, and its cost."""
        return self.path(kind, axes, self.facts(src), self.facts(dst))

    def path(self, kind: str, axes: tuple[int, ...], have: Facts, want: Facts) -> Path:
        """`step`, between layouts of which the facts are at hand."""
        key = kind, axes, have, want
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._step(*key)
        return found

    def _step(self, kind: str, axes: tuple[int, ...], have: Facts, want: Facts) -> Path:
        src, dst = have.layout, want.layout
        k, model = self.ranks(axes), self.model
        if kind == "all_gather":
            n = have.nbytes * (k - 1)
            if have.uneven:
                exact = want.nbytes - self.kept(have, want)
                n = exact if padding_counts(n, exact) else n
            cost = model.all_gather(k, n / (k - 1), axes)
        elif kind == "all_to_all":
            n = want.nbytes - self.kept(have, want)
            cost = model.all_to_all(k, n * k / (k - 1), axes)
        elif kind == "all_to_all_reduce":
            whole = tuple(_REPLICATE if isinstance(p, Partial) and p is not q else p for p, q in zip(src, dst))
            parts = self.ranks([a for a in axes if whole[a] is not src[a]])
            n = self._carried(want.nbytes * parts - self.kept(self.facts(whole), want), self.itemsize)
            cost = model.all_to_all(k, n * k / (k - 1), axes) + model.local_copy(n) + parts * model.hop
        elif kind == "reduce_scatter":
            n = self._carried(self.nbytes(tuple([p if a in axes else q for a, (p, q) in enumerate(zip(src, dst))])))
            cost, n = model.reduce_scatter(k, n, axes), n * (k - 1) // k
        elif kind == "all_reduce":
            n = self._carried(have.nbytes)
            cost, n = model.all_reduce(k, n, axes), 2 * n * (k - 1) // k
        else:  # a slice is a view, copied only where nothing follows
            n = want.nbytes
            cost = 0.0 if kind == "slice" else model.local_copy(n)
        wire = self.wire if kind in ("all_reduce", "reduce_scatter", "all_to_all_reduce") else None
        return cost, (Step(kind, axes, src, dst, n, wire=wire),)

    def spread_step(self, axes: tuple[int, ...], src: Layout, dst: Layout, nbytes: int, passes: int) -> Path:
        """A spread_reduce of so many all-to-alls, in which the rank that receives most receives `nbytes`.

        They follow each other, and no rank need receive much in all of them: the last ones bring what is wanted.
        """
        k, model = self.ranks(axes), self.model
        n, wanted = self._carried(nbytes), self._carried(self.nbytes(dst))
        in_turn = max(n, (n - wanted) + (passes - 1) * wanted)
        launch = model.all_to_all(k, 0, axes)
        cost = passes * launch + model.all_to_all(k, in_turn * k / (k - 1), axes) - launch + model.local_copy(n)
        return cost, (Step("spread_reduce", axes, src, dst, n, wire=self.wire, passes=passes),)

    def _carried(self, nbytes: int, most: int = 16) -> int:
        """`nbytes` of the tensor as a reduction sends them, in items of at most `most` bytes."""
        return nbytes if self.wire is None else nbytes // self.itemsize * min(self.wire.itemsize, most)

    def extends(self, src: Layout, dst: Layout) -> bool:
        """True when every rank's shard of `dst` lies inside its shard of `src`: the cuts of `src` come first."""
        return all(t[: len(s)] == s for s, t in zip(self.cuts(src), self.cuts(dst)))


def _split_digits(free: Pieces, n: int) -> tuple[Pieces, Pieces] | None:
    """The major digits of an index that together count to `n`, and the others; None where they do not."""
    major: list[tuple[int, int]] = []
    for i, (stride, size) in enumerate(free):
        if n == 1:
            return tuple(major), free[i:]
        if n % size == 0:
            major.append((stride, size))
            n //= size
        elif size % n == 0:
            major.append((stride * (size // n), n))
            return tuple(major), ((stride, size // n), *free[i + 1 :])
        else:
            return None
    return (tuple(major), ()) if n == 1 else None


def _joined(pieces: Pieces) -> Pieces:
    """The same digits, neighbours as one."""
    out: list[tuple[int, int]] = []
    for stride, size in pieces:
        if out and out[-1][0] == stride * size:
            out[-1] = (stride, out[-1][1] * size)
        elif size > 1:
            out.append((stride, size))
    return tuple(out)


def _cross(a: Pieces, b: Pieces) -> bool:
    """True where two sets of digits have something in common."""
    return any(s < t * m and t < s * n for s, n in a for t, m in b)
