"""Set arithmetic on shards: which part of what one rank holds is wanted by another, and where it lies.

A shard is the product of its dims' intervals (`Spec.intervals_of`). The part that two shards share is a
product too, so it is described dim by dim:

    have [0,4)      want [2,6)         common: global [2,4) = elements [2,4) of have = elements [0,2) of want

A `Region` says, per dim, which runs of a local tensor's elements are meant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from dtensor.placement import Shard, StridedShard
from dtensor.reshard_step import Layout, Step
from dtensor.spec import Interval, Spec, dim_intervals

__all__ = ["Region", "common", "holdings", "members", "received", "region_shape", "region_size"]

Coord = tuple[int, ...]
Runs = tuple[Interval, ...]
Region = tuple[Runs, ...]
"""Per dim, the start and length of runs of a local tensor, ascending; () where nothing is meant."""


def holdings(spec: Spec, layout: Layout, coord: Sequence[int]) -> Region:
    """Per dim, the intervals of the global dim that the rank at `coord` holds of `spec`'s tensor in `layout`."""
    cuts: list[tuple[tuple[int, int, int], ...]] = [()] * len(spec.shape)
    for p, k, r in zip(layout, spec.mesh.shape, coord):
        if isinstance(p, Shard):
            cuts[p.dim] += ((k, r, 0),)
        elif isinstance(p, StridedShard):
            cuts[p.dim] += ((k, r, p.split_factor),)
    return tuple(map(dim_intervals, spec.shape, cuts))


def members(spec: Spec, axes: Sequence[int], coord: Coord) -> Iterator[Coord]:
    """The coords along `axes` (flattened row-major) through `coord`, by position."""
    sizes = [spec.mesh.shape[a] for a in axes]
    for position in range(math.prod(sizes)):
        at, rest = list(coord), position
        for a, k in zip(reversed(axes), reversed(sizes)):
            rest, at[a] = divmod(rest, k)
        yield tuple(at)


def common(have: Region, want: Region) -> tuple[Region, Region]:
    """The shared part of two shards, given by their global intervals: as a region of the first and of the second."""
    pairs = [_common_runs(a, b) for a, b in zip(have, want)]
    return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)


@lru_cache(maxsize=65536)
def _common_runs(a: Runs, b: Runs) -> tuple[Runs, Runs]:
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
    return tuple([sum([n for _, n in runs]) for runs in region])


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
        from dtensor.reshard_spread import arrivals

        return arrivals(spec, step, coord)
    k = math.prod(spec.mesh.shape[a] for a in step.axes)
    want = holdings(spec, step.dst, coord)
    if step.kind == "all_reduce":
        return 2 * region_size(want) * (k - 1) // k
    if step.kind == "reduce_scatter":
        parts = [region_size(holdings(spec, step.dst, other)) for other in members(spec, step.axes, coord)]
        return sum(parts) * (k - 1) // k
    return sum(
        region_size(common(holdings(spec, step.src, other), want)[1])
        for other in members(spec, step.axes, coord)
        if other != coord
    )
