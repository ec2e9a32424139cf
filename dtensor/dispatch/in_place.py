"""Calls that write: in place, by `out=`, views in place. All that can be refused is refused before anything is written.

Where no strategy keeps the layout of what is written, the call is computed elsewhere and written back:

    x: f32[8@dp]{P:tp}       x.relu_()       relu passes no pending sum, and x must stay pending
    functional               y = relu(x)     the planner moves x as it likes; y: f32[8@dp]
    back                     y into {P:tp}   the value on the first position of tp, zero elsewhere; into x's memory

The functional form is found by schema (`relu_` -> `relu`). An op without one, or one that writes several arguments,
runs on replicated copies of what it writes, which keep their layout; so do ops that draw random numbers, on empty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from dtensor.dispatch import hit as hot
from dtensor.dispatch.call import flat, is_dtensor, layouts, map_args, plain_wrapper
from dtensor.dispatch.hit import Op, OpInfo
from dtensor.dispatch.metadata import output_metas
from dtensor.dispatch.no_rule import on_each_rank, run_on_copies
from dtensor.dispatch.plan import Execute
from dtensor.dispatch.views import write_local
from dtensor.errors import LayoutError, MixedTensorError, NoRuleError, explain_error
from dtensor.placement import Shard, StridedShard
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.call import Call
from dtensor.spec import Spec, TensorMeta

__all__ = [
    "check_written", "functional_form", "kept", "laid_out_like", "rewritten", "run_inplace_view", "run_out",
    "take_over", "with_kwargs",
]  # fmt: skip

aten = torch.ops.aten
_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


@cache
def functional_form(func: Op) -> Op | None:
    """The op that returns what `func` writes (its first argument or `out=`) and writes nothing; or None."""
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    packet = getattr(getattr(torch.ops, func.namespace), name if name.endswith("__") else name.removesuffix("_"), None)
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    for overload in packet.overloads() if packet is not None else ():
        other: Op = getattr(packet, overload)
        given = other._schema.arguments
        if [(a.name, str(a.type)) for a in given] == wanted and not any(
            a.alias_info is not None and a.alias_info.is_write for a in given
        ):
            return other
    return None


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


# ------------------------------------------------------------ no strategy keeps what is written
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


# ------------------------------------------------------------ `out=`
def run_out(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`out=`: compute out of place, bring the results into the layouts of the targets, write them there.

    A target without elements takes over the result, as torch resizes it.
    """
    outs = [a.name for a in info.func._schema.arguments if a.is_out]
    given = {n: kwargs[n] for n in outs}
    targets = list(flat((), given))
    rest = {k: v for k, v in kwargs.items() if k not in outs}
    for target in targets:
        if not is_dtensor(target):
            raise MixedTensorError(f"{info.name}: out= must be a DTensor when an input is one, got a plain tensor")
    form = functional_form(info.func)
    if form is None:
        many: Any = on_each_rank(info, args, rest, given, targets[0])
    else:
        known = output_metas(form, args, rest)
        if known is not None:
            _check_targets(info, args, rest, given, targets, known[1])
        got = hot.dispatch(form, args, rest)
        many = list(got) if isinstance(got, (list, tuple)) else [got]
    for t, target in zip(many, targets, strict=True):
        _check_shape(info, t.shape, target)
    for t, target in zip(many, targets, strict=True):
        if t.shape != target.shape:
            take_over(target, laid_out_like(t, target._spec))
        else:
            hot.dispatch(aten.copy_.default, (target, t))
    if not info.func._schema.returns:
        return None
    return targets[0] if len(info.func._schema.returns) == 1 and len(outs) == 1 else tuple(targets)


def laid_out_like(t: Any, spec: Spec) -> Any:
    """`t` in the placements of `spec`, where it has the dims that they split, and in the dtype of `spec`."""
    if t.dtype is not spec.dtype:
        t = hot.dispatch(aten._to_copy.default, (t,), {"dtype": spec.dtype})
    if any(isinstance(p, (Shard, StridedShard)) and p.dim >= t.ndim for p in spec.placements):
        return t
    own = t._spec
    want = own.with_placements(spec.placements)
    return plain_wrapper(redistribute_local(t._local_tensor, own, want), want)


def _check_targets(
    info: OpInfo, args: tuple[Any, ...], rest: dict[str, Any], given: dict[str, Any], targets: Sequence[Any],
    metas: Sequence[TensorMeta | None],
) -> None:  # fmt: skip
    """Shapes, and by the op itself, on tensors without data, the dtypes that it writes to."""
    made = []
    for target, meta in zip(targets, metas, strict=True):
        if meta is not None:
            _check_shape(info, meta.shape, target)
            made.append(torch.empty(meta.shape, dtype=target.dtype, device="meta"))
    if len(made) == len(targets):
        left = iter(made)
        outs = {n: [next(left) for _ in a] if isinstance(a, (list, tuple)) else next(left) for n, a in given.items()}
        with suppress(TypeError):  # some shape functions of torch do not know `out=`
            output_metas(info.func, args, {**rest, **outs})


def _check_shape(info: OpInfo, shape: Sequence[int], target: Any) -> None:
    if tuple(shape) != tuple(target.shape) and target.numel():
        raise LayoutError(
            f"{info.name}: out= has shape {list(target.shape)}, the result {list(shape)}; "
            "a DTensor with elements is not resized, make it of the right shape"
        )


def take_over(target: Any, other: Any) -> None:
    """Make `target` share shape and memory with the DTensor `other`, as `target.set_(other)` does."""
    _set_data(target, other)
    target._local_tensor, target._spec = other._local_tensor, other._spec


# ------------------------------------------------------------ views in place
def run_inplace_view(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`squeeze_`, `t_` and the like: take over what the view gives, and set the wrapper's own metadata."""
    packet = info.func._schema.name.rpartition("::")[2].rstrip("_")
    overload = "int" if packet == "transpose" else info.func._overloadname
    base = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if base is None or packet in ("resize", "set", "detach"):
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
