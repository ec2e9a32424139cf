"""unparallelize_module: the plain module again, with full parameters and without the hooks of any style.

`parallelize_module` notes, on the modules themselves, which hooks a style added and which styles were applied, so
that deep copies can be taken back too and hooks of other people stay. Hooks that this package or the engine put
on a module without a plan (`distribute_module`, `input_reshard`) are told by the function's own module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from dtensor.distribute import owned_parameters, replacing, unguard_state
from dtensor.tensor import DTensor

from ..styles.style import APPLIED, ParallelStyle, full

__all__ = ["PATH", "STYLES", "HookIds", "hook_ids", "note_applied", "unparallelize_module"]

HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_state_dict_pre_hooks",
    "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
FLAGS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
ADDED, STYLES, PATH = "_parallel_hooks", "_parallel_styles", "_parallel_path"

HookIds = dict[tuple[int, str], set[int]]


def hook_ids(module: nn.Module) -> HookIds:
    """The numbers of all hooks of `module` and the modules below it."""
    return {(id(part), kind): set(getattr(part, kind, ())) for part in module.modules() for kind in HOOKS}


def note_applied(module: nn.Module, style: ParallelStyle, before: HookIds) -> None:
    """Note that `style` was applied to `module`, and the hooks that are new since `before`."""
    module.__dict__[STYLES] = [*module.__dict__.get(STYLES, ()), style]
    for part in module.modules():
        for kind in HOOKS:
            new = set(getattr(part, kind, ())) - before.get((id(part), kind), set())
            if new:
                part.__dict__[ADDED] = part.__dict__.get(ADDED, frozenset()) | {(kind, number) for number in new}


def unparallelize_module(module: nn.Module) -> nn.Module:
    """Undo `parallelize_module` on `module` and all below it, in place, and return it.

    Parameters and buffers that are DTensors become plain tensors with all their elements, on every rank (one
    gather for each that is sharded); gradients likewise. What was shared stays shared, frozen stays frozen, and
    `state_dict` has the keys it had. The hooks of styles, of `distribute_module` and of `input_reshard` go, others
    stay. Parameters are new objects: make optimizers anew. A module without DTensors is left as it is. All ranks of
    the mesh must take part.

    Raises TypeError for something that is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"unparallelize_module: expected a module, got {type(module).__name__}\n  fix: unparallelize_module(net)"
        )
    ours = [x for x in owned_parameters(module) if isinstance(x[1]._parameters[x[2]], DTensor)]
    with replacing(ours, module, "unparallelize_module"):
        for part in list(module.modules()):
            for style in reversed(part.__dict__.pop(STYLES, [])):
                style._undo(part)
        done: dict[int, nn.Parameter | torch.Tensor] = {}
        for part in module.modules():
            _undo_one(part, done)
    return module


def _undo_one(part: nn.Module, done: dict[int, nn.Parameter | torch.Tensor]) -> None:
    _remove_hooks(part)
    unguard_state(part)
    part.__dict__.pop(APPLIED, None)
    part.__dict__.pop(PATH, None)
    for name, param in list(part._parameters.items()):
        if isinstance(param, DTensor):
            part._parameters[name] = cast(nn.Parameter, _once(done, param, _plain_parameter))
    for name, buffer in list(part._buffers.items()):
        if isinstance(buffer, DTensor):
            part._buffers[name] = _once(done, buffer, full)


def _once(
    done: dict[int, nn.Parameter | torch.Tensor], x: DTensor, make: Callable[[DTensor], torch.Tensor]
) -> torch.Tensor:
    if id(x) not in done:
        done[id(x)] = make(x)
    return done[id(x)]


def _plain_parameter(x: DTensor) -> nn.Parameter:
    param = nn.Parameter(full(x), requires_grad=x.requires_grad)
    if isinstance(x.grad, DTensor):
        param.grad = full(x.grad)
    return param


def _remove_hooks(part: nn.Module) -> None:
    added = part.__dict__.pop(ADDED, frozenset())
    for kind in HOOKS:
        hooks = getattr(part, kind, {})
        for number, hook in list(hooks.items()):
            made_in = getattr(hook, "__module__", None) or ""
            if (kind, number) in added or made_in.partition(".")[0] == "dtensor":
                del hooks[number]
                for flags in FLAGS.get(kind, ()):
                    getattr(part, flags, {}).pop(number, None)
