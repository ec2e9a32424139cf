"""Calls that write: what must stay as it is, `out=` forms, views in place.

All checks come before anything is moved or written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtensor.dispatch import OpInfo
from dtensor.dispatch_call import is_dtensor, layouts
from dtensor.errors import LayoutError, MixedTensorError, NoRuleError, explain_error
from dtensor.registry import Call
from dtensor.spec import TensorMeta

__all__ = ["cannot_keep", "check_written", "kept", "run_inplace_view", "run_out"]


def kept(info: OpInfo, call: Call) -> dict[int, int]:
    """Input that is written -> output that is it, or -1."""
    keep: dict[int, int] = {}
    returns = info.func._schema.returns
    for a in info.func._schema.arguments:
        if a.alias_info is not None and a.alias_info.is_write:
            at = call.index(a.name)
            if at is not None:
                out = [
                    j for j, r in enumerate(returns)
                    if r.alias_info is not None and r.alias_info.before_set == a.alias_info.before_set
                ]  # fmt: skip
                keep[at] = out[0] if out else -1
    return keep


def check_written(info: OpInfo, call: Call, outs: Sequence[TensorMeta | None]) -> None:
    """The result of an in-place op fits its target."""
    target = call.inputs[0]
    if outs and outs[0] is not None and len(outs) == 1 and tuple(outs[0].shape) != tuple(target.shape):
        raise RuntimeError(f"{info.name}: the result has shape {list(outs[0].shape)}, the target {list(target.shape)}")


def cannot_keep(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LayoutError:
    """The error for an in-place op none of whose strategies leaves its target where it is."""
    functional = info.name.split(".")[1].rstrip("_")
    return LayoutError(
        explain_error(
            info.name, layouts(args, kwargs),
            "an in-place op cannot change the layout of the tensor it writes, and none of its strategies keeps it",
            f"x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) first, or use {functional}",
        )
    )  # fmt: skip


def run_out(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`out=`: compute out of place, bring the result into the layout of `out`, write it there."""
    outs = [a.name for a in info.func._schema.arguments if a.is_out]
    targets = [kwargs[n] for n in outs]
    rest = {k: v for k, v in kwargs.items() if k not in outs}
    packet = getattr(torch.ops.aten, info.func._schema.name.rpartition("::")[2])
    wanted = [(a.name, str(a.type)) for a in info.func._schema.arguments if not a.is_out]
    for name in packet.overloads():
        base = getattr(packet, name)
        same = [(a.name, str(a.type)) for a in base._schema.arguments] == wanted
        if same and not any(a.alias_info and a.alias_info.is_write for a in base._schema.arguments):
            break
    else:
        raise NoRuleError(f"{info.name}: no out-of-place form was found; call it without out=")
    result = base(*args, **rest)
    many = list(result) if isinstance(result, (list, tuple)) else [result]
    for t, target in zip(many, targets, strict=True):
        if not is_dtensor(target):
            raise MixedTensorError(f"{info.name}: out= must be a DTensor when an input is one, got a plain tensor")
        if t.shape != target.shape:
            raise LayoutError(
                f"{info.name}: out= has shape {list(target.shape)}, the result {list(t.shape)}; "
                "a DTensor cannot be resized, make it of the right shape"
            )
    for t, target in zip(many, targets, strict=True):
        target.copy_(t)
    return tuple(targets) if isinstance(result, tuple) else targets if isinstance(result, list) else targets[0]


def run_inplace_view(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`squeeze_`, `t_` and the like: take over what the view gives, and set the wrapper's own metadata."""
    packet = info.func._schema.name.rpartition("::")[2].rstrip("_")
    overload = "int" if packet == "transpose" else info.func._overloadname
    base = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if base is None or packet in ("resize", "set", "as_strided", "detach"):
        raise NoRuleError(
            explain_error(
                info.name, layouts(args, kwargs), "the storage of a DTensor cannot be changed in place",
                "make a new DTensor instead",
            )
        )  # fmt: skip
    target = args[0]
    view = base(*args, **kwargs)
    with torch._C._DisableTorchDispatch():
        info.func(*args, **kwargs)
    target._local_tensor, target._spec = view._local_tensor, view._spec
    return target
