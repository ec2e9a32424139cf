"""Carrying out a reduction that is spread over the ranks: `dtensor.redistribute.division` says who reduces which piece.

    all-to-all 1    pending parts go to the piece's reducer, which adds them up in the order of the parts
    all-to-all 2    where there are three: sums go to the rank that adds its own part
    the last        results go to those who want them; where there are two, also sums to the one who adds its part

Each is one collective of flat tensors; what goes from one rank to another is in the order of the pieces. It runs over
the fewest of the step's axes that what is sent goes along: on (2, 4) axes x, y

    [S(0), P] -> [R, S(0)]    parts along y, sums along y, results along x
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dtensor.comm.communicator import Communicator, Pending
from dtensor.comm.fast_path import carried, ready
from dtensor.comm.reduce_ops import divided, reduce_tensors
from dtensor.placement import Partial
from dtensor.redistribute.division import Piece, pieces_of
from dtensor.redistribute.executor.asynchronous import unwaited
from dtensor.redistribute.executor.local import Join, Take
from dtensor.redistribute.geometry import Coord, common, holdings, members, region_shape, region_size
from dtensor.redistribute.step import Step
from dtensor.spec import Spec

__all__ = ["Move", "Spread", "Stage"]

Parts = dict[int, torch.Tensor]
"""By number of the piece."""


Move = tuple[int, int, int]
"""Number of the piece, position in the group that it goes from, position that it goes to."""


def stages(step: Step, pieces: Sequence[Piece]) -> list[list[Move]]:
    """What goes where in each all-to-all, in the order in which it is sent."""
    parts: list[Move] = []
    sums: list[Move] = []
    results: list[Move] = []
    for n, (_, holders, wanting, reducer, last) in enumerate(pieces):
        parts += [(n, h, reducer) for h in holders if h not in (last, reducer)]
        if last >= 0:
            sums.append((n, reducer, last))
        end = reducer if last < 0 else last
        results += [(n, end, to) for to in wanting if to != end]
    if step.passes == 3:
        return [parts, sums, results]
    assert not any(pieces[n].last >= 0 for n, _, _ in results)
    return [parts, sorted(sums + results)]


class Stage(NamedTuple):
    """One all-to-all: over which communicator, and which position of the group is which in it; None: not in it."""

    comm: Communicator
    group: tuple[int, ...]
    moves: list[Move]

    def of(self, me: int) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """What goes from position `me` of the group, as (to, piece), and what comes there, as (from, piece, from whom).

        Both are in order; `to` and `from` are positions of the communicator, `from whom` is one of the group.
        """
        place = {at: i for i, at in enumerate(self.group)}
        go = sorted([(place[to], n) for n, one, to in self.moves if one == me])
        return go, sorted([(place[one], n, one) for n, one, to in self.moves if to == me])


def stage_of(spec: Spec, step: Step, coord: Coord, moves: list[Move]) -> Stage | None:
    """The all-to-all of `moves`, as the rank at `coord` takes part in it; None where the group sends nothing.

    All ranks of a group find the same axes. Those of one mesh may only where the group is all of it, so that elsewhere
    nothing narrower is taken than one axis, whose communicator is there, or else all of them.
    """
    group = [*members(spec, step.axes, coord)]
    axes = tuple([a for a in step.axes if any(group[i][a] != group[j][a] for _, i, j in moves)])
    if not axes:
        return None
    if len(axes) > 1 and len(group) < math.prod(spec.mesh.shape):
        axes = step.axes
    place = {at: i for i, at in enumerate(group)}
    comm = spec.mesh.comm(axes if len(axes) > 1 else axes[0])
    return Stage(comm, tuple([place[at] for at in members(spec, axes, coord)]), moves)


class _Swap:
    """One all-to-all: which pieces go to each position and which come from it."""

    __slots__ = ("_arrive", "_come", "_comm", "_leave", "_move", "_numels", "go")

    def __init__(self, stage: Stage, me: int, pieces: Sequence[Piece]):
        self._comm, (go, come) = stage.comm, stage.of(me)
        self._leave, self._arrive = [0] * len(stage.group), [0] * len(stage.group)
        for to, n in go:
            self._leave[to] += region_size(pieces[n].box)
        for of, n, _ in come:
            self._arrive[of] += region_size(pieces[n].box)
        self.go = [n for _, n in go]
        self._come = [(n, one, region_shape(pieces[n].box)) for _, n, one in come]
        self._numels = [math.prod(shape) for _, _, shape in self._come]
        self._move = self._comm.bind_exchange(self._leave, self._arrive)

    def start(self, sent: torch.Tensor, async_op: bool) -> Callable[[], dict[int, Parts]]:
        """Send pieces, those of `go` one after the other. Returns what waits and gives what came, by who sent it."""
        got = self._sent(sent, async_op)

        def finish() -> dict[int, Parts]:
            out: dict[int, Parts] = {}
            for (n, one, shape), part in zip(self._come, torch.split(got.wait(), self._numels)):
                out.setdefault(one, {})[n] = part.view(shape)
            return out

        return finish

    def _sent(self, flat: torch.Tensor, async_op: bool) -> Pending[torch.Tensor]:
        """What arrives, in one tensor; `flat` goes."""
        if self._move is None or async_op or not (carried(flat.dtype) and ready(flat)):
            return self._comm.all_to_all_flat(flat, self._leave, self._arrive, async_op=async_op)
        out = flat.new_empty(sum(self._numels))
        self._move(flat, out)
        return Pending(out)


class Spread:
    """A spread reduction, bound to one rank."""

    def __init__(self, spec: Spec, step: Step, coord: Coord) -> None:
        pending = [p for a in step.axes if isinstance(p := step.src[a], Partial) and p is not step.dst[a]]
        group = tuple(members(spec, step.axes, coord))
        me = group.index(coord)
        pieces = pieces_of(spec, step, group)
        self.have, self.want = have, want = holdings(spec, step.src, coord), holdings(spec, step.dst, coord)
        self.op, self.me, self.pieces, self.wire = pending[0].reduce_op, me, pieces, step.wire
        self.summed = [n for n, p in enumerate(pieces) if p.reducer == me]
        self.ended = [n for n, p in enumerate(pieces) if p.last == me]
        self.wanted = [n for n, p in enumerate(pieces) if me in p.wanting]
        self.shape = region_shape(want)
        self.join = Join([common(pieces[n].box, want)[1] for n in self.wanted], self.shape)
        self.moves = stages(step, pieces)
        self.stages = [stage_of(spec, step, coord, moves) for moves in self.moves]
        self.swaps = [None if stage is None else _Swap(stage, me, pieces) for stage in self.stages]
        self.own = [n for n in self.summed if me in pieces[n].senders] + self.ended
        mine = lambda some: Take([common(have, pieces[n].box)[0] for n in some], region_shape(have))  # noqa: E731
        self.keep, self.leave = mine(self.own), mine(self.swaps[0].go if self.swaps[0] else [])

    def __call__(self, x: torch.Tensor, async_op: bool) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format) if async_op and self.wire is None else x
        dtype = x.dtype
        if self.wire is not None:
            x = x.to(self.wire)
        first = self.swaps[0]
        got = {} if first is None else first.start(self.leave.flat(x) if first.go else x.new_empty(0), False)()
        own: Parts = dict(zip(self.own, self.keep(x) if self.own else ()))
        have: Parts = {}
        parts: list[torch.Tensor] = []
        for n in self.summed:
            piece = self.pieces[n]
            parts = [own[n] if h == self.me else got[h][n] for h in piece.senders]
            have[n] = self._reduced(parts, len(piece.holders), piece.last < 0)
        del parts[:]
        got.clear()  # what came is large
        if len(self.swaps) == 3:
            came = self._start(1, have, x, False)()
            self._end(have, own, came)
            came.clear()
        arriving = self._start(-1, have, x, async_op)

        def finish() -> torch.Tensor:
            last = arriving()
            if len(self.swaps) == 2:
                self._end(have, own, last)
            for some in last.values():
                for n, part in some.items():
                    have.setdefault(n, part)
            if not math.prod(self.shape):
                return torch.empty(self.shape, dtype=dtype, device=x.device)
            return self.join([have[n] for n in self.wanted]).to(dtype)

        if not async_op:
            return finish()
        return unwaited(finish, x if dtype is x.dtype else x.new_empty(0, dtype=dtype), self.shape)

    def _start(self, stage: int, have: Parts, like: torch.Tensor, async_op: bool) -> Callable[[], dict[int, Parts]]:
        """A later all-to-all, of pieces of `have`; those that are not wanted here are let go of."""
        swap = self.swaps[stage]
        if swap is None:
            return dict
        flats = [have[n].reshape(-1) for n in swap.go]
        sent = torch.cat(flats) if flats else like.new_empty(0)
        del flats[:]
        for n in {*swap.go}.difference(self.wanted):
            del have[n]
        return swap.start(sent, async_op)

    def _end(self, have: Parts, own: Parts, got: dict[int, Parts]) -> None:
        """Add my own part to the sums that came for that."""
        for n in self.ended:
            piece = self.pieces[n]
            have[n] = self._reduced([own[n], got[piece.reducer][n]], len(piece.holders), True)

    def _reduced(self, parts: list[torch.Tensor], k: int, complete: bool) -> torch.Tensor:
        """The reduction of some of `k` parts; of all of them if `complete`, which is when an average is divided."""
        if self.op != "avg" or parts[0].dtype == torch.bool:
            return reduce_tensors(parts, self.op)
        total = reduce_tensors(parts, "sum")
        return divided(total, k) if complete else total
