"""Several redistributions at once: on an accelerator, the small collectives of one group go out as one launch.

    mul of f32[8,8]{P:tp} and f32[8,8]{P:tp}     all_reduce, all_reduce over tp: one launch
    a list op, elements of four layouts          one launch a group, and those that stay alone

What goes together depends on the layouts, the global shapes and the kind of device only, so that all ranks decide
alike: moves whose plan is one collective, last, of parts of one size on all ranks, of at most `SMALL` elements on any
rank; by group, in the order of the moves, at most `MOST` a launch. The others, and all of them on the CPU, on simulated
ranks, in traces and where waiting takes the host, are carried out one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor import comm_sent
from dtensor.comm import Pending
from dtensor.comm_c10d import C10dCommunicator
from dtensor.comm_sent import gathering
from dtensor.comm_together import Together
from dtensor.comm_wire import waited
from dtensor.errors import CollectiveError
from dtensor.reshard_plan import plan_reshard
from dtensor.reshard_run import redistribute_local, run_reshard
from dtensor.reshard_step import ReshardPlan
from dtensor.spec import Spec, is_even

__all__ = ["MOST", "SMALL", "may_meet", "redistribute_together"]

SMALL = 1 << 20
"""Elements of a tensor's largest shard, before and after, up to which its collective is one of several in a launch."""

MOST = 64
"""Collectives of one launch."""

Move = tuple[torch.Tensor, Spec, Spec]
"""This rank's part, the layout it has, the layout it is to have."""

_KINDS = frozenset({"all_gather", "all_reduce", "all_to_all", "reduce_scatter"})


def may_meet(specs: Sequence[Spec]) -> bool:
    """True where moves of tensors of these specs may have collectives that can be one launch."""
    return len(specs) > 1 and all(s.mesh.device_type not in ("cpu", "meta") for s in specs)


def redistribute_together(moves: Sequence[Move]) -> list[torch.Tensor]:
    """What `redistribute_local` makes of each move, in order. The moves are independent; nothing is written to.

    Raises what it raises; a CollectiveError of a launch names its collectives and redistributions.
    """
    batches: dict[tuple[object, ...], list[int]] = {}
    for i, (local, src, dst) in enumerate(moves):
        comm = _group(local, src, dst) if gathering.now is None else None
        batches.setdefault(("alone", i) if comm is None else (comm.name, local.device), []).append(i)
    out: list[torch.Tensor] = [local for local, _, _ in moves]
    for members in batches.values():
        for start in range(0, len(members), MOST):
            some = members[start : start + MOST]
            if len(some) == 1:
                out[some[0]] = redistribute_local(*moves[some[0]])
                continue
            for i, moved in zip(some, _launched([moves[i] for i in some]), strict=True):
                out[i] = moved
    return out


def _launched(moves: Sequence[Move]) -> list[torch.Tensor]:
    """Moves of one collective each, of one group, by one launch: all are issued, it ends, all are finished."""
    locals_ = [waited(local) for local, _, _ in moves]
    plans = [plan_reshard(src, dst) for _, src, dst in moves]
    comm = _group(*moves[0])
    assert comm is not None
    try:
        with Together(comm, locals_[0].device):
            under_way = [run_reshard(p, x, async_op=True) for p, x in zip(plans, locals_, strict=True)]
        return [p.wait() if isinstance(p, Pending) else p for p in under_way]
    except CollectiveError as e:
        e.during("\n".join(f"redistribute {plan}" for plan in plans))
        raise


def _group(local: torch.Tensor, src: Spec, dst: Spec) -> C10dCommunicator | None:
    """The group whose launch this move's collective may join; None where it goes alone."""
    if src is dst or src.mesh.coord is None or local.device.type == "meta" or not comm_sent.in_queue(local):
        return None
    if max(src.local_numel_bound, dst.local_numel_bound) > SMALL or not is_even(src) or not is_even(dst):
        return None
    return _group_of(plan_reshard(src, dst), local.device)


def _group_of(plan: ReshardPlan, device: torch.device) -> C10dCommunicator | None:
    if len(plan.collectives) != 1 or plan.steps[-1].kind not in _KINDS:
        return None
    axes = plan.steps[-1].axes
    comm = plan.src.mesh.comm(axes)
    return comm if isinstance(comm, C10dCommunicator) and comm.has_launches(device) else None
