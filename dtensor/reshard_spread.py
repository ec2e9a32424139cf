"""Reducing where there is room, then moving: pending sums whose results end up on other ranks than hold them.

A reduction of k parts of an element takes k - 1 arrivals, and every rank that wants the element and has not reduced it
takes one more. Where they arrive is free, so they can be spread until all ranks receive alike. On a mesh (2, 4):

    [P, S(0)] -> [S(0), S(0)]   eighth 1 of the rows is pending on (0,0) and (1,0) and wanted on (0,1). Were it reduced
                                where it is wanted, (0,1) would receive two eighths and (0,0), which has half of what it
                                wants, one. Three quarters of it are reduced on the holders: each rank receives 1.75.

The ranks along the axes that must talk or are pending are looked at together; in such a group each part of an element
has one holder. The elements fall into classes with the same holders H and the same wanting ranks W. With every wanting
rank receiving each of its elements once, what is left to spread is, for each element,

    H and W share a rank     k - 2 arrivals, on any of H. A rank of both that takes them receives the k - 1 other parts;
                             another first adds up all but the part of a rank of both, and sends it the sum
    they share none          k - 1 arrivals, on any of H or W

`balanced` levels the ranks' loads, class by class, until nothing changes; then the classes are cut into `Piece`s, each
with the rank that reduces it. Two all-to-alls do it, parts to the reducer and results to who wants them, or three where
a sum goes by way of a rank of both to others. In between no rank holds a shard, so the whole is one step of a plan.

All of a group compute the same pieces from the specs alone, in exact set arithmetic, and add up in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from dtensor.placement import Partial
from dtensor.reshard_geometry import Coord, Region, Runs, holdings, members, region_size
from dtensor.reshard_layout import Facts, Path, Space
from dtensor.reshard_step import Step
from dtensor.spec import Spec, part_of_runs

__all__ = ["Piece", "arrivals", "in_stages", "pieces_of", "spread"]

_MOST_RANKS, _MOST_CLASSES = 32, 512
"""Larger groups, and finer cuts, reduce in other ways: the division takes time that grows with both."""
_SWEEPS = 256
_FINE = 64
"""A class is cut in parts that are exact to a 64th of it or less."""
_IN_STAGES = frozenset({"sum", "avg", "product", "max", "min", "band", "bor", "bxor"})


class Piece(NamedTuple):
    """A box of the tensor and who does what with it; ranks are positions in the group.

    Attributes:
        box: per dim, runs of the global dim.
        holders: who holds a pending part, in the order of the parts.
        wanting: who wants the result.
        reducer: who adds up the parts: of all holders, or of all but `last`.
        last: who adds its own part to that sum; -1 where the reducer has the whole.
    """

    box: Region
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


def in_stages(spec: Spec) -> bool:
    """True where the pending parts of `spec` may be reduced some first and the others later, with the same meaning.

    Not norms, which take a root, nor dtypes that are added up in a wider one and rounded once.
    """
    kinds = {p.reduce_op for p in spec.placements if isinstance(p, Partial)}
    if not kinds <= _IN_STAGES or spec.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return False
    return not str(spec.dtype).startswith("torch.float8")


def spread(space: Space, src: Facts, dst: Facts, axes: tuple[int, ...], pending: Sequence[int]) -> Path | None:
    """The step from `src`, which is pending on `pending`, to `dst`, over `axes`: those, and those that must talk.

    None where the group is too large or too finely cut, or the parts cannot be reduced in stages.
    """
    if not space.in_stages or not space.shape or space.ranks(axes) > _MOST_RANKS:
        return None
    classes = 1
    for layout in (src, dst):
        for cuts in layout.cuts:
            for a, factor in cuts:
                classes *= space.sizes[a] * (factor or 1) if a in axes else 1
    if classes > _MOST_CLASSES:
        return None
    k = space.ranks(pending)
    launches = 2 if k == 2 or all(dst.dim_of[a] >= 0 or space.sizes[a] == 1 for a in axes) else 3
    return space.spread_step(axes, src, dst, int(level(space, src, dst, axes, k)), launches)


def level(space: Space, src: Facts, dst: Facts, axes: tuple[int, ...], k: int) -> float:
    """Bytes that each rank receives when a reduction of k parts is spread over the ranks along `axes`.

    Counted by the digits of the index that each axis fixes, as though all shards were even. For a share `both` of the
    elements there is a rank that holds a part and wants the result: along every axis that cuts them before and after,
    the digits must be the same. Where only a circle of axes change digits, `room` is the share of the ranks that
    have to do with the other elements.
    """
    both, circles, links = 1.0, 0, 0
    known: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def root(digit: tuple[int, int, int]) -> tuple[int, int, int]:
        while digit in known:
            digit = known[digit]
        return digit

    have, want = _digits_of(space, src, axes), _digits_of(space, dst, axes)
    for a, digit in have.items():
        if a not in want or digit == want[a]:
            continue
        one, other = root(digit), root(want[a])
        links += 1
        if one == other:
            circles += 1
        else:
            known[one], both = other, both / space.sizes[a]
    copies = space.ranks([a for a in axes if a not in want])
    spare = (1 - both) * (k - 1) + both * (k - 2)
    room = 1 - both if k == 2 and circles and both < 1 and links == 2 * circles else 1.0
    apart = {a for layout in (src, dst) for cuts in layout.cuts for a, _ in cuts if a not in axes}
    mean = space.nbytes_of_all / space.ranks([*apart, *axes])
    return max(dst.nbytes, mean * (copies + spare / room))


def _digits_of(space: Space, layout: Facts, axes: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    """The digit of an index that each of `axes` fixes: (dim, what is cut before it, its size)."""
    found = {}
    for d, cuts in enumerate(layout.cuts):
        before = 1
        for a, factor in cuts:
            before *= max(factor, 1)
            if a in axes:
                found[a] = (d, before, space.sizes[a])
            before *= space.sizes[a]
    return found


def arrivals(spec: Spec, step: Step, coord: Coord) -> int:
    """Elements that the rank at `coord` receives in a spread step."""
    group = tuple(members(spec, step.axes, coord))
    me, total = group.index(coord), 0
    for piece in pieces_of(spec, step, group):
        size = region_size(piece.box)
        if me == piece.reducer:
            total += size * sum(h != me for h in piece.senders)
        if me == piece.last or (me != piece.end and me in piece.wanting):
            total += size
    return total


@lru_cache(maxsize=256)
def pieces_of(spec: Spec, step: Step, group: tuple[Coord, ...]) -> tuple[Piece, ...]:
    """Who reduces what, in the group of ranks at the coords `group`."""
    pending = [a for a in step.axes if isinstance(step.src[a], Partial) and step.src[a] is not step.dst[a]]
    have = [holdings(spec, step.src, coord) for coord in group]
    want = [holdings(spec, step.dst, coord) for coord in group]
    order = sorted(range(len(group)), key=lambda i: [group[i][a] for a in pending])
    everyone = (1 << len(group)) - 1
    dims = [_signatures([h[d] for h in have], [w[d] for w in want]) for d in range(len(spec.shape))]
    classes: list[tuple[Region, tuple[int, ...], tuple[int, ...]]] = []
    for box in itertools.product(*dims):
        held = wanted = everyone
        for (h, w), _ in box:
            held, wanted = held & h, wanted & w
        if wanted:
            holders = tuple([i for i in order if held >> i & 1])
            wanting = tuple([i for i in range(len(group)) if wanted >> i & 1])
            classes.append((tuple([runs for _, runs in box]), holders, wanting))
    work = []
    for region, holders, wanting in classes:
        both = [i for i in holders if i in wanting]
        takers = tuple(sorted({*holders, *wanting}))
        if both:  # those of both first: where nothing is to be spread, one of them takes it
            takers = (*both, *[i for i in holders if i not in both])
        work.append((region_size(region), len(holders) - (2 if both else 1), takers))
    shares = balanced([region_size(w) for w in want], work)
    out: list[Piece] = []
    for (region, holders, wanting), (_, _, takers), share in zip(classes, work, shares):
        both = [i for i in holders if i in wanting]
        for taker, part in _cut(region, takers, share):
            out.append(Piece(part, holders, wanting, taker, both[0] if both and taker not in both else -1))
    return tuple(out)


def _signatures(have: Sequence[Runs], want: Sequence[Runs]) -> list[tuple[tuple[int, int], Runs]]:
    """The runs of one dim by who holds and who wants them: ((holders, wanting ranks), runs), as bits."""
    edges = sorted({at for runs in (*have, *want) for start, n in runs for at in (start, start + n)})
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for lo, hi in itertools.pairwise(edges):
        masks = [sum(1 << i for i, runs in enumerate(side) if _inside(runs, lo)) for side in (have, want)]
        if masks[0] and masks[1]:
            runs = found.setdefault((masks[0], masks[1]), [])
            if runs and sum(runs[-1]) == lo:
                runs[-1] = (runs[-1][0], hi - runs[-1][0])
            else:
                runs.append((lo, hi - lo))
    return [(masks, tuple(runs)) for masks, runs in found.items()]


def _inside(runs: Runs, at: int) -> bool:
    return any(start <= at < start + n for start, n in runs)


def balanced(loads: Sequence[float], work: Sequence[tuple[int, int, tuple[int, ...]]]) -> list[list[float]]:
    """Which share of each class each of its takers takes, so that the rank with the highest load has the least.

    `loads`: what each rank receives anyhow. `work`: per class its elements, the arrivals to spread for each, and who
    may take them. Each class in turn fills up its takers to one level, as water does, until that changes little:
    this makes the sum of the squares of the loads least, and with it the highest load.
    """
    level = [float(n) for n in loads]
    shares = [[0.0] * len(takers) for _, _, takers in work]
    whole = sum(n * each for n, each, _ in work)
    for _ in range(_SWEEPS if whole else 0):
        change = 0.0
        for (n, each, takers), share in zip(work, shares):
            if not each:
                continue
            for i, t in enumerate(takers):
                level[t] -= share[i]
            new = _filled([level[t] for t in takers], float(n * each))
            for i, t in enumerate(takers):
                level[t] += new[i]
                change = max(change, abs(new[i] - share[i]))
            share[:] = new
        if change * len(level) <= 1e-4 * whole:
            break
    for (n, each, _), share in zip(work, shares):
        if not each:
            share[0] = 1.0
            continue
        share[:] = [amount / (n * each) for amount in share]
    return shares


def _filled(levels: Sequence[float], amount: float) -> list[float]:
    """How much water goes to each of several vessels of equal width that have these levels."""
    order = sorted(levels)
    top, below = order[0], 0.0
    for count, low in enumerate(order, 1):
        below += low
        top = (amount + below) / count
        if count == len(order) or top <= order[count]:
            break
    return [max(top - low, 0.0) for low in levels]


def _cut(region: Region, takers: Sequence[int], shares: Sequence[float]) -> list[tuple[int, Region]]:
    """The parts of `region` in these proportions, as boxes."""
    used = [(t, share) for t, share in zip(takers, shares) if share > 1e-6]
    size = region_size(region)
    out: list[tuple[int, Region]] = []
    rest, at, total = [region], 0, 0.0
    for taker, share in used[:-1]:
        total += share
        some: list[Region] = []
        left: list[Region] = []
        count = round(total * size) - at
        for box in rest:
            first, second = _first(box, count, size // _FINE)
            count -= sum([region_size(part) for part in first])
            some, left = some + first, left + second
        at += sum([region_size(part) for part in some])
        out += [(taker, part) for part in some]
        rest = left
    return out + [(used[-1][0], part) for part in rest]


def _first(box: Region, count: int, coarse: int) -> tuple[list[Region], list[Region]]:
    """About the first `count` elements of `box`, and the others: `coarse` elements more or less do not matter.

    Cut along the first dim that is long, else the longest; what is missing comes from the slab that follows.
    """
    size = region_size(box)
    if count <= 0 or count >= size:
        return ([], [box]) if count <= 0 else ([box], [])
    lengths = [sum([n for _, n in runs]) for runs in box]
    dim = next((d for d, n in enumerate(lengths) if n >= _FINE), lengths.index(max(lengths)))
    slab, n = size // lengths[dim], lengths[dim]
    part = lambda lo, hi: (*box[:dim], tuple(part_of_runs(box[dim], lo, hi)), *box[dim + 1 :])  # noqa: E731
    end = (count + slab // 2) // slab if slab <= 2 * coarse else count // slab
    first, second = [part(0, end)] if end else [], [part(end, n)] if end < n else []
    if slab > 2 * coarse and count > end * slab:
        inner, outer = _first(part(end, end + 1), count - end * slab, coarse)
        second = outer + ([part(end + 1, n)] if end + 1 < n else [])
        first += inner
    return first, second
