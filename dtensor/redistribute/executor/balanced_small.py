"""A spread reduction of small tensors, bound once: indexes take the place of boxes
(`dtensor.redistribute.executor.indexed`).

    sums      an index lays out what has come as rows of parts, which are added up: the first part of a buffer, `held`
    held      sums | what the second all-to-all brings | sums from others with my own part added | what the third brings
    results   one index of `held`: my shard

What each later all-to-all sends is an index of `held` as well. Sums that are complete lie before the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dtensor.comm.fast_path import Try
from dtensor.comm.reduce_ops import fold_of
from dtensor.redistribute.executor.balanced_reduction import Spread, Stage
from dtensor.redistribute.executor.indexed import MOST, Index, Send, joined, places, sender, span
from dtensor.redistribute.geometry import common, region_shape, region_size

__all__ = ["small_spread"]


class _Swap(NamedTuple):
    """One all-to-all: what is sent, as places in what it is taken from; where what comes starts, and how much it is."""

    send: Send
    sent: Index
    start: int
    comes: int


class _Held:
    """Where pieces lie in `held`, which grows as they are put there."""

    def __init__(self, size: Sequence[int]) -> None:
        self.size, self.total = size, 0
        self.at: dict[int, Index] = {}

    def put(self, numbers: Sequence[int]) -> int:
        """Pieces one after the other. Returns where the first begins."""
        start = self.total
        for n in numbers:
            self.at[n] = span(self.total, self.size[n])
            self.total += self.size[n]
        return start


def small_spread(spread: Spread, dtype: torch.dtype) -> Try | None:
    """The whole step, for tensors of `dtype`; None where they are not small, or it is of another kind."""
    with torch.inference_mode(False):
        try:
            return _Small(spread, dtype)
        except NotImplementedError:
            return None


class _Small:
    """A spread reduction of small tensors, bound to one rank."""

    def __init__(self, spread: Spread, dtype: torch.dtype) -> None:
        pieces, me = spread.pieces, spread.me
        self._shape, self._size = spread.shape, [region_size(piece.box) for piece in pieces]
        have = region_shape(spread.have)
        fold = fold_of(spread.op, dtype, len(pieces[0].holders)) if pieces else None
        if fold is None or max(math.prod(have), math.prod(self._shape)) > MOST:
            raise NotImplementedError
        self._fold = fold
        own = [n for n, piece in enumerate(pieces) if me in piece.holders]
        mine = {n: places(common(spread.have, pieces[n].box)[0], have) for n in own}

        stays = [(n, me, me) for n in spread.summed if me in pieces[n].senders]
        parts = {(me, n): mine[n] for n, _, _ in stays}
        self._first: _Swap | None = None
        if spread.stages[0] is not None:
            stage = spread.stages[0]._replace(moves=sorted([*spread.stages[0].moves, *stays]))
            self._first, come = self._swap(stage, me, mine, 0, dtype)
            begin = _Held(self._size)
            for one, n in come:
                parts[one, n] = span(begin.put([n]), self._size[n])

        held = _Held(self._size)
        summed = sorted(spread.summed, key=lambda n: pieces[n].last >= 0)
        held.put(summed)
        self._sums = held.total
        self._complete = sum([self._size[n] for n in summed if pieces[n].last < 0])
        most = max([len(pieces[n].senders) for n in summed], default=0)
        rows = [
            joined([parts[pieces[n].senders[j], n] for n in summed if j < len(pieces[n].senders)]) for j in range(most)
        ]
        self._rows, self._lengths = joined(rows), [*map(len, rows)]

        self._second = self._later(spread.stages[1], me, held, dtype)
        self._own, self._came = (joined([of[n] for n in spread.ended]) for of in (mine, held.at))
        self._end = held.put(spread.ended)
        self._third = self._later(spread.stages[2], me, held, dtype) if len(spread.stages) == 3 else None
        self._total = held.total
        self._result = torch.empty(math.prod(self._shape), dtype=torch.int64, device="cpu")
        for n in spread.wanted:
            self._result[places(common(pieces[n].box, spread.want)[1], self._shape)] = held.at[n]
        if max(self._total, len(self._rows)) > 4 * MOST:
            raise NotImplementedError

    def _later(self, stage: Stage | None, me: int, held: _Held, dtype: torch.dtype) -> _Swap | None:
        """An all-to-all of what lies in `held`, after which what came lies there too."""
        if stage is None:
            return None
        swap, come = self._swap(stage, me, held.at, held.total, dtype)
        held.put([n for _, n in come])
        return swap

    def _swap(
        self, stage: Stage, me: int, at: dict[int, Index], start: int, dtype: torch.dtype
    ) -> tuple[_Swap, list[tuple[int, int]]]:
        """An all-to-all, and what comes: (from, piece), in order."""
        (go, come), leave, arrive = stage.of(me), [0] * len(stage.group), [0] * len(stage.group)
        for to, n in go:
            leave[to] += self._size[n]
        for of, n, _ in come:
            arrive[of] += self._size[n]
        send = sender(stage.comm, leave, arrive, dtype)
        if send is None:
            raise NotImplementedError
        return _Swap(send, joined([at[n] for _, n in go]), start, sum(arrive)), [(one, n) for _, n, one in come]

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        if not x.is_cpu:
            return None
        flat = x.view(-1)
        held = x.new_empty(self._total)
        self._add_up(flat, held)
        if self._second is not None:
            _move(self._second, held, held)
        if len(self._own):
            out = held.narrow(0, self._end, len(self._own))
            own, came = flat.index_select(0, self._own), held.index_select(0, self._came)
            self._fold.finish(self._fold.pairwise(own, came, out=out))
        if self._third is not None:
            _move(self._third, held, held)
        return held.index_select(0, self._result).view(self._shape)

    def _add_up(self, flat: torch.Tensor, held: torch.Tensor) -> None:
        """The parts go to those who reduce them; the sums of mine are the beginning of `held`."""
        came = flat
        if self._first is not None:
            came = flat.new_empty(self._first.comes)
            _move(self._first, flat, came)
        if not self._sums:
            return
        first, *others = came.index_select(0, self._rows).split(self._lengths)
        sums = held.narrow(0, 0, self._sums)
        if others and len(others[0]) == self._sums:
            self._fold.pairwise(first, others.pop(0), out=sums)
        else:
            sums.copy_(first)
        for part in others:
            self._fold.add(held.narrow(0, 0, len(part)), part)
        if self._complete:
            self._fold.finish(held.narrow(0, 0, self._complete))


def _move(swap: _Swap, of: torch.Tensor, to: torch.Tensor) -> None:
    swap.send(of.index_select(0, swap.sent), to.narrow(0, swap.start, swap.comes))
