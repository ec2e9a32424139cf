"""The handful of good ways between two layouts, and the layouts that they lead over.

A reduction is followed by one collective at most. Above that there is a choice: to all-reduce, to scatter, to scatter
what the goal splits and reduce the rest, or to let the receivers reduce; and, where links differ in speed, to go axis
by axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dtensor.intervals import chunk_size
from dtensor.placement import Placement, Replicate, Shard, StridedShard
from dtensor.redistribute.planner.balanced_reduction import spread
from dtensor.redistribute.planner.layout_space import Facts, Path, Space
from dtensor.redistribute.planner.single_collective import moving_axes, one_shot

__all__ = [
    "changed", "collectives", "fewest", "least_bytes", "pending_axes", "receivers_take", "scatter_takes",
    "scattered_to", "shot", "sliced_first", "staged", "talking", "ways",
]  # fmt: skip

_REPLICATE = Replicate()
_FEW = 256
"""Bytes that are not worth another collective."""
_MUCH = 1 << 20
"""Bytes that may arrive to be reduced even if input and output are smaller together."""


def shot(space: Space, have: Facts, want: Facts) -> Path:
    """One shot; by seconds, a gather and a slice where an all-to-all is slower, or the other way round."""
    key = have, want
    found = space.shots.get(key)
    if found is None:
        found = one_shot(space, have, want)
        kinds = [s.kind for s in found[1]] if space.by_seconds else []
        if kinds[-1:] == ["all_to_all"]:
            found = _gathered(space, have, want, found)
        elif space.links.kinds_differ and kinds == ["slice", "all_gather"]:
            straight = space.step("all_to_all", moving_axes(space, have, want)[0], have, want)
            found = straight if straight[0] < found[0] else found
        space.shots[key] = found
    return found


def _gathered(space: Space, have: Facts, want: Facts, known: Path) -> Path:
    """A slice of what can be sliced, a gather and another slice, where that is faster than `known`, an all-to-all."""
    over = known[1][-1].axes
    link, sliced = space.links.over(over), sliced_first(space, have, want, ())
    for start in (have,) if sliced is have else (sliced, have):
        if not start.uneven and link.all_gather(start.nbytes * (link.size - 1)) >= known[0]:
            continue
        whole = space.put(start, over, _REPLICATE)
        if start is not have and moving_axes(space, start, whole) != (over, True):
            continue
        gather, step = space.step("all_gather", over, start, whole)
        rest = one_shot(space, whole, want)[1] if gather < known[0] else known[1]
        if not any(s.is_collective for s in rest):
            first = () if start is have else space.step("slice", changed(have, start), have, start)[1]
            return gather, first + step + rest
    return known


def ways(space: Space, src: Facts, dst: Facts, pending: tuple[int, ...], room: float = math.inf) -> list[Path]:
    """The ways of one or two collectives to reduce `pending`, axes of one kind, those in less than `room` seconds.

    After a slice, which is free, they are reduced in full, or scattered and then moved, or those scattered that `dst`
    splits and the others reduced in full; or every rank receives the pending parts of what it wants and reduces them
    itself; or, where that receives less, the reduction is spread over the ranks first. Two reductions of one form are
    never better than one over the axes together, which receives as much.
    """
    sliced = sliced_first(space, src, dst, pending)
    first: Path = (0.0, ()) if sliced is src else space.step("slice", changed(src, sliced), src, sliced)
    sure = None if space.by_seconds else _sure(space, src, first, sliced, dst, pending)
    if sure is not None:
        return [sure]
    found: list[Path] = []
    lands = False
    if space.links.over(pending).all_reduce(space.carried(sliced.nbytes)) <= room:
        reduced = space.put(sliced, pending, _REPLICATE)
        found.append(_then(space, (first, space.step("all_reduce", pending, sliced, reduced)), reduced, dst))
    if scatter_takes(space, sliced, dst, pending) <= room:
        scattered = scattered_to(space, sliced, dst, pending)
        if scattered is not None:
            part = space.step("reduce_scatter", pending, sliced, scattered)
            found.append(_then(space, (first, part), scattered, dst))
            lands = scattered is dst
    cut = tuple([a for a in pending if dst.dim_of[a] >= 0])
    rest = tuple([a for a in pending if a not in cut])
    if cut and rest and space.links.over(cut).least + space.links.over(rest).least <= room:
        scattered = scattered_to(space, sliced, dst, cut)
        if scattered is not None:
            part = space.step("reduce_scatter", cut, sliced, scattered)
            reduced = space.put(scattered, rest, _REPLICATE)
            found.append(_then(space, (first, part, space.step("all_reduce", rest, scattered, reduced)), reduced, dst))
    if not lands or (space.by_seconds and space.links.kinds_differ):  # else receivers receive as much
        _by_receivers(space, src, first, sliced, dst, pending, found, room)
    return found


def _sure(
    space: Space, src: Facts, first: Path, sliced: Facts, dst: Facts, pending: tuple[int, ...]
) -> Path | None:  # fmt: skip
    """The way that would be chosen of all `ways`, where bytes count and a look at `dst` tells; else None.

    A scatter that ends there, as nothing receives less or takes fewer collectives. Or a reduction that does, where no
    other way receives much less and that of the receivers takes as long: all that is left has more collectives.
    """
    for a, (p, q) in enumerate(zip(sliced.layout, dst.layout)):
        if p is not q and p is not _REPLICATE and a not in pending:
            return None
    takes = space.links.over(pending).all_reduce(space.carried(sliced.nbytes))
    if all(dst.dim_of[a] >= 0 for a in pending):
        if scattered_to(space, sliced, dst, pending) is not dst:
            return None
        part = space.step("reduce_scatter", pending, sliced, dst)
        return _then(space, (first, part), dst, dst) if part[0] < takes else None
    if space.wire is not None or space.put(sliced, pending, _REPLICATE) is not dst:
        return None
    way = _then(space, (first, space.step("all_reduce", pending, sliced, dst)), dst, dst)
    if way[0] > receivers_take(space, src, dst, pending) or not _near(space, way, least_bytes(space, sliced, dst)):
        return None
    return way


def _by_receivers(
    space: Space, src: Facts, first: Path, sliced: Facts, dst: Facts, pending: tuple[int, ...], found: list[Path],
    room: float,
) -> None:  # fmt: skip
    """Add to `found`: each rank reduces what it wants; and, where less may be received so, ranks that have room do."""
    room = min([room, *(way[0] for way in found)]) if space.by_seconds else math.inf
    over: tuple[int, ...] = ()
    if receivers_take(space, src, dst, pending) <= room:
        over = talking(space, src, dst, pending)
        found.append(space.step("all_to_all_reduce", over, src, dst))
        room = min(room, found[-1][0])
    if not over or sliced is not src:
        over = talking(space, sliced, dst, pending)
    if space.by_seconds and 2 * space.links.over(over).least > room:
        return
    least = least_bytes(space, sliced, dst)
    if any(_near(space, way, least) for way in found):
        return
    way = spread(space, sliced, dst, over, pending)
    if way is not None:
        found.append((first[0] + way[0], first[1] + way[1]))


def scatter_takes(space: Space, cur: Facts, dst: Facts, axes: tuple[int, ...]) -> float:
    """Seconds that a reduce-scatter takes at least, with the launch that follows if `dst` does not sharded `axes`."""
    copies = space.ranks([a for a, p in enumerate(cur.layout) if p is _REPLICATE])  # may be sharded along with them
    scatter = space.links.over(axes).reduce_scatter(space.carried(cur.nbytes) / copies)
    return scatter + (space.links.launch if any(dst.dim_of[a] < 0 for a in axes) else 0.0)


def receivers_take(space: Space, cur: Facts, dst: Facts, pending: tuple[int, ...]) -> float:
    """Seconds that it takes at least if every rank receives the parts of what it wants; inf where that fills memory."""
    parts = space.ranks(pending)
    arrives = space.carried(dst.nbytes, space.itemsize) * (parts - 1)
    if arrives > max(_MUCH, cur.nbytes + dst.nbytes):
        return math.inf
    return space.links.over(pending).least + space.links.pace * arrives + parts * space.model.kernel


def talking(space: Space, cur: Facts, dst: Facts, pending: Sequence[int]) -> tuple[int, ...]:
    """The axes over which data moves where `pending` are reduced on the way from `cur` to `dst`, in one step."""
    return tuple(sorted({*moving_axes(space, space.put(cur, pending, _REPLICATE), dst)[0], *pending}))


def _near(space: Space, way: Path, least: float) -> bool:
    """True where nothing that receives `least` bytes in two collectives would be chosen instead of `way`."""
    if space.by_seconds:
        return way[0] <= space.floor(2, least)
    return sum([s.nbytes for s in way[1] if s.is_collective]) <= space.carried(int(least)) * space.model.slack + _FEW


def least_bytes(space: Space, cur: Facts, dst: Facts) -> float:
    """No way from `cur` to `dst` makes the rank that receives most receive less.

    Where nothing is pending, what one shot receives. Else a rank receives all that it wants; and for every element
    k - 1 of its k pending parts arrive somewhere, and one more at every further rank that wants it, spread over the
    ranks. Axes that stay replicated or pending hold copies that are counted one by one.
    """
    pending = pending_axes(cur, dst)
    if not pending:
        return sum([s.nbytes for s in one_shot(space, cur, dst)[1] if s.is_collective])
    ranks, copies, reduced = 1, 1, space.ranks(pending)
    for p, q, d, e, k in zip(cur.layout, dst.layout, cur.dim_of, dst.dim_of, space.sizes):
        if p is not q or d >= 0:
            ranks *= k
            if e < 0:
                copies *= k
    return max(dst.nbytes, space.nbytes_of_all * (reduced + copies - 2) / ranks)


def fewest(space: Space, some: Sequence[Path]) -> Path:
    """Of `some` ways the one with the fewest collectives, of those within the model's slack of the fewest bytes."""
    nbytes = [sum([s.nbytes for s in steps if s.is_collective]) for _, steps in some]
    most = min(nbytes) * space.model.slack + _FEW
    return min([way for way, n in zip(some, nbytes) if n <= most], key=lambda way: (collectives(way), way[0]))


def collectives(path: Path) -> int:
    """How many collectives a path has."""
    return sum([s.launches for s in path[1]])


def staged(space: Space, src: Facts, dst: Facts, groups: Sequence[tuple[int, ...]]) -> Path:
    """Group by group: what is pending is scattered, or reduced, in the order given; the rest moves in the other order.

    So fast links carry much and slow ones what is left of it. Axes of a group that are pending in several kinds are
    reduced kind by kind. Where nothing else moves the last of them are all-reduced if `dst` does not shard them: that
    is a scatter and a gather in one.
    """
    pending = pending_axes(src, dst)
    cur = sliced_first(space, src, dst, pending)
    paths: list[Path] = [] if cur is src else [space.step("slice", changed(src, cur), src, cur)]
    left = len(changed(src, dst))
    for group in groups if pending else ():
        for kind in dict.fromkeys([src.layout[a] for a in group if a in pending]):
            axes = tuple([a for a in group if a in pending and src.layout[a] is kind])
            left -= len(axes)
            whole = not left and all(dst.dim_of[a] < 0 for a in axes)
            nxt = None if whole else scattered_to(space, cur, dst, axes)
            name = "all_reduce" if nxt is None else "reduce_scatter"
            nxt = nxt or space.put(cur, axes, _REPLICATE)
            paths.append(space.step(name, axes, cur, nxt))
            cur = nxt
    for group in reversed(groups):
        nxt = space.put_from(cur, group, dst)
        if nxt is not cur:
            paths.append(shot(space, cur, nxt))
            cur = nxt
    return _then(space, paths, cur, dst)


def _then(space: Space, paths: Iterable[Path], cur: Facts, dst: Facts) -> Path:
    """`paths`, which lead to `cur`, and one shot from there."""
    some = [*paths] if cur is dst else [*paths, shot(space, cur, dst)]
    return sum([cost for cost, _ in some]), tuple([step for _, steps in some for step in steps])


def pending_axes(cur: Facts, dst: Facts) -> tuple[int, ...]:
    """The axes that are still to be reduced."""
    pending = cur.pending
    return tuple([a for a in pending if cur.layout[a] is not dst.layout[a]]) if pending else pending


def changed(cur: Facts, nxt: Facts) -> tuple[int, ...]:
    """The axes on which two layouts differ."""
    return tuple([a for a, (p, q) in enumerate(zip(cur.layout, nxt.layout)) if p is not q])


def _cut_later(layout: Facts, axis: int, dim: int) -> list[int]:
    """The axes after `axis` that split `dim`."""
    return [b for b, _ in layout.splits[dim] if b > axis]


def sliced_first(space: Space, cur: Facts, dst: Facts, pending: Sequence[int]) -> Facts:
    """`cur` with every replicated axis split that can be, so that less is reduced.

    Left alone are axes that shard a dim before another axis does in `cur` (their part is not this rank's to take,
    unless a split factor skips what the other shards, now and in `dst`), or after a pending axis that will shard the
    same dim (it must come first).
    """
    nxt = cur
    for a, p in enumerate(cur.layout):
        d = dst.dim_of[a]
        if p is not _REPLICATE or d < 0 or space.sizes[a] == 1:
            continue
        if any(b < a and dst.dim_of[b] == d for b in pending):
            continue
        later = _cut_later(cur, a, d)
        if later and not isinstance(dst.layout[a], StridedShard):
            continue
        cut = space.put(nxt, (a,), dst.layout[a])
        if not later or (not moving_axes(space, nxt, cut)[0] and a not in moving_axes(space, cut, dst)[0]):
            nxt = cut
    return nxt


def scattered_to(space: Space, cur: Facts, dst: Facts | None, axes: tuple[int, ...]) -> Facts | None:
    """Where a reduce-scatter over `axes` leads: to shards of `dst` where possible, else (or with None) to even shards.

    Replicated axes that shard the same dim right after one of `axes` are sharded along with it, so that nothing is
    received that is not wanted. Returns None for a tensor without dims.
    """
    now, sizes = cur, space.sizes
    for a in axes:
        cut: Placement | None
        if dst is None or dst.dim_of[a] < 0 or _cut_later(cur, a, dst.dim_of[a]):
            cut = _best_cut(space, now, cur if dst is None else dst, a)
            if cut is None:
                return None
        else:
            cut = dst.layout[a]
        now = space.put(now, (a,), cut)
    if dst is None:
        return now
    for b, p in enumerate(cur.layout):
        d = dst.dim_of[b]
        if p is not _REPLICATE or d < 0 or sizes[b] == 1 or _cut_later(cur, b, d):
            continue
        if any(a < b and now.layout[a] is dst.layout[a] and dst.dim_of[a] == d for a in axes):
            now = space.put(now, (b,), dst.layout[b])
    return now


def _best_cut(space: Space, cur: Facts, dst: Facts, axis: int) -> Placement | None:
    """A shard for `axis` that keeps what this rank holds of `cur` in place: even, of a dim `dst` leaves whole, early.

    An early dim is gathered without a copy; where none is even it is the one whose largest shard is smallest. Where a
    later axis shards the dim already, a split factor puts `axis` after it, if all is even.
    """
    k, best, choice = space.sizes[axis], (0.0, False, 1), None
    for d, n in enumerate(cur.dims):
        if not n:
            continue
        splits = cur.splits[d]
        later = [b for b, _ in splits if b > axis]
        if later and (any(f for _, f in splits) or space.shape[d] % (k * space.ranks([a for a, _ in splits]))):
            continue
        score = (-(chunk_size(n, k) * k / n), d not in dst.dim_of, -d)
        if choice is None or score > best:
            best, choice = score, StridedShard(d, split_factor=space.ranks(later)) if later else Shard(d)
            if best[1] and n % k == 0:
                break  # those of further dims are no better
    return choice
