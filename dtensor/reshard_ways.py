"""The handful of good ways between two layouts, and the layouts that they lead over.

A reduction is followed by one shot at most. Above that there is a choice: to reduce whole, to scatter, to scatter what
the goal cuts and reduce the rest, or to let the receivers reduce; and, where links differ in speed, to go axis by axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.reshard_layout import Path, Space
from dtensor.reshard_shot import one_shot, shot_between, talkers
from dtensor.reshard_spread import spread
from dtensor.reshard_step import Layout

__all__ = [
    "by_speed", "changed", "collectives", "dim_of", "fewest", "least_bytes", "pending_axes", "replicated",
    "scattered_to", "shot", "sliced_first", "staged", "ways",
]  # fmt: skip

_REPLICATE = Replicate()
_ALIKE = 1.25
"""Links whose speeds differ by less are as fast as each other: a measurement is not more exact."""
_FEW = 256
"""Bytes that are not worth another collective."""


def shot(space: Space, src: Layout, dst: Layout) -> Path:
    """One shot; by seconds, a gather and a slice where an all-to-all, which takes longer to start, is slower."""
    key = space.facts(src), space.facts(dst)
    found = space.shots.get(key)
    if found is None:
        found = shot_between(space, *key)
        if space.model.by_seconds and found[1] and found[1][-1].kind == "all_to_all":
            over, k = found[1][-1].axes, space.ranks(found[1][-1].axes)
            gather: float = math.inf
            if key[0].uneven or space.model.all_gather(k, key[0].nbytes, over) < found[0]:
                whole = replicated(src, over)
                gather, step = space.step("all_gather", over, src, whole)
            if gather < found[0]:
                rest, more = one_shot(space, whole, dst)
                found = min(found, (gather + rest, step + more), key=lambda path: path[0])
        space.shots[key] = found
    return found


def ways(space: Space, src: Layout, dst: Layout, pending: tuple[int, ...]) -> list[Path]:
    """The ways of one or two collectives to reduce `pending`, axes of one kind.

    After a slice, which is free, they are reduced whole, or scattered and then moved, or those scattered that `dst`
    cuts and the others reduced whole; or every rank receives the pending parts of what it wants and reduces them
    itself; or, where that receives less, the reduction is spread over the ranks first. Two reductions of one form are
    never better than one over the axes together, which receives as much.
    """
    sliced = sliced_first(space, src, dst, pending)
    first: Path = (0.0, ()) if sliced == src else space.step("slice", changed(src, sliced), src, sliced)
    reduced = replicated(sliced, pending)
    found = [_then(space, (first, space.step("all_reduce", pending, sliced, reduced)), reduced, dst)]
    scattered = scattered_to(space, sliced, dst, pending)
    if scattered is not None:
        found.append(_then(space, (first, space.step("reduce_scatter", pending, sliced, scattered)), scattered, dst))
    cut = tuple([a for a in pending if dim_of(dst[a]) >= 0])
    rest = tuple([a for a in pending if a not in cut])
    scattered = scattered_to(space, sliced, dst, cut) if cut and rest else None
    if scattered is not None:
        part = space.step("reduce_scatter", cut, sliced, scattered)
        reduced = replicated(scattered, rest)
        found.append(_then(space, (first, part, space.step("all_reduce", rest, scattered, reduced)), reduced, dst))
    if not any(_lands(way, dst) for way in found):
        over, _ = talkers(space, replicated(src, pending), dst)
        found.append(space.step("all_to_all_reduce", tuple(sorted({*over, *pending})), src, dst))
        least = least_bytes(space, sliced, dst)
        if not any(_near(space, way, least) for way in found):
            over, _ = talkers(space, replicated(sliced, pending), dst)
            way = spread(space, sliced, dst, tuple(sorted({*over, *pending})), pending)
            found += [] if way is None else [_after(first, way)]
    return found


def _near(space: Space, way: Path, least: float) -> bool:
    """True where nothing that receives `least` bytes in two collectives would be chosen instead of `way`."""
    if space.model.by_seconds:
        return way[0] <= space.floor(2, least)
    return sum([s.nbytes for s in way[1] if s.is_collective]) <= space._carried(int(least)) * space.model.slack + _FEW


def _after(first: Path, then: Path) -> Path:
    return first[0] + then[0], first[1] + then[1]


def least_bytes(space: Space, cur: Layout, dst: Layout) -> float:
    """No way from `cur` to `dst` makes the rank that receives most receive less.

    Where nothing is pending, what one shot receives. Else a rank receives all that it wants; and for every element
    k - 1 of its k pending parts arrive somewhere, and one more at every further rank that wants it, spread over the
    ranks. Axes that stay replicated or pending hold copies that are counted one by one.
    """
    pending = pending_axes(space, cur, dst)
    if not pending:
        return sum([s.nbytes for s in one_shot(space, cur, dst)[1] if s.is_collective])
    axes = [a for a, (p, q) in enumerate(zip(cur, dst)) if p is not q or not (p is _REPLICATE or p.is_partial())]
    cut = {a for cuts in space.cuts(dst) for a, _ in cuts}
    arrivals = space.ranks(pending) - 1 + space.ranks([a for a in axes if a not in cut]) - 1
    total = space.itemsize
    for n in space.shape:
        total *= n
    return max(space.nbytes(dst), total * arrivals / space.ranks(axes))


def fewest(space: Space, some: Sequence[Path]) -> Path:
    """Of `some` ways the one with the fewest collectives, of those within the model's slack of the fewest bytes."""
    nbytes = [sum([s.nbytes for s in steps if s.is_collective]) for _, steps in some]
    most = min(nbytes) * space.model.slack + _FEW
    return min([way for way, n in zip(some, nbytes) if n <= most], key=lambda way: (collectives(way), way[0]))


def collectives(path: Path) -> int:
    """How many collectives a path has."""
    return sum([s.launches for s in path[1]])


def by_speed(space: Space, axes: Iterable[int]) -> list[tuple[int, ...]]:
    """Groups of axes whose links are about equally fast, the fastest first."""
    key = tuple(axes)
    known = space.speeds.get(key)
    if known is not None:
        return known
    paces = sorted([(space.model.transfer(1.0, (a,)), a) for a in key if space.sizes[a] > 1])
    groups: list[tuple[int, ...]] = []
    start = 0.0
    for pace, a in paces:
        if groups and pace <= start * _ALIKE:
            groups[-1] = tuple(sorted((*groups[-1], a)))
        else:
            groups.append((a,))
            start = pace
    space.speeds[key] = groups
    return groups


def staged(space: Space, src: Layout, dst: Layout, groups: Sequence[tuple[int, ...]]) -> Path:
    """Group by group: what is pending is scattered, or reduced, in the order given; the rest moves in the other order.

    So fast links carry much and slow ones what is left of it. Axes of a group that are pending in several kinds are
    reduced kind by kind.
    """
    pending = pending_axes(space, src, dst)
    cur = sliced_first(space, src, dst, pending)
    paths: list[Path] = [] if cur == src else [space.step("slice", changed(src, cur), src, cur)]
    for group in groups:
        for kind in dict.fromkeys([src[a] for a in group if a in pending]):
            axes = tuple([a for a in group if a in pending and src[a] is kind])
            nxt = scattered_to(space, cur, dst, axes)
            name = "all_reduce" if nxt is None else "reduce_scatter"
            nxt = nxt or replicated(cur, axes)
            paths.append(space.step(name, axes, cur, nxt))
            cur = nxt
    for group in reversed(groups):
        nxt = tuple([dst[a] if a in group else p for a, p in enumerate(cur)])
        if nxt != cur:
            paths.append(shot(space, cur, nxt))
            cur = nxt
    return _then(space, paths, cur, dst)


def _then(space: Space, paths: Iterable[Path], cur: Layout, dst: Layout) -> Path:
    """`paths`, which lead to `cur`, and one shot from there."""
    some = [*paths, shot(space, cur, dst)]
    return sum([cost for cost, _ in some]), tuple([step for _, steps in some for step in steps])


def _lands(way: Path, dst: Layout) -> bool:
    """True for a reduce-scatter that leads straight to `dst`: the receivers' own reduction receives as much."""
    return way[1][-1].kind == "reduce_scatter" and way[1][-1].dst == dst


def replicated(layout: Layout, axes: Sequence[int]) -> Layout:
    """`layout` with `axes` replicated."""
    return tuple([_REPLICATE if a in axes else p for a, p in enumerate(layout)])


def pending_axes(space: Space, cur: Layout, dst: Layout) -> list[int]:
    """The axes that are still to be reduced."""
    return [a for a, p in enumerate(cur) if isinstance(p, Partial) and p is not dst[a] and space.sizes[a] > 1]


def changed(cur: Layout, nxt: Layout) -> tuple[int, ...]:
    """The axes on which two layouts differ."""
    return tuple(a for a, p in enumerate(cur) if p is not nxt[a])


def _cut_later(space: Space, layout: Layout, axis: int, dim: int) -> list[int]:
    """The axes after `axis` that cut `dim`."""
    return [b for b, _ in space.cuts(layout)[dim] if b > axis]


def dim_of(p: Placement) -> int:
    """The dim that a shard cuts, -1 for other placements."""
    return p.dim if isinstance(p, (Shard, StridedShard)) else -1


def sliced_first(space: Space, cur: Layout, dst: Layout, pending: Sequence[int]) -> Layout:
    """`cur` with every replicated axis cut that can be, so that less is reduced.

    Left alone are axes that cut a dim before another axis does in `cur` (their part is not this rank's to
    take), or after a pending axis that will cut the same dim (it must come first).
    """
    nxt = list(cur)
    for a, p in enumerate(cur):
        d = dim_of(dst[a])
        if p is _REPLICATE and d >= 0 and space.sizes[a] > 1 and not _cut_later(space, cur, a, d):
            if not any(b < a and dim_of(dst[b]) == d for b in pending):
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
        d = dim_of(dst[a])
        if d < 0 or _cut_later(space, cur, a, d):
            p = _best_cut(space, tuple(nxt), dst, a)
            if p is None:
                return None
            nxt[a] = p
            continue
        nxt[a] = dst[a]
    for b, p in enumerate(cur):
        d = dim_of(dst[b])
        if p is _REPLICATE and d >= 0 and space.sizes[b] > 1 and not _cut_later(space, cur, b, d):
            if any(a < b and nxt[a] is dst[a] and dim_of(dst[a]) == d for a in axes):
                nxt[b] = dst[b]
    return tuple(nxt)


def _best_cut(space: Space, cur: Layout, dst: Layout, axis: int) -> Placement | None:
    """A shard for `axis` that keeps what this rank holds of `cur` in place: even, of a dim `dst` leaves whole, early.

    An early dim is gathered without a copy; where none is even it is the one whose largest shard is smallest. Where a
    later axis cuts the dim already, a split factor puts `axis` after it, if all is even.
    """
    k, best, choice = space.sizes[axis], (0.0, False, 1), None
    for d, n in enumerate(space.dims(cur)):
        if not n:
            continue
        later = _cut_later(space, cur, axis, d)
        p: Placement = Shard(d)
        if later:
            if any(f for _, f in space.cuts(cur)[d]):
                continue
            if space.shape[d] % (k * space.ranks([a for a, _ in space.cuts(cur)[d]])):
                continue
            p = StridedShard(d, split_factor=space.ranks(later))
        score = (-(-(-n // k) * k / n), not any(dim_of(q) == d for q in dst), -d)
        if choice is None or score > best:
            best, choice = score, p
    return choice
