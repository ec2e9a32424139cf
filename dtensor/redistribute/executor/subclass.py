"""Redistribution of parts that are tensor subclasses of somebody else's: numbers in 8 bits with scales, for instance.

Such a part is not one block of numbers, and has few operations: it can be gathered by the functional collectives,
along dim 0, split and joined. So it goes axis by axis: what must not stay as it is is gathered, the last axis first,
and then sharded anew, the first axis first.

    [S(0), S(0)] -> [R, S(0)] on (2, 2)     gather over axis 1, gather over axis 0, take half of it over axis 1
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dtensor.comm.c10d import C10dCommunicator
from dtensor.comm.communicator import Communicator
from dtensor.errors import LayoutError, explain_error
from dtensor.placement import Replicate, Shard, StridedShard
from dtensor.redistribute.plan import ReshardPlan
from dtensor.spec import Spec, is_even

__all__ = ["is_opaque", "run_opaque"]

_F = torch.ops._c10d_functional


def is_opaque(x: torch.Tensor) -> bool:
    """True for a part of a class that is neither torch's plain one nor one that waits, or of a trace."""
    return is_traceable_wrapper_subclass(x) and type(x).__name__ != "AsyncCollectiveTensor"


def run_opaque(plan: ReshardPlan, x: torch.Tensor) -> torch.Tensor:
    """`run_reshard` for such a part.

    Raises LayoutError, on all ranks alike, for layouts that are pending, uneven or have split factors where they
    change. Raises what the class raises for an operation that it lacks.
    """
    src, dst = plan.src, plan.dst
    axes = _changing(src, dst)
    if not axes:
        return x
    placements = [p for a in axes for p in (src.placements[a], dst.placements[a])]
    if not (all(isinstance(p, (Replicate, Shard)) for p in placements) and is_even(src) and is_even(dst)):
        raise LayoutError(
            explain_error(
                f"redistribute {src} -> {dst}", f"parts that are tensors of class {type(x).__name__}",
                "parts that are no plain tensors move between replicas and even shards only",
                "make plain tensors of the parts first, e.g. x.to_local().dequantize()",
            )
        )  # fmt: skip
    mesh = src.mesh
    for a in reversed(axes):
        p = src.placements[a]
        if isinstance(p, Shard) and mesh.shape[a] > 1:
            x = _gathered(x, p.dim, mesh.comm(a), mesh.get_group(a).group_name)
    for a in axes:
        p = dst.placements[a]
        if isinstance(p, Shard) and mesh.shape[a] > 1 and mesh.coord is not None:
            size = x.shape[p.dim] // mesh.shape[a]
            x = x.narrow(p.dim, size * mesh.coord[a], size)
    return x.clone() if any(isinstance(dst.placements[a], Shard) for a in axes) else x


def _changing(src: Spec, dst: Spec) -> list[int]:
    """The axes to be gathered: those that change, and those that split, later, a dim that one of them splits."""
    axes: list[int] = []
    dims: set[int] = set()
    for a, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True)):
        cut = {r.dim for r in (p, q) if isinstance(r, (Shard, StridedShard))}
        if p != q or cut & dims:
            axes.append(a)
            dims |= cut
    return axes


def _gathered(x: torch.Tensor, dim: int, comm: Communicator, group: str) -> torch.Tensor:
    """All positions' `x` side by side along `dim`. The collective puts them one after the other along dim 0."""
    x = _F.wait_tensor(_F.all_gather_into_tensor(x.contiguous(), comm.size, group))
    order = [comm.group_rank(i) if isinstance(comm, C10dCommunicator) else i for i in range(comm.size)]
    if dim == 0 and order == sorted(order):
        return x
    parts = x.chunk(comm.size, 0)
    return torch.cat([parts[i] for i in order], dim)
