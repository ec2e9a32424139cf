"""Set arithmetic on shards: which part of what one rank holds is wanted by another, and where it lies.

A shard is the product of its dims' intervals (`Spec.intervals_of`). The part that two shards share is a
product too, so it is described dim by dim:

    have [0,4)      want [2,6)         common: global [2,4) = elements [2,4) of have = elements [0,2) of want

A `Region` says, per dim, which runs of a local tensor's elements are meant.

What the ranks of a group hold is worked out dim by dim as well. A dim is cut by few of the group's axes, so there are
few different runs of it; which of them a rank has is a matter of its positions on those axes alone:

    S(0), S(1) on (2, 4)      dim 0: a a a a b b b b     dim 1: p q r s p q r s      (of the 8 ranks, in order)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from dtensor.placement import Shard, StridedShard
from dtensor.redistribute.step import Layout, Step
from dtensor.spec import Cut, Interval, Spec, cut_runs, dim_intervals

__all__ = [
    "Coord", "Region", "Runs", "by_dim", "common", "held_along", "holdings", "members", "received", "region_shape",
    "region_size", "shared_along",
]  # fmt: skip

Coord = tuple[int, ...]
Runs = tuple[Interval, ...]
Region = tuple[Runs, ...]
"""Per dim, the start and length of runs of a local tensor, ascending; () where nothing is meant."""


Cuts = tuple[Cut, ...]
"""What cuts a dim, in order. A position -1 - j stands for every one on the j-th axis of a group."""


def holdings(spec: Spec, layout: Layout, coord: Sequence[int]) -> Region:
    """Per dim, the intervals of the global dim that the rank at `coord` holds of `spec`'s tensor in `layout`."""
    return tuple(map(dim_intervals, spec.shape, _cuts(spec, layout, coord)))


def held_along(spec: Spec, layout: Layout, axes: Sequence[int], coord: Coord) -> list[Region]:
    """`holdings` of the `members` along `axes` through `coord`."""
    return _by_rank(by_dim(spec, layout, axes, coord), [spec.mesh.shape[a] for a in axes])


def by_dim(spec: Spec, layout: Layout, axes: Sequence[int], coord: Coord) -> list[tuple[Runs, ...]]:
    """Per dim the runs of each of the `members` along `axes` through `coord`: `held_along` the other way round."""
    sizes, where = _group(spec, axes, coord)
    return [_runs_of(n, cuts, sizes) for n, cuts in zip(spec.shape, _cuts(spec, layout, where))]


def shared_along(spec: Spec, mine: Layout, theirs: Layout, axes: Sequence[int], coord: Coord) -> list[Region]:
    """What the rank at `coord` holds in `mine` of what each of the `members` along `axes` holds in `theirs`.

    As regions of what the rank at `coord` holds.
    """
    sizes, where = _group(spec, axes, coord)
    both = zip(spec.shape, _cuts(spec, mine, coord), _cuts(spec, theirs, where))
    return _by_rank([_shared_runs(n, own, cuts, sizes) for n, own, cuts in both], sizes)


def _cuts(spec: Spec, layout: Layout, where: Sequence[int]) -> list[Cuts]:
    """Per dim what cuts it, for a rank at the positions `where`, of which negative ones are as in `Cuts`."""
    cuts: list[Cuts] = [()] * len(spec.shape)
    for p, k, r in zip(layout, spec.mesh.shape, where):
        if isinstance(p, Shard):
            cuts[p.dim] += ((k, r, 0),)
        elif isinstance(p, StridedShard):
            cuts[p.dim] += ((k, r, p.split_factor),)
    return cuts


def _group(spec: Spec, axes: Sequence[int], coord: Coord) -> tuple[tuple[int, ...], list[int]]:
    """Positions on each of `axes`, which ascend; `coord` with the marks of `Cuts` for them."""
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
def _runs_of(size: int, cuts: Cuts, sizes: tuple[int, ...]) -> tuple[Runs, ...]:
    """The runs of a dim of `size` that each rank of a group holds; `sizes` are those of the group's axes.

    Those axes cut in the order in which they are in the group.
    """
    found: list[Runs] = [((0, size),) if size else ()]
    axis = 0  # the positions on the axes before it have been told apart
    for k, r, factor in cuts:
        if r >= 0:
            found = [cut_runs(runs, k, r, factor) for runs in found]
            continue
        same = math.prod(sizes[axis : -1 - r])
        found = [cut_runs(runs, k, i, factor) for runs in found for _ in range(same) for i in range(k)]
        axis = -r
    same = math.prod(sizes[axis:])
    return tuple([runs for runs in found for _ in range(same)] if same > 1 else found)


@lru_cache(maxsize=8192)
def _shared_runs(size: int, mine: Cuts, theirs: Cuts, sizes: tuple[int, ...]) -> tuple[Runs, ...]:
    """As `_runs_of` for `theirs`: what of it is left after the cuts `mine`, as runs of what those leave."""
    others = _runs_of(size, theirs, sizes)
    if not mine:
        return others
    own = dim_intervals(size, mine)
    found = {runs: _common_runs(own, runs)[0] for runs in {*others}}
    return tuple([found[runs] for runs in others])


def members(spec: Spec, axes: Sequence[int], coord: Coord) -> Iterator[Coord]:
    """The coords along `axes` (flattened row-major) through `coord`, by position."""
    at = list(coord)
    for positions in itertools.product(*[range(spec.mesh.shape[a]) for a in axes]):
        for a, position in zip(axes, positions):
            at[a] = position
        yield tuple(at)


def common(have: Region, want: Region) -> tuple[Region, Region]:
    """The shared part of two shards, given by their global intervals: as a region of the first and of the second."""
    pairs = [*map(_common_runs, have, want)]
    return tuple([first for first, _ in pairs]), tuple([second for _, second in pairs])


def _common_runs(a: Runs, b: Runs) -> tuple[Runs, Runs]:
    if len(a) != 1 or len(b) != 1:
        return _common_of_many(a, b)
    (start_a, n_a), (start_b, n_b) = a[0], b[0]
    lo = max(start_a, start_b)
    n = min(start_a + n_a, start_b + n_b) - lo
    return (((lo - start_a, n),), ((lo - start_b, n),)) if n > 0 else ((), ())


@lru_cache(maxsize=65536)
def _common_of_many(a: Runs, b: Runs) -> tuple[Runs, Runs]:
    in_a: list[Interval] = []
    in_b: list[Interval] = []
    i = j = at_a = at_b = 0
    while i < len(a) and j < len(b):
        (start_a, n_a), (start_b, n_b) = a[i], b[j]
        lo, hi = max(start_a, start_b), min(start_a + n_a, start_b + n_b)
        if lo < hi:
            _add(in_a, at_a + lo - start_a, hi - lo)
            _add(in_b, at_b + lo - start_b, hi - lo)
        if start_a + n_a <= start_b + n_b:
            i, at_a = i + 1, at_a + n_a
        else:
            j, at_b = j + 1, at_b + n_b
    return tuple(in_a), tuple(in_b)


def _add(runs: list[Interval], start: int, length: int) -> None:
    if runs and runs[-1][0] + runs[-1][1] == start:
        runs[-1] = (runs[-1][0], runs[-1][1] + length)
    else:
        runs.append((start, length))


def region_shape(region: Region) -> tuple[int, ...]:
    """Shape of the tensor that a region is."""
    return tuple([runs[0][1] if len(runs) == 1 else sum([n for _, n in runs]) for runs in region])


def region_size(region: Region) -> int:
    """Elements of a region."""
    return math.prod(region_shape(region))


def received(spec: Spec, step: Step, coord: Coord) -> int:
    """Elements that the rank at `coord` receives in `step`.

    Reductions count as on a ring of k ranks: (k-1)/k of what is scattered, 2(k-1)/k of what is reduced whole.
    """
    if not step.is_collective:
        return 0
    if step.kind == "spread_reduce":
        from dtensor.redistribute.division import arrivals

        return arrivals(spec, step, coord)
    k = math.prod(spec.mesh.shape[a] for a in step.axes)
    want = holdings(spec, step.dst, coord)
    if step.kind == "all_reduce":
        return 2 * region_size(want) * (k - 1) // k
    if step.kind == "reduce_scatter":
        return sum(map(region_size, held_along(spec, step.dst, step.axes, coord))) * (k - 1) // k
    arrive = shared_along(spec, step.dst, step.src, step.axes, coord)
    mine = common(holdings(spec, step.src, coord), want)[1]
    return sum(map(region_size, arrive)) - region_size(mine)
