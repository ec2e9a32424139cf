"""softmax: all dims but the one it works along are free, and that one has kernels.

Over a sharded dim each rank sends, for every row, the max of its part and the sum of its exponentials, one small
tensor [2, rows]; all ranks combine them alike and scale their own part:

    rank 0: [1, 3] -> max 3, sum 1.14      rank 1: [2] -> max 2, sum 1      total = 1.14 + exp(2 - 3) = 1.50

The gradient needs one all-reduce of a number a row. Sums are taken in float32 for lower precisions.

glu: one half of a dim gates the other, so that dim is whole and the others are free.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Kernel, Rule, linear

from .build.dtypes import accumulation_dtype
from .build.gathered import gather_stacked, output_spec

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
    out = output_spec(ctx)
    d = ctx.call.dim()
    x = ctx.inputs[0]
    x = x.to(accumulation_dtype(x.dtype))
    kept = (*x.shape[:d], 1, *x.shape[d + 1 :])
    top = x.amax(d, keepdim=True) if x.shape[d] else x.new_full(kept, float("-inf"))
    powers = (x - _finite(top)).exp_()
    tops, sums = gather_stacked(ctx, torch.stack((top, powers.sum(d, keepdim=True)))).unbind(1)
    best = _finite(tops.amax(0))
    total = torch.where(sums == 0, 0.0, sums * (_finite(tops) - best).exp()).sum(0)
    return (powers * ((_finite(top) - best).exp() / total)).to(out.dtype)


def _finite(top: torch.Tensor) -> torch.Tensor:
    """0 for the maxima of rows that are -inf throughout or empty."""
    return torch.where(top == float("-inf"), 0.0, top)


def safe_softmax(call: Call) -> Rule:
    """Rows that are all -inf give zeros; no kernel."""
    return _free(call)[0]


def softmax_backward(call: Call) -> Rule:
    """(grad - sum(grad * output)) * output: linear in the gradient; one all-reduce of the rows' sums."""
    rule, d = _free(call)
    rule = replace(rule, linear=(linear(0),))
    if d < 0:
        return rule
    kernel = Kernel("softmax backward", frozenset({d}), ("shard",), _run_backward)
    return replace(rule, kernels=(kernel,))


def _run_backward(ctx: KernelContext) -> torch.Tensor:
    out = output_spec(ctx)
    grad, y = (t.to(accumulation_dtype(t.dtype)) for t in ctx.inputs)
    total = ctx.all_reduce((grad * y).sum(ctx.call.dim(), keepdim=True), "sum")
    return ((grad - total) * y).to(out.dtype)


register("aten._softmax", softmax)
register("aten._safe_softmax", safe_softmax)
register("aten._softmax_backward_data", softmax_backward)


def glu(call: Call) -> Rule:
    """Forward and backward, whose halved tensors have the split dim as a factor of their own."""
    at = call.index("self")
    assert at is not None
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
