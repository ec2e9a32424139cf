"""Batch normalisation.

    evaluating    n c s ..., c, c, c, c -> n c s ..., 0, 0        everything is free
    training      a kernel shards the batch and gathers count, mean and squared deviations of every channel,
                  so that the statistics are those of the whole batch

Running statistics are written although the schema of `native_batch_norm` does not say so. They stay where they are,
in any layout: the new statistics are brought to them, one number a channel.

    running_mean {P}        m' = (1 - momentum) m + momentum * (the first position's: the new mean; the others': 0)

The other forms of batch normalisation, told in terms of `native_batch_norm`.

They return the same three tensors, and some of them more: space that a backend reserves for its backward (here there
is none), and the new running statistics, where those that are given must not be written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.dispatch.hit import special
from dtensor.errors import LayoutError, explain_error
from dtensor.placement import Partial, Replicate
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Kernel, Rule, linear
from dtensor.spec import Spec
from dtensor.tensor import DTensor

from .build.dtypes import accumulation_dtype, separate_statistics
from .build.empty_shards import is_empty_shard, zeros_of
from .build.gathered import output_spec
from .build.labelled import share_of
from .reduce import combined_moments

RUNNING = ("running_mean", "running_var")


def _channels(t: torch.Tensor, ndim: int) -> torch.Tensor:
    """A tensor of one number a channel, to broadcast against [n, c, ...]."""
    return t.reshape(1, -1, *(1,) * (ndim - 2))


def _rule(call: Call, outputs: Sequence[bool], training: bool, kernel: Kernel) -> Rule:
    """`outputs` says which outputs are like the input; the others have one number a channel."""
    at = call.names.index("input")
    x = call.inputs[at]
    c = 1
    every: Dims = tuple((d,) for d in range(x.ndim))
    batch = frozenset(d for d in range(x.ndim) if d != c)

    def dims(name: str, s: Spec) -> Dims:
        return every if name in ("input", "grad_out") else ((c,),) if s.shape[0] == x.shape[c] else ((),)

    return Rule(
        tuple(dims(name, s) for name, s in zip(call.names, call.inputs, strict=True)),
        tuple(() if m is None else every if like else ((c,),) for like, m in zip(outputs, call.outputs, strict=True)),
        tuple(x.shape),
        batch if training else frozenset(),
        # Half-precision statistics have a dtype that torch's shape function does not know; an empty shard has none.
        nonempty=frozenset({c}) if x.dtype.itemsize < 4 else frozenset(),
        kernels=(replace(kernel, factors=batch),) if training else (),
        stays=frozenset(i for i, s in enumerate(call.inputs) if s.numel == 0 and s.ndim == 1),
    )


def batch_norm(call: Call) -> Rule:
    """Output, and the statistics that backward needs, which are empty when nothing is trained."""
    kernel = Kernel("batch_norm", frozenset(), ("shard", "replicate", "replicate"), _run)
    training = bool(call["training"])
    rule = _rule(call, (True, False, False), training, kernel)
    if not training:
        return replace(rule, outputs=(rule.outputs[0], ((),), ((),)), nonempty=frozenset({1}))
    written = frozenset(i for i in map(call.index, RUNNING) if i is not None)
    for i in written:
        if any(isinstance(p, Partial) and p.reduce_op not in ("sum", "avg") for p in call.inputs[i].placements):
            raise LayoutError(
                explain_error(
                    str(call.op), f"{call.names[i]}: {call.inputs[i]}", "only pending sums and averages can be updated",
                    "redistribute the running statistics to Replicate() first",
                )
            )  # fmt: skip

    def local(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[[KernelContext], object] | None:
        aligned = all(outs[1] is not None and ins[i].placements == outs[1].placements for i in written)
        return None if aligned else _run

    return replace(
        rule, stays=rule.stays | written, local=local,
        bind=lambda ins, outs: zeros_of(outs) if is_empty_shard(ins[0]) else None,
    )  # fmt: skip


def _run(ctx: KernelContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, spec = ctx.inputs[0], output_spec(ctx)
    n = x.ndim
    count, mean, squares = combined_moments(ctx, x, tuple(d for d in range(n) if d != 1))
    variance = squares / count
    eps = ctx.arguments["eps"]
    assert isinstance(eps, float)
    unbiased = squares / (count - 1)
    for name, new in zip(RUNNING, (mean, unbiased), strict=True):
        _update(ctx, name, new.reshape(-1))
    rstd = (variance + eps).rsqrt()
    y = (x.to(mean.dtype) - mean) * rstd
    weight, bias = ctx.optional("weight"), ctx.optional("bias")
    y = y if weight is None else y * _channels(weight, n)
    y = y if bias is None else y + _channels(bias, n)
    saved = output_spec(ctx, 1)
    return y.to(spec.dtype), mean.reshape(-1).to(saved.dtype), rstd.reshape(-1).to(saved.dtype)


def _update(ctx: KernelContext, name: str, new: torch.Tensor) -> None:
    """Move a running statistic, in whatever layout it is, towards the new one, laid out like the channels."""
    running, at = ctx.optional(name), ctx.call.index(name)
    if running is None or at is None:
        return
    momentum, given, made = ctx.arguments["momentum"], ctx.in_specs[at], output_spec(ctx, 1)
    assert isinstance(momentum, float)
    settled = tuple(Replicate() if isinstance(p, Partial) else p for p in given.placements)
    new = redistribute_local(new.to(running.dtype), _of_dtype(made, given), given.with_placements(settled))
    running.mul_(1 - momentum).add_(new * (share_of(1.0, given) * momentum))


def _of_dtype(spec: Spec, like: Spec) -> Spec:
    return Spec.make(spec.mesh, spec.placements, spec.shape, spec.stride, like.dtype)


def batch_norm_backward(call: Call) -> Rule:
    """Linear in the gradient; when training a kernel adds up two sums a channel over the batch."""
    how = tuple("replicate" if m is None else s for m, s in zip(call.outputs, ("shard", "sum", "sum"), strict=True))
    kernel = Kernel("batch_norm backward", frozenset(), how, _run_backward)
    rule = _rule(call, (True, False, False), bool(call["train"]), kernel)
    at = call.names.index("grad_out")
    apart = bool(call["train"]) and separate_statistics(call, "save_mean", "weight", *RUNNING)
    return replace(
        rule, linear=(linear(at),), bind=lambda ins, outs: zeros_of(outs) if is_empty_shard(ins[at]) else None,
        local=(lambda ins, outs: _run_backward) if apart else None,
    )  # fmt: skip


def _run_backward(ctx: KernelContext) -> tuple[torch.Tensor | None, ...]:
    acc = accumulation_dtype(ctx.inputs[0].dtype)
    grad, x = ctx.tensor("grad_out").to(acc), ctx.tensor("input").to(acc)
    n = x.ndim
    mean, rstd = (_channels(ctx.tensor(name).to(acc), n) for name in ("save_mean", "save_invstd"))
    scaled = (x - mean) * rstd
    dims = tuple(d for d in range(n) if d != 1)
    own = torch.stack(((grad * scaled).sum(dims), grad.sum(dims)))
    total = ctx.all_reduce(own, "sum")
    at = ctx.call.names.index("input")
    count = ctx.call.inputs[at].numel // max(ctx.call.inputs[at].shape[1], 1)
    weight = ctx.optional("weight")
    scale = rstd if weight is None else rstd * _channels(weight.to(acc), n)
    dx = (grad - (scaled * _channels(total[0], n) + _channels(total[1], n)) / count) * scale
    results = (dx, own[0], own[1])
    return tuple(None if s is None else t.to(s.dtype) for t, s in zip(results, ctx.out_specs, strict=True))


register("aten.native_batch_norm", batch_norm, values="eps momentum")
register("aten.native_batch_norm_backward", batch_norm_backward, values="eps")


aten = torch.ops.aten


def _named(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; running statistics are None where the op takes none."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | dict(kwargs)
    return {"running_mean": None, "running_var": None, "training": False, **given}


def _norm(named: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    made: tuple[Any, ...] = aten.native_batch_norm.default(*(named[n] for n in names))
    return made


def _copied(named: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """Put copies in the place of the running statistics, and return them."""
    named["running_mean"], named["running_var"] = named["running_mean"].clone(), named["running_var"].clone()
    return named["running_mean"], named["running_var"]


def _reserved(x: DTensor) -> DTensor:
    mesh = x.device_mesh
    return DTensor.from_local(
        torch.empty(0, dtype=torch.uint8, device=x.device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )


@special("aten._native_batch_norm_legit.default")
def _legit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return _norm(_named(aten._native_batch_norm_legit.default, args, kwargs))


@special("aten._native_batch_norm_legit.no_stats")
def _no_stats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return _norm(_named(aten._native_batch_norm_legit.no_stats, args, kwargs))


@special("aten._native_batch_norm_legit_no_training.default")
def _no_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return _norm(_named(aten._native_batch_norm_legit_no_training.default, args, kwargs))


@special("aten._native_batch_norm_legit_functional.default")
def _functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten._native_batch_norm_legit_functional.default, args, kwargs)
    new = _copied(named)
    return (*_norm(named), *new)


@special("aten._batch_norm_with_update.default")
def _with_update(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten._batch_norm_with_update.default, args, kwargs) | {"training": True}
    return (*_norm(named), _reserved(named["input"]))


@special("aten._batch_norm_with_update_functional.default")
def _with_update_functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten._batch_norm_with_update_functional.default, args, kwargs) | {"training": True}
    new = _copied(named)
    return (*_norm(named), _reserved(named["input"]), *new)


@special("aten._batch_norm_no_update.default")
def _no_update(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten._batch_norm_no_update.default, args, kwargs)
    return (*_norm(named), _reserved(named["input"]))


@special("aten.batch_norm_backward.default")
def _backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten.batch_norm_backward.default, args, kwargs)
    names = (
        "grad_out input weight running_mean running_var save_mean save_var update eps output_mask"
    ).split()  # fmt: skip
    made: tuple[Any, ...] = aten.native_batch_norm_backward.default(*(named[n] for n in names))
    return made
