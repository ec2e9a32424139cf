"""The planner's searches: over the orders of moving, and over the ways to reduce.

Both are uniform-cost searches (Dijkstra) over layouts. `dtensor.reshard_plan` tells the whole story.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.reshard_layout import Path, Space
from dtensor.reshard_shot import one_shot, talkers
from dtensor.reshard_step import Layout, Step

__all__ = ["cheapest", "move", "scattered_to"]

_REPLICATE = Replicate()
_FEW = 1024
"""Bytes that are not worth another collective."""
_SLACK = 1 + 1e-9
"""A known path's cost may be a rounding below the same path's cost as the search adds it up."""
Edges = Callable[[Layout, float], Iterable[tuple[Layout, Path]]]
"""From a layout, and the seconds that a path through it may still take, to the layouts that may follow."""


def move(space: Space, src: Layout, dst: Layout) -> Path:
    """The cheapest way between layouts whose Partial axes agree.

    Input: the layouts. State: which axes already have their placement of `dst`; an edge brings some more of
    them there in one shot, or replicates them on the way where only two differ. Initial state: none. Every edge
    changes an axis that is not yet as in `dst`, so the search ends. No search is made where one shot is at most
    what two launches cost, and none where bytes count first: nothing receives less than one shot.
    Returns: cost and steps.
    """
    direct = one_shot(space, src, dst)
    if not space.model.by_seconds:
        return direct
    if direct[1] and direct[1][-1].kind == "all_to_all":  # which takes longer to start than a gather
        over = talkers(space, src, dst)[0]
        via = _replicated(src, over)
        gather, step = space.step("all_gather", over, src, via)
        if gather < direct[0]:
            direct = gather, (*step, *one_shot(space, via, dst)[1])
    differ = [a for a, p in enumerate(src) if p is not dst[a] and space.sizes[a] > 1]
    collectives = [s for s in direct[1] if s.is_collective]
    if len(differ) < 2 or not collectives or direct[0] <= space.model.floor(2, collectives[0].nbytes):
        return direct

    def edges(cur: Layout, slack: float) -> Iterator[tuple[Layout, Path]]:
        return ((nxt, one_shot(space, cur, nxt)) for nxt in _between(cur, dst, differ))

    return _search(src, dst, edges, direct[0])


def _between(cur: Layout, dst: Layout, axes: list[int]) -> Iterator[Layout]:
    """Layouts with some more of `axes` as in `dst`, or replicated where there are only two of them."""
    choices = [
        (cur[a],) if cur[a] is dst[a] else (dst[a], cur[a], _REPLICATE)[: 3 if len(axes) == 2 else 2] for a in axes
    ]
    for some in itertools.product(*choices):
        nxt = list(cur)
        for a, p in zip(axes, some):
            nxt[a] = p
        if tuple(nxt) != cur:
            yield tuple(nxt)


def cheapest(space: Space, src: Layout, dst: Layout) -> Path:
    """The cheapest way from `src` to `dst`, where every Partial axis of `dst` is the same in `src`.

    Input: the layouts. State: a layout; `pending` are its axes that still have to be reduced.
    Edges while something is pending: reduce some pending axes of one kind, in one all-reduce or one
    reduce-scatter; slice. Then: move to `dst`. Each reducing edge leaves fewer pending axes and a slice fewer
    replicated ones, so the search ends.
    Returns: cost and steps.
    """
    pending = _pending(space, src, dst)
    if not pending:
        return move(space, src, dst)
    if not space.model.by_seconds and all(src[a] is src[pending[0]] for a in pending):
        return _fewest_bytes(space, src, dst, tuple(pending))
    known = float("inf") if len(pending) == 1 else _plain_cost(space, src, dst, pending)
    launch = space.model.floor(1, 0)
    return _search(
        src,
        dst,
        lambda cur, slack: _edges(space, cur, dst, slack),
        known,
        lambda cur: launch if _pending(space, cur, dst) else 0.0,
    )


def _fewest_bytes(space: Space, src: Layout, dst: Layout, pending: tuple[int, ...]) -> Path:
    """The way that takes the fewest collectives, of those within the model's slack of the fewest bytes.

    All pending axes are of one kind. After a slice, which is free, they are reduced whole, or scattered and then
    moved, or those scattered that `dst` cuts and the others reduced whole; or every rank receives the pending
    parts of what it wants and reduces them itself. Two reductions of one form are never better than one over the
    axes together, which receives as much.
    """
    sliced = _slice(space, src, dst, list(pending))
    first: Path = (0.0, ()) if sliced == src else space.step("slice", _changed(src, sliced), src, sliced)
    reduced = _replicated(sliced, pending)
    ways = [_then(space, (first, space.step("all_reduce", pending, sliced, reduced)), reduced, dst)]
    scattered = scattered_to(space, sliced, dst, pending)
    if scattered is not None:
        ways.append(_then(space, (first, space.step("reduce_scatter", pending, sliced, scattered)), scattered, dst))
    cut = tuple([a for a in pending if _dim(dst[a]) >= 0])
    rest = tuple([a for a in pending if a not in cut])
    scattered = scattered_to(space, sliced, dst, cut) if cut and rest else None
    if scattered is not None:
        part = space.step("reduce_scatter", cut, sliced, scattered)
        reduced = _replicated(scattered, rest)
        ways.append(_then(space, (first, part, space.step("all_reduce", rest, scattered, reduced)), reduced, dst))
    if not any(_lands(way, dst) for way in ways):
        over, _ = talkers(space, _replicated(src, pending), dst)
        ways.append(space.step("all_to_all_reduce", tuple(sorted({*over, *pending})), src, dst))
    nbytes = [sum([s.nbytes for s in steps if s.is_collective]) for _, steps in ways]
    most = min(nbytes) * space.model.slack + _FEW
    return min(
        [way for way, n in zip(ways, nbytes) if n <= most],
        key=lambda way: (sum([s.is_collective for s in way[1]]), way[0]),
    )


def _then(space: Space, paths: Iterable[Path], cur: Layout, dst: Layout) -> Path:
    """`paths`, which lead to `cur`, and one shot from there."""
    some = [*paths, one_shot(space, cur, dst)]
    return sum([cost for cost, _ in some]), tuple([step for _, steps in some for step in steps])


def _lands(way: Path, dst: Layout) -> bool:
    """True for a reduce-scatter that leads straight to `dst`: the receivers' own reduction receives as much."""
    return way[1][-1].kind == "reduce_scatter" and way[1][-1].dst == dst


def _replicated(layout: Layout, axes: Sequence[int]) -> Layout:
    return tuple([_REPLICATE if a in axes else p for a, p in enumerate(layout)])


def _plain_cost(space: Space, src: Layout, dst: Layout, pending: list[int]) -> float:
    """The cheaper of two plain ways: slice, reduce each kind at once, move; with what `dst` shards scattered first."""
    cut = [a for a in pending if _dim(dst[a]) >= 0]
    costs = []
    sliced = _slice(space, src, dst, pending)
    first = 0.0 if sliced == src else space.step("slice", (), src, sliced)[0]
    for scattered in ([], cut) if cut else ([],):
        cur, cost = sliced, first
        for axes, scatter in ((scattered, True), ([a for a in pending if a not in scattered], False)):
            for kind in dict.fromkeys(src[a] for a in axes):
                some = tuple(a for a in axes if src[a] is kind)
                nxt = scattered_to(space, cur, dst, some) if scatter else None
                name = "reduce_scatter" if nxt is not None else "all_reduce"
                nxt = nxt or _replicated(cur, some)
                cost += space.step(name, some, cur, nxt)[0]
                cur = nxt
        costs.append(cost + move(space, cur, dst)[0])
    return min(costs)


def _search(
    src: Layout, dst: Layout, edges: Edges, limit: float, rest: Callable[[Layout], float] | None = None
) -> Path:
    """Uniform-cost search; ties go to fewer collectives, then to the edge found first.

    Input: `limit`, the cost of a path that is known; `rest`, what a layout still takes at least. No path that
    must cost more than the limit is followed.
    """
    best: dict[Layout, tuple[float, int]] = {src: (0.0, 0)}
    came: dict[Layout, tuple[Layout, tuple[Step, ...]]] = {}
    queue: list[tuple[float, int, int, Layout]] = [(0.0, 0, 0, src)]
    order = itertools.count(1)
    while queue:
        cost, launches, _, cur = heapq.heappop(queue)
        if cur == dst:
            break
        if (cost, launches) > best[cur]:
            continue
        for nxt, (extra, edge) in edges(cur, limit - cost):
            total = (cost + extra, launches + sum(s.is_collective for s in edge))
            least = total[0] if rest is None else total[0] + rest(nxt)
            if least <= limit * _SLACK and (nxt not in best or total < best[nxt]):
                best[nxt] = total
                came[nxt] = (cur, edge)
                limit = min(limit, total[0]) if nxt == dst else limit
                heapq.heappush(queue, (*total, next(order), nxt))
    if dst not in best:  # the known path uses an edge that is left out for a cheaper one, by a rounding of shard sizes
        return _search(src, dst, edges, float("inf"), rest)
    steps: tuple[Step, ...] = ()
    at = dst
    while at in came and at != src:
        at, some = came[at]
        steps = some + steps
    return best[dst][0], steps


def _pending(space: Space, cur: Layout, dst: Layout) -> list[int]:
    return [a for a, p in enumerate(cur) if isinstance(p, Partial) and p is not dst[a] and space.sizes[a] > 1]


def _edges(space: Space, cur: Layout, dst: Layout, slack: float) -> Iterator[tuple[Layout, Path]]:
    """What may follow `cur`: see `cheapest`.

    Left out are edges after which `slack` does not allow the launch that would still be needed, and all-reduces
    where a reduce-scatter leads for less to shards from which `dst` is a slice: what follows costs less too.
    """
    pending = _pending(space, cur, dst)
    if not pending:
        yield dst, move(space, cur, dst)
        return
    sliced = _slice(space, cur, dst, pending)
    if sliced != cur:
        yield sliced, space.step("slice", _changed(cur, sliced), cur, sliced)
    if all(cur[a] is cur[pending[0]] for a in pending):
        over, _ = talkers(space, _replicated(cur, pending), dst)
        yield dst, space.step("all_to_all_reduce", tuple(sorted({*over, *pending})), cur, dst)
    two = space.model.floor(2, 0)
    for n in range(len(pending), 0, -1):
        if n < len(pending) and slack < two:
            return
        for axes in itertools.combinations(pending, n):
            if any(cur[a] is not cur[axes[0]] for a in axes):
                continue
            reduced = _replicated(cur, axes)
            whole = space.step("all_reduce", axes, cur, reduced)
            scattered = scattered_to(space, cur, dst, axes)
            if scattered is not None:
                part = space.step("reduce_scatter", axes, cur, scattered)
                yield scattered, part
                if part[0] <= whole[0] and space.extends(scattered, dst):
                    continue
            yield reduced, whole


def _changed(cur: Layout, nxt: Layout) -> tuple[int, ...]:
    return tuple(a for a, p in enumerate(cur) if p is not nxt[a])


def _cut_later(space: Space, layout: Layout, axis: int, dim: int) -> list[int]:
    """The axes after `axis` that cut `dim`."""
    return [b for b, _ in space.cuts(layout)[dim] if b > axis]


def _dim(p: Placement) -> int:
    """The dim that a shard cuts, -1 for other placements."""
    return p.dim if isinstance(p, (Shard, StridedShard)) else -1


def _slice(space: Space, cur: Layout, dst: Layout, pending: list[int]) -> Layout:
    """`cur` with every replicated axis cut that can be, so that less is reduced.

    Left alone are axes that cut a dim before another axis does in `cur` (their part is not this rank's to
    take), or after a pending axis that will cut the same dim (it must come first).
    """
    nxt = list(cur)
    for a, p in enumerate(cur):
        d = _dim(dst[a])
        if p is _REPLICATE and d >= 0 and space.sizes[a] > 1 and not _cut_later(space, cur, a, d):
            if not any(b < a and _dim(dst[b]) == d for b in pending):
                nxt[a] = dst[a]
    return tuple(nxt)


def scattered_to(space: Space, cur: Layout, dst: Layout | None, axes: tuple[int, ...]) -> Layout | None:
    """Where a reduce-scatter over `axes` leads: to shards of `dst` where possible, else (or with None) to even shards.

    Replicated axes that cut the same dim right after one of `axes` are cut along with it, so that nothing is
    received that is not wanted. Returns None for a tensor without dims.
    """
    nxt = list(cur)
    if dst is None:
        for a in axes:
            cut = _best_cut(space, tuple(nxt), cur, a)
            if cut is None:
                return None
            nxt[a] = cut
        return tuple(nxt)
    for a in axes:
        d = _dim(dst[a])
        if d < 0 or _cut_later(space, cur, a, d):
            p = _best_cut(space, tuple(nxt), dst, a)
            if p is None:
                return None
            nxt[a] = p
            continue
        nxt[a] = dst[a]
    for b, p in enumerate(cur):
        d = _dim(dst[b])
        if p is _REPLICATE and d >= 0 and space.sizes[b] > 1 and not _cut_later(space, cur, b, d):
            if any(a < b and nxt[a] is dst[a] and _dim(dst[a]) == d for a in axes):
                nxt[b] = dst[b]
    return tuple(nxt)


def _best_cut(space: Space, cur: Layout, dst: Layout, axis: int) -> Placement | None:
    """A shard for `axis` that keeps what this rank holds of `cur` in place: even, of a dim `dst` leaves whole, early.

    An early dim is gathered without a copy; where none is even it is the one whose largest shard is smallest. Where a
    later axis cuts the dim already, a split factor puts `axis` after it, if all is even.
    """
    k, best, choice = space.sizes[axis], (0.0, False, 1), None
    for d, n in enumerate(space.dims(cur)):
        later = _cut_later(space, cur, axis, d)
        p: Placement = Shard(d)
        if later:
            if any(f for _, f in space.cuts(cur)[d]):
                continue
            if space.shape[d] % (k * space.ranks([a for a, _ in space.cuts(cur)[d]])):
                continue
            p = StridedShard(d, split_factor=space.ranks(later))
        score = (-(-(-n // k) * k / n), not any(_dim(q) == d for q in dst), -d)
        if choice is None or score > best:
            best, choice = score, p
    return choice
