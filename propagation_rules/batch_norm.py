"""Batch normalisation.

    evaluating    n c s ..., c, c, c, c -> n c s ..., c, c        everything is free
    training      the batch is whole, with a kernel that gathers count, mean and squared deviations of every channel,
                  so that the statistics are those of the whole batch

Running statistics are written although the schema does not say so. They must stay where they are: a call whose
strategy would have to move them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dtensor.errors import LayoutError, explain_error
from dtensor.factors import Bind, Dims, Kernel, Rule, linear
from dtensor.kernel import KernelContext
from dtensor.registry import Call, register
from dtensor.spec import Spec
from propagation_rules.dtypes import accumulation_dtype
from propagation_rules.empty_shards import is_empty_shard, zeros_of
from propagation_rules.gathered import output_spec
from propagation_rules.variance import combined_moments

RUNNING = ("running_mean", "running_var")


def _channels(t: torch.Tensor, ndim: int) -> torch.Tensor:
    """A tensor of one number a channel, to broadcast against [n, c, ...]."""
    return t.reshape(1, -1, *(1,) * (ndim - 2))


def _rule(call: Call, outputs: Sequence[bool], training: bool, kernel: Kernel) -> Rule:
    """`outputs` says which outputs are like the input; the others have one number a channel."""
    at = call.index("input")
    assert at is not None
    x = call.inputs[at]
    c = 1
    every: Dims = tuple((d,) for d in range(x.ndim))
    batch = frozenset(d for d in range(x.ndim) if d != c)
    written = [call.inputs[i] for i in map(call.index, RUNNING) if i is not None] if training else []
    fixed = frozenset({c}) if written and not all(s.is_sharded_on(0) for s in written) else frozenset()
    return Rule(
        tuple(every if name in ("input", "grad_out") else ((c,),) for name in call.names),
        tuple(() if m is None else every if like else ((c,),) for like, m in zip(outputs, call.outputs, strict=True)),
        tuple(x.shape),
        (batch if training else frozenset()) | fixed,
        # Half-precision statistics have a dtype that torch's shape function does not know; an empty shard has none.
        nonempty=frozenset({c}) if x.dtype.itemsize < 4 else frozenset(),
        kernels=(replace(kernel, factors=batch),) if training else (),
    )


def batch_norm(call: Call) -> Rule:
    """Output, and the statistics that backward needs."""
    training = bool(call["training"])
    kernel = Kernel("batch_norm", frozenset(), ("shard", "replicate", "replicate"), _run)
    return replace(_rule(call, (True, False, False), training, kernel), bind=_keep_running(call, training))


def _keep_running(call: Call, training: bool) -> Bind:
    """Refuses to move running statistics; when evaluating, gives saved statistics the shape the schema promises."""
    op = call.op

    def evaluate(*args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        y, mean, rstd = op(*args, **kwargs)
        empty = y.new_zeros(y.shape[1], dtype=mean.dtype)
        return y, mean if mean.numel() else empty, rstd if rstd.numel() else empty.clone()

    def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
        for given, wanted, name in zip(call.inputs, ins, call.names, strict=True):
            if training and name in RUNNING and given is not wanted:
                raise LayoutError(
                    explain_error(
                        str(op), f"{name}: {given}", f"it is written to, and would have to move to {wanted} first",
                        "keep running statistics replicated, or sharded like the channels of the input",
                    )
                )  # fmt: skip
        return zeros_of(outs) if is_empty_shard(ins[0]) else None if training else evaluate

    return bind


def _run(ctx: KernelContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, spec = ctx.inputs[0], output_spec(ctx)
    n = x.ndim
    count, mean, squares = combined_moments(ctx, x, tuple(d for d in range(n) if d != 1))
    variance = squares / count
    momentum, eps = ctx.arguments["momentum"], ctx.arguments["eps"]
    assert isinstance(momentum, float) and isinstance(eps, float)
    unbiased = squares / (count - 1)
    for name, new in zip(RUNNING, (mean, unbiased), strict=True):
        running = ctx.optional(name)
        if running is not None:
            running.lerp_(new.reshape(-1).to(running.dtype), momentum)
    rstd = (variance + eps).rsqrt()
    y = (x.to(mean.dtype) - mean) * rstd
    weight, bias = ctx.optional("weight"), ctx.optional("bias")
    y = y if weight is None else y * _channels(weight, n)
    y = y if bias is None else y + _channels(bias, n)
    saved = output_spec(ctx, 1)
    return y.to(spec.dtype), mean.reshape(-1).to(saved.dtype), rstd.reshape(-1).to(saved.dtype)


def batch_norm_backward(call: Call) -> Rule:
    """Linear in the gradient; when training a kernel adds up two sums a channel over the batch."""
    how = tuple("replicate" if m is None else s for m, s in zip(call.outputs, ("shard", "sum", "sum"), strict=True))
    kernel = Kernel("batch_norm backward", frozenset(), how, _run_backward)
    rule = _rule(call, (True, False, False), bool(call["train"]), kernel)
    at = call.index("grad_out")
    assert at is not None
    return replace(
        rule, linear=(linear(at),), bind=lambda ins, outs: zeros_of(outs) if is_empty_shard(ins[at]) else None
    )


def _run_backward(ctx: KernelContext) -> tuple[torch.Tensor | None, ...]:
    acc = accumulation_dtype(ctx.inputs[0].dtype)
    grad, x = ctx.tensor("grad_out").to(acc), ctx.tensor("input").to(acc)
    n = x.ndim
    mean, rstd = (_channels(ctx.tensor(name).to(acc), n) for name in ("save_mean", "save_invstd"))
    scaled = (x - mean) * rstd
    dims = tuple(d for d in range(n) if d != 1)
    own = torch.stack(((grad * scaled).sum(dims), grad.sum(dims)))
    total = ctx.all_reduce(own, "sum")
    at = ctx.call.index("input")
    assert at is not None
    count = ctx.call.inputs[at].numel // max(ctx.call.inputs[at].shape[1], 1)
    weight = ctx.optional("weight")
    scale = rstd if weight is None else rstd * _channels(weight.to(acc), n)
    dx = (grad - (scaled * _channels(total[0], n) + _channels(total[1], n)) / count) * scale
    results = (dx, own[0], own[1])
    return tuple(None if s is None else t.to(s.dtype) for t, s in zip(results, ctx.out_specs, strict=True))


register("aten.native_batch_norm", batch_norm, values="eps momentum")
register("aten.native_batch_norm_backward", batch_norm_backward, values="eps")
