"""The planner's search: by seconds, over the orders of reducing and moving.

With bytes first, or where no more than the known good ways can be worth it, there is nothing to search for; see
`dtensor.reshard_ways`. Otherwise a best-first search (A*) looks for a faster way than those, and stops after a number
of steps that depends on the number of axes alone, so that a plan takes no longer than it is worth and all ranks find
the same. `dtensor.reshard_plan` tells the whole story.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from dtensor.placement import Replicate
from dtensor.reshard_layout import Facts, Path, Space
from dtensor.reshard_shot import talkers
from dtensor.reshard_step import Layout, Step
from dtensor.reshard_ways import (
    changed,
    collectives,
    fewest,
    least_bytes,
    pending_axes,
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


def cheapest(space: Space, source: Layout, goal: Layout) -> Path:
    """The cheapest way from `source` to `goal`, where every Partial axis of `goal` is the same in `source`."""
    src, dst = space.facts(source), space.facts(goal)
    pending = pending_axes(src, dst)
    if not pending:
        known = shot(space, src, dst)
    elif len({id(source[a]) for a in pending}) == 1:
        some = ways(space, src, dst, pending)
        if not space.by_seconds:
            return fewest(space, some)
        known = _better(some)
    else:
        known = staged(space, src, dst, [tuple(range(len(source)))])
    if not space.by_seconds:
        return known
    differ = _differing(space, src, dst)
    if len(differ) < 2 or known[0] <= space.floor(2, 0) or not collectives(known):
        return known
    if known[0] <= space.floor(2, least_bytes(space, src, dst)):
        return known
    groups = space.links.by_speed(tuple(range(len(source))))
    if len(groups) == 1 and len(differ) == 2 and space.links.splitting_saves(groups[0]) <= 0:
        return known
    for order in dict.fromkeys((groups, tuple([(a,) for group in groups for a in group]))):
        if len(order) > 1 and (pending or len(differ) > 2):  # else the search tries them
            known = _better((known, staged(space, src, dst, order)))
    return _search(space, src, dst, known, _FUEL[min(len(differ), 4)])


def _better(some: Sequence[Path]) -> Path:
    """The fastest of some ways, of equally fast ones that of the fewest collectives."""
    return min(some, key=lambda way: (way[0], collectives(way)))


def _differing(space: Space, cur: Facts, dst: Facts) -> tuple[int, ...]:
    """The axes that are not yet as in `dst`."""
    return tuple([a for a, (p, q) in enumerate(zip(cur.layout, dst.layout)) if p is not q and space.sizes[a] > 1])


def _search(space: Space, src: Facts, dst: Facts, known: Path, fuel: int) -> Path:
    """A faster way than `known`, or `known`.

    State: a layout. Edges from one with pending axes reduce some of them, or slice; from any other they bring some
    axes to their placement of `dst`. An edge to a layout where nothing is pending is tried with one shot after it at
    once. Every edge leaves fewer axes to reduce, to slice or to bring, and `fuel` counts edges, so the search ends.
    """
    best: dict[Facts, float] = {src: 0.0}
    came: dict[Facts, tuple[Facts, tuple[Step, ...]]] = {}
    queue: list[tuple[float, int, float, Facts]] = [(0.0, 0, 0.0, src)]
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
            if nxt is dst:
                if total < known[0] * _BETTER:
                    known = total, _way(came, src, cur) + steps
                continue
            if total >= best.get(nxt, known[0] * _BETTER):
                continue
            best[nxt], came[nxt] = total, (cur, steps)
            if total + space.links.launch >= known[0] and not space.extends(nxt, dst):
                continue
            if pending_axes(nxt, dst):
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


def _way(came: dict[Facts, tuple[Facts, tuple[Step, ...]]], src: Facts, at: Facts) -> tuple[Step, ...]:
    steps: tuple[Step, ...] = ()
    while at is not src:
        at, some = came[at]
        steps = some + steps
    return steps


def _edges(space: Space, cur: Facts, dst: Facts, room: float) -> Iterator[tuple[Facts, Path]]:
    """What may follow `cur`, where a way to `dst` in less than `room` seconds is looked for."""
    pending = pending_axes(cur, dst)
    if pending:
        yield from _reducing(space, cur, dst, pending, room)
        return
    for nxt in _between(space, cur, dst, _differing(space, cur, dst)):
        yield nxt, shot(space, cur, nxt)


def _between(space: Space, cur: Facts, dst: Facts, differ: tuple[int, ...]) -> Iterator[Facts]:
    """Layouts with some more axes as in `dst`; where there are only two, with one as in `dst` or replicated."""
    if len(differ) != 2:
        for axes in space.links.some(differ):
            yield space.put_from(cur, axes, dst)
        return
    for a in differ:
        yield space.put_from(cur, (a,), dst)
        if cur.layout[a] is not _REPLICATE is not dst.layout[a]:
            yield space.put(cur, (a,), _REPLICATE)


def _reducing(
    space: Space, cur: Facts, dst: Facts, pending: tuple[int, ...], room: float
) -> Iterator[tuple[Facts, Path]]:
    """Left out are edges after which `room` does not allow the launch that would still be needed."""
    sliced = sliced_first(space, cur, dst, pending)
    if sliced is not cur:
        yield sliced, space.step("slice", changed(cur, sliced), cur, sliced)
        return
    kind = cur.layout[pending[0]]
    if all(cur.layout[a] is kind for a in pending):
        over, _ = talkers(space, space.put(cur, pending, _REPLICATE), dst)
        yield dst, space.step("all_to_all_reduce", tuple(sorted({*over, *pending})), cur, dst)
    subsets = [pending]
    if room > space.floor(2, 0):
        subsets += space.links.some(pending)
    for axes in subsets:
        if len({id(cur.layout[a]) for a in axes}) > 1:
            continue
        reduced = space.put(cur, axes, _REPLICATE)
        whole = space.step("all_reduce", axes, cur, reduced)
        scattered = scattered_to(space, cur, dst, axes)
        if scattered is not None:
            part = space.step("reduce_scatter", axes, cur, scattered)
            yield scattered, part
            if part[0] <= whole[0] and space.extends(scattered, dst):
                continue
        yield reduced, whole
