"""`DTensor.from_local(run_check=True)`: do the ranks of a mesh agree on what they pass?

Compared over the mesh's own ranks, whatever the world: dtype, requires_grad and, where no global shape is given,
dims, shape and stride. A disagreement is a ValueError on every rank, before anything is changed. Then replicas
are made equal: position 0's part is broadcast along every replicated axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtensor.device_mesh import DeviceMesh
from dtensor.placement import Placement, Replicate

__all__ = ["run_checks"]

DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
)
MAX_DIMS = 64


def run_checks(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], check_shape: bool
) -> torch.Tensor:
    """`local`, with replicated parts made equal; a new tensor where something was broadcast.

    All ranks of the mesh must call it. Without `check_shape` shape and stride may differ (uneven shards).

    Raises:
        ValueError: on every rank, where any of them passes another dtype, requires_grad, shape or stride.
    """
    if mesh.coord is None or mesh.size() == 1 or local.device.type == "meta":
        return local
    axes = tuple(a for a, k in enumerate(mesh.shape) if k > 1)
    comm = mesh.comm(axes)
    seen = [_read(t) for t in comm.all_gather(_facts(local), [(3 + 2 * MAX_DIMS,)] * comm.size)]
    _compare(comm.ranks, "dtype", [s[0] for s in seen])
    _compare(comm.ranks, "requires_grad", [s[1] for s in seen])
    if check_shape:
        _compare(comm.ranks, "shape", [s[2] for s in seen])
        _compare(comm.ranks, "stride", [s[3] for s in seen])
    copied = [a for a in axes if isinstance(placements[a], Replicate)]
    places = torch.arange(comm.size).view([mesh.shape[a] for a in axes])
    for a in copied:
        for line in places.movedim(axes.index(a), -1).reshape(-1, mesh.shape[a]).tolist():
            _compare([comm.ranks[i] for i in line], "shape", [seen[i][2] for i in line])
    if not copied:
        return local
    made = _Synchronised.apply(local, mesh, tuple(copied))
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


Facts = tuple[torch.dtype, bool, tuple[int, ...], tuple[int, ...]]


def _facts(local: torch.Tensor) -> torch.Tensor:
    """dtype, requires_grad, dims, shape and stride as int64 of fixed length."""
    if local.ndim > MAX_DIMS:
        raise ValueError(f"from_local(run_check=True): tensors of more than {MAX_DIMS} dims are not supported")
    room = [0] * (MAX_DIMS - local.ndim)
    numbers = [DTYPES.index(local.dtype), int(local.requires_grad), local.ndim]
    return torch.tensor([*numbers, *local.shape, *room, *local.stride(), *room], dtype=torch.int64, device=local.device)


def _read(t: torch.Tensor) -> Facts:
    numbers = [int(n) for n in t.tolist()]
    n = numbers[2]
    shape, stride = numbers[3 : 3 + n], numbers[3 + MAX_DIMS : 3 + MAX_DIMS + n]
    return DTYPES[numbers[0]], bool(numbers[1]), tuple(shape), tuple(stride)


def _compare(ranks: Sequence[int], what: str, values: Sequence[object]) -> None:
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            raise ValueError(
                f"from_local(run_check=True): the ranks of the mesh pass local tensors of different {what}: rank "
                f"{ranks[0]} has {values[0]}, rank {rank} has {value}; pass the same {what} everywhere"
                + (", or shape= and stride= of the global tensor for uneven shards" if what == "shape" else "")
            )
