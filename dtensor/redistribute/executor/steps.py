"""Each kind of step, bound to one rank: a callable from the local tensor before the step to the one after it.

A step that communicates is three things, all decided when it is bound:

    pack      the send regions of the local tensor, in the order of the group's positions, in one buffer
    send      one collective of fixed sizes, by the communicator
    unpack    what has arrived, to its receive regions in the new local tensor

    all_to_all S(0) -> S(1) of [4, 4] on 2, position 1      columns [0,2) and [2,4) of my [2, 4], each in one piece
                                                            2 and 2 rows of 2, which are my [4, 2] as they lie

The sizes follow from layouts and coords alone, and there is one collective for them: how the communicator issues it
(`dtensor.comm.issue`) may differ from rank to rank, what it issues does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtensor.comm.communicator import Communicator
from dtensor.comm.issue import gathering
from dtensor.comm.pending import Pending
from dtensor.comm.reduce_ops import reduce_tensors
from dtensor.intervals import common, region_shape
from dtensor.placement import Partial
from dtensor.redistribute.executor.asynchronous import arriving, unwaited
from dtensor.redistribute.executor.balanced_reduction import BalancedReduction
from dtensor.redistribute.executor.copies import Pack, Place, Unpack, private
from dtensor.redistribute.executor.unbuffered import unbuffered
from dtensor.redistribute.geometry import Coord, Parts, holdings, members, parts_along
from dtensor.redistribute.step import Step
from dtensor.spec import Spec

__all__ = ["Run", "bind_step", "exchange"]

Run = Callable[[torch.Tensor, bool], torch.Tensor]
"""From the local tensor before a step to the one after; True asks for a result that may be unwaited."""
Made = torch.Tensor | Pending[torch.Tensor]


def bind_step(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    """`step`, of a plan of `spec`'s tensor, as the rank at `coord` carries it out; `nxt` is the one that follows."""
    usual = _BIND[step.kind](spec, step, coord, nxt)
    return unbuffered(spec, step, coord, usual) if step.is_collective else usual


# ------------------------------------------------------------ without communication
def _keep(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    return lambda x, _: x


def _empty(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    shape = spec.with_placements(step.dst).local_shape
    return lambda x, _: x.new_empty(shape)


def _scale(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    factor = step.factor
    return lambda x, _: x * factor


def _fill(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    fill = torch.zeros_like if step.kind == "zero_fill" else torch.ones_like
    if all(coord[a] == 0 for a in step.axes):
        return lambda x, _: x
    return lambda x, _: fill(x, memory_format=torch.contiguous_format)


def _embed(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    have, want = holdings(spec, step.src, coord), holdings(spec, step.dst, coord)
    place, shape = Place(common(have, want)[1]), region_shape(want)

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        out = x.new_zeros(shape)
        place.put(out, x)
        return out

    return run


def _slice(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    place = Place(common(holdings(spec, step.src, coord), holdings(spec, step.dst, coord))[0])
    if not place.is_view or (nxt is not None and nxt.is_collective):  # which reads it at once
        return lambda x, _: place.get(x)
    return lambda x, _: place.view(x).clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------ collectives
def _all_reduce(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    comm, op = _comm(spec, step), _reduce_op(step)
    shape = region_shape(holdings(spec, step.dst, coord))
    # what the group does not reduce itself is gathered, and sent as it is; all else as a copy
    gathered = op not in ("sum", "avg", "max", "min") or not (spec.dtype.is_floating_point or spec.dtype == torch.int64)
    return _in_wire(lambda x, late: comm.all_reduce(_own(x, late and gathered), op, async_op=late), step, shape)


def _reduce_scatter(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    comm, op = _comm(spec, step), _reduce_op(step)
    leaving = parts_along(spec, step.src, step.dst, step.axes, coord)
    shape = region_shape(holdings(spec, step.dst, coord))
    pack, even = Pack(leaving), len({*leaving.sizes}) == 1

    def run(x: torch.Tensor, async_op: bool) -> Made:
        if not even:
            return comm.reduce_scatter(pack.parts(_own(x, async_op)), op, async_op=async_op)
        got = comm.reduce_scatter_flat(_sent(pack, x, async_op), op, async_op)
        return Pending(finish=lambda: got.wait().view(shape)) if isinstance(got, Pending) else got.view(shape)

    return _in_wire(run, step, shape)


def _all_gather(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    comm = _comm(spec, step)
    into = parts_along(spec, step.dst, step.src, step.axes, coord)
    unpack = Unpack(into)
    if into.even:
        return lambda x, late: _finished(comm.all_gather_flat(_own(x, late), late), unpack, x, into.shape)
    shapes = into.shapes

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        got = comm.all_gather(_own(x, async_op), shapes, async_op=async_op)
        if isinstance(got, Pending):
            return unwaited(lambda: unpack.of(got.wait()), x, into.shape)
        return unpack.of(got)

    return run


def _all_to_all(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    leaving = parts_along(spec, step.src, step.dst, step.axes, coord)
    into = parts_along(spec, step.dst, step.src, step.axes, coord)
    return exchange(_comm(spec, step), leaving, into, [*members(spec, step.axes, coord)].index(coord))


def _all_to_all_reduce(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    """The pending parts of what this rank wants are received as rows of one tensor, which are reduced.

    Positions that agree on the pending axes hold disjoint shards of one part.
    """
    op, dtype, wire = _reduce_op(step), spec.dtype, step.wire
    pending = [a for a in step.axes if isinstance(step.src[a], Partial) and step.src[a] is not step.dst[a]]
    group = [*members(spec, step.axes, coord)]
    rows: dict[tuple[int, ...], int] = {}
    row_of = [rows.setdefault(tuple([at[a] for a in pending]), len(rows)) for at in group]
    leaving = parts_along(spec, step.src, step.dst, step.axes, coord)
    one = parts_along(spec, step.dst, step.src, step.axes, coord)
    into = Parts(
        (len(rows), *one.shape), len(group), lambda: [(((row, 1),), *r) for row, r in zip(row_of, one.regions)]
    )
    wide = None if wire is None or wire.itemsize <= dtype.itemsize else wire

    def reduced(parts: torch.Tensor) -> torch.Tensor:
        if wide is None:
            return reduce_tensors(parts.unbind(), op)
        return reduce_tensors([part.to(wide) for part in parts.unbind()], op).to(dtype)

    run = exchange(_comm(spec, step), leaving, into, group.index(coord), reduced, one.shape)
    if wire is None or wide is not None:
        return run
    return lambda x, async_op: run(x.to(wire), False).to(x.dtype)


def exchange(
    comm: Communicator, leaving: Parts, into: Parts, me: int,
    then: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, shape: tuple[int, ...] | None = None,
) -> Run:  # fmt: skip
    """One all-to-all: `leaving` of the local tensor go to the positions of `comm`, `into` come from there.

    `me`: this rank's position, whose own part goes through the collective where that saves a copy. `then` makes
    the result, of `shape`, of the tensor that is received.
    """
    made, unpack = into.shape if shape is None else shape, Unpack(into)
    keep: Place | None = None
    single, own_shape, arriving_shapes = False, into.shape, [into.shape]
    tiled = leaving.tiling is not None and into.tiling is not None
    if not tiled and (into.single is not None or not (leaving.in_order or into.in_order)):
        keep, single, own_shape = Place(leaving.regions[me]), into.single == me, into.shapes[me]
        leaving, into = leaving.without(me), into.without(me)
        arriving_shapes = into.shapes
    pack, leave, arrive = Pack(leaving), leaving.sizes, into.sizes

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        mine = None if keep is None else keep.get(x)
        if mine is not None and (async_op or single):
            mine = private(mine, x)
        got = comm.all_to_all_flat(_sent(pack, x, async_op), leave, arrive, async_op)

        def finish(flat: torch.Tensor) -> torch.Tensor:
            if mine is None:
                return then(unpack(flat))
            parts = [part.view(shape) for part, shape in zip(torch.split(flat, arrive), arriving_shapes)]
            parts[me] = mine.reshape(own_shape)  # which may have a row's dim more
            return then(unpack.of(parts))

        return _finished(got, finish, x, made)

    return run


def _balanced_reduce(spec: Spec, step: Step, coord: Coord, nxt: Step | None) -> Run:
    return BalancedReduction(spec, step, coord)


_BIND: dict[str, Callable[[Spec, Step, Coord, Step | None], Run]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_reduce": _all_to_all_reduce,
    "embed": _embed,
    "empty": _empty,
    "keep": _keep,
    "one_fill": _fill,
    "reduce_scatter": _reduce_scatter,
    "scale": _scale,
    "slice": _slice,
    "spread_reduce": _balanced_reduce,
    "zero_fill": _fill,
}


# ------------------------------------------------------------ helpers
def _comm(spec: Spec, step: Step) -> Communicator:
    return spec.mesh.comm(step.axes if len(step.axes) > 1 else step.axes[0])


def _reduce_op(step: Step) -> str:
    pending = [p for a in step.axes if isinstance(p := step.src[a], Partial) and p is not step.dst[a]]
    return pending[0].reduce_op


def _own(x: torch.Tensor, async_op: bool) -> torch.Tensor:
    """`x`, as a copy where the caller may write to it before it has been sent."""
    return x.clone(memory_format=torch.contiguous_format) if async_op and gathering.now is None else x


def _sent(pack: Pack, x: torch.Tensor, async_op: bool) -> torch.Tensor:
    """What `pack` makes of `x`, in memory of its own where the caller may write to `x` before it has been sent."""
    flat = pack(x)
    return private(flat, x) if async_op and gathering.now is None else flat


def _finished(
    got: Made, finish: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """What `finish` makes, of `shape`, of what a collective returned: at once, or when it is first used."""
    if not isinstance(got, Pending):
        return finish(got)
    return unwaited(lambda: finish(got.wait()), like, shape)


def _in_wire(run: Callable[[torch.Tensor, bool], Made], step: Step, shape: tuple[int, ...]) -> Run:
    """A reduction to `shape`, in the dtype of the step's wire where it has one; the result is in the tensor's again."""
    wire = step.wire

    def reduce(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        dtype, result = x.dtype, run(x if wire is None else x.to(wire), async_op)
        if not isinstance(result, Pending):
            return result if wire is None else result.to(dtype)
        if wire is not None:
            return unwaited(lambda: result.wait().to(dtype), x, shape)
        return unwaited(result.wait, x, shape) if result.unfinished else arriving(result)

    return reduce
