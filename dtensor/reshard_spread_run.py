"""Carrying out a reduction that is spread over the ranks: `dtensor.reshard_spread` says who reduces which piece.

    all-to-all 1    pending parts go to the piece's reducer, which adds them up in the order of the parts
    all-to-all 2    sums go to those who want them, or to the rank that adds its own part
    all-to-all 3    where needed: from there to the others who want them

Each is one collective of flat tensors; what goes from one rank to another is in the order of the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dtensor.comm import Communicator, Pending
from dtensor.placement import Partial
from dtensor.reductions import reduce_tensors
from dtensor.reshard_async import unwaited
from dtensor.reshard_geometry import Coord, common, holdings, members, region_shape
from dtensor.reshard_local import Join, Take
from dtensor.reshard_spread import Piece, pieces_of
from dtensor.reshard_step import Step
from dtensor.spec import Spec

__all__ = ["bind_spread"]

Parts = dict[int, torch.Tensor]
"""By number of the piece."""


class _Swap:
    """One all-to-all: which pieces go to each position and which come from it."""

    __slots__ = ("_comm", "_come", "_go", "_numels", "_shapes")

    def __init__(self, comm: Communicator, me: int, moves: Sequence[tuple[int, int, int]], pieces: Sequence[Piece]):
        """`moves`: (piece, from, to) of the whole group, in order of the pieces."""
        self._comm = comm
        self._go = [[n for n, one, to in moves if one == me and to == i] for i in range(comm.size)]
        self._come = [[n for n, one, to in moves if one == i and to == me] for i in range(comm.size)]
        self._shapes = [[region_shape(pieces[n].box) for n in some] for some in self._come]
        self._numels = [[math.prod(shape) for shape in some] for some in self._shapes]

    def start(self, have: Parts, like: torch.Tensor, async_op: bool) -> Callable[[], list[Parts]]:
        """Send pieces of `have`. Returns what waits and gives what came from each position."""
        flats = [have[n].reshape(-1) for some in self._go for n in some]
        sent = torch.cat(flats) if flats else like.new_empty(0)
        sizes = [sum([have[n].numel() for n in some]) for some in self._go]
        got = self._comm.all_to_all(
            list(torch.split(sent, sizes)), [(sum(numels),) for numels in self._numels], async_op=async_op
        )

        def finish() -> list[Parts]:
            out = []
            for flat, some, numels, shapes in zip(
                got.wait() if isinstance(got, Pending) else got, self._come, self._numels, self._shapes
            ):
                pieces = torch.split(flat, numels) if some else ()
                out.append({n: piece.view(shape) for n, piece, shape in zip(some, pieces, shapes)})
            return out

        return finish


class _Spread:
    """A spread reduction, bound to one rank."""

    def __init__(self, spec: Spec, step: Step, coord: Coord, comm: Communicator) -> None:
        pending = [p for a in step.axes if isinstance(p := step.src[a], Partial) and p is not step.dst[a]]
        group = tuple(members(spec, step.axes, coord))
        me = group.index(coord)
        pieces = pieces_of(spec, step, group)
        have, want = holdings(spec, step.src, coord), holdings(spec, step.dst, coord)
        self.op, self.me, self.pieces, self.wire = pending[0].reduce_op, me, pieces, step.wire
        self.own = [n for n, p in enumerate(pieces) if me in p.holders]
        self.take = Take([common(have, pieces[n].box)[0] for n in self.own], region_shape(have))
        self.summed = [n for n, p in enumerate(pieces) if p.reducer == me]
        self.ended = [n for n, p in enumerate(pieces) if p.last == me]
        self.wanted = [n for n, p in enumerate(pieces) if me in p.wanting]
        self.shape = region_shape(want)
        self.join = Join([common(pieces[n].box, want)[1] for n in self.wanted], self.shape)
        first = [(n, h, p.reducer) for n, p in enumerate(pieces) for h in p.senders if h != p.reducer]
        second = [
            (n, p.reducer, to)
            for n, p in enumerate(pieces)
            for to in (p.wanting if p.last < 0 else (p.last,))
            if to != p.reducer
        ]
        third = [(n, p.last, to) for n, p in enumerate(pieces) if p.last >= 0 for to in p.wanting if to != p.last]
        assert step.passes == 3 or not third
        self.swaps = [_Swap(comm, me, moves, pieces) for moves in (first, second, third)[: step.passes]]

    def __call__(self, x: torch.Tensor, async_op: bool) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format) if async_op and self.wire is None else x
        dtype = x.dtype
        if self.wire is not None:
            x = x.to(self.wire)
        own: Parts = dict(zip(self.own, self.take(x) if self.own else ()))
        got = self.swaps[0].start(own, x, False)()
        have: Parts = {}
        parts: list[torch.Tensor] = []
        for n in self.summed:
            piece = self.pieces[n]
            parts = [own[n] if h == self.me else got[h][n] for h in piece.senders]
            have[n] = self._reduced(parts, len(piece.holders), piece.last < 0)
        del parts[:], got[:]  # what came is large
        if len(self.swaps) == 3:
            got = self.swaps[1].start(have, x, False)()
            self._end(have, own, got)
        arriving = self.swaps[-1].start(have, x, async_op)

        def finish() -> torch.Tensor:
            last = arriving()
            if len(self.swaps) == 2:
                self._end(have, own, last)
            for some in last if len(self.swaps) == 2 else (*got, *last):
                for n, part in some.items():
                    have.setdefault(n, part)
            if not math.prod(self.shape):
                return torch.empty(self.shape, dtype=dtype, device=x.device)
            return self.join([have[n] for n in self.wanted]).to(dtype)

        if not async_op:
            return finish()
        return unwaited(finish, x if dtype is x.dtype else x.new_empty(0, dtype=dtype), self.shape)

    def _end(self, have: Parts, own: Parts, got: list[Parts]) -> None:
        """Add my own part to the sums that came for that."""
        for n in self.ended:
            piece = self.pieces[n]
            have[n] = self._reduced([own[n], got[piece.reducer][n]], len(piece.holders), True)

    def _reduced(self, parts: list[torch.Tensor], k: int, complete: bool) -> torch.Tensor:
        """The reduction of some of `k` parts; of all of them if `complete`, which is when an average is divided."""
        if self.op != "avg" or parts[0].dtype == torch.bool:
            return reduce_tensors(parts, self.op)
        total = reduce_tensors(parts, "sum")
        if not complete:
            return total
        if total.dtype.is_floating_point or total.dtype.is_complex:
            return total.div_(k)
        return torch.div(total, k, rounding_mode="trunc")


def bind_spread(
    spec: Spec, step: Step, coord: Coord, comm: Communicator
) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """The step as a callable for the rank at `coord`: from its pending part to its shard."""
    return _Spread(spec, step, coord, comm)
