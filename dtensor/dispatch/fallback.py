"""Ops that run on whole tensors: those without a rule, those whose output depends on the data."""

from __future__ import annotations

from typing import Any

import torch

from dtensor.dispatch import hit as hot
from dtensor.dispatch.call import flat, is_dtensor, make_call, map_args, replicated_on
from dtensor.dispatch.functional import run_on_copies
from dtensor.dispatch.hit import OpInfo
from dtensor.dispatch.materialized import note_written
from dtensor.dispatch.no_rule import is_of_torch, no_rule, notice, refuse_strict, unshaped
from dtensor.errors import refuse_layout
from dtensor.rules.faults import depends_on_data

__all__ = ["run_replicated"]


def run_replicated(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op whose output cannot be known before: every rank gathers the inputs and computes the same."""
    first = next(a for a in flat(args, kwargs) if is_dtensor(a))
    mesh = first._spec.mesh
    call, why = make_call(info.func, args, kwargs, ()), unshaped(info)
    if not is_of_torch(info.name):
        raise no_rule(info, call, why)
    if not depends_on_data(info.func):
        refuse_strict(info, call, 1, why)
        notice(info, call, why)
    if info.written and not all(s.is_replicated() for s in call.inputs):
        return run_on_copies(info, args, kwargs, everything=True)

    def whole(a: Any) -> Any:
        if not is_dtensor(a):
            return a
        return hot.redistribute_local(a._local_tensor, a._spec, a._spec.replicated())

    largs, lkwargs = map_args(whole, args, kwargs)
    got = info.run(*largs, **lkwargs)

    def wrap(t: Any) -> Any:
        if isinstance(t, (list, tuple)):
            return type(t)(map(wrap, t))
        if not isinstance(t, torch.Tensor):
            return t
        if t.is_nested or t.layout not in (torch.strided, torch.sparse_coo):
            refuse_layout(f"{info.name}, the result", t)
        return replicated_on(mesh, t)

    note_written(args, info.written_at)
    if info.gives_target:
        return args[0]
    return wrap(got)
