"""The older FSDP (`FullyShardedDataParallel`) over tensor parallelism: it flattens this rank's parts.

FSDP keeps the parameters of a module in one flat buffer, a piece on each rank. Where its mesh is a slice of a larger
one it asks an extension what to flatten and what a module sees; this is that extension:

    parameter ──pre_flatten──▶ this rank's part ──FSDP: flat, sharded, gathered──▶ part ──post_unflatten──▶ DTensor

All ranks of an FSDP group have one place along the tensor-parallel axes, so they flatten parts of equal sizes, uneven
layouts too. Sharded state dicts hold DTensors: a parameter of tensor parallelism on the axes of both, another on
FSDP's axes alone, which are the ranks that are known to hold the same. Files of `torch.distributed.checkpoint` say
where in a tensor a piece lies, whatever the mesh.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._common_utils import _set_fsdp_flattened
from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.spec import Spec
from dtensor.tensor import DTensor

__all__ = ["DTensorExtensions"]


class DTensorExtensions(FSDPExtensions):
    """What the older FSDP asks about the parameters of one module that it wraps. `compute_stream` is set by it."""

    def __init__(self, device_handle: Any) -> None:
        self.device_handle = device_handle
        self.compute_stream: Any = None
        self.tensor_parallel: set[str] = set()
        self.made: dict[tuple[Spec, int], torch.Tensor] = {}

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Spec | None]:
        """This rank's part of a DTensor, and what makes it one again; a plain tensor as it is.

        The part is a parameter: of another tensor FSDP makes one that has a gradient, be the DTensor frozen or not.
        Raises ValueError for a pending sum, whose parts are no values of the parameter.
        """
        if not isinstance(tensor, DTensor):
            return tensor, None
        spec = tensor._spec
        if any(isinstance(p, Partial) for p in spec.placements):
            raise ValueError(
                f"FullyShardedDataParallel: a sum is pending in a parameter, {spec}; redistribute it first"
            )
        self.tensor_parallel.update(spec.mesh.mesh_dim_names or ())
        return torch.nn.Parameter(tensor._local_tensor.detach(), requires_grad=tensor.requires_grad), spec

    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Spec) -> torch.Tensor:
        """A DTensor over the part that FSDP has gathered. Differentiable: the gradient comes back as a part.

        FSDP frees what it gathered after the forward, gathers it again before the backward, into the same memory, and
        sets that as the `data` of the forward's tensor. The tensor of the part is the same one then as in the forward,
        which tells that its data are.
        """
        spec, stream = param_extension, self.compute_stream or self.device_handle.current_stream()
        with self.device_handle.stream(stream):
            whole = DTensor.from_local(tensor, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)
        part, key = whole._local_tensor, (spec, int(tensor.storage_offset()))
        before = self.made.setdefault(key, part)
        if _same_memory(before, part):
            whole._local_tensor = before
        else:
            self.made[key] = part
        _set_fsdp_flattened(whole)
        return whole

    def chunk_tensor(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """NotImplementedError: such state dicts would hold `ShardedTensor`s inside `ShardedTensor`s."""
        raise NotImplementedError(
            "FullyShardedDataParallel over tensor parallelism: sharded state dicts hold DTensors here, not "
            "ShardedTensors; ask for them with torch.distributed.checkpoint.state_dict.get_model_state_dict, or "
            "ShardedStateDictConfig(_use_dtensor=True)"
        )

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: Any) -> torch.Tensor:
        """`tensor`, whole along FSDP's axes (`device_mesh`), sharded along dim 0 over the last of them."""
        cut: list[Placement] = [Replicate()] * (device_mesh.ndim - 1) + [Shard(0)]
        held = tensor.detach().clone()
        if not isinstance(held, DTensor):
            whole = DTensor.from_local(held, device_mesh, [Replicate()] * device_mesh.ndim, run_check=False)
            return whole.redistribute(placements=cut)
        layout = dict(zip(_names(held._spec.mesh), held._spec.placements, strict=True))
        names = _names(device_mesh)
        mesh = _over_both(device_mesh, (*names, *layout))
        whole = DTensor.from_local(
            held._local_tensor,
            mesh,
            [layout.get(name, Replicate()) for name in _names(mesh)],
            shape=held._spec.shape,
            stride=held._spec.stride,
        )
        layout |= dict(zip(names, cut, strict=True))
        return whole.redistribute(placements=[layout[name] for name in _names(mesh)])

    def pre_load_state_dict_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """NotImplementedError, as for `chunk_tensor`."""
        return self.chunk_tensor(tensor), []

    def all_gather_dtensor(self, tensor: Any, parent_mesh: Any) -> torch.Tensor:
        """The reverse of `chunk_dtensor`: whole along FSDP's axes, and of that this rank's part, plain."""
        spec = tensor._spec
        names = spec.mesh.mesh_dim_names or [""] * spec.mesh.ndim
        kept = [
            p if name in self.tensor_parallel else Replicate() for name, p in zip(names, spec.placements, strict=True)
        ]
        return tensor.redistribute(placements=kept).to_local()


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views lie in one storage, at one place. (A storage that is held is not another one's memory.)"""
    where = [(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype) for t in (a, b)]
    return where[0] == where[1] and not a.requires_grad and not b.requires_grad


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    if not mesh.mesh_dim_names:
        raise ValueError(f"FullyShardedDataParallel over tensor parallelism: the axes of {mesh} have no names")
    return tuple(mesh.mesh_dim_names)


def _over_both(device_mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The slice of FSDP's root mesh that has these axes, in the root's order."""
    root = device_mesh._get_root_mesh()
    lost = sorted(set(names) - set(_names(root)))
    if lost:
        raise NotImplementedError(
            f"FullyShardedDataParallel over tensor parallelism: a sharded state dict needs both as axes of one mesh, "
            f"and {lost} are none of {root}"
        )
    ordered = tuple(name for name in _names(root) if name in names)
    return root if ordered == _names(root) else root[ordered]
