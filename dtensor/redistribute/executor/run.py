"""Carrying out a plan on this rank.

The first run *binds* a plan to the rank's coord (`dtensor.redistribute.executor.steps`): which regions of its tensor go
to which position, in collectives of which sizes, where in the result what arrives belongs. Later runs only pack, send
and unpack. The executor takes no decisions, and nothing is padded here: parts have the sizes they have.

    plan                        bound, on position 1 of 2
    all_to_all S(0) -> S(1)     pack the columns [0,2) and [2,4); send 4 and 4 elements; what has come is the rows

    run_reshard      a plan, of one mesh                         here
    steps            each kind of step, bound                    copies, unbuffered, balanced_reduction
    coalescing       several redistributions as one launch       on accelerators
    asynchronous     results that wait when they are used
    subclass         local tensors of somebody else's class
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from dtensor.comm.world import kept
from dtensor.errors import CollectiveError, LayoutError, explain_error
from dtensor.placement import Placement
from dtensor.redistribute.cost_model import CostModel, current_cost_model
from dtensor.redistribute.executor.asynchronous import belongs_to, has_side_stream, on_side_stream
from dtensor.redistribute.executor.steps import Run, bind_step
from dtensor.redistribute.executor.subclass import is_opaque, run_opaque
from dtensor.redistribute.plan import ReshardPlan, plan_reshard
from dtensor.spec import Spec

__all__ = ["Move", "known_move", "redistribute_local", "remember_move", "resolved", "run_reshard"]


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
    steps = [bind_step(plan.src, step, coord, nxt) for step, nxt in pairwise([*plan.steps, None]) if step is not None]
    if not steps:
        return lambda x, _: x
    last, before = steps[-1], steps[:-1]
    several = len(plan.collectives) > 1

    def all_steps(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step(x, False)
        return x

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        if type(x) is not torch.Tensor and is_opaque(x):
            return run_opaque(plan, x)
        try:
            if async_op and several and has_side_stream(x):
                return belongs_to(on_side_stream(all_steps, x, dst_shape), plan)
            for step in before:
                x = step(x, False)
            return belongs_to(last(x, True), plan) if async_op else last(x, False)
        except CollectiveError as e:
            e.during(f"redistribute {plan}")
            raise

    return run
