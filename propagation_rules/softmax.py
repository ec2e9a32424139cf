"""softmax and log_softmax: all dims but the one it works along are free, and that one has kernels.

Over a sharded dim each rank sends, for every row, the max of its part and the sum of its exponentials, one small
tensor [2, rows]; all ranks combine them alike and scale their own part:

    rank 0: [1, 3] -> max 3, sum 1.14      rank 1: [2] -> max 2, sum 1      total = 1.14 + exp(2 - 3) = 1.50

log_softmax sends the same: x - log(total). The gradient needs one all-reduce of a number a row. Sums are taken in
float32 for lower precisions.

glu: one half of a dim gates the other, so that dim is replicated and the others are free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Kernel, Rule, linear

from .build.dtypes import accumulation_dtype
from .build.gathered import finite_top, gather_stacked, local_max_and_sum, log_sum_exp, output_spec

__all__ = ["softmax"]


def _free(call: Call) -> tuple[Rule, int]:
    """All dims as factors, the softmax dim whole; and that dim, -1 for a 0-d tensor."""
    shape = tuple(call.inputs[0].shape)
    dims: Dims = tuple((d,) for d in range(len(shape)))
    d = call.dim() if shape else -1
    whole = frozenset({d}) if shape else frozenset()
    return Rule((dims,) * len(call.inputs), (dims,), shape, whole), d


def softmax(call: Call) -> Rule:
    """One all-gather of the shards' statistics."""
    rule, d = _free(call)
    if d < 0:
        return rule
    return replace(rule, kernels=(Kernel("softmax", frozenset({d}), ("shard",), _run),))


def _run(ctx: KernelContext) -> torch.Tensor:
    d, x = ctx.call.dim(), ctx.inputs[0]
    x = x.to(accumulation_dtype(x.dtype))
    kept = (*x.shape[:d], 1, *x.shape[d + 1 :])
    top = x.amax(d, keepdim=True) if x.shape[d] else x.new_full(kept, float("-inf"))
    powers = (x - finite_top(top)).exp_()
    tops, sums = gather_stacked(ctx, torch.stack((top, powers.sum(d, keepdim=True)))).unbind(1)
    best = finite_top(tops.amax(0))
    total = torch.where(sums == 0, 0.0, sums * (finite_top(tops) - best).exp()).sum(0)
    return (powers * ((finite_top(top) - best).exp() / total)).to(output_spec(ctx).dtype)


def log_softmax(call: Call) -> Rule:
    """Every dim a factor; the softmax dim whole, with a kernel."""
    rule, d = _free(call)
    return rule if d < 0 else replace(rule, kernels=(Kernel("log_softmax", frozenset({d}), ("shard",), _run_log),))


def _run_log(ctx: KernelContext) -> torch.Tensor:
    x = ctx.inputs[0].to(accumulation_dtype(ctx.inputs[0].dtype))
    tops, sums = gather_stacked(ctx, torch.stack(local_max_and_sum(x, ctx.call.dim()))).unbind(1)
    top, log_sum = log_sum_exp(tops, sums)
    return (x - top - log_sum).to(output_spec(ctx).dtype)


def safe_softmax(call: Call) -> Rule:
    """Rows that are all -inf give zeros; no kernel."""
    return _free(call)[0]


def _backward(call: Call, name: str, run: Callable[[KernelContext], torch.Tensor]) -> Rule:
    """Linear in the gradient; one all-reduce of the rows' sums."""
    rule, d = _free(call)
    kernels = () if d < 0 else (Kernel(name, frozenset({d}), ("shard",), run),)
    return replace(rule, linear=(linear(0),), kernels=kernels)


def softmax_backward(call: Call) -> Rule:
    """(grad - sum(grad * output)) * output: linear in the gradient; one all-reduce of the rows' sums."""
    return _backward(call, "softmax backward", _run_backward)


def _run_backward(ctx: KernelContext) -> torch.Tensor:
    grad, y = (t.to(accumulation_dtype(t.dtype)) for t in ctx.inputs)
    total = ctx.all_reduce((grad * y).sum(ctx.call.dim(), keepdim=True), "sum")
    return ((grad - total) * y).to(output_spec(ctx).dtype)


def log_softmax_backward(call: Call) -> Rule:
    """grad - exp(output) * sum(grad): linear in the gradient; a kernel for the softmax dim."""
    return _backward(call, "log_softmax backward", _run_log_backward)


def _run_log_backward(ctx: KernelContext) -> torch.Tensor:
    grad, y = (t.to(accumulation_dtype(t.dtype)) for t in ctx.inputs)
    total = ctx.all_reduce(grad.sum(ctx.call.dim(), keepdim=True), "sum")
    return (grad - y.exp() * total).to(output_spec(ctx).dtype)


register("aten._log_softmax", log_softmax)
register("aten._log_softmax_backward_data", log_softmax_backward)
register("aten._softmax", softmax)
register("aten._safe_softmax", safe_softmax)
register("aten._softmax_backward_data", softmax_backward)


def glu(call: Call) -> Rule:
    """Forward and backward, whose halved tensors have the split dim as a factor of their own."""
    at = call.names.index("self")
    x = call.inputs[at]
    d, half = call.dim(of=at), x.ndim
    full: Dims = tuple((i,) for i in range(x.ndim))
    halved: Dims = (*full[:d], (half,), *full[d + 1 :])
    backward = len(call.inputs) == 2
    return Rule(
        (halved, full) if backward else (full,),
        (full,) if backward else (halved,),
        (*x.shape, x.shape[d] // 2),
        frozenset({d, half}),
        linear=(linear(0),) if backward else (),
    )


register("aten.glu aten.glu_backward", glu)
