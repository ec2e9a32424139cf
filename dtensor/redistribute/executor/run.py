"""Carrying out a plan on this rank.

The first run *binds* a plan to the rank's coord: which regions of its tensor go to which position, how what
arrives is put together. Later runs only take, communicate and join. The executor takes no decisions, and
nothing is padded here: parts have the sizes they have.

    plan                        bound, on position 1 of 2
    all_to_all S(0) -> S(1)     take columns [0,2) and [2,4); send the first; cat(what came, the second) by rows
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

from dtensor.comm.communicator import Communicator, Pending
from dtensor.comm.fast_path import Try, later, modes, ready
from dtensor.comm.pending import gathering
from dtensor.comm.reduce_ops import Reducing, reduce_tensors
from dtensor.comm.world import kept
from dtensor.errors import CollectiveError, LayoutError, explain_error
from dtensor.placement import Partial, Placement
from dtensor.redistribute.cost_model import CostModel, current_cost_model
from dtensor.redistribute.executor.asynchronous import arriving, belongs_to, unwaited
from dtensor.redistribute.executor.balanced_direct import direct_spread
from dtensor.redistribute.executor.balanced_reduction import Spread
from dtensor.redistribute.executor.balanced_small import small_spread
from dtensor.redistribute.executor.direct import direct_exchange, direct_gather, direct_reduce, or_direct
from dtensor.redistribute.executor.even import box, one_part
from dtensor.redistribute.executor.indexed import reduce_arriving
from dtensor.redistribute.executor.local import Boxes, Embed, Join, Take
from dtensor.redistribute.executor.pieces import SMALL
from dtensor.redistribute.executor.repeated import exchange_known, gather_known, scatter_known
from dtensor.redistribute.executor.side_streams import beside, can_run_beside
from dtensor.redistribute.executor.subclass import is_opaque, run_opaque
from dtensor.redistribute.executor.uneven import gather_uneven
from dtensor.redistribute.geometry import Region, common, held_along, holdings, members, region_shape, shared_along
from dtensor.redistribute.plan import plan_reshard
from dtensor.redistribute.step import ReshardPlan, Step
from dtensor.spec import Spec, contiguous_stride

__all__ = [
    "Move", "exchange_others", "known_move", "redistribute_local", "remember_move", "resolved", "run_reshard",
]  # fmt: skip

R = TypeVar("R")
Run = Callable[[torch.Tensor, bool], torch.Tensor]
"""From the local tensor before a step to the one after; True asks for a result that may be unwaited."""


def redistribute_local(local: torch.Tensor, src: Spec, dst: Spec, *, async_op: bool = False) -> torch.Tensor:
    """This rank's part of `dst`, from `local`, its part of `src`; `local` itself where `src` is `dst`.

    Plans (cached) and runs: see `plan_reshard` and `run_reshard`.
    """
    if src is dst:
        return local
    return run_reshard(plan_reshard(src, dst), local, async_op=async_op)


def run_reshard(plan: ReshardPlan, local: torch.Tensor, *, async_op: bool = False) -> torch.Tensor:
    """This rank's part of `plan.dst`, from `local`, its part of `plan.src`, which is not written to.

    All ranks of the mesh must call it. The result shares no memory with `local`, except where no rank's data
    changes (no steps, or only new labels); it is contiguous unless it is `local`. With `async_op` it may be an
    `AsyncCollectiveTensor`, which waits when first used. Ranks outside the mesh (empty result) do not communicate;
    collectives of meta tensors are counted as those of others, but nothing travels. Not differentiable. Raises
    LayoutError where `local` has not the shape that `plan.src` says.
    """
    bound = plan.bound
    if not bound:
        bound.append(_bind(plan))
    if local.shape != plan.src.local_shape and plan.src.mesh.coord is not None:
        raise LayoutError(
            explain_error(
                f"redistribute {plan.src} -> {plan.dst}",
                f"a local tensor of shape {tuple(local.shape)} on this rank",
                f"its shard of that layout has shape {tuple(plan.src.local_shape)}",
                "DTensor.from_local(local, mesh, placements, shape=global_shape, stride=global_stride)",
            )
        )
    if local.is_conj() or local.is_neg():
        local = resolved(local)
    return bound[0](local, async_op)


class Move(NamedTuple):
    """A redistribution that was made before: how this rank runs it, and the spec of the result."""

    run: Run
    target: Spec
    shape: torch.Size
    model: CostModel


_MOVES: dict[tuple[object, ...], Move] = kept({})
_MOST = 4096


def known_move(src: Spec, placements: Sequence[object], local: torch.Tensor) -> Move | None:
    """The move of a tensor of `src`, whose part is `local`, to `placements` as a user wrote them, if it is known."""
    if type(placements) is not list and type(placements) is not tuple:
        return None
    try:
        move = _MOVES.get((src, *placements))
    except TypeError:  # what is no placement need not have a hash
        return None
    if move is None or move.shape != local.shape or move.model is not current_cost_model():
        return None
    return None if local.is_conj() or local.is_neg() else move


def remember_move(src: Spec, placements: Sequence[object], target: Spec) -> None:
    """Remember how a tensor of `src` came to be one of `target`. Specs of views that moved are not remembered."""
    if type(src) is not Spec or src.mesh.coord is None or src.placements == target.placements:
        return
    plan = plan_reshard(src, src.with_placements(target.placements))
    if plan.bound and all(isinstance(p, Placement) for p in placements) and any(s.kind != "keep" for s in plan.steps):
        if len(_MOVES) >= _MOST:
            _MOVES.clear()
        _MOVES[(src, *placements)] = Move(plan.bound[0], target, torch.Size(src.local_shape), current_cost_model())


def resolved(local: torch.Tensor) -> torch.Tensor:
    """`local` without lazy conjugation or negation, which ops ignore where torch dispatches for a subclass."""
    if local.is_conj():
        local = torch.conj_physical(local.conj())
    return torch.neg(torch._neg_view(local)) if local.is_neg() else local


def _bind(plan: ReshardPlan) -> Run:
    """The plan as one callable for this rank."""
    dst_shape = plan.dst.local_shape
    coord = plan.src.mesh.coord
    if coord is None:
        return lambda x, _: x.new_zeros(dst_shape)  # nothing, or the 0 of a tensor of no dims
    steps = [
        _BIND[step.kind](plan.src, step, coord, nxt) for step, nxt in pairwise([*plan.steps, None]) if step is not None
    ]
    if not steps:
        return lambda x, _: x
    last, before = steps[-1], steps[:-1]
    several = len(plan.collectives) > 1

    def whole(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step(x, False)
        return x

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        if type(x) is not torch.Tensor and is_opaque(x):
            return run_opaque(plan, x)
        try:
            if async_op and several and can_run_beside(x):
                return belongs_to(beside(whole, x, dst_shape), plan)
            for step in before:
                x = step(x, False)
            return belongs_to(last(x, True), plan) if async_op else last(x, False)
        except CollectiveError as e:
            e.during(f"redistribute {plan}")
            raise

    return run


def _keep(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    return lambda x, _: x


def _empty(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    shape = spec.with_placements(step.dst).local_shape
    return lambda x, _: x.new_empty(shape)


def _scale(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    factor = step.factor
    return lambda x, _: x * factor


def _fill(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    fill = torch.zeros_like if step.kind == "zero_fill" else torch.ones_like
    if all(coord[a] == 0 for a in step.axes):
        return lambda x, _: x
    return lambda x, _: fill(x, memory_format=torch.contiguous_format)


def _embed(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    have, want = holdings(spec, step.src, coord), holdings(spec, step.dst, coord)
    embed = Embed(common(have, want)[1], region_shape(want))
    return lambda x, _: embed(x)


def _slice(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    have, want = holdings(spec, step.src, coord), holdings(spec, step.dst, coord)
    region = common(have, want)[0]
    shape = region_shape(have)
    take, quick = Take([region], shape), one_part(region, shape)
    place = box(region, shape)
    view = nxt is not None and nxt.is_collective
    if nxt is not None and nxt.kind == "all_gather":  # which takes what is contiguous
        view = place is None or place[1] == contiguous_stride(region_shape(region))
    if view or take.copies:
        return lambda x, _: take(x)[0]

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        if quick is not None and ready(x):
            return quick(x)
        return take(x)[0].clone(memory_format=torch.contiguous_format)

    return run


def _comm(spec: Spec, step: Step) -> Communicator:
    return spec.mesh.comm(step.axes if len(step.axes) > 1 else step.axes[0])


def _reduce_op(step: Step) -> str:
    pending = [p for a in step.axes if isinstance(p := step.src[a], Partial) and p is not step.dst[a]]
    return pending[0].reduce_op


def _late(result: torch.Tensor | Pending[torch.Tensor], like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What a collective returned, as a tensor of `shape` that may be unwaited."""
    if not isinstance(result, Pending):
        return result
    return unwaited(result.wait, like, shape) if result.unfinished else arriving(result)


def _private(x: torch.Tensor, async_op: bool) -> torch.Tensor:
    """`x`, as a copy where the caller may write to it before it has been sent."""
    return x.clone(memory_format=torch.contiguous_format) if async_op and gathering.now is None else x


def _pending_parts(result: list[torch.Tensor] | Pending[list[torch.Tensor]]) -> Pending[list[torch.Tensor]]:
    """What a collective with `async_op` returned, as a `Pending`."""
    return result if isinstance(result, Pending) else Pending(result)


def _once_bound(
    make: Callable[[], Try | None], dtype: torch.dtype, general: Callable[[torch.Tensor, bool], R]
) -> Callable[[torch.Tensor, bool], torch.Tensor | R]:
    """`general`; from the second time on what `make` binds, for tensors of `dtype` that are ready for it."""
    quick = later(make)

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor | R:
        if not async_op and x.dtype is dtype and ready(x):
            done = quick[0](x)
            if done is not None:
                return done
        return general(x, async_op)

    return run


def _in_wire(
    run: Callable[[torch.Tensor, bool], torch.Tensor | Pending[torch.Tensor]], step: Step, shape: tuple[int, ...]
) -> Run:
    """A reduction to `shape`, in the dtype of the step's wire where it has one; the result is in the tensor's again."""
    wire = step.wire
    if wire is None:
        return lambda x, async_op: _late(run(x, async_op), x, shape)

    def reduce(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        dtype, result = x.dtype, run(x.to(wire), async_op)
        if isinstance(result, Pending):
            return _late(Pending(finish=lambda: result.wait().to(dtype)), x, shape)
        return result.to(dtype)

    return reduce


def _all_reduce(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    comm, op = _comm(spec, step), _reduce_op(step)
    shape = region_shape(holdings(spec, step.dst, coord))
    gathered = op not in ("sum", "avg", "max", "min") or not (spec.dtype.is_floating_point or spec.dtype == torch.int64)
    what = Reducing(op, spec.dtype, step.wire)

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor | Pending[torch.Tensor]:
        return comm.all_reduce(_private(x, async_op and gathered), op, async_op=async_op)  # else sent as a copy

    return _once_bound(lambda: comm.bind_all_reduce(what), spec.dtype, _in_wire(run, step, shape))


def _reduce_scatter(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    comm, op = _comm(spec, step), _reduce_op(step)
    have = region_shape(holdings(spec, step.src, coord))
    leaving = shared_along(spec, step.src, step.dst, step.axes, coord)
    take = Take(leaving, have)
    shape = region_shape(holdings(spec, step.dst, coord))
    alike, what = len({*take.sizes}) == 1, Reducing(op, spec.dtype, step.wire)
    known = lambda: scatter_known(comm, leaving, have, shape, what)  # noqa: E731

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor | Pending[torch.Tensor]:
        if not alike:
            return comm.reduce_scatter(take(_private(x, async_op)), op, async_op=async_op)
        pending = comm.reduce_scatter_flat(take.flat(x, async_op and gathering.now is None), op, async_op=async_op)
        return Pending(finish=lambda: pending.wait().view(shape)) if async_op else pending.wait().view(shape)

    direct = direct_reduce(comm, spec, step, coord, op, [[i] for i in range(comm.size)], None)
    if direct is None:
        return _once_bound(known, spec.dtype, _in_wire(run, step, shape))
    return _in_wire(or_direct(direct, run, what.reduced, spec.mesh.device_type), step, shape)


def _all_gather(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    comm, general = _comm(spec, step), _gather_buffered(spec, step, coord)
    return or_direct(direct_gather(comm, spec, step, coord), general, spec.dtype, spec.mesh.device_type)


def _gather_buffered(spec: Spec, step: Step, coord: tuple[int, ...]) -> Run:
    """Parts that are boxes of the result, but do not follow each other in it, are gathered straight into it."""
    comm, dtype = _comm(spec, step), spec.dtype
    regions = shared_along(spec, step.dst, step.src, step.axes, coord)
    shapes = [*map(region_shape, held_along(spec, step.src, step.axes, coord))]
    out_shape = region_shape(holdings(spec, step.dst, coord))
    join = Join(regions, out_shape)
    alike, whole = len({*shapes}) == 1, all(len(runs) < 2 for region in regions for runs in region)
    straight = whole and join.single is None and not (alike and join.in_order) and math.prod(spec.shape) > SMALL
    if alike and not straight:
        known = lambda: gather_known(comm, shapes, regions, out_shape, dtype)  # noqa: E731
        return _once_bound(known, dtype, _gather_alike(comm, join, out_shape))
    boxes = Boxes(regions, out_shape)

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        out = x.new_empty(out_shape) if straight else None
        into = None if out is None else boxes(out)
        finish: Callable[[list[torch.Tensor]], torch.Tensor] = join if out is None else lambda _: out
        if async_op:
            pending = _pending_parts(comm.all_gather(_private(x, True), shapes, into=into, async_op=True))
            return unwaited(lambda: finish(pending.wait()), x, out_shape)
        return finish(comm.all_gather(x, shapes, into=into))

    return _once_bound(lambda: gather_uneven(comm, shapes, regions, out_shape, dtype, straight), dtype, run)


def _gather_alike(comm: Communicator, join: Join, out_shape: tuple[int, ...]) -> Run:
    """Parts of one shape are gathered into one buffer, which is the result or is laid out as it."""

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        if not async_op:
            return join.of_flat(comm.all_gather_flat(x).wait())
        pending = comm.all_gather_flat(_private(x, True), async_op=True)
        return unwaited(lambda: join.of_flat(pending.wait()), x, out_shape)

    return run


def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if modes():  # what is made here may be of a mode's own kind
        return torch.empty(0, dtype=dtype, device=device)
    return _kept_nothing(dtype, device)


@functools.cache
def _kept_nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _sides(
    spec: Spec, step: Step, coord: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], list[Region], list[Region], tuple[int, ...], tuple[int, ...]]:
    """Who takes part; where in mine lies what goes to each, in my result what comes from each; the shapes of both."""
    have, want = holdings(spec, step.src, coord), holdings(spec, step.dst, coord)
    leaving = shared_along(spec, step.src, step.dst, step.axes, coord)
    into = shared_along(spec, step.dst, step.src, step.axes, coord)
    return list(members(spec, step.axes, coord)), leaving, into, region_shape(have), region_shape(want)


def _all_to_all(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    comm, general = _comm(spec, step), _exchange_buffered(spec, step, coord)
    return or_direct(direct_exchange(comm, spec, step, coord), general, spec.dtype, spec.mesh.device_type)


def _exchange_buffered(spec: Spec, step: Step, coord: tuple[int, ...]) -> Run:
    """My own part goes through the collective where that saves a copy: of what is sent, or of what has come."""
    comm = _comm(spec, step)
    group, leaving, into, shape, out_shape = _sides(spec, step, coord)
    take, join, me = Take(leaving, shape), Join(into, out_shape), group.index(coord)
    all_of_it = join.single is None and (take.in_order or join.in_order)
    apart, dtype = None if all_of_it else me, spec.dtype
    known = lambda: exchange_known(comm, leaving, shape, into, out_shape, apart, dtype)  # noqa: E731
    if all_of_it:
        return _once_bound(known, dtype, _exchange_all(comm, take, join, [*map(region_shape, into)], out_shape))

    def finish(got: list[torch.Tensor], mine: torch.Tensor) -> torch.Tensor:
        got[me] = mine
        return mine.clone(memory_format=torch.contiguous_format) if join.single == me else join(got)

    return _once_bound(known, dtype, exchange_others(comm, take, me, into, out_shape, finish))


def exchange_others(
    comm: Communicator, take: Take, me: int, into: Sequence[Region], out_shape: tuple[int, ...],
    finish: Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor],
) -> Run:  # fmt: skip
    """All parts but my own, at position `me`, go through one all-to-all; `finish` makes the result of both."""
    shapes = [(0,) if i == me else region_shape(part) for i, part in enumerate(into)]

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        parts = take(_private(x, async_op), me)
        mine, parts[me] = parts[me], _nothing(x.dtype, x.device)
        if async_op:
            pending = _pending_parts(comm.all_to_all(parts, shapes, async_op=True))
            return unwaited(lambda: finish(pending.wait(), mine), x, out_shape)
        got = comm.all_to_all(parts, shapes)
        del parts[:]  # what was sent may have been copies
        return finish(got, mine)

    return run


def _exchange_all(
    comm: Communicator, take: Take, join: Join, shapes: Sequence[tuple[int, ...]], out_shape: tuple[int, ...]
) -> Run:
    """All parts go through the collective."""
    leave, arrive = take.sizes, [math.prod(shape) for shape in shapes]

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        flat = take.flat(x, async_op and gathering.now is None)
        pending = comm.all_to_all_flat(flat, leave, arrive, async_op=async_op)
        if async_op:
            return unwaited(lambda: join.of_flat(pending.wait()), x, out_shape)
        return join.of_flat(pending.wait())

    return run


def _all_to_all_reduce(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    """Positions that agree on the pending axes hold disjoint shards of one part; the parts are reduced here."""
    op = _reduce_op(step)
    pending = [a for a in step.axes if isinstance(step.src[a], Partial) and step.src[a] is not step.dst[a]]
    group, leaving, into, shape, out_shape = _sides(spec, step, coord)
    take, me = Take(leaving, shape), group.index(coord)
    by_part: dict[tuple[int, ...], list[int]] = {}
    for i, other in enumerate(group):
        by_part.setdefault(tuple(other[a] for a in pending), []).append(i)
    joins = [(some, Join([into[i] for i in some], out_shape)) for some in by_part.values()]

    def finish(got: list[torch.Tensor], mine: torch.Tensor) -> torch.Tensor:
        got[me] = mine
        if not math.prod(out_shape):
            return mine.new_empty(out_shape)
        parts = [join([got[i] for i in some]) for some, join in joins]
        if wide is None:
            return reduce_tensors(parts, op)
        return reduce_tensors([part.to(wide) for part in parts], op).to(spec.dtype)

    wire = step.wire
    wide = None if wire is None or wire.itemsize <= spec.dtype.itemsize else wire
    comm, dtype, on = _comm(spec, step), spec.dtype, spec.mesh.device_type
    run = exchange_others(comm, take, me, into, out_shape, finish)
    parts = [*by_part.values()]
    direct = direct_reduce(comm, spec, step, coord, op, parts, wide)
    if wire is None:
        known = lambda: reduce_arriving(comm, leaving, shape, into, out_shape, parts, op, dtype)  # noqa: E731
        return or_direct(direct, _once_bound(known, dtype, run), dtype, on)
    run = or_direct(direct, run, dtype if wide is not None else wire, on)
    if wide is not None:
        return run
    return lambda x, async_op: run(x.to(wire), False).to(x.dtype)


def _spread_reduce(spec: Spec, step: Step, coord: tuple[int, ...], nxt: Step | None) -> Run:
    spread, dtype = Spread(spec, step, coord), spec.dtype
    if step.wire is not None:
        return spread
    general = _once_bound(lambda: small_spread(spread, dtype), dtype, spread)
    return or_direct(direct_spread(spread, spec, step), general, dtype, spec.mesh.device_type)


_BIND: dict[str, Callable[[Spec, Step, tuple[int, ...], Step | None], Run]] = {
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
    "spread_reduce": _spread_reduce,
    "zero_fill": _fill,
}
