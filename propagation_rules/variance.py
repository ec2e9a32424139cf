"""Variance and standard deviation, alone and with the mean; log of a sum of exponentials.

Over sharded dims each rank sends count, mean and the sum of squared deviations from its own mean; they are
combined as Chan, Golub and LeVeque do, which loses no digits when the mean is large:

    n = sum n_i      mean = sum n_i mean_i / n      M = sum M_i + n_i (mean_i - mean)^2      var = M / (n - correction)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Kernel, Rule

from .build.dtypes import accumulation_dtype
from .build.empty_shards import is_empty_shard, zeros_of
from .build.gathered import gather_stacked, output_spec
from .reduce import reduced_dims, reduced_rule

__all__ = ["combined_moments"]


def combined_moments(
    ctx: KernelContext, x: torch.Tensor, dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean and sum of squared deviations over `dims`, of all positions of the kernel's axes; dims kept."""
    x = x.to(accumulation_dtype(x.dtype))
    count = 1
    for d in dims:
        count *= x.shape[d]
    mean = x.sum(dims, keepdim=True) / max(count, 1)
    squares = (x - mean).square().sum(dims, keepdim=True)
    sent = gather_stacked(ctx, torch.stack((torch.full_like(mean, count), mean, squares)))
    counts, means, parts = sent.unbind(1)
    total = counts.sum(0)
    whole = (counts * means).sum(0) / total
    return total, whole, (parts + counts * (means - whole).square()).sum(0)


def variance(call: Call) -> Rule:
    """Reduced dims are whole; a kernel combines the shards' moments. No rows give no warning."""
    gone = reduced_dims(call)
    rule = replace(
        reduced_rule(call),
        whole=frozenset(gone),
        bind=lambda ins, outs: zeros_of(outs) if is_empty_shard(ins[0]) else None,
    )
    if call.inputs[0].dtype.is_complex or not gone:
        return rule
    n = len(call.outputs)
    return replace(rule, kernels=(Kernel("moments", frozenset(gone), ("replicate",) * n, _run),))


def _run(ctx: KernelContext) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    out = output_spec(ctx)
    name = ctx.call.op._schema.name
    given = ctx.call["correction"]
    correction = 1.0 if given is None else float(given)
    count, mean, squares = combined_moments(ctx, ctx.inputs[0], reduced_dims(ctx.call))
    var = squares / (count - correction).clamp(min=0)
    first = (var.sqrt() if "std" in name else var).reshape(out.local_shape).to(out.dtype)
    if len(ctx.out_specs) == 1:
        return first
    return first, mean.reshape(out.local_shape).to(out.dtype)


def logsumexp(call: Call) -> Rule:
    """Reduced dims are whole; a kernel takes the log-sum-exp of the shards' ones."""
    gone = reduced_dims(call)
    rule = replace(reduced_rule(call), whole=frozenset(gone))
    kernel = Kernel("logsumexp", frozenset(gone), ("replicate",), _run_logsumexp)
    return replace(rule, kernels=(kernel,))


def _run_logsumexp(ctx: KernelContext) -> torch.Tensor:
    out = output_spec(ctx)
    local = ctx.inputs[0].logsumexp(reduced_dims(ctx.call), bool(ctx.call["keepdim"]))
    return gather_stacked(ctx, local.to(accumulation_dtype(out.dtype))).logsumexp(0).to(out.dtype)


register("aten.std.correction aten.std_mean.correction aten.var.correction aten.var_mean.correction", variance)
register("aten.logsumexp", logsumexp)
