"""State dicts of a module of DTensors under DDP, and of its optimizer: they hold DTensors.

Under DDP the parameters are this rank's parts (`dtensor.swap.data_parallel`), and so is what an optimizer keeps.
In a state dict they would be taken for whole tensors that all ranks have, and all but one part be lost in a file.

    out    part, or state of a part ──▶ DTensor over it, same memory ──▶ state dict
    in     DTensor of any layout, whole tensor, or part ──▶ part ──▶ copied
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from dtensor.spec import Spec
from dtensor.swap.parts import part_of
from dtensor.tensor import DTensor

__all__ = ["module_hooks", "with_hooks"]


def module_hooks(module: nn.Module) -> None:
    """From now on the state dicts of the module and its parts hold DTensors for what is kept as a part."""
    for part in module.modules():
        part.register_state_dict_post_hook(_saved)
        part.register_load_state_dict_pre_hook(_loaded)


def _kept(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Spec]]:
    """The parameters and buffers of this very module that are parts: name, part, layout of the whole."""
    for name, held in chain(module._parameters.items(), module._buffers.items()):
        part = getattr(held, "_made_of", held)
        spec = getattr(part, "_st_info", None)
        if isinstance(part, torch.Tensor) and isinstance(spec, Spec):
            yield name, part, spec


def _saved(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    for name, part, spec in _kept(module):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and not value.requires_grad:  # with keep_vars it is the parameter itself
            state[prefix + name] = _whole(value, part, spec)


def _loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name, part, spec in _kept(module):
        if isinstance(value := state.get(prefix + name), torch.Tensor):
            state[prefix + name] = _part(value, part, spec)


def _whole(value: torch.Tensor, part: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A DTensor over `value`, which is this rank's part or state like it; other state as it is."""
    if isinstance(value, DTensor) or value.shape != part.shape or value.dim() == 0:
        return value
    return DTensor.from_local(value, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)


def _part(value: torch.Tensor, part: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's part of a DTensor or of a whole tensor; a part, and state of other shapes, as they are."""
    return part_of(value, spec) if value.shape == spec.shape else value


# ------------------------------------------------------------ optimizers
def _state_saved(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return _each(optimizer, state, _whole)


def _state_loaded(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return _each(optimizer, state, _part)


def _each(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    to: Callable[[torch.Tensor, torch.Tensor, Spec], torch.Tensor],
) -> dict[str, Any]:
    """The state dict with the tensors of parts changed; its keys name the parameters in the order of the groups."""
    keys = chain.from_iterable(group["params"] for group in state["param_groups"])
    params = dict(zip(keys, chain.from_iterable(g["params"] for g in optimizer.param_groups), strict=False))
    changed = {}
    for key, held in state["state"].items():
        part = params.get(key)
        spec = getattr(part, "_st_info", None)
        if isinstance(part, torch.Tensor) and isinstance(spec, Spec) and isinstance(held, dict):
            held = {name: to(v, part, spec) if isinstance(v, torch.Tensor) else v for name, v in held.items()}
        changed[key] = held
    return {**state, "state": changed}


def _has_parts(optimizer: torch.optim.Optimizer) -> bool:
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return any(isinstance(getattr(p, "_st_info", None), Spec) for p in params)


def _hooked(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that has hooks: what is given, or what that wraps and calls, as accelerate's does."""
    inner = optimizer
    while not hasattr(inner, "_optimizer_state_dict_post_hooks"):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise TypeError(
                f"state dict of {type(optimizer).__name__}, of parameters under DDP over tensor parallelism: it never "
                "called Optimizer.__init__, and has no attribute `optimizer`, so its state would be saved as parts. "
                "Give the optimizer that it wraps"
            )
    found: torch.optim.Optimizer = inner
    return found


def with_hooks(original: Callable[..., Any], model: nn.Module, optimizers: Iterable[Any], *args: Any) -> Any:
    """A function for state dicts of optimizers, while those that it is given save and load DTensors."""
    of_parts = [_hooked(o) for o in optimizers if _has_parts(o)]
    hooks = [o.register_state_dict_post_hook(_state_saved) for o in of_parts]
    hooks += [o.register_load_state_dict_pre_hook(_state_loaded) for o in of_parts]
    try:
        return original(model, optimizers, *args)
    finally:
        for hook in hooks:
            hook.remove()
