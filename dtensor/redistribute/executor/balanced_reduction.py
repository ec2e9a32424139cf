"""Carrying out a balanced reduction, of which `dtensor.redistribute.planner.division` says who reduces which box.

    all-to-all 1    pending parts go to the box's reducer, which adds them up in the order of the parts
    all-to-all 2    where there are three: sums go to the rank that adds its own part
    the last        results go to the ranks that want them; of two, also sums to the rank that adds its own part

Each is one collective of flat tensors; what goes from one rank to another is in the order of the boxes. It runs over
the fewest of the step's axes that what is sent goes along: on (2, 4) axes x, y

    [S(0), P] -> [R, S(0)]    parts along y, sums along y, results along x
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dtensor.comm.communicator import Communicator
from dtensor.comm.pending import Pending
from dtensor.comm.reduce_ops import divided, reduce_tensors
from dtensor.intervals import Region, common, region_shape, region_size
from dtensor.placement import Partial
from dtensor.redistribute.executor.asynchronous import unwaited
from dtensor.redistribute.executor.copies import Pack, Unpack
from dtensor.redistribute.geometry import Coord, Parts, holdings, members
from dtensor.redistribute.planner.division import Box, boxes_of
from dtensor.redistribute.step import Step
from dtensor.spec import Spec

__all__ = ["BalancedReduction"]

Tensors = dict[int, torch.Tensor]
"""By number of the box."""

Route = tuple[int, int, int]
"""Number of the box, position in the group that it goes from, position that it goes to."""


def _routes(step: Step, boxes: Sequence[Box]) -> list[list[Route]]:
    """What goes where in each all-to-all, in the order in which it is sent."""
    parts: list[Route] = []
    sums: list[Route] = []
    results: list[Route] = []
    for n, (_, holders, wanting, reducer, last) in enumerate(boxes):
        parts += [(n, h, reducer) for h in holders if h not in (last, reducer)]
        if last >= 0:
            sums.append((n, reducer, last))
        end = reducer if last < 0 else last
        results += [(n, end, to) for to in wanting if to != end]
    if step.passes == 3:
        return [parts, sums, results]
    assert not any(boxes[n].last >= 0 for n, _, _ in results)
    return [parts, sorted(sums + results)]


class _Exchange:
    """One all-to-all of a stage, as one rank takes part in it: which boxes go to each position and come from it."""

    __slots__ = ("_arrive", "_comm", "_come", "_leave", "_numels", "go")

    def __init__(
        self, comm: Communicator, group: Sequence[int], routes: Sequence[Route], me: int, boxes: Sequence[Box]
    ):
        """`group`: the positions in the step's group of those of `comm`. `me`: this rank's in the step's group."""
        place = {at: i for i, at in enumerate(group)}
        go = sorted([(place[to], n) for n, one, to in routes if one == me])
        come = sorted([(place[one], n, one) for n, one, to in routes if to == me])
        self._comm, self._leave, self._arrive = comm, [0] * len(group), [0] * len(group)
        for to, n in go:
            self._leave[to] += region_size(boxes[n].region)
        for of, n, _ in come:
            self._arrive[of] += region_size(boxes[n].region)
        self.go = [n for _, n in go]
        self._come = [(n, one, region_shape(boxes[n].region)) for _, n, one in come]
        self._numels = [math.prod(shape) for _, _, shape in self._come]

    def start(self, flat: torch.Tensor, async_op: bool) -> Callable[[], dict[int, Tensors]]:
        """Send boxes, those of `go` one after the other. Returns what waits and gives what came, by who sent it."""
        got = self._comm.all_to_all_flat(flat, self._leave, self._arrive, async_op)

        def finish() -> dict[int, Tensors]:
            out: dict[int, Tensors] = {}
            arrived = got.wait() if isinstance(got, Pending) else got
            for (n, one, shape), part in zip(self._come, torch.split(arrived, self._numels)):
                out.setdefault(one, {})[n] = part.view(shape)
            return out

        return finish


def _exchange_of(
    spec: Spec, step: Step, coord: Coord, routes: list[Route], boxes: Sequence[Box]
) -> _Exchange | None:  # fmt: skip
    """The all-to-all of `routes`, as the rank at `coord` takes part in it; None where the group sends nothing.

    All ranks of a group find the same axes. Those of one mesh may only where the group is all of it, so that elsewhere
    nothing narrower is taken than one axis, whose communicator is there, or else all of them.
    """
    group = [*members(spec, step.axes, coord)]
    axes = tuple([a for a in step.axes if any(group[i][a] != group[j][a] for _, i, j in routes)])
    if not axes:
        return None
    if len(axes) > 1 and len(group) < math.prod(spec.mesh.shape):
        axes = step.axes
    place = {at: i for i, at in enumerate(group)}
    comm = spec.mesh.comm(axes if len(axes) > 1 else axes[0])
    return _Exchange(comm, [place[at] for at in members(spec, axes, coord)], routes, place[coord], boxes)


class BalancedReduction:
    """A balanced reduction, bound to one rank."""

    def __init__(self, spec: Spec, step: Step, coord: Coord) -> None:
        pending = [p for a in step.axes if isinstance(p := step.src[a], Partial) and p is not step.dst[a]]
        group = tuple(members(spec, step.axes, coord))
        boxes = boxes_of(spec, step, group)
        have, want = holdings(spec, step.src, coord), holdings(spec, step.dst, coord)
        self._op, self._me, self._boxes, self._wire = pending[0].reduce_op, group.index(coord), boxes, step.wire
        me = self._me
        self._summed = [n for n, b in enumerate(boxes) if b.reducer == me]
        self._ended = [n for n, b in enumerate(boxes) if b.last == me]
        self._wanted = [n for n, b in enumerate(boxes) if me in b.wanting]
        self._shape = region_shape(want)
        self._unpack = Unpack(_parts(self._shape, [common(boxes[n].region, want)[1] for n in self._wanted]))
        self._exchanges = [_exchange_of(spec, step, coord, routes, boxes) for routes in _routes(step, boxes)]
        self._own = [n for n in self._summed if me in boxes[n].senders] + self._ended
        first = self._exchanges[0]
        mine = lambda some: _parts(region_shape(have), [common(have, boxes[n].region)[0] for n in some])  # noqa: E731
        self._keep, self._leave = Pack(mine(self._own)), Pack(mine(first.go if first else []))

    def __call__(self, x: torch.Tensor, async_op: bool) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format) if async_op and self._wire is None else x
        dtype = x.dtype
        if self._wire is not None:
            x = x.to(self._wire)
        first = self._exchanges[0]
        got = {} if first is None else first.start(self._leave(x), False)()
        own: Tensors = dict(zip(self._own, self._keep.each(x)))
        have: Tensors = {}
        parts: list[torch.Tensor] = []
        for n in self._summed:
            box = self._boxes[n]
            parts = [own[n] if h == self._me else got[h][n] for h in box.senders]
            have[n] = self._reduced(parts, len(box.holders), box.last < 0)
        del parts[:]
        got.clear()  # what came is large
        if len(self._exchanges) == 3:
            came = self._start(1, have, x, False)()
            self._end(have, own, came)
            came.clear()
        arriving = self._start(-1, have, x, async_op)

        def finish() -> torch.Tensor:
            last = arriving()
            if len(self._exchanges) == 2:
                self._end(have, own, last)
            for some in last.values():
                for n, part in some.items():
                    have.setdefault(n, part)
            if not math.prod(self._shape):
                return torch.empty(self._shape, dtype=dtype, device=x.device)
            return self._unpack.of([have[n] for n in self._wanted]).to(dtype)

        if not async_op:
            return finish()
        return unwaited(finish, x if dtype is x.dtype else x.new_empty(0, dtype=dtype), self._shape)

    def _start(self, stage: int, have: Tensors, like: torch.Tensor, async_op: bool) -> Callable[[], dict[int, Tensors]]:
        """A later all-to-all, of boxes of `have`; those that are not wanted here are let go of."""
        exchange = self._exchanges[stage]
        if exchange is None:
            return dict
        flats = [have[n].reshape(-1) for n in exchange.go]
        sent = torch.cat(flats) if flats else like.new_empty(0)
        del flats[:]
        for n in {*exchange.go}.difference(self._wanted):
            del have[n]
        return exchange.start(sent, async_op)

    def _end(self, have: Tensors, own: Tensors, got: dict[int, Tensors]) -> None:
        """Add my own part to the sums that came for that."""
        for n in self._ended:
            box = self._boxes[n]
            have[n] = self._reduced([own[n], got[box.reducer][n]], len(box.holders), True)

    def _reduced(self, parts: list[torch.Tensor], k: int, complete: bool) -> torch.Tensor:
        """The reduction of some of `k` parts; of all of them if `complete`, which is when an average is divided."""
        if self._op != "avg" or parts[0].dtype == torch.bool:
            return reduce_tensors(parts, self._op)
        total = reduce_tensors(parts, "sum")
        return divided(total, k) if complete else total


def _parts(shape: Sequence[int], regions: list[Region]) -> Parts:
    return Parts(shape, len(regions), lambda: regions)
