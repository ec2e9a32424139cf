"""A spread reduction of a large tensor by messages: parts are added up as they arrive, results land as they arrive.

    all-to-all 1    pending parts, from where they lie, to the piece's reducer: to the first the others are added
    all-to-all 2    where there are three: sums to the rank that has a part of its own, to which it adds them
    the last        results to their places in the shard of who wants them; where there are two, also those sums

Who sends which piece where, and in which order parts are added up, is as in
`dtensor.redistribute.executor.balanced_reduction`, so that bits agree. What a rank allocates is its shard, the sums of
what it reduces, what it sends that does not lie in one piece, and a message or more on the way; sums and results that
lie in one piece of the shard are put together there. Decided when a plan is bound, alike on all ranks: see
`dtensor.redistribute.executor.direct`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from dtensor.comm.messages import Direct, Turn
from dtensor.comm.reduce_ops import Fold, fold_of
from dtensor.redistribute.division import Piece
from dtensor.redistribute.executor import direct as reshard_direct
from dtensor.redistribute.executor.balanced_reduction import Move, Spread, Stage
from dtensor.redistribute.executor.direct import Way
from dtensor.redistribute.executor.landing import Add, Landing
from dtensor.redistribute.executor.messages import Leaving, straight
from dtensor.redistribute.geometry import Region, common, region_shape, region_size
from dtensor.redistribute.step import Step
from dtensor.spec import Spec

__all__ = ["direct_spread", "exceeds"]

Pieces = dict[int, torch.Tensor]
"""Sums and results of pieces, contiguous, each in memory of its own."""


def direct_spread(spread: Spread, spec: Spec, step: Step) -> Way | None:
    """The whole step for contiguous tensors; None where they are not large, or the group sends no messages.

    Many small messages in turns take longer than a buffer, so it is for those that would take more memory otherwise.
    """
    shards = [spec.with_placements(layout).local_numel_bound for layout in (step.src, step.dst)]
    fold = fold_of(spread.op, spec.dtype, len(spread.pieces[0].holders)) if spread.pieces else None
    if fold is None or step.wire is not None or sum(shards) * spec.dtype.itemsize < 32 * reshard_direct.SAVES:
        return None
    if not exceeds(spread.pieces, spread.moves):
        return None
    swaps = [None if stage is None else _swap(spread, stage, spec.mesh.device_type) for stage in spread.stages]
    if any(stage is not None and swap is None for stage, swap in zip(spread.stages, swaps)):
        return None
    return _Large(spread, swaps, fold)


def exceeds(pieces: Sequence[Piece], moves: Sequence[Sequence[Move]]) -> bool:
    """Whether, the usual way, some rank of the group holds more at one time than its input and output have."""
    size = [region_size(piece.box) for piece in pieces]

    def of(some: Iterable[tuple[int, Sequence[int]]]) -> Counter[int]:
        total: Counter[int] = Counter()
        for n, ranks in some:
            for rank in ranks:
                total[rank] += size[n]
        return total

    each = [*enumerate(pieces)]
    have, want = of((n, p.holders) for n, p in each), of((n, p.wanting) for n, p in each)
    sums, ends = of((n, (p.reducer,)) for n, p in each), of((n, (p.end,)) for n, p in each)
    go = [of((n, (one,)) for n, one, _ in some) for some in moves]
    come = [of((n, (to,)) for n, _, to in some) for some in moves]
    for rank in {*have, *want}:
        first = come[0][rank] + max(go[0][rank], sums[rank])
        middle = sums[rank] + go[1][rank] + come[1][rank] if len(moves) == 3 else 0
        last = ends[rank] + come[-1][rank] + max(go[-1][rank], want[rank])
        if max(first, middle, last) > have[rank] + want[rank]:
            return True
    return False


class _Swap(NamedTuple):
    """One all-to-all: the pieces that go to each position, and where those that come are: (position, number)."""

    way: Direct
    go: list[tuple[int, list[int]]]
    come: dict[tuple[int, int], tuple[int, int]]


def _swap(spread: Spread, stage: Stage, device_type: str) -> _Swap | None:
    way = stage.comm.direct(device_type)
    if way is None or way.whole:
        return None
    leave, arrive = stage.of(spread.me)
    go = [(to, [n for _, n in some]) for to, some in itertools.groupby(leave, operator.itemgetter(0))]
    come: dict[tuple[int, int], tuple[int, int]] = {}
    for of, from_one in itertools.groupby(arrive, operator.itemgetter(0)):
        come |= {(n, one): (of, number) for number, (_, n, one) in enumerate(from_one)}
    return _Swap(way, go, come)


class _Place:
    """Where a piece is put together: in the result, where it lies in one piece there, or in memory of its own."""

    __slots__ = ("_landing", "_own", "_shape", "at", "numel")

    def __init__(self, spread: Spread, n: int, own: Region | None, in_place: bool) -> None:
        """`own`: where my own part lies, if I have one. Not `in_place`: the result is not there yet."""
        box = spread.pieces[n].box
        self._shape = region_shape(box)
        self.numel = math.prod(self._shape)
        there = common(box, spread.want)[1] if spread.me in spread.pieces[n].wanting else None
        self.at = None if there is None or not in_place else straight(there, spread.shape)
        self._landing = None if there is None or self.at is not None else Landing(there, spread.shape)
        to, whole = (tuple([((0, k),) for k in self._shape]), self._shape) if self.at is None else (there, spread.shape)
        self._own = None
        if own is not None and to is not None:
            self._own = Landing(to, whole, (own, region_shape(spread.have)))

    def begun(self, out: torch.Tensor) -> torch.Tensor:
        """The piece, not filled yet."""
        if self.at is None:
            return out.new_empty(self._shape)
        return out.view(-1).narrow(0, self.at, self.numel).view(self._shape)

    def bring(self, x: torch.Tensor, total: torch.Tensor, out: torch.Tensor, add: Add | None) -> None:
        """Put, or add, my own part, which is in `x`."""
        assert self._own is not None
        self._own.bring(x, total if self.at is None else out, add)

    def end(self, total: torch.Tensor, out: torch.Tensor) -> None:
        """The finished piece into the result, if it is not there already."""
        if self._landing is not None:
            self._landing.bring(total, out, None)


class _Large:
    """A spread reduction of a large tensor, bound to one rank."""

    def __init__(self, spread: Spread, swaps: Sequence[_Swap | None], fold: Fold) -> None:
        self._spread, self._swaps, self._fold = spread, swaps, fold
        pieces, me, have = spread.pieces, spread.me, spread.have
        first = swaps[0].go if swaps[0] else []
        self._regions = {n: common(have, pieces[n].box)[0] for _, some in first for n in some}
        self._leaving = Leaving(self._regions.values(), region_shape(have))
        early, late = self._placed(True), self._placed(False)
        self._early = self._most(early, True) < self._most(late, False)
        self._places = early if self._early else late
        self._sums = self._apart(self._places, spread.summed)
        self._parts = [
            (n, sender, sender != pieces[n].senders[0]) for n in spread.summed for sender in pieces[n].senders
        ]
        self._closing = [(n, one, one != me) for n in spread.ended for one in (me, pieces[n].reducer)]
        last = swaps[-1].come if swaps[-1] else {}
        self._results = [(n, one) for n, one in last if n not in spread.ended]

    def _placed(self, early: bool) -> dict[int, _Place]:
        """Where the pieces are put together, if the result is there from the beginning, or for the last step only."""
        spread, pieces = self._spread, self._spread.pieces
        own = {n: common(spread.have, pieces[n].box)[0] for n in spread.own}
        in_place = {n: early and pieces[n].last < 0 for n in spread.summed}
        in_place |= {n: early or len(self._swaps) == 2 for n in spread.ended}
        some = {*spread.summed, *spread.wanted}
        return {n: _Place(spread, n, own.get(n), in_place.get(n, True)) for n in some}

    @staticmethod
    def _apart(places: dict[int, _Place], some: Sequence[int]) -> int:
        return sum([places[n].numel for n in some if places[n].at is None])

    def _most(self, places: dict[int, _Place], early: bool) -> int:
        """Elements that are held at one time, but for messages on the way."""
        spread, out = self._spread, math.prod(self._spread.shape)
        sums, ended = (self._apart(places, some) for some in (spread.summed, spread.ended))
        complete = self._apart(places, [n for n in spread.summed if spread.pieces[n].last < 0])
        at_first = sums + self._leaving.packed + (out if early else 0)
        if len(self._swaps) == 2:
            return max(at_first, out + sums + ended)
        return max(at_first, sums + ended + (out if early else 0), out + complete + ended)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        spread, pieces = self._spread, self._spread.pieces
        room = max(x.numel() - self._leaving.packed - self._sums, 0)
        out = x.new_empty(spread.shape if self._early else 0)
        have = {n: self._places[n].begun(out) for n in spread.summed}
        leaving = self._leaving.of(x)
        self._exchange(0, x, out, {n: leaving[r] for n, r in self._regions.items()}, have, self._parts, room)
        leaving.clear()
        for n in spread.summed:
            if pieces[n].last < 0:
                self._fold.finish(have[n])
        three = len(self._swaps) == 3
        if three:
            ended = self._ended(1, x, out, have, room)
            have = {n: total for n, total in have.items() if pieces[n].last < 0} | ended
        if not self._early:
            out = x.new_empty(spread.shape)
        if three:
            self._exchange(2, x, out, have, {}, [], room)
        else:
            have |= self._ended(1, x, out, have, room)
        for n in spread.wanted:
            if n in have:
                self._places[n].end(have[n], out)
        return out

    def _ended(self, stage: int, x: torch.Tensor, out: torch.Tensor, have: Pieces, room: int) -> Pieces:
        """The pieces that end here: my own part, and the sum of the others, which comes in this all-to-all."""
        ended = {n: self._places[n].begun(out) for n in self._spread.ended}
        self._exchange(stage, x, out, have, ended, self._closing, room)
        for total in ended.values():
            self._fold.finish(total)
        return ended

    def _exchange(
        self, stage: int, x: torch.Tensor, out: torch.Tensor, sent: Pieces, totals: Pieces,
        parts: Sequence[tuple[int, int, bool]], room: int,
    ) -> None:  # fmt: skip
        """One all-to-all of pieces of `sent`; `parts` (piece, who has it, whether it is added) make `totals`.

        In the last one results go to their places. Without one what is this rank's own has its turn all the same.
        """
        swap = self._swaps[stage]
        turns = [self._part(swap, n, one, more, totals[n], x, out) for n, one, more in parts]
        if swap is None:
            for turn in turns:
                turn.put(x.new_empty(0))
            return
        arrive: list[tuple[int, int, torch.Tensor]] = []
        for n, one in self._results if stage == len(self._swaps) - 1 else ():
            place, (position, number) = self._places[n], swap.come[n, one]
            if place.at is not None:
                arrive.append((position, number, out.view(-1).narrow(0, place.at, place.numel)))
            else:
                turns.append(Turn(position, number, place.numel, lambda got, place=place: place.end(got, out)))  # type: ignore[misc]
        leave = [(to, [sent[n].view(-1) for n in some]) for to, some in swap.go]
        swap.way.exchange("all_to_all", x, out, leave, arrive, turns, room)

    def _part(
        self, swap: _Swap | None, n: int, one: int, more: bool, total: torch.Tensor, x: torch.Tensor, out: torch.Tensor
    ) -> Turn:
        """A part of a piece that is put into `total`, or added to what is there."""
        add, place = self._fold.add, self._places[n]
        if one == self._spread.me:
            return Turn(None, 0, 0, lambda _: place.bring(x, total, out, add if more else None))
        assert swap is not None

        def put(message: torch.Tensor) -> None:
            part = message.view(total.shape)
            if more:
                add(total, part)
            else:
                total.copy_(part)

        return Turn(*swap.come[n, one], place.numel, put)
