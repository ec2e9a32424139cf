"""Calls that write where no strategy keeps the layout of what is written: compute elsewhere, then write back.

    x: f32[8@dp]{P:tp}       x.relu_()       relu passes no pending sum, and x must stay pending
    functional               y = relu(x)     the planner moves x as it likes; y: f32[8@dp]
    back                     y into {P:tp}   the value on the first position of tp, zero elsewhere; into x's memory

The functional form is found by schema (`relu_` -> `relu`). An op without one, or one that writes several
arguments, runs on replicated copies of what it writes, which keep their layout; so do ops that draw random numbers,
on empty ones. All that can be refused is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor.dispatch import hit as hot
from dtensor.dispatch.call import is_dtensor, map_args, map_named, plain_wrapper, put_back
from dtensor.dispatch.hit import OpInfo
from dtensor.dispatch.in_place import cannot_keep, functional_form
from dtensor.dispatch.views import whole, write_local

__all__ = ["Execute", "rewritten", "run_on_copies", "with_kwargs"]

DRAWS = frozenset("bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_".split())
"""Ops that draw numbers and do not read what they write."""

Execute = Callable[[list[Any], dict[str, Any], tuple[Any, ...]], Any]


def rewritten(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Execute:
    """What a plan runs for a call none of whose strategies keeps what it writes."""
    draws = info.entry is not None and info.entry.random
    plain = info.written_at == (0,) and info.gives_target and not draws
    form = functional_form(info.func) if plain else None
    if form is None:
        return with_kwargs(kwargs, lambda a, k: run_on_copies(info, a, k))

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        write_local(args[0], hot.dispatch(form, args, kwargs))
        return args[0]

    return with_kwargs(kwargs, run)


def with_kwargs(kwargs: dict[str, Any], run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Execute:
    """`run` on whole arguments: a plan is given the local parts of those that have names; their specs are known."""
    specs = {n: map_args(lambda t: t._spec if is_dtensor(t) else None, (a,), {})[0][0] for n, a in kwargs.items()}

    def wrapped(local: Any, spec: Any) -> Any:
        if isinstance(spec, list):
            return [wrapped(x, s) for x, s in zip(local, spec, strict=True)]
        return local if spec is None else plain_wrapper(local, spec)

    def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        return run(args, {n: wrapped(a, specs[n]) for n, a in named.items()})

    return execute


def run_on_copies(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], everything: bool = False) -> Any:
    """Run an op on replicated copies of the tensors it writes (of all its tensors, if asked), and write back."""
    written: list[tuple[Any, Any]] = []

    def copied(t: Any) -> Any:
        if not is_dtensor(t):
            return t
        spec = t._spec.replicated()
        if info.name.split(".")[1] in DRAWS:
            local = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=t._local_tensor.device)
        else:
            local = whole(t)
        made = plain_wrapper(local, spec)
        written.append((t, made))
        return made

    def replicated(t: Any) -> Any:
        if not everything or not is_dtensor(t):
            return t
        return plain_wrapper(whole(t), t._spec.replicated())

    def convert(name: str, a: Any) -> Any:
        f = copied if name in info.written else replicated
        return [f(x) for x in a] if isinstance(a, (list, tuple)) else f(a)

    new_args, new_kwargs = map_named(convert, info.func, args, kwargs)
    if all(t._spec is made._spec for t, made in written) and not everything:
        raise cannot_keep(info, args, kwargs)
    result = hot.dispatch(info.func, new_args, new_kwargs)
    for t, made in written:
        write_local(t, made)
    return put_back(result, written)
