"""distribute_module: make the parameters and buffers of a module DTensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

from torch import nn

from dtensor.api import distribute_tensor
from dtensor.device_mesh import DeviceMesh, as_mesh
from dtensor.placement import Replicate
from dtensor.tensor import DTensor

__all__ = ["distribute_module"]

PartitionFn = Callable[[str, nn.Module, DeviceMesh], object]
IOFn = Callable[..., object]

APPLIED = "_distribute_module_applied"


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: IOFn | None = None,
    output_fn: IOFn | None = None,
) -> nn.Module:
    """Make every parameter and buffer of `module` a DTensor on `device_mesh`, in place, and return `module`.

    Args:
        device_mesh: by default the mesh of the enclosing `with mesh:`.
        partition_fn: called as `partition_fn(name, submodule, mesh)` for every submodule (and "" for the
            module itself); it replaces the parameters it wants sharded. What is still plain afterwards is
            replicated from the mesh's first rank.
        input_fn: called as `input_fn(module, inputs, mesh)` before forward; what it returns, unless None,
            replaces the inputs.
        output_fn: called as `output_fn(module, outputs, mesh)` after forward, likewise.

    Raises RuntimeError when the module was distributed before, ValueError when `input_fn` or `output_fn` takes
    another number of arguments.
    """
    if getattr(module, APPLIED, False):
        raise RuntimeError(
            f"distribute_module: this {type(module).__name__} was distributed before\n"
            "  rule: a module is distributed once, since its hooks would run twice\n"
            "  fix: do all of it in one call, or distribute its parts"
        )
    mesh = as_mesh(device_mesh)
    prepare = None if input_fn is None else _three_arguments("input_fn", input_fn)
    finish = None if output_fn is None else _three_arguments("output_fn", output_fn)
    if partition_fn is not None:
        for name, part in module.named_modules():
            partition_fn(name, part, mesh)
    done: dict[int, nn.Parameter] = {}
    for part in module.modules():
        _replicate(part, mesh, done)
    if prepare is not None:
        module.register_forward_pre_hook(lambda mod, inputs: prepare(mod, inputs, mesh))
    if finish is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: finish(mod, outputs, mesh))
    setattr(module, APPLIED, True)
    return module


def _replicate(part: nn.Module, mesh: DeviceMesh, done: dict[int, nn.Parameter]) -> None:
    """Make what is still plain in one module (its children apart) replicated.

    `done` holds what became of parameters by id, so that shared ones stay shared.
    """
    everywhere = [Replicate()] * mesh.ndim
    for name, param in list(part._parameters.items()):
        if param is not None and not isinstance(param, DTensor):
            if id(param) not in done:
                value = distribute_tensor(param.detach(), mesh, everywhere)
                done[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
            part.register_parameter(name, done[id(param)])
    for name, buffer in list(part._buffers.items()):
        if buffer is not None and not isinstance(buffer, DTensor):
            part._buffers[name] = distribute_tensor(buffer.detach(), mesh, everywhere)


def _three_arguments(name: str, fn: IOFn) -> IOFn:
    """`fn` as a function of (module, value, mesh)."""
    count = len(inspect.signature(fn).parameters)
    if count == 3:
        return fn
    if count == 2:
        warnings.warn(
            f"distribute_module: {name} of two arguments (value, mesh) is deprecated, take (module, value, mesh)",
            FutureWarning,
            stacklevel=3,
        )
        return lambda module, value, mesh: fn(value, mesh)
    raise ValueError(
        f"distribute_module: {name} must take 3 arguments (module, value, mesh), {fn!r} takes {count}\n"
        f"  fix: def {name}(module, value, mesh): ..."
    )
