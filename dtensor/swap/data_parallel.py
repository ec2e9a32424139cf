"""DDP over tensor parallelism: DDP sees this rank's parts, the module sees DTensors.

DDP reduces the gradients of plain parameters. So the parameters and buffers of a module are this rank's parts
(`_localize_dtensor`), and DTensors over them while a forward runs (`_reconstruct_dtensor`): autograd then brings
the gradients to the parts.

    parameters of the module     parts ──pre-hook──▶ DTensors ──forward──▶ ──hook──▶ the same parts

The hooks are on every module inside, as activation checkpointing calls modules again in backward, one by one; the
outermost call of the moment does the work.

DDP makes parameters equal over its group and averages their gradients, so the ranks of the group must hold the same
part of each. What torch prepares only when it is given a slice of a mesh is prepared here for any group of which that
is true, and another group is refused before anything is sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from dtensor.placement import Partial, Replicate
from dtensor.spec import Spec
from dtensor.swap import data_parallel_state
from dtensor.tensor import DTensor

__all__ = ["_localize_dtensor", "_pre_dp_module_transform", "_reconstruct_dtensor", "init", "sharding_spec"]


def _localize_dtensor(module: nn.Module, *_: object, ignored_params: Iterable[torch.Tensor] | None = None) -> None:
    """Parameters and buffers that are DTensors become this rank's parts, plain ones that share their memory."""
    ignored = {id(p) for p in ignored_params or ()}
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for table in _tables(part):
            for name, held in table.items():
                if isinstance(held, DTensor) and id(held) not in ignored:
                    local = getattr(held, "_made_of", made.get(id(held)))
                    if local is None:
                        local = held._local_tensor.detach()
                        if table is part._parameters:
                            local = nn.Parameter(local, requires_grad=held.requires_grad)
                        local._st_info = held._spec  # type: ignore[attr-defined]
                        made[id(held)] = local
                    table[name] = local


def _reconstruct_dtensor(module: nn.Module, _input: object) -> None:
    """Those parts become DTensors over them, differentiable; a shared parameter stays shared."""
    made: dict[int, DTensor] = {}
    for part in module.modules():
        for table in _tables(part):
            for name, held in table.items():
                local = getattr(held, "_made_of", held)
                spec: Spec | None = getattr(local, "_st_info", None)
                if local is None or spec is None:
                    continue
                if id(local) not in made:
                    made[id(local)] = made_of = DTensor.from_local(
                        local, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride
                    )
                    made_of._made_of = local  # type: ignore[attr-defined]
                table[name] = made[id(local)]


def _tables(module: nn.Module) -> tuple[dict[str, torch.Tensor | None], ...]:
    return cast(dict[str, torch.Tensor | None], module._parameters), module._buffers


class _Calls:
    """How deep the calls of a module's parts are."""

    def __init__(self, module: nn.Module) -> None:
        self.depth = 0
        for part in module.modules():
            part.register_forward_pre_hook(self.enter, prepend=True)
            part.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, _input: object) -> None:
        if self.depth == 0:
            _reconstruct_dtensor(module, None)
        self.depth += 1

    def leave(self, module: nn.Module, _input: object, _output: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            _localize_dtensor(module)


def _pre_dp_module_transform(module: nn.Module, ignored_params: Iterable[torch.Tensor] | None = None) -> None:
    """Prepare a module of DTensors for DDP: parts outside of its forward, DTensors inside. Once is enough."""
    ignored = {id(t) for t in ignored_params or ()}
    if any(isinstance(t, DTensor) and id(t) not in ignored for t in (*module.parameters(), *module.buffers())):
        _localize_dtensor(module, ignored_params=ignored_params)
        _Calls(module)
        data_parallel_state.module_hooks(module)


# ------------------------------------------------------------ the constructor of DDP
def init(original: Callable[..., None], ddp: object, *args: Any, **kwargs: Any) -> None:
    """It takes a module of DTensors whatever way it is told its ranks."""
    given = inspect.signature(original).bind(ddp, *args, **kwargs).arguments
    module, mesh, group = given["module"], given.get("device_mesh"), given.get("process_group")
    if isinstance(module, nn.Module):
        names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        ignored = [t for name, t in held if name in names]
        specs = {
            name: t._spec if isinstance(t, DTensor) else t._st_info
            for name, t in held
            if name not in names and (isinstance(t, DTensor) or hasattr(t, "_st_info"))
        }
        if specs:
            if mesh is not None and group is None and mesh.ndim == 1:
                group = mesh.get_group(0)
            _check_group(specs, dist.get_process_group_ranks(group))
            _pre_dp_module_transform(module, ignored)
    original(ddp, *args, **kwargs)


def _check_group(specs: dict[str, Spec], ranks: list[int]) -> None:
    """ValueError where two ranks of the group hold different parts of a tensor, or one is a pending sum."""
    for name, spec in specs.items():
        where = {int(rank): i for i, rank in enumerate(spec.mesh.mesh.flatten().tolist())}
        places: dict[tuple[int, ...], int] = {}
        for rank in ranks:
            if rank in where:
                coord = tuple(int(c) for c in torch.unravel_index(torch.tensor(where[rank]), spec.mesh.shape))
                parts = tuple(c for c, p in zip(coord, spec.placements, strict=True) if not isinstance(p, Replicate))
                places.setdefault(parts, rank)
        if len(places) > 1 or any(isinstance(p, Partial) for p in spec.placements):
            unlike = " and ".join(map(str, list(places.values())[:2]))
            what = f"ranks {unlike} hold different parts of" if len(places) > 1 else "a sum is pending in"
            raise ValueError(
                f"DistributedDataParallel over ranks {ranks}: {what} {name}, {spec}, and DDP would make them equal. "
                "Give it the ranks that hold the same part: device_mesh=mesh['dp'], or process_group="
                "mesh.get_group('dp'), for the axis along which the model is replicated"
            )


# ------------------------------------------------------------ fully_shard
def sharding_spec(original: Callable[..., Any], held: Any, param: DTensor, *args: Any, **kwargs: Any) -> Any:
    """It asks for the very mesh that `fully_shard` was given; a spec holds one of all the meshes that are equal."""
    if held.mesh_info.spmd_mesh == param._spec.mesh:
        held.mesh_info.spmd_mesh = param._spec.mesh
    return original(held, param, *args, **kwargs)
