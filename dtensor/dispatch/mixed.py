"""Plain tensors beside DTensors that do not meet: list ops over both kinds, and numbers written into plain tensors.

A model under a tensor-parallel plan may keep its norms plain. Its optimizer and `clip_grad_norm_` then hand lists
of both kinds to one list op, whose elements have nothing to do with each other:

    _foreach_mul_([plain, f32[8@tp], plain], 0.9)      the plain ones by themselves, the DTensors by themselves

(the step counts of an optimizer, plain numbers beside a DTensor, go with it)
and scale every gradient by one number, a DTensor where any gradient is one: `plain.mul_(number)` uses the number's
value, which all ranks of its mesh agree on. Anything else that mixes is the business of `dtensor.dispatch.plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from dtensor.dispatch import hit as hot
from dtensor.dispatch.call import flat, is_dtensor, map_args, some_elements
from dtensor.dispatch.hit import OpInfo
from dtensor.dispatch.materialized import settled_spec
from dtensor.redistribute.executor.run import redistribute_local

__all__ = ["number_written", "run_kinds"]


def run_kinds(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """A list op whose elements are of one kind each: (its result,). None where some element mixes kinds."""
    schema = info.func._schema
    named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    lists = [named[a.name] for a in schema.arguments if str(a.type) == "List[Tensor]" and a.name in named]
    count = len(lists[0]) if lists else 0
    if any(len(x) != count for x in lists):
        return None
    plain = [i for i in range(count) if not any(is_dtensor(x[i]) for x in lists)]
    ours = [i for i in range(count) if i not in plain and all(is_dtensor(x[i]) or x[i].ndim == 0 for x in lists)]
    if len(plain) + len(ours) != count or not plain:
        return None
    if any(isinstance(a, torch.Tensor) and a.ndim for a in named.values()):
        return None
    results: dict[int, Any] = {}
    if ours:  # first: what these are refused for comes before anything is written
        some, named = some_elements(info.func, ours, count, args, kwargs)
        results.update(zip(ours, hot.dispatch(info.func, some, named) or ()))
    some, named = map_args(_value, *some_elements(info.func, plain, count, args, kwargs))
    results.update(zip(plain, info.func(*some, **named) or ()))
    if info.written:
        increment_version([args[0][i] for i in plain])  # as the plain op does, above what comes here
        return (args[0] if schema.returns else None,)
    return ([results[i] for i in range(count)],)


def number_written(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """A write into a plain tensor with nothing but numbers as DTensors: (its result,); None for any other call."""
    if not info.written or info.kind != "plain" or not args or is_dtensor(args[0]) or info.written_at != (0,):
        return None
    if not _numbers([t for t in flat(args, kwargs) if is_dtensor(t)]):
        return None
    local, named = map_args(_value, args, kwargs)
    return (info.func(*local, **named),)


def _numbers(tensors: Sequence[Any]) -> bool:
    return all(t.ndim == 0 for t in tensors)


def _value(a: Any) -> Any:
    """The local tensor of a DTensor, replicated."""
    if not is_dtensor(a):
        return a
    spec = settled_spec(a, "a number")
    with torch.no_grad():
        return redistribute_local(a._local_tensor, spec, spec.replicated())
