"""`DTensor.from_local(run_check=True)`: do the ranks of a mesh agree on what they pass?

Compared over the mesh's own ranks, whatever the world: placements, dtype, requires_grad, and dims, shape and stride of
the local tensors or, where one is given, of the global tensor. A disagreement is an error on every rank, before
anything is changed; so is a rank that refuses its arguments, such as a part that does not fit the global shape, which
no other rank would notice. Then replicas are made equal: position 0's part is broadcast along every replicated axis.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Replicate
from dtensor.spec import Spec

__all__ = ["run_checks"]

ROOM = 4096
"""Bytes of what a rank says of its arguments."""


def run_checks(describe: Callable[[], tuple[torch.Tensor, Spec]], mesh: DeviceMesh, check_shape: bool) -> torch.Tensor:
    """The local tensor that `describe` gives, with replicated parts made equal; new where something was broadcast.

    All ranks of the mesh must call it. `describe` checks this rank's arguments. Without `check_shape` the local
    shapes and strides may differ (uneven shards), those of the global tensor may not.

    Raises:
        ValueError: on every rank, where ranks pass other placements, dtypes, requires_grad, shapes or strides, and
            where `describe` raised on another rank; what it raised on this one is raised here.
    """
    axes = tuple(a for a, k in enumerate(mesh.shape) if k > 1)
    if mesh.coord is None or not axes or mesh.device_type == "meta":
        return describe()[0]
    refused: Exception | None = None
    try:
        local, spec = describe()
        facts = _facts(local, spec, check_shape)
    except Exception as e:
        refused, facts = e, {"refused": f"{type(e).__name__}: {e}"[: ROOM // 8]}
    comm = mesh.comm(axes)
    text = json.dumps(facts).encode().ljust(ROOM)
    sent = torch.tensor(list(text), dtype=torch.uint8, device=mesh.device_type)
    got = comm.all_gather(sent, [(ROOM,)] * comm.size)
    seen: list[dict[str, object]] = [json.loads(bytes(t.tolist())) for t in got]
    if refused is not None:
        raise refused
    for rank, its in zip(comm.ranks, seen, strict=True):
        if "refused" in its:
            raise ValueError(
                f"from_local(run_check=True): rank {rank} refuses what it was given, so no rank goes on; it raised\n"
                f"  {its['refused']}"
            )
    for what in facts:
        _compare(comm.ranks, what, [its[what] for its in seen])
    copied = tuple(a for a in axes if isinstance(spec.placements[a], Replicate))
    if not copied or local.device.type == "meta":
        return local
    made = _Synchronised.apply(local, mesh, copied)
    assert isinstance(made, torch.Tensor)
    return made


class _Synchronised(torch.autograd.Function):
    """Position 0's values along some axes; the gradient is that of the rank's own tensor."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, mesh: DeviceMesh, axes: tuple[int, ...]) -> torch.Tensor:
        for a in axes:
            local = mesh.comm(a).broadcast(local, 0)
        return local

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


def _facts(local: torch.Tensor, spec: Spec, check_shape: bool) -> dict[str, object]:
    """What must be the same on all ranks, in the order in which it is looked at."""
    alike = local if check_shape else spec
    facts: dict[str, object] = {
        "placements": str(list(spec.placements)), "dtype": str(spec.dtype), "requires_grad": local.requires_grad,
        "device type": local.device.type, "shape": list(alike.shape),
        "stride": list(local.stride() if check_shape else spec.stride),
    }  # fmt: skip
    if len(json.dumps(facts)) > ROOM:
        raise ValueError(f"from_local(run_check=True): a tensor of {local.ndim} dims is too much to compare")
    return facts


def _compare(ranks: Sequence[int], what: str, values: Sequence[object]) -> None:
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            raise ValueError(
                f"from_local(run_check=True): the ranks of the mesh pass local tensors of different {what}: rank "
                f"{ranks[0]} has {values[0]}, rank {rank} has {value}; pass the same {what} everywhere"
                + (", or shape= and stride= of the global tensor for uneven shards" if what == "shape" else "")
            )
