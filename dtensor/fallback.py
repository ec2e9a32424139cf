"""Ops that run on whole tensors: those without a rule, those whose output depends on the data."""

from __future__ import annotations

from typing import Any

import torch

from dtensor import dispatch as hot
from dtensor.dispatch import OpInfo
from dtensor.dispatch_call import flat, is_dtensor, make_call, map_args
from dtensor.dispatch_functional import run_on_copies
from dtensor.dispatch_writes import gives_target
from dtensor.memory import refuse_layout
from dtensor.moved import note_writes
from dtensor.placement import Replicate
from dtensor.rule_absent import is_of_torch, no_rule
from dtensor.spec import Spec

__all__ = ["run_replicated"]


def run_replicated(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op whose output cannot be known before: every rank gathers the inputs and computes the same."""
    first = next(a for a in flat(args, kwargs) if is_dtensor(a))
    mesh = first._spec.mesh
    if info.written and not all(a._spec.is_replicated() for a in flat(args, kwargs) if is_dtensor(a)):
        return run_on_copies(info, args, kwargs, everything=True)
    if not is_of_torch(info.name):
        why = "the operator has no sharding rule, and its output cannot be predicted"
        raise no_rule(info, make_call(info.func, args, kwargs, ()), why)

    def whole(a: Any) -> Any:
        if not is_dtensor(a):
            return a
        return hot.redistribute_local(a._local_tensor, a._spec, a._spec.with_placements((Replicate(),) * mesh.ndim))

    largs, lkwargs = map_args(whole, args, kwargs)
    got = info.run(*largs, **lkwargs)

    def wrap(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if t.is_nested or t.layout not in (torch.strided, torch.sparse_coo):
            refuse_layout(f"{info.name}, the result", t)
        spec = Spec.make(mesh, (Replicate(),) * mesh.ndim, t.shape, t.stride(), t.dtype)
        return hot._new(hot._DTensor, t, spec, requires_grad=False)

    if info.written:
        note_writes(*(a for n, a in zip((p.name for p in info.func._schema.arguments), args, strict=False)
                      if n in info.written))  # fmt: skip
        if gives_target(info):
            return args[0]
    return type(got)(wrap(t) for t in got) if isinstance(got, (list, tuple)) else wrap(got)
