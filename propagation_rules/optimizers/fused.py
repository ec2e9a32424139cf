"""Optimizers: fused steps and loss scaling.

For-loop and foreach forms are made of pointwise ops, which have rules; each would bring a pending gradient into
its parameter's layout anew, so before a step of any optimizer what is pending is settled (`pending_gradients`), and
foreach steps run as a whole on local tensors where all is laid out alike (`optimizer_lists`).

The fused ops take whole lists, so they have no rules but handlers: whatever a step writes must be laid out like
the parameter, gradients are brought there, and the op runs once on the local tensors. Parameters of several
meshes, and plain ones, may stand in one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dtensor.dispatch.hit import special
from dtensor.dispatch.materialized import note_writes
from dtensor.dispatch.views import Written, carry_back, settled, writable
from dtensor.errors import LayoutError, explain_error
from dtensor.placement import Replicate
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.spec import Spec
from dtensor.tensor import DTensor
from dtensor.torch_changes import undoing

from .pending_gradients import settle, settle_gradients


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    settle_gradients(p for group in optimizer.param_groups for p in group["params"])
    if isinstance(optimizer, torch.optim.LBFGS) and any(isinstance(p, DTensor) for p in optimizer._params):
        vars(optimizer).update(_gather_flat_grad=partial(_as_vector, optimizer), _add_grad=partial(_along, optimizer))


def install() -> None:
    """Settle gradients before every optimizer's step."""
    undoing(register_optimizer_step_pre_hook(_before_step).remove)


# ------------------------------------------------------------ optimizers of one long vector
def _whole(t: torch.Tensor) -> torch.Tensor:
    """A tensor as real numbers in one dim, replicated."""
    if isinstance(t, DTensor):
        t = t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)
    return (torch.view_as_real(t) if t.is_complex() else t).reshape(-1)


def _as_vector(optimizer: torch.optim.LBFGS) -> torch.Tensor:
    """All gradients in one vector. LBFGS itself takes views of them, which shards do not have."""
    return torch.cat([_whole(torch.zeros_like(p) if p.grad is None else p.grad) for p in optimizer._params])


def _along(optimizer: torch.optim.LBFGS, length: float, direction: torch.Tensor) -> None:
    """Move the parameters: every one by its part of the direction, which is sharded like the parameter."""
    at = 0
    for p in optimizer._params:
        real = torch.view_as_real(p) if p.is_complex() else p
        real.add_(direction[at : at + real.numel()].reshape(real.shape), alpha=length)
        at += real.numel()


# ------------------------------------------------------------ fused steps
def _named(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    found = {a.name: a.default_value for a in op._schema.arguments}
    found.update(zip(found, args, strict=False))
    return found | kwargs


def _local(t: Any) -> Any:
    """The local tensor of a number that is the same everywhere, such as a learning rate."""
    if not isinstance(t, DTensor):
        return t
    t = settled(t, "a fused step")
    return redistribute_local(t._local_tensor, t._spec, t._spec.replicated())


def _wrong_layout(op: str, name: str, t: object, param: Spec) -> LayoutError:
    got = str(t._spec) if isinstance(t, DTensor) else "a plain tensor"
    return LayoutError(
        explain_error(
            op, f"{name}: {got}; parameter: {param}", f"{name} must be a DTensor laid out like its parameter",
            f"{name}.redistribute(placements={list(param.placements)})",
        )
    )  # fmt: skip


def fused_step(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Run a `_fused_*_` op on the local tensors; all checks come before anything is moved or written."""
    named = _named(op, args, kwargs)
    lists = {a.name: list(named[a.name]) for a in op._schema.arguments if "[]" in str(a.type) or "List" in str(a.type)}
    name = str(op)
    plain = ("state_steps", "grads")
    written: Written = []
    for key, values in lists.items():
        ready = (lambda t: settled(t, name)) if key in plain else (lambda t: writable(t, name, written))
        lists[key] = [ready(t) if isinstance(t, DTensor) else t for t in values]
    for key, values in lists.items():
        for p, t in zip(lists["self"], values, strict=False):
            if not isinstance(p, DTensor):
                if isinstance(t, DTensor):
                    raise LayoutError(f"{name}: {key} is a DTensor ({t._spec}), its parameter a plain tensor")
            elif p._spec.has_partial():
                raise LayoutError(f"{name}: the parameter {p._spec} is pending; an optimizer cannot step on it")
            elif key not in plain and not (isinstance(t, DTensor) and t._spec.placements == p._spec.placements):
                if not (key == "momentum_buffer_list" and named.get("is_first_step") and isinstance(t, DTensor)):
                    raise _wrong_layout(name, key, t, p._spec)
            elif key == "grads" and not (isinstance(t, DTensor) and t.device_mesh == p.device_mesh):
                raise _wrong_layout(name, "grad", t, p._spec)
    moved: list[DTensor] = []
    local: dict[str, Any] = {k: _local(v) for k, v in named.items() if k not in lists}
    for key, values in lists.items():
        local[key] = out = [_local(t) if key == "state_steps" else t for t in values]
        for i, (p, t) in enumerate(zip(lists["self"], values, strict=False)):
            if not isinstance(t, DTensor) or key == "state_steps":
                continue
            out[i] = t._local_tensor
            if t._spec.placements != p._spec.placements:
                target = t._spec.with_placements(p._spec.placements)
                if key == "grads":
                    out[i] = redistribute_local(t._local_tensor, t._spec, target)
                    moved.append(t)
                else:  # a buffer that the first step fills
                    out[i] = torch.empty_like(p._local_tensor)
                    t._local_tensor, t._spec = out[i], target
    op(**local)
    note_writes(*(values for key, values in lists.items() if key not in plain))
    carry_back(written)
    scale = local.get("grad_scale")
    if scale is not None:
        for t in moved:
            t._local_tensor.div_(scale)


def _register_fused(name: str) -> None:
    for overload in getattr(torch.ops.aten, name).overloads():
        op = getattr(getattr(torch.ops.aten, name), overload)
        if any(a.is_out for a in op._schema.arguments):
            continue
        special(f"aten.{name}.{overload}")(lambda args, kwargs, op=op: fused_step(op, args, kwargs))


for _name in ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"):
    _register_fused(_name)


# ------------------------------------------------------------ loss scaling
@special("aten._amp_foreach_non_finite_check_and_unscale_.default")
def _unscale(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Divide gradients by the scale and note whether any is not finite: on every rank of their meshes the same.

    Pending gradients are settled first, in place: their sum may overflow where no part does.
    """
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    named = _named(op, args, kwargs)
    written: Written = []
    grads = [writable(g, str(op), written) for g in named["self"]]
    found, scale = named["found_inf"], named["inv_scale"]
    settle(grads, tracked=True)
    meshes = list({id(g._spec.mesh): g._spec.mesh for g in grads if isinstance(g, DTensor)}.values())
    local = found._local_tensor if isinstance(found, DTensor) else found
    op([g._local_tensor if isinstance(g, DTensor) else g for g in grads], local, _local(scale))
    note_writes(grads)
    carry_back(written)
    for mesh in meshes:
        axes = tuple(a for a, k in enumerate(mesh.shape) if k > 1)
        if axes and mesh.coord is not None:
            local.copy_(mesh.comm(axes).all_reduce(local, "max"))
