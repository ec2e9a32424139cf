"""The planner's search: by seconds, over the orders of reducing and moving.

With bytes first, or where no more than the known good ways can be worth it, there is nothing to search for; see
`dtensor.reshard_ways`. Otherwise a best-first search (A*) looks for a faster way than those, and stops after a number
of steps that depends on the number of axes alone, so that a plan takes no longer than it is worth and all ranks find
the same. `dtensor.reshard_plan` tells the whole story.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from dtensor.placement import Replicate
from dtensor.reshard_layout import Path, Space
from dtensor.reshard_shot import talkers
from dtensor.reshard_step import Layout, Step
from dtensor.reshard_ways import (
    by_speed,
    changed,
    collectives,
    fewest,
    least_bytes,
    pending_axes,
    replicated,
    scattered_to,
    shot,
    sliced_first,
    staged,
    ways,
)  # fmt: skip

__all__ = ["cheapest"]

_REPLICATE = Replicate()
_FUEL = (0, 8, 12, 16, 20)
"""Edges that a search may look at, by the number of axes that differ."""
_BETTER = 1 - 1e-9
"""Less of a gain than this is rounding."""


def cheapest(space: Space, src: Layout, dst: Layout) -> Path:
    """The cheapest way from `src` to `dst`, where every Partial axis of `dst` is the same in `src`."""
    pending = tuple(pending_axes(space, src, dst))
    if not pending:
        known = shot(space, src, dst)
    elif all(src[a] is src[pending[0]] for a in pending):
        some = ways(space, src, dst, pending)
        if not space.model.by_seconds:
            return fewest(space, some)
        known = min(some, key=lambda way: (way[0], collectives(way)))
    else:
        known = staged(space, src, dst, [tuple(range(len(src)))])
    differ = [a for a, p in enumerate(src) if p is not dst[a] and space.sizes[a] > 1]
    if not space.model.by_seconds or len(differ) < 2 or not collectives(known):
        return known
    if known[0] <= space.floor(2, 0) or known[0] <= space.floor(2, least_bytes(space, src, dst)):
        return known
    groups = by_speed(space, range(len(src)))
    if len(groups) == 1 and len(differ) == 2 and _splitting_saves(space, groups[0]) <= 0:
        return known
    for order in dict.fromkeys((tuple(groups), tuple([(a,) for group in groups for a in group]))):
        if len(order) > 1 and (pending or len(differ) > 2):  # else the search tries them
            known = min(known, staged(space, src, dst, order), key=lambda way: (way[0], collectives(way)))
    return _search(space, src, dst, known, _FUEL[min(len(differ), 4)])


def _splitting_saves(space: Space, axes: Sequence[int]) -> float:
    """Seconds that a collective over `axes`, of links alike, takes longer than one after the other, besides bytes."""
    model, sizes = space.model, [space.sizes[a] for a in axes]
    if len(sizes) < 2:
        return 0.0
    return model.all_gather(math.prod(sizes), 0, axes) - sum(
        [model.all_gather(k, 0, (a,)) for k, a in zip(sizes, axes)]
    )


def _search(space: Space, src: Layout, dst: Layout, known: Path, fuel: int) -> Path:
    """A faster way than `known`, or `known`.

    State: a layout. Edges from one with pending axes reduce some of them, or slice; from any other they bring some
    axes to their placement of `dst`. An edge to a layout where nothing is pending is tried with one shot after it at
    once. Every edge leaves fewer axes to reduce, to slice or to bring, and `fuel` counts edges, so the search ends.
    """
    best: dict[Layout, float] = {src: 0.0}
    came: dict[Layout, tuple[Layout, tuple[Step, ...]]] = {}
    queue: list[tuple[float, int, float, Layout]] = [(0.0, 0, 0.0, src)]
    order = itertools.count(1)
    while queue:
        expected, _, cost, cur = heapq.heappop(queue)
        if expected >= known[0] * _BETTER:
            return known
        if cost > best[cur]:
            continue
        for nxt, (extra, steps) in _edges(space, cur, dst, known[0] - cost):
            if fuel <= 0:
                return known
            fuel -= 1
            total = cost + extra
            if nxt == dst and total < known[0] * _BETTER:
                known = total, _way(came, src, cur) + steps
            elif nxt != dst and total < best.get(nxt, known[0] * _BETTER):
                best[nxt], came[nxt] = total, (cur, steps)
                if total + space.launch >= known[0] and not space.extends(nxt, dst):
                    continue
                if pending_axes(space, nxt, dst):
                    least = space.floor(1, least_bytes(space, nxt, dst))
                else:
                    after, last = shot(space, nxt, dst)
                    if total + after < known[0] * _BETTER:
                        known = total + after, _way(came, src, nxt) + last
                    if not any(len(s.axes) > 1 for s in last if s.is_collective):
                        continue  # one axis is not left to the steps of several
                    least = space.floor(2, sum([s.nbytes for s in last if s.is_collective]))
                if total + least < known[0] * _BETTER:
                    heapq.heappush(queue, (total + least, next(order), total, nxt))
    return known


def _way(came: dict[Layout, tuple[Layout, tuple[Step, ...]]], src: Layout, at: Layout) -> tuple[Step, ...]:
    steps: tuple[Step, ...] = ()
    while at != src:
        at, some = came[at]
        steps = some + steps
    return steps


def _some(space: Space, axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Subsets of axes worth trying: those of equal speed, single ones, all but one."""
    found = dict.fromkeys(by_speed(space, axes))
    found.update(dict.fromkeys(itertools.combinations(axes, 1)))
    found.update(dict.fromkeys(itertools.combinations(axes, len(axes) - 1)))
    return [some for some in found if 0 < len(some) < len(axes)]


def _edges(space: Space, cur: Layout, dst: Layout, room: float) -> Iterator[tuple[Layout, Path]]:
    """What may follow `cur`, where a way to `dst` in less than `room` seconds is looked for."""
    pending = pending_axes(space, cur, dst)
    if pending:
        yield from _reducing(space, cur, dst, pending, room)
        return
    differ = [a for a, p in enumerate(cur) if p is not dst[a] and space.sizes[a] > 1]
    for nxt in _between(space, cur, dst, differ):
        yield nxt, shot(space, cur, nxt)


def _between(space: Space, cur: Layout, dst: Layout, differ: Sequence[int]) -> Iterator[Layout]:
    """Layouts with some more axes as in `dst`; where there are only two, with one as in `dst` or replicated."""
    if len(differ) != 2:
        for axes in _some(space, differ):
            yield tuple([dst[a] if a in axes else p for a, p in enumerate(cur)])
        return
    for a in differ:
        for p in dict.fromkeys((dst[a], _REPLICATE)):
            if p is not cur[a]:
                yield (*cur[:a], p, *cur[a + 1 :])


def _reducing(space: Space, cur: Layout, dst: Layout, pending: list[int], room: float) -> Iterator[tuple[Layout, Path]]:
    """Left out are edges after which `room` does not allow the launch that would still be needed."""
    sliced = sliced_first(space, cur, dst, pending)
    if sliced != cur:
        yield sliced, space.step("slice", changed(cur, sliced), cur, sliced)
        return
    if all(cur[a] is cur[pending[0]] for a in pending):
        over, _ = talkers(space, replicated(cur, pending), dst)
        yield dst, space.step("all_to_all_reduce", tuple(sorted({*over, *pending})), cur, dst)
    subsets = [tuple(pending)]
    if room > space.floor(2, 0):
        subsets += _some(space, pending)
    for axes in subsets:
        if any(cur[a] is not cur[axes[0]] for a in axes):
            continue
        reduced = replicated(cur, axes)
        whole = space.step("all_reduce", axes, cur, reduced)
        scattered = scattered_to(space, cur, dst, axes)
        if scattered is not None:
            part = space.step("reduce_scatter", axes, cur, scattered)
            yield scattered, part
            if part[0] <= whole[0] and space.extends(scattered, dst):
                continue
        yield reduced, whole
