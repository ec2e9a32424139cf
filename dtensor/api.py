"""`distribute_tensor`: from a tensor that one rank knows to a DTensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor.compiled import refuse_export
from dtensor.device_mesh import DeviceMesh, as_mesh
from dtensor.errors import expect
from dtensor.memory import refuse_layout
from dtensor.placement import Placement, Replicate, Shard
from dtensor.reshard_run import redistribute_local
from dtensor.spec import Spec, contiguous_stride, normalize_placements
from dtensor.strides import dense, in_order
from dtensor.tensor import DTensor

__all__ = ["distribute_tensor"]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Lay a leaf tensor out over a mesh.

    Args:
        tensor: the whole tensor; the same shape and dtype on every rank. Its gradients are not linked.
        device_mesh: default: the mesh of the enclosing `with mesh:`.
        placements: one per mesh axis; default all `Replicate()`. `Partial(op)` gives parts that reduce to
            the tensor (sum: position 0 holds it, the others zero).
        src_data_rank: position, on every mesh axis, of the rank whose data counts; None: every rank cuts its
            own, and nothing is sent.

    Returns:
        A leaf DTensor that requires grad when `tensor` does. A DTensor of the same mesh and placements is
        returned as it is.

    Raises:
        RuntimeError: no mesh, or not a leaf.
        ValueError, IndexError, TypeError: bad placements; a DTensor of another mesh or layout.
    """
    mesh = as_mesh(device_mesh)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"distribute_tensor: expected a torch.Tensor, got {type(tensor).__name__}\n"
            "  fix: distribute_tensor(torch.as_tensor(values), mesh, placements)"
        )
    refuse_layout("distribute_tensor", tensor)
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor: the tensor is not a leaf of the autograd graph, and the link to its history would be "
            "lost; use x.detach(), or DTensor.from_local, which is differentiable"
        )
    placed = normalize_placements(placements, mesh, tensor.ndim, "distribute_tensor")
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise ValueError(f"distribute_tensor: a DTensor of {tensor.device_mesh}, asked for {mesh}")
        if tensor.placements != placed:
            raise ValueError(
                f"distribute_tensor: a DTensor laid out as {tensor.placements}, asked for {placed}; use redistribute()"
            )
        return tensor
    refuse_export("distribute_tensor")
    if src_data_rank is not None:
        expect("distribute_tensor", "src_data_rank", src_data_rank, int, "a position on the mesh, or None", "0")
    if src_data_rank is not None and not 0 <= src_data_rank < max(mesh.shape, default=1):
        raise ValueError(
            f"distribute_tensor: src_data_rank={src_data_rank} is no position on a mesh of {mesh.shape}\n"
            "  fix: 0"
        )
    local = tensor.detach()
    if local.device.type not in (mesh.device_type, "meta"):
        local = local.to(mesh.device_type)
    stride = local.stride() if dense(local) else contiguous_stride(local.shape)
    spec = Spec.make(mesh, placed, local.shape, stride, local.dtype)
    local = in_order(_cut(local, spec, src_data_rank), stride)
    return DTensor(local, spec, requires_grad=tensor.requires_grad)


def _cut(local: torch.Tensor, spec: Spec, src: int | None) -> torch.Tensor:
    """One collective per mesh axis, left to right, on what the axes before left."""
    mesh = spec.mesh
    if mesh.coord is None:
        return local.new_zeros(spec.local_shape)
    done: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    start = local
    for axis, p in enumerate(spec.placements):
        here = spec.with_placements(done)
        done = (*done[:axis], p, *done[axis + 1 :])
        there = spec.with_placements(done)
        k, at = mesh.shape[axis], src if src is None else min(src, mesh.shape[axis] - 1)
        if at is None or k == 1:
            local = redistribute_local(local, here, there)
        elif isinstance(p, Shard):
            local = _scatter(local, here, there, axis, p.dim, at)
        else:
            local = redistribute_local(mesh.comm(axis).broadcast(local.contiguous(), at), here, there)
    return local.clone(memory_format=torch.contiguous_format) if local is start else local.contiguous()


def _scatter(local: torch.Tensor, here: Spec, there: Spec, axis: int, dim: int, src: int) -> torch.Tensor:
    """Every position of `axis` gets its chunk of position `src`'s tensor."""
    k, n = here.mesh.shape[axis], local.shape[dim]
    step = -(-n // k)
    cuts = [(min(i * step, n), max(min(step, n - i * step), 0)) for i in range(k)]
    comm = here.mesh.comm(axis)
    parts = [local.narrow(dim, *cut).contiguous() for cut in cuts] if comm.rank == src else None
    shapes = [torch.Size([*local.shape[:dim], size, *local.shape[dim + 1 :]]) for _, size in cuts]
    return comm.scatter(parts, local.new_empty(there.local_shape), src, shapes=shapes)
