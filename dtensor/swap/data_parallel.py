"""DDP over tensor parallelism: DDP sees this rank's parts, the module sees DTensors.

DDP reduces the gradients of plain parameters. So the parameters of a module are this rank's parts
(`_localize_dtensor`), and DTensors over them while its forward runs (`_reconstruct_dtensor`): autograd then brings
the gradients to the parts.

    parameters of the module     parts ──pre-hook──▶ DTensors ──forward──▶ ──hook──▶ the same parts
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from dtensor.spec import Spec
from dtensor.tensor import DTensor

__all__ = ["_localize_dtensor", "_pre_dp_module_transform", "_reconstruct_dtensor"]


def _localize_dtensor(module: nn.Module, *_: object, ignored_params: set[nn.Parameter] | None = None) -> None:
    """Parameters that are DTensors become this rank's parts, plain parameters that share their memory."""
    ignored = {id(p) for p in ignored_params or ()}
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if isinstance(param, DTensor) and id(param) not in ignored:
                local = getattr(param, "_made_of", made.get(id(param)))
                if local is None:
                    local = nn.Parameter(param._local_tensor.detach(), requires_grad=param.requires_grad)
                    local._st_info = param._spec
                    made[id(param)] = local
                part._parameters[name] = local


def _reconstruct_dtensor(module: nn.Module, _input: object) -> None:
    """Those parts become DTensors over them, differentiable; a shared parameter stays shared."""
    made: dict[int, DTensor] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            local = getattr(param, "_made_of", param)
            spec: Spec | None = getattr(local, "_st_info", None)
            if local is None or spec is None:
                continue
            if id(local) not in made:
                made[id(local)] = made_of = DTensor.from_local(
                    local, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride
                )
                made_of._made_of = local  # type: ignore[attr-defined]
            part._parameters[name] = cast(nn.Parameter, cast(torch.Tensor, made[id(local)]))


def _pre_dp_module_transform(module: nn.Module) -> None:
    """Prepare a module of DTensors for DDP: parts outside of its forward, DTensors inside."""
    _localize_dtensor(module)
    module.register_forward_pre_hook(_reconstruct_dtensor)
    module.register_forward_hook(_localize_dtensor)
