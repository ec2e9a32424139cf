"""Who reduces which box of a tensor in a balanced reduction (`dtensor.redistribute.planner.balanced_reduction`).

The elements fall into classes with the same holders and the same wanting ranks, found dim by dim. `balanced` levels the
ranks' loads, class by class, until nothing changes; then the classes are divided into `Box`es, each with the rank that
reduces it.

All of a group compute the same boxes from the specs alone, in exact set arithmetic, and add up in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from dtensor.comm.world import kept
from dtensor.intervals import Region, Runs, part_of_runs, region_shape, region_size
from dtensor.placement import Partial
from dtensor.redistribute.geometry import Coord, by_dim, members
from dtensor.redistribute.step import Step
from dtensor.spec import Spec

__all__ = ["Box", "arrivals", "balanced", "boxes_of"]

_SWEEPS = 256
_FINE = 64
"""A class is sharded in parts that are exact to a 64th of it or less."""


class Box(NamedTuple):
    """A region of the tensor and who does what with it; ranks are positions in the group.

    Attributes:
        region: per dim, runs of the global dim.
        holders: who holds a pending part, in the order of the parts.
        wanting: who wants the result.
        reducer: who adds up the parts: of all holders, or of all but `last`.
        last: who adds its own part to that sum; -1 where the reducer has the whole.
    """

    region: Region
    holders: tuple[int, ...]
    wanting: tuple[int, ...]
    reducer: int
    last: int

    @property
    def end(self) -> int:
        """Who has the result first."""
        return self.reducer if self.last < 0 else self.last

    @property
    def senders(self) -> tuple[int, ...]:
        """The holders whose parts are added up at `reducer`, itself among them where it has one."""
        return tuple([h for h in self.holders if h != self.last])


def arrivals(spec: Spec, step: Step, coord: Coord) -> int:
    """Elements that the rank at `coord` receives in a spread step."""
    group = tuple(members(spec, step.axes, coord))
    me, total = group.index(coord), 0
    for box in boxes_of(spec, step, group):
        size = region_size(box.region)
        if me == box.reducer:
            total += size * sum(h != me for h in box.senders)
        if me == box.last or (me != box.end and me in box.wanting):
            total += size
    return total


@kept
@lru_cache(maxsize=256)
def boxes_of(spec: Spec, step: Step, group: tuple[Coord, ...]) -> tuple[Box, ...]:
    """Who reduces what, in the group of ranks at the coords `group`, the `members` along the step's axes."""
    pending = [a for a in step.axes if isinstance(step.src[a], Partial) and step.src[a] is not step.dst[a]]
    have, want = (by_dim(spec, layout, step.axes, group[0]) for layout in (step.src, step.dst))
    place = [[at[a] for a in pending] for at in group]
    everyone = (1 << len(group)) - 1
    roles: dict[tuple[int, int], _Roles] = {}
    classes: list[tuple[Region, _Roles]] = []
    for box in itertools.product(*map(_signatures, have, want)):
        held = wanted = everyone
        for h, w, _ in box:
            held, wanted = held & h, wanted & w
        if wanted:
            role = roles.get((held, wanted))
            if role is None:
                role = roles[held, wanted] = _roles(held, wanted, place)
            classes.append((tuple([runs for _, _, runs in box]), role))
    sizes = [region_size(region) for region, _ in classes]
    work = [(size, role.each, role.takers) for size, (_, role) in zip(sizes, classes)]
    shares = balanced([*map(region_size, zip(*want))], work)
    out: list[Box] = []
    for (region, role), size, share in zip(classes, sizes, shares):
        for taker, part in _cut(region, size, role.takers, share):
            last = -1 if taker in role.both else role.last
            out.append(Box(part, role.holders, role.wanting, taker, last))
    return tuple(out)


class _Roles(NamedTuple):
    """Of the elements of a class: who holds, wants, does both, may reduce; who adds his part where another reduces.

    `each`: arrivals to spread for each element.
    """

    holders: tuple[int, ...]
    wanting: tuple[int, ...]
    both: tuple[int, ...]
    takers: tuple[int, ...]
    last: int
    each: int


def _roles(held: int, wanted: int, place: Sequence[list[int]]) -> _Roles:
    """Who does what where the ranks `held` hold and `wanted` want, as bits; holders are in the order of `place`."""
    holders = tuple(sorted(_ranks(held), key=place.__getitem__))
    wanting = tuple(_ranks(wanted))
    if not held & wanted:
        return _Roles(holders, wanting, (), tuple(_ranks(held | wanted)), -1, len(holders) - 1)
    # those of both first: where nothing is to be spread, one of them takes it
    both = tuple([i for i in holders if wanted >> i & 1])
    takers = both + tuple([i for i in holders if not wanted >> i & 1])
    return _Roles(holders, wanting, both, takers, both[0], len(holders) - 2)


def _ranks(bits: int) -> list[int]:
    """The numbers of the bits that are set, ascending."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


def _signatures(have: Sequence[Runs], want: Sequence[Runs]) -> list[tuple[int, int, Runs]]:
    """The runs of one dim by who holds and who wants them: (holders, wanting ranks, runs), as bits."""
    ranks = len(have)
    who: dict[Runs, int] = {}
    for i, runs in enumerate((*have, *want)):
        who[runs] = who.get(runs, 0) | 1 << i
    changes: dict[int, int] = {}
    for runs, bits in who.items():
        for start, n in runs:
            changes[start] = changes.get(start, 0) ^ bits
            changes[start + n] = changes.get(start + n, 0) ^ bits
    found: dict[int, list[tuple[int, int]]] = {}
    now, everyone = 0, (1 << ranks) - 1
    for lo, hi in itertools.pairwise(sorted(changes)):
        now ^= changes[lo]
        if now & everyone and now >> ranks:
            some = found.setdefault(now, [])
            if some and sum(some[-1]) == lo:
                some[-1] = (some[-1][0], hi - some[-1][0])
            else:
                some.append((lo, hi - lo))
    return [(bits & everyone, bits >> ranks, tuple(some)) for bits, some in found.items()]


def balanced(loads: Sequence[float], work: Sequence[tuple[int, int, tuple[int, ...]]]) -> list[list[float]]:
    """Which share of each class each of its takers takes, so that the rank with the highest load has the least.

    `loads`: what each rank receives anyhow. `work`: per class its elements, the arrivals to spread for each, and who
    may take them. Each class in turn fills up its takers to one level, as water does, until that changes little:
    this makes the sum of the squares of the loads least, and with it the highest load.
    """
    level = [float(n) for n in loads]
    shares = [[0.0] * len(takers) for _, _, takers in work]
    whole = sum(n * each for n, each, _ in work)
    spread = [(i, float(n * each), takers) for i, (n, each, takers) in enumerate(work) if each]
    for _ in range(_SWEEPS if whole else 0):
        change = 0.0
        for i, amount, takers in spread:
            share = shares[i]
            others = [level[t] - had for t, had in zip(takers, share)]
            top = _filled(others, amount)
            shares[i] = new = []
            for t, low, had in zip(takers, others, share):
                more = top - low if top > low else 0.0
                new.append(more)
                level[t] = low + more
                if more - had > change:
                    change = more - had
                elif had - more > change:
                    change = had - more
        if change * len(level) <= 1e-4 * whole:
            break
    for share, (n, each, _) in zip(shares, work):
        if not each:
            share[0] = 1.0
            continue
        share[:] = [amount / (n * each) for amount in share]
    return shares


def _filled(levels: Sequence[float], amount: float) -> float:
    """The level to which so much water fills several vessels of equal width that have these levels."""
    order = sorted(levels)
    top, below, last = order[0], 0.0, len(order)
    for count, low in enumerate(order, 1):
        below += low
        top = (amount + below) / count
        if count == last or top <= order[count]:
            break
    return top


def _cut(region: Region, size: int, takers: Sequence[int], shares: Sequence[float]) -> list[tuple[int, Region]]:
    """The parts of `region`, of `size` elements, in these proportions, as boxes."""
    used = [(t, share) for t, share in zip(takers, shares) if share > 1e-6]
    out: list[tuple[int, Region]] = []
    rest, at, total = [(region, size)], 0, 0.0
    for taker, share in used[:-1]:
        total += share
        left: list[_Sized] = []
        count = round(total * size) - at
        at += count
        for box, n in rest:
            if count <= 0:
                left.append((box, n))
            elif count >= n:
                out.append((taker, box))
                count -= n
            else:
                first, second = _first(box, n, count, size // _FINE)
                for part, m in first:
                    out.append((taker, part))
                    count -= m
                left += second
        at -= count
        rest = left
    return out + [(used[-1][0], part) for part, _ in rest]


_Sized = tuple[Region, int]
"""A box and its elements."""


def _first(box: Region, size: int, count: int, coarse: int) -> tuple[list[_Sized], list[_Sized]]:
    """About the first `count` of the `size` elements of `box`, and the others; `coarse` more or less do not matter.

    Some, but not all. Divided along the first dim that is long, else the longest; what is missing comes from the slab
    that follows.
    """
    lengths = region_shape(box)
    for dim, n in enumerate(lengths):  # noqa: B007 (the one that it ends with)
        if n >= _FINE:
            break
    else:
        n = max(lengths)
        dim = lengths.index(n)
    slab, before, runs, after = size // n, box[:dim], box[dim], box[dim + 1 :]

    def part(lo: int, hi: int) -> _Sized:
        some = ((runs[0][0] + lo, hi - lo),) if len(runs) == 1 else tuple(part_of_runs(runs, lo, hi))
        return (*before, some, *after), (hi - lo) * slab

    if slab <= 2 * coarse:
        end = (count + slab // 2) // slab
        return [part(0, end)] if end else [], [part(end, n)] if end < n else []
    end, more = divmod(count, slab)
    first, second = [part(0, end)] if end else [], [part(end, n)] if end < n else []
    if more:
        inner, outer = _first(*part(end, end + 1), more, coarse)
        second = outer + ([part(end + 1, n)] if end + 1 < n else [])
        first += inner
    return first, second
