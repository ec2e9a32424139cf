"""The total norm of tensors that live on several meshes, or in part on none, and clipping by it.

    FSDP over tensor parallelism:   weights f32[8@dp,16@tp] on ("dp", "tp"), norms f32[16@dp] on ("dp",)

One op has one mesh, so torch's functions, which stack the norms of all tensors, cannot do it. Here the norms are taken
mesh by mesh, as torch takes them, and gathered; they are numbers then, and torch's own function makes the total of
them, a plain tensor. Tensors of one mesh, or plain ones alone, go to torch's functions as ever.

The meshes must be slices of one grid of ranks, so that every rank is on all of them and all have the same total. A
plain gradient among DTensors counts as what every rank has: keeping it alike is the program's part, as it is with
plain tensors alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from dtensor.errors import MeshError
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.tensor import DTensor
from dtensor.torch_changes import replace

from .pending_gradients import settle

__all__: list[str] = []

_total_norm, _clip = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_


def _by_mesh(tensors: Iterable[torch.Tensor]) -> list[tuple[DeviceMesh | None, list[int]]]:
    """Positions of the tensors of each mesh, and of the plain ones, in the order in which the meshes come."""
    found: dict[DeviceMesh | None, list[int]] = {}
    for i, x in enumerate(tensors):
        found.setdefault(x._spec.mesh if isinstance(x, DTensor) else None, []).append(i)
    return list(found.items())


def _check(meshes: Sequence[DeviceMesh | None]) -> None:
    """MeshError, on all ranks, for meshes that are no slices of the same ranks."""
    real = [mesh for mesh in meshes if mesh is not None]
    roots = {mesh._get_root_mesh()._key for mesh in real}
    if len(roots) > 1:
        raise MeshError(
            f"the norm of tensors on the meshes {real}: they are no slices of one mesh, so some ranks lack a part\n"
            "  fix: take torch.nn.utils.get_total_norm on each mesh, and bring the norms together"
        )


@functools.wraps(_total_norm)
def total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch's `get_total_norm`, over any number of meshes."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    groups = _by_mesh(tensors)
    if len(groups) < 2:
        return _total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    _check([mesh for mesh, _ in groups])
    numbers: list[torch.Tensor] = [torch.empty(())] * len(tensors)
    with torch.no_grad():
        for mesh, at in groups:
            mine: list[Any] = [tensors[i] for i in at]
            if mesh is not None:
                settle(mine)
            norms = torch.stack([torch.linalg.vector_norm(x, norm_type).to(tensors[0].device) for x in mine])
            whole = norms.full_tensor() if isinstance(norms, DTensor) else norms
            for i, number in zip(at, whole.unbind(), strict=True):
                numbers[i] = number
    return _total_norm(numbers, norm_type, error_if_nonfinite, foreach)


@functools.wraps(_clip)
def clip_with_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:  # fmt: skip
    """torch's `clip_grads_with_norm_`, over any number of meshes."""
    kept = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with_grad = [p for p in kept if p.grad is not None]
    groups = _by_mesh(p.grad for p in with_grad if p.grad is not None)
    if len(groups) > 1 and isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    for _, at in groups:
        _clip([with_grad[i] for i in at], max_norm, total_norm, foreach)


def install() -> None:
    """Measure and clip over any number of meshes."""
    replace(clip_grad, "_get_total_norm", total_norm)
    replace(clip_grad, "_clip_grads_with_norm_", clip_with_norm)
    replace(utils, "get_total_norm", total_norm)
    replace(utils, "clip_grads_with_norm_", clip_with_norm)
