"""Private helpers that programs import from torch's engine, done with this one's means."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtensor import distribute as api
from dtensor.mesh.device_mesh import DeviceMesh, active_meshes
from dtensor.placement import Placement
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.spec import Spec, TensorMeta, contiguous_stride, normalize_placements
from dtensor.tensor import DTensor
from dtensor.tensor_methods import offsets as _utils

if TYPE_CHECKING:
    from dtensor.parallel import ParallelStyle

__all__ = [
    "compute_local_shape_and_global_offset", "is_rng_supported_mesh", "manual_seed", "mesh_resources",
    "parallelize_module", "redistribute_local_tensor", "shard_tensor", "use_min_cost_redistribution_plan",
]  # fmt: skip


class _MeshResources:
    """What is left of torch's mesh registry: the meshes of `with mesh:`, and a mesh's root."""

    @property
    def mesh_stack(self) -> list[DeviceMesh]:
        """The meshes that this thread is in, innermost last."""
        return active_meshes.stack

    def get_current_mesh(self) -> DeviceMesh:
        """The innermost mesh. Raises RuntimeError where there is none."""
        return DeviceMesh.current()

    def get_root_mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        """The mesh that `device_mesh` was sliced from, or itself."""
        return device_mesh._get_root_mesh()


mesh_resources = _MeshResources()


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seed what random DTensors are drawn from. All ranks of the mesh give the same seed; others are left alone."""
    if device_mesh.coord is not None:
        torch.manual_seed(seed)


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """True: random ops work on meshes of every device type."""
    return True


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Iterable[object], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As `dtensor.tensor_methods.offsets`, but a part that a split factor shards into runs begins where its first run
    does.

    That is what torch says, and what programs read that take the runs apart by themselves. Torch's own callers read
    the part as one run: they get the error of `dtensor.tensor_methods.offsets` instead.
    """
    shape = tuple(int(n) for n in global_shape)
    asks = sys._getframe(1).f_globals.get("__name__", "")
    if skip_offset or asks.startswith("torch.") or mesh.coord is None:
        return _utils.compute_local_shape_and_global_offset(shape, mesh, placements, skip_offset)
    layout = normalize_placements(placements, mesh, len(shape), "compute_local_shape_and_global_offset")
    spec = Spec.make(mesh, layout, shape, contiguous_stride(shape), torch.float32)
    return tuple(spec.local_shape_of(mesh.coord)), spec.local_offset_of(mesh.coord)


def redistribute_local_tensor(
    local_tensor: torch.Tensor, current_spec: Spec, target_spec: Spec, *, async_op: bool = False
) -> torch.Tensor:
    """This rank's part of a tensor of `current_spec`, in the layout of `target_spec`. Not differentiable.

    Torch shards what is there and does not look at the specs' shape, so programs hand over whole tensors of this mesh
    that are parts on another one, with specs of the latter's shape. Whole tensors are taken as they are.

    Raises NotImplementedError for specs of two meshes.
    """
    if current_spec.mesh != target_spec.mesh:
        raise NotImplementedError("redistribute_local_tensor: two meshes; use DTensor.redistribute")
    whole = all(p.is_replicate() or p.is_partial() for p in current_spec.placements)
    if whole and local_tensor.shape != current_spec.shape:
        meta = TensorMeta(local_tensor.shape, contiguous_stride(local_tensor.shape), local_tensor.dtype)
        current_spec, target_spec = (
            Spec(spec.mesh, spec.placements, tensor_meta=meta) for spec in (current_spec, target_spec)
        )
    return redistribute_local(local_tensor, current_spec, target_spec, async_op=async_op)


def shard_tensor(
    full_tensor: torch.Tensor, placements: Sequence[Placement], device_mesh: DeviceMesh | None = None
) -> DTensor:
    """`distribute_tensor` of a tensor that all ranks have: each takes its part, nothing is sent."""
    return api.distribute_tensor(full_tensor, device_mesh, placements, src_data_rank=None)


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    **options: Any,
) -> nn.Module:
    """As `dtensor.parallel.parallelize_module`, with two differences.

    A path that names no module is passed over with a warning. A module that is not in the plan and shares a parameter
    with one that is goes on sharing it, laid out now: programs lay out the embedding and the head of a tied model in
    two calls. Left out for good, it has a DTensor among plain tensors and says so in its forward.
    """
    from dtensor.parallel import plan

    if isinstance(parallelize_plan, Mapping):
        paths = [path for path in parallelize_plan if isinstance(path, str) and path]
        lost = [path for path in paths if next(plan.find(module, path.split("."), ""), None) is None]
        for path in lost:
            warnings.warn(f"parallelize_module: the plan names {path!r}, which is not there: skipped", stacklevel=2)
        parallelize_plan = {path: style for path, style in parallelize_plan.items() if path not in lost}
    followers = plan.followers(module, parallelize_plan)
    for owner, name, *_ in followers:
        owner._parameters[name] = None
    try:
        module = plan.parallelize_module(module, device_mesh, parallelize_plan, **options)
    finally:
        for owner, name, leader, of in followers:
            owner._parameters[name] = leader._parameters[of]
    return module


@contextmanager
def use_min_cost_redistribution_plan(enabled: bool = True) -> Iterator[None]:
    """Nothing: plans are those of least cost here anyway."""
    yield
