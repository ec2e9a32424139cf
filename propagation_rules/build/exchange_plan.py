"""What an exchange along a sharded dim sends and where to: geometry only, see `propagation_rules.build.exchange`.

A piece is a part of a run that one position holds and another must hold. A message carries the pieces from one to the
other, each element once: its blocks are the union of what the pieces read, and each piece knows where in them it is.

    runs over 4 elements repeated 3 times, to a position that must hold [2, 9), from the one that holds [0, 2)
    pieces     elements 0 1, twice, and element 0          message     one block: 0 1
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from dtensor.intervals import Interval, dim_intervals
from dtensor.placement import Shard, StridedShard
from dtensor.spec import Spec

__all__ = [
    "Block",
    "Piece",
    "Places",
    "Plan",
    "Run",
    "backwards",
    "busiest",
    "axes_of",
    "divides",
    "places",
    "places_of",
    "plan",
    "row",
]

Places = tuple[tuple[Interval, ...], ...]
"""Per position of the axes that shard a dim, the intervals it holds."""

SAMPLED = 16
"""Positions that an estimate of traffic looks at."""


class Run(NamedTuple):
    """`target[out + stride * i] = source[start + step * i]` for i < length; a stride of 0 adds up."""

    out: int
    start: int
    length: int
    step: int = 1
    stride: int = 1
    source: int = 0
    target: int = 0


def backwards(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs from target to source: where gradients go, to be added up."""
    back = []
    for r in runs:
        if r.step < 0:
            last = r.length - 1
            r = r._replace(out=r.out + r.stride * last, start=r.start + r.step * last, step=-r.step, stride=-r.stride)
        back.append(Run(r.start, r.out, r.length, r.stride, r.step, r.target, r.source))
    return tuple(back)


# ------------------------------------------------------------ who holds what
def axes_of(spec: Spec, dim: int) -> tuple[int, ...]:
    """The mesh axes that shard `dim`."""
    return tuple(a for a, p in enumerate(spec.placements) if isinstance(p, (Shard, StridedShard)) and p.dim == dim)


def row(spec: Spec, dim: int) -> int:
    """Elements of the largest shard in one index of `dim`."""
    return spec.local_numel_bound // max(spec.local_shape_of([0] * spec.mesh.ndim)[dim], 1)


def divides(spec: Spec, dim: int, parts: int = 1) -> bool:
    """True when the axes that shard `dim` split each of `parts` equal parts of it evenly."""
    return spec.shape[dim] % (parts * math.prod(spec.mesh.shape[a] for a in axes_of(spec, dim))) == 0


def places(spec: Spec, dim: int) -> Places:
    """What the positions of `axes_of(spec, dim)`, row-major, hold of `dim`."""
    return places_of(spec, dim, spec.shape[dim])


def places_of(spec: Spec, dim: int, size: int) -> Places:
    """As `places`, for a dim of another size."""
    cut = [(spec.mesh.shape[a], p) for a, p in enumerate(spec.placements) if isinstance(p, (Shard, StridedShard))]
    splits = tuple((k, p.split_factor if isinstance(p, StridedShard) else 0) for k, p in cut if p.dim == dim)
    return _places(size, splits)


@lru_cache(maxsize=4096)
def _places(size: int, splits: tuple[tuple[int, int], ...]) -> Places:
    return tuple(
        dim_intervals(size, tuple((k, r, split) for (k, split), r in zip(splits, at, strict=True)))
        for at in itertools.product(*(range(k) for k, _ in splits))
    )


# ------------------------------------------------------------ what goes from one position to another
class Block(NamedTuple):
    """Elements `start`, `start + step`, ... of a source's local part: a part of a message, `at` in it."""

    source: int
    start: int
    step: int
    length: int
    at: int


class Piece(NamedTuple):
    """What is read of a message (or of this rank's own part), `count` elements from `at`, and written."""

    target: int
    out: int
    stride: int
    length: int
    at: int
    step: int
    source: int


class Plan(NamedTuple):
    """One position's part: its own pieces, blocks to send per position, and per position what is received and read.

    `silent`: nobody lacks anything, nothing is called. `covered`: elements written, per target.
    """

    silent: bool
    own: tuple[Piece, ...]
    sends: tuple[tuple[Block, ...], ...]
    receives: tuple[tuple[int, tuple[Piece, ...]], ...]
    covered: tuple[int, ...]


def _within(first: int, step: int, length: int, low: int, size: int) -> tuple[int, int]:
    """The i in [0, length) with low <= first + step * i < low + size, as a range."""
    if step == 0:
        return (0, length) if low <= first < low + size else (0, 0)
    if step > 0:
        lo, hi = -((first - low) // step), -((first - low - size) // step)
    else:
        lo, hi = (first - low - size) // -step + 1, (first - low) // -step + 1
    return max(lo, 0), min(hi, length)


def _pieces(runs: Sequence[Run], ins: Sequence[Places], outs: Sequence[Places], p: int, q: int) -> list[Piece]:
    """The pieces of the runs that position `p` holds and `q` must hold, in local indices of both."""
    found = []
    for r in runs:
        base, goals = 0, outs[r.target][q]
        starts, before = [b for b, _ in goals], [0, *itertools.accumulate(n for _, n in goals)]
        for a, held in ins[r.source][p]:
            lo, hi = _within(r.start, r.step, r.length, a, held)
            if lo < hi:
                low, high = sorted((r.out + r.stride * lo, r.out + r.stride * (hi - 1)))
                for i in range(max(bisect_right(starts, low) - 1, 0), bisect_right(starts, high)):
                    b, wanted = goals[i]
                    first, last = _within(r.out, r.stride, r.length, b, wanted)
                    first, last = max(first, lo), min(last, hi)
                    if first < last:
                        out, start = r.out + r.stride * first - b + before[i], r.start + r.step * first - a + base
                        found.append(Piece(r.target, out, r.stride, last - first, start, r.step, r.source))
            base += held
    return found


def _message(pieces: Sequence[Piece]) -> tuple[int, tuple[Block, ...], tuple[Piece, ...]]:
    """Length of a message that carries these pieces, each element once; its blocks; the pieces as read from it."""
    lanes: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for i, c in enumerate(pieces):
        step = abs(c.step) or 1
        low = min(c.at, c.at + c.step * (c.length - 1))
        first, count = low // step, c.length if c.step else 1
        lanes.setdefault((c.source, step, low % step), []).append((first, first + count, i))
    blocks: list[Block] = []
    read: list[Piece] = list(pieces)
    total = 0
    for (source, step, rest), spans in sorted(lanes.items()):
        spans.sort()
        begin = end = -1
        for first, stop, i in spans:
            if first > end:
                begin, end = first, first
                blocks.append(Block(source, begin * step + rest, step, 0, total))
            if stop > end:
                total += stop - end
                blocks[-1] = blocks[-1]._replace(length=stop - begin)
                end = stop
            sign = (pieces[i].step > 0) - (pieces[i].step < 0)
            read[i] = pieces[i]._replace(at=blocks[-1].at + first - begin, step=sign)
    return total, tuple(blocks), tuple(read)


@lru_cache(maxsize=4096)
def plan(runs: tuple[Run, ...], ins: tuple[Places, ...], outs: tuple[Places, ...], at: int, adds: bool) -> Plan:
    """What position `at` sends and receives."""
    many = range(len(ins[0]))
    silent = len(many) == 1 or _silent(runs, ins, outs, adds)
    own = tuple(_pieces(runs, ins, outs, at, at))
    sends = () if silent else tuple(_message(_pieces(runs, ins, outs, at, q))[1] if q != at else () for q in many)
    receives: tuple[tuple[int, tuple[Piece, ...]], ...] = ()
    if not silent:
        messages = [_message(_pieces(runs, ins, outs, p, at)) if p != at else (0, (), ()) for p in many]
        receives = tuple((total, read) for total, _, read in messages)
    covered = [0] * len(outs)
    for piece in itertools.chain(own, *(read for _, read in receives)):
        covered[piece.target] += piece.length
    return Plan(silent, own, sends, receives, tuple(covered))


def _silent(runs: Sequence[Run], ins: Sequence[Places], outs: Sequence[Places], adds: bool) -> bool:
    """True when every position holds all that it must: the same answer on all ranks."""
    many = range(len(ins[0]))
    if adds:  # positions may hold parts of the same indices, to be added
        return not any(_pieces(runs, ins, outs, p, q) for p in many for q in many if p != q)
    for q in many:
        wanted = sum(
            max(last - first, 0)
            for r in runs
            for b, n in outs[r.target][q]
            for first, last in (_within(r.out, r.stride, r.length, b, n),)
        )
        if wanted != sum(c.length for c in _pieces(runs, ins, outs, q, q)):
            return False
    return True


@lru_cache(maxsize=4096)
def busiest(runs: tuple[Run, ...], ins: tuple[Places, ...], outs: tuple[Places, ...], adds: bool = False) -> int:
    """Elements along the dim that the busiest position sends or receives; an estimate where there are many."""
    k = len(ins[0])
    if k == 1:
        return 0
    looked = sorted({i * (k - 1) // (SAMPLED - 1) for i in range(SAMPLED)}) if k > SAMPLED else range(k)
    most = 0
    for p in looked:
        near = range(k) if k <= SAMPLED**2 else range(max(p - SAMPLED, 0), min(p + SAMPLED, k))
        others = [q for q in near if q != p]
        got = sum(_message(_pieces(runs, ins, outs, q, p))[0] for q in others)
        sent = sum(_message(_pieces(runs, ins, outs, p, q))[0] for q in others)
        most = max(most, got, sent)
    return most
