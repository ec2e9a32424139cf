"""Files of `torch.save` in which torch's DTensor is: `torch.load` gives this engine's.

A file names torch's classes, and torch makes its own objects of what is in it, of its own mesh and spec too. Every
tensor of a subclass comes out of one function of torch's, `_rebuild_from_type_v2`; so this is where torch's DTensor
is exchanged for ours over the same local part, before anything else of the file refers to it.

As in torch the part is that of the process which wrote the file, and the mesh is seen from the one that reads it.

And `async_save` of torch.distributed.checkpoint, which copies what it saves first: it takes a tensor that has an
address for one that has a storage of its own, so it is told to copy the local part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _weights_only_unpickler

from dtensor.dispatch.materialized import settled_spec
from dtensor.mesh import device_mesh
from dtensor.placement import as_placement
from dtensor.spec import Spec
from dtensor.tensor import DTensor

__all__ = ["forget", "offload_tensor", "rebuild"]


def rebuild(original: Callable[..., torch.Tensor], func: Any, kind: type, args: Any, state: Any) -> torch.Tensor:
    """A tensor of a subclass that is in a file: a DTensor of this engine for torch's."""
    made = original(func, kind, args, state)
    kind = type(made)
    return _ours(made) if kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed") else made


def forget() -> None:
    """The functions that `torch.load` has looked up: to be called when that one is replaced or put back."""
    _weights_only_unpickler._get_allowed_globals.cache_clear()


def _ours(its: Any) -> DTensor:
    spec, meta = its._spec, its._spec.tensor_meta
    placements = spec.placements
    if not spec.use_strided_shard_as_shard_order and not spec.is_default_device_order(spec.shard_order):
        placements = spec._convert_shard_order_to_StridedShard(spec.shard_order, placements, spec.mesh)
    placed = tuple(as_placement(p) for p in placements)
    made = DTensor(
        its._local_tensor, Spec.make(_mesh(spec.mesh), placed, meta.shape, meta.stride, meta.dtype),
        requires_grad=its.requires_grad,
    )  # fmt: skip
    made.__dict__.update({k: v for k, v in vars(its).items() if k not in ("_local_tensor", "_spec")})
    return made


def _mesh(mesh: Any) -> device_mesh.DeviceMesh:
    """As a mesh of ours is unpickled: seen from this process, groups found when they are used."""
    root = mesh._root_mesh or mesh
    ranks = root._rank_map.tolist()
    return device_mesh.rebuild_mesh(
        mesh._device_type, len(ranks) if ranks == list(range(len(ranks))) else ranks, device_mesh.axes_of(root),
        root._mesh_dim_names, device_mesh.axes_of(mesh), mesh._mesh_dim_names,
        bool(getattr(mesh, "_dim_group_names", None)),
    )  # fmt: skip


def offload_tensor(
    original: Callable[..., Any], stager: object, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False
) -> Any:
    """The copy of a tensor that `async_save` makes: of a DTensor, one over the copy of its local part."""
    if not isinstance(x, DTensor):
        return original(stager, x, memo, non_blocking)
    spec = settled_spec(x, "async_save")
    memo[id(x)] = made = DTensor(
        original(stager, x._local_tensor, memo, non_blocking), spec, requires_grad=x.requires_grad
    )
    return made
