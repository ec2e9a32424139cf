"""Several redistributions at once: on an accelerator, the small collectives of one group go out as one launch.

    mul of f32[8,8]{P:tp} and f32[8,8]{P:tp}     all_reduce, all_reduce over tp: one launch
    a list op, elements of four layouts          one launch a group, and those that stay alone
    pending gradients, f32 and bf16, over tp     all_reduce of all f32, all_reduce of all bf16: one launch

What goes together depends on the layouts, the global shapes and the kind of device only, so that all ranks decide
alike: redistributions whose plan is one collective, last, of at most `SMALL` elements on any rank, but no
reduce-scatter of parts of different sizes, which a group takes as a list; by group, in the order given, at most `MOST`
a launch. The rest, and all of them on the CPU, on simulated ranks, in traces and where waiting takes the host, are
carried out one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dtensor.comm import issue
from dtensor.comm.c10d import C10dCommunicator
from dtensor.comm.coalescing import Together
from dtensor.comm.communicator import Communicator
from dtensor.comm.issue import gathering
from dtensor.comm.pending import Pending
from dtensor.comm.wire import waited
from dtensor.errors import CollectiveError
from dtensor.redistribute.executor.run import redistribute_local, run_reshard
from dtensor.redistribute.plan import ReshardPlan, plan_reshard
from dtensor.spec import Spec, is_even

__all__ = ["MOST", "SMALL", "all_reduce_together", "may_meet", "redistribute_together"]

SMALL = 1 << 20
"""Elements of a tensor's largest shard, before and after, up to which its collective is one of several in a launch."""

MOST = 64
"""Collectives of one launch."""

Redistribution = tuple[torch.Tensor, Spec, Spec]
"""This rank's part, the layout it has, the layout it is to have."""

_KINDS = frozenset({"all_gather", "all_reduce", "all_to_all", "reduce_scatter"})


def may_meet(specs: Sequence[Spec]) -> bool:
    """True where moves of tensors of these specs may have collectives that can be one launch."""
    return len(specs) > 1 and all(s.mesh.device_type not in ("cpu", "meta") for s in specs)


def redistribute_together(moves: Sequence[Redistribution]) -> list[torch.Tensor]:
    """What `redistribute_local` makes of each move, in order. The moves are independent; nothing is written to.

    Raises what it raises; a CollectiveError of a launch names its collectives and redistributions.
    """
    out: list[torch.Tensor] = [local for local, _, _ in moves]
    groups = [_group(*move) if gathering.now is None else None for move in moves]
    for comm, some in _runs(groups, out):
        if comm is None:
            done = [redistribute_local(*moves[i]) for i in some]
        else:
            done = _launched(comm, [moves[i] for i in some])
        for i, moved in zip(some, done, strict=True):
            out[i] = moved
    return out


def all_reduce_together(sums: Sequence[tuple[Communicator, torch.Tensor]]) -> list[torch.Tensor]:
    """Each tensor summed over the positions of its communicator, in order: new tensors. All are independent.

    They may have any size: what is sent and what arrives is kept until the last has arrived. A CollectiveError of a
    launch names its collectives.
    """
    out = [x for _, x in sums]
    groups = [_launching(comm, x) if gathering.now is None and comm.size > 1 else None for comm, x in sums]
    for comm, some in _runs(groups, out):
        if comm is None:
            for i in some:
                out[i] = sums[i][0].all_reduce(out[i], "sum")
            continue
        with Together(comm, out[some[0]].device):
            under_way = [comm.all_reduce(waited(out[i]), "sum", async_op=True) for i in some]
        for i, late in zip(some, under_way, strict=True):
            out[i] = late.wait() if isinstance(late, Pending) else late
    return out


def _runs(
    groups: Sequence[C10dCommunicator | None], tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[C10dCommunicator | None, list[int]]]:
    """Which collectives go together: a group and at most `MOST`, by number; None and one that goes alone."""
    batches: dict[tuple[object, ...], list[int]] = {}
    for i, (comm, x) in enumerate(zip(groups, tensors, strict=True)):
        batches.setdefault(("alone", i) if comm is None else (comm.name, x.device), []).append(i)
    for members in batches.values():
        for start in range(0, len(members), MOST):
            some = members[start : start + MOST]
            yield groups[some[0]] if len(some) > 1 else None, some


def _launched(comm: C10dCommunicator, moves: Sequence[Redistribution]) -> list[torch.Tensor]:
    """Moves of one collective each, of one group, by one launch: all are issued, it ends, all are finished."""
    locals_ = [waited(local) for local, _, _ in moves]
    plans = [plan_reshard(src, dst) for _, src, dst in moves]
    try:
        with Together(comm, locals_[0].device):
            under_way = [run_reshard(p, x, async_op=True) for p, x in zip(plans, locals_, strict=True)]
        return [p.wait() if isinstance(p, Pending) else p for p in under_way]
    except CollectiveError as e:
        e.during("\n".join(f"redistribute {plan}" for plan in plans))
        raise


def _group(local: torch.Tensor, src: Spec, dst: Spec) -> C10dCommunicator | None:
    """The group whose launch this move's collective may join; None where it goes alone."""
    if src is dst or src.mesh.coord is None or local.device.type == "meta" or not issue.in_queue(local):
        return None
    if max(src.local_numel_bound, dst.local_numel_bound) > SMALL:
        return None
    return _group_of(plan_reshard(src, dst), local)


def _group_of(plan: ReshardPlan, local: torch.Tensor) -> C10dCommunicator | None:
    if len(plan.collectives) != 1 or plan.steps[-1].kind not in _KINDS:
        return None
    if plan.steps[-1].kind == "reduce_scatter" and not (is_even(plan.src) and is_even(plan.dst)):
        return None
    return _launching(plan.src.mesh.comm(plan.steps[-1].axes), local)


def _launching(comm: Communicator, x: torch.Tensor) -> C10dCommunicator | None:
    """`comm`, where collectives of tensors like `x` can be launched together."""
    if isinstance(comm, C10dCommunicator) and issue.in_queue(x) and comm.has_launches(x.device):
        return comm
    return None
