"""The planner's search: by seconds, over the orders of reducing and moving.

With bytes first, or where no more than the known good ways can be worth it, there is nothing to search for; see
`dtensor.redistribute.planner.candidates`. Otherwise a best-first search (A*) looks for a faster way than those, and
stops after a number of steps that depends on the number of axes alone, so that a plan takes no longer than it is worth
and all ranks find the same. `dtensor.redistribute.plan` tells the whole story.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from dtensor.placement import Replicate
from dtensor.redistribute.planner.candidates import (
    changed,
    collectives,
    fewest,
    least_bytes,
    pending_axes,
    receivers_take,
    scatter_takes,
    scattered_to,
    shot,
    sliced_first,
    staged,
    talking,
    ways,
)  # fmt: skip
from dtensor.redistribute.planner.layout_space import Facts, Path, Space
from dtensor.redistribute.step import Layout, Step

__all__ = ["cheapest"]

_REPLICATE = Replicate()
_FUEL = (0, 8, 11, 16, 20)
"""Edges that a search may look at, by the number of axes that differ."""
_BETTER = 1 - 1e-9
"""Less of a gain than this is rounding."""


def cheapest(space: Space, source: Layout, goal: Layout) -> Path:
    """The cheapest way from `source` to `goal`, where every Partial axis of `goal` is the same in `source`."""
    src, dst = space.facts(source), space.facts(goal)
    pending = pending_axes(src, dst)
    one_kind = len({id(source[a]) for a in pending}) == 1
    if one_kind and not space.by_seconds:
        return fewest(space, ways(space, src, dst, pending))
    groups = space.links.by_speed(tuple(range(len(source))))
    orders = [order for order in dict.fromkeys((groups, tuple([(a,) for group in groups for a in group]))) if order[1:]]
    early: list[Path] = []
    if one_kind and len(pending) > 1 and space.links.over(pending).least >= 2 * space.links.launch:
        early, orders = [staged(space, src, dst, order) for order in orders], []
    if not pending:
        some = [shot(space, src, dst)]
    elif one_kind:
        some = ways(space, src, dst, pending, min([math.inf, *(way[0] for way in early)]))
    else:
        some = [staged(space, src, dst, [tuple(range(len(source)))])]
    known, differ = _better([*some, *early]), _differing(space, src, dst)
    if not space.by_seconds or len(differ) < 2 or not collectives(known):
        return known
    if known[0] <= space.floor(2, 0) or known[0] <= space.floor(2, least_bytes(space, src, dst)):
        return known
    if len(groups) == 1 and len(differ) == 2 and space.links.splitting_saves(groups[0]) <= 0:
        return known
    if pending or len(differ) > 2:  # else the search tries them
        known = _better([known, *[staged(space, src, dst, order) for order in orders]])
    return _Search(space, src, dst, known, _FUEL[min(len(differ), 4)]).run()


def _better(some: Sequence[Path]) -> Path:
    """The fastest of some ways, of equally fast ones that of the fewest collectives."""
    return min(some, key=lambda way: (way[0], collectives(way)))


def _differing(space: Space, cur: Facts, dst: Facts) -> tuple[int, ...]:
    """The axes that are not yet as in `dst`."""
    return tuple([a for a, (p, q) in enumerate(zip(cur.layout, dst.layout)) if p is not q and space.sizes[a] > 1])


def _taking_part(cur: Facts, dst: Facts) -> tuple[int, ...]:
    """Axes that must take part in a collective: those that are to be reduced, and those whose splits are dropped."""
    both = zip(cur.layout, dst.layout, cur.dim_of, dst.dim_of)
    return tuple([a for a, (p, q, d, e) in enumerate(both) if p is not q and (d >= 0 > e or a in cur.pending)])


class _Search:
    """For a faster way than `known`.

    State: a layout. Edges from one with pending axes reduce some of them, or slice; from any other they bring some
    axes to their placement of `dst`. An edge to a layout where nothing is pending is tried with one shot after it at
    once. Every edge leaves fewer axes to reduce, to slice or to bring, and `fuel` counts edges, so the search ends.
    """

    __slots__ = ("_best", "_came", "_cost", "_fuel", "_known", "dst", "space", "src")

    def __init__(self, space: Space, src: Facts, dst: Facts, known: Path, fuel: int) -> None:
        self.space, self.src, self.dst, self._known, self._fuel = space, src, dst, known, fuel
        self._best: dict[Facts, float] = {src: 0.0}
        self._came: dict[Facts, tuple[Facts, tuple[Step, ...]]] = {}
        self._cost = 0.0  # of the way to the layout that is looked at

    def run(self) -> Path:
        """The fastest way found, or `known`."""
        queue: list[tuple[float, int, float, Facts]] = [(0.0, 0, 0.0, self.src)]
        order = itertools.count(1)
        while queue:
            expected, _, self._cost, cur = heapq.heappop(queue)
            if expected >= self._known[0] * _BETTER:
                break
            if self._cost > self._best[cur]:
                continue
            for nxt, (extra, steps) in self._edges(cur):
                if self._fuel <= 0:
                    return self._known
                self._fuel -= 1
                total = self._cost + extra
                if nxt is self.dst:
                    self._found(total, cur, steps)
                elif total < self._best.get(nxt, self._known[0] * _BETTER):
                    self._best[nxt], self._came[nxt] = total, (cur, steps)
                    expected = total + self._least(total, nxt)
                    if expected < self._known[0] * _BETTER:
                        heapq.heappush(queue, (expected, next(order), total, nxt))
        return self._known

    def _found(self, total: float, at: Facts, steps: tuple[Step, ...]) -> None:
        """Keep the way to `at` with `steps` after it, if it is faster."""
        if total >= self._known[0] * _BETTER:
            return
        while at is not self.src:
            at, some = self._came[at]
            steps = some + steps
        self._known = total, steps

    def _least(self, total: float, cur: Facts) -> float:
        """Seconds that are still needed from `cur`, reached in `total`; inf where one shot, which is tried, is best."""
        space, dst = self.space, self.dst
        if total + space.links.launch >= self._known[0] and not space.extends(cur, dst):
            return math.inf
        if pending_axes(cur, dst):
            return space.links.least(_taking_part(cur, dst)) + space.links.pace * least_bytes(space, cur, dst)
        after, last = shot(space, cur, dst)
        self._found(total + after, cur, last)
        if not any(len(s.axes) > 1 for s in last if s.is_collective):
            return math.inf  # one axis is not left to the steps of several
        return space.floor(2, sum([s.nbytes for s in last if s.is_collective]))

    @property
    def _room(self) -> float:
        """Seconds that the rest of a faster way may take."""
        return self._known[0] - self._cost

    def _edges(self, cur: Facts) -> Iterator[tuple[Facts, Path]]:
        """What may follow `cur`."""
        pending = pending_axes(cur, self.dst)
        if pending:
            return self._reducing(cur, pending)
        return ((nxt, shot(self.space, cur, nxt)) for nxt in self._between(cur, _differing(self.space, cur, self.dst)))

    def _between(self, cur: Facts, differ: tuple[int, ...]) -> Iterator[Facts]:
        """Layouts with some more axes as in `dst`; where there are only two, with one as in `dst` or replicated."""
        space, dst = self.space, self.dst
        if len(differ) != 2:
            for axes in space.links.some(differ):
                yield space.put_from(cur, axes, dst)
            return
        for a in differ:
            yield space.put_from(cur, (a,), dst)
            if cur.layout[a] is not _REPLICATE is not dst.layout[a]:
                yield space.put(cur, (a,), _REPLICATE)

    def _reducing(self, cur: Facts, pending: tuple[int, ...]) -> Iterator[tuple[Facts, Path]]:
        """A slice, or reductions of some axes: those that leave room for what must follow."""
        space, dst, links = self.space, self.dst, self.space.links
        sliced = sliced_first(space, cur, dst, pending)
        if sliced is not cur:
            yield sliced, space.step("slice", changed(cur, sliced), cur, sliced)
            return
        one_kind = len({id(cur.layout[a]) for a in pending}) == 1
        if one_kind and receivers_take(space, cur, dst, pending) < self._room:
            yield dst, space.step("all_to_all_reduce", talking(space, cur, dst, pending), cur, dst)
        if one_kind and links.kinds_differ:
            for axes in (pending, *links.some(pending)):
                nxt = space.put_from(cur, axes, dst)
                if nxt is not dst and receivers_take(space, cur, nxt, axes) < self._room:
                    yield nxt, space.step("all_to_all_reduce", talking(space, cur, nxt, axes), cur, nxt)
        nbytes = space.carried(cur.nbytes)
        for axes in (pending, *links.some(pending)):
            if not one_kind and len({id(cur.layout[a]) for a in axes}) > 1:
                continue
            whole, scattered = links.over(axes).all_reduce(nbytes), None
            more = 0.0 if len(axes) == len(pending) else links.launch
            if scatter_takes(space, cur, dst, axes) < self._room:
                scattered = scattered_to(space, cur, dst, axes)
            if scattered is not None:
                part = space.step("reduce_scatter", axes, cur, scattered)
                yield scattered, part
                if part[0] <= whole and space.extends(scattered, dst):
                    continue
            if whole + more < self._room:
                reduced = space.put(cur, axes, _REPLICATE)
                yield reduced, space.step("all_reduce", axes, cur, reduced)
