"""Who holds what: the shards of a layout, rank by rank of a group, and which part of one is wanted by another.

A shard is the product of its dims' intervals (`dtensor.intervals`). The part that two shards share is a product too, so
all is worked out dim by dim. A dim is sharded by few of the group's axes, so there are few different runs of it; which
of them a rank has is a matter of its positions on those axes alone:

    S(0), S(1) on (2, 4)      dim 0: a a a a b b b b     dim 1: p q r s p q r s      (of the 8 ranks, in order)

What a step moves between this rank's local tensor and the members of a group is a `Parts`: send regions and receive
regions. Where they tile the tensor evenly they are given in closed form, and no list of them is made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache

from dtensor.intervals import (
    Region,
    Runs,
    Split,
    Tiling,
    common_runs,
    dim_intervals,
    region_shape,
    region_size,
    split_runs,
)
from dtensor.placement import Shard, StridedShard
from dtensor.redistribute.step import Layout
from dtensor.spec import Spec

__all__ = ["Coord", "Parts", "by_dim", "held_along", "holdings", "members", "parts_along", "shared_along"]

Coord = tuple[int, ...]

Splits = tuple[Split, ...]
"""What shards a dim, in order. A position -1 - j stands for every one on the j-th axis of a group."""


def holdings(spec: Spec, layout: Layout, coord: Sequence[int]) -> Region:
    """Per dim, the intervals of the global dim that the rank at `coord` holds of `spec`'s tensor in `layout`."""
    return tuple(map(dim_intervals, spec.shape, _cuts(spec, layout, coord)))


def held_along(spec: Spec, layout: Layout, axes: Sequence[int], coord: Coord) -> list[Region]:
    """`holdings` of the `members` along `axes` through `coord`."""
    return _by_rank(by_dim(spec, layout, axes, coord), [spec.mesh.shape[a] for a in axes])


def by_dim(spec: Spec, layout: Layout, axes: Sequence[int], coord: Coord) -> list[tuple[Runs, ...]]:
    """Per dim the runs of each of the `members` along `axes` through `coord`: `held_along`, transposed."""
    sizes, where = _group(spec, axes, coord)
    return [_runs_of(n, splits, sizes) for n, splits in zip(spec.shape, _cuts(spec, layout, where))]


def shared_along(spec: Spec, mine: Layout, theirs: Layout, axes: Sequence[int], coord: Coord) -> list[Region]:
    """What the rank at `coord` holds in `mine` of what each of the `members` along `axes` holds in `theirs`.

    As regions of what the rank at `coord` holds.
    """
    sizes, where = _group(spec, axes, coord)
    both = zip(spec.shape, _cuts(spec, mine, coord), _cuts(spec, theirs, where))
    return _by_rank([_shared_runs(n, own, splits, sizes) for n, own, splits in both], sizes)


def members(spec: Spec, axes: Sequence[int], coord: Coord) -> Iterator[Coord]:
    """The coords along `axes` (flattened row-major) through `coord`, by position."""
    at = list(coord)
    for positions in itertools.product(*[range(spec.mesh.shape[a]) for a in axes]):
        for a, position in zip(axes, positions):
            at[a] = position
        yield tuple(at)


class Parts:
    """Regions of a tensor of `shape`, one for each position of a group; some may be empty.

    Attributes:
        shape: of the tensor.
        count: positions.
        tiling: the regions in closed form, where they are of one shape and tile the tensor; else None.
    """

    def __init__(
        self, shape: Sequence[int], count: int, regions: Callable[[], list[Region]], tiling: Tiling | None = None
    ) -> None:
        self.shape, self.count, self.tiling, self._make = tuple(shape), count, tiling, regions

    @cached_property
    def regions(self) -> list[Region]:
        """The regions, in order."""
        return self._make()

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of each."""
        return [*map(region_shape, self.regions)]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each."""
        if self.tiling is not None:
            return [math.prod(self.shape) // self.count] * self.count
        return [*map(region_size, self.regions)]

    @property
    def even(self) -> bool:
        """True where all have one shape."""
        return self.tiling is not None or len({*self.shapes}) == 1

    @cached_property
    def filled(self) -> list[int]:
        """Positions whose regions have elements, in the order in which they lie in the tensor."""
        return sorted([i for i, n in enumerate(self.sizes) if n], key=self.regions.__getitem__)

    @property
    def single(self) -> int | None:
        """The position whose region is all there is; None where there are several or none."""
        return self.filled[0] if self.tiling is None and len(self.filled) == 1 else None

    @cached_property
    def dim(self) -> int | None:
        """The dim along which the regions lie one behind the other and are all of the tensor; None without one."""
        return _adjacent([self.regions[i] for i in self.filled], self.shape)

    @cached_property
    def in_order(self) -> bool:
        """True where the tensor is the regions, one after the other, as they lie in memory."""
        if self.tiling is not None:
            return self.tiling.in_order
        ahead = () if self.dim is None else self.shape[: self.dim]
        return self.dim is not None and self.filled == sorted(self.filled) and all(n == 1 for n in ahead)

    def without(self, position: int) -> Parts:
        """The same with nothing at `position`."""
        nothing: Region = ((),) * max(len(self.shape), 1)
        return Parts(
            self.shape, self.count, lambda: [nothing if i == position else r for i, r in enumerate(self.regions)]
        )


def parts_along(spec: Spec, mine: Layout, theirs: Layout, axes: Sequence[int], coord: Coord) -> Parts:
    """`shared_along` as parts of this rank's local tensor."""
    sizes, where = _group(spec, axes, coord)
    shape, levels = [], []
    for n, own, other in zip(spec.shape, _cuts(spec, mine, coord), _cuts(spec, theirs, where)):
        shape.append(sum([length for _, length in dim_intervals(n, own)]))
        levels.append(_cut_further(own, other))
    tiling = None if None in levels else Tiling.of(shape, [level or () for level in levels], sizes)
    return Parts(shape, math.prod(sizes), lambda: shared_along(spec, mine, theirs, axes, coord), tiling)


def _cut_further(own: Splits, other: Splits) -> list[tuple[int, int]] | None:
    """The axes of the group by which `other` shards what `own` leaves: (number of the axis, size); None: otherwise."""
    if own[: len(other)] == other:
        return []
    if other[: len(own)] != own or any(r >= 0 or factor > 1 for _, r, factor in other[len(own) :]):
        return None
    return [(-1 - r, k) for k, r, _ in other[len(own) :]]


def _adjacent(regions: Sequence[Region], shape: Sequence[int]) -> int | None:
    """The dim along which `regions` lie one behind the other, in order, and are all of `shape`."""
    if not shape or not regions:
        return None
    columns = list(zip(*regions))
    differ = [d for d, (runs, n) in enumerate(zip(columns, shape)) if runs.count(((0, n),)) < len(runs)]
    if len(differ) > 1:
        return None
    dim, at = differ[0] if differ else 0, 0
    for runs in columns[dim]:
        if len(runs) != 1 or runs[0][0] != at:
            return None
        at += runs[0][1]
    return dim if at == shape[dim] else None


def _cuts(spec: Spec, layout: Layout, where: Sequence[int]) -> list[Splits]:
    """Per dim what shards it, for a rank at the positions `where`, of which negative ones are as in `Splits`."""
    splits: list[Splits] = [()] * len(spec.shape)
    for p, k, r in zip(layout, spec.mesh.shape, where):
        if isinstance(p, Shard):
            splits[p.dim] += ((k, r, 0),)
        elif isinstance(p, StridedShard):
            splits[p.dim] += ((k, r, p.split_factor),)
    return splits


def _group(spec: Spec, axes: Sequence[int], coord: Coord) -> tuple[tuple[int, ...], list[int]]:
    """Positions on each of `axes`, which ascend; `coord` with the marks of `Splits` for them."""
    if any(a >= b for a, b in itertools.pairwise(axes)):
        raise ValueError(f"the axes of a group must ascend, got {tuple(axes)}")
    where = [*coord]
    for j, a in enumerate(axes):
        where[a] = -1 - j
    return tuple([spec.mesh.shape[a] for a in axes]), where


def _by_rank(dims: list[tuple[Runs, ...]], sizes: Sequence[int]) -> list[Region]:
    """The regions of a group's ranks, of which each dim's runs are given rank by rank."""
    return list(zip(*dims)) if dims else [()] * math.prod(sizes)


@lru_cache(maxsize=8192)
def _runs_of(size: int, splits: Splits, sizes: tuple[int, ...]) -> tuple[Runs, ...]:
    """The runs of a dim of `size` that each rank of a group holds; `sizes` are those of the group's axes.

    Those axes sharded in the order in which they are in the group.
    """
    found: list[Runs] = [((0, size),) if size else ()]
    axis = 0  # the positions on the axes before it have been told apart
    for k, r, factor in splits:
        if r >= 0:
            found = [split_runs(runs, k, r, factor) for runs in found]
            continue
        same = math.prod(sizes[axis : -1 - r])
        found = [split_runs(runs, k, i, factor) for runs in found for _ in range(same) for i in range(k)]
        axis = -r
    same = math.prod(sizes[axis:])
    return tuple([runs for runs in found for _ in range(same)] if same > 1 else found)


@lru_cache(maxsize=8192)
def _shared_runs(size: int, mine: Splits, theirs: Splits, sizes: tuple[int, ...]) -> tuple[Runs, ...]:
    """As `_runs_of` for `theirs`: what of it is left after the splits `mine`, as runs of what those leave."""
    others = _runs_of(size, theirs, sizes)
    if not mine:
        return others
    own = dim_intervals(size, mine)
    found = {runs: common_runs(own, runs)[0] for runs in {*others}}
    return tuple([found[runs] for runs in others])
