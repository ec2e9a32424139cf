"""Differentiable cross entropy of DTensors, made of the operators in `loss.kernels` and `loss.probabilities`.

The operators give sums. The mean divides the sum over all rows by what all rows weigh; on a mesh whose other
axes shard the rows both are pending sums, and the denominator is reduced first (one small all-reduce):

    loss{P:dp} / total       total = all rows that count, on every rank

The same all-reduce counts targets that name no class, so an IndexError is one on all ranks.

Differentiated a second time (`create_graph=True`), the gradient is made of ops that have gradients themselves,
log_softmax and nll_loss; these communicate over the class axis.
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor.placement import Replicate
from dtensor.propagation_rules.build import accumulation_dtype, check_targets
from dtensor.rules.kernel import looks_at_values
from dtensor.tensor import DTensor

from . import kernels as _kernels
from . import probabilities as _probabilities
from .rows import Classes, along_classes, class_dim, index_totals

__all__ = ["autocast_dtype", "cross_entropy", "in_parts", "mean_of", "settled_total", "totals_of"]

_ops = torch.ops.shardwright
_registered = (_kernels, _probabilities)
_REDUCTIONS = ("none", "mean", "sum")


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, ignore_index: int,
    smoothing: float, totals: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Cross entropy as `F.cross_entropy` defines it, layouts as they come.

    Args:
        logits: [rows..., classes, ...] with classes in dim 1 (dim 0 when it has one dim).
        target: class indices, without the class dim, or probabilities, with it.
        weight: [classes], replicated.
        reduction: "none", "sum" or "mean".
        totals: `totals_of` the targets of all rows, where they are known.
    """
    low = accumulation_dtype(logits.dtype) if autocast_dtype(logits.device) else logits.dtype
    if target.ndim == logits.ndim:
        loss = _Probabilities.apply(logits, target, weight, reduction, smoothing)
    else:
        loss = _Indices.apply(logits, target, weight, totals, reduction, ignore_index, smoothing)
    return loss.to(low)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The lower precision of autocast on `device`; None where it is off."""
    kind = device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


# ------------------------------------------------------------ what all rows weigh
def totals_of(
    target: DTensor, weight: DTensor | None, count: int, dtype: torch.dtype, ignore_index: int
) -> torch.Tensor:
    """[weight of the rows that count, targets that name no class] of replicated targets: nothing is sent.

    IndexError on all ranks where a target names no class.
    """
    whole = [Replicate()] * target.device_mesh.ndim
    check_targets("cross_entropy", target.to_local(), count, ignore_index)
    own = None if weight is None else weight.to_local().to(dtype)
    found = index_totals(target.to_local(), Classes((), count, own, ignore_index, 0.0), dtype)
    return DTensor.from_local(found, target.device_mesh, whole, run_check=False)


def settled_total(
    totals: torch.Tensor, reduction: str, target: torch.Tensor, count: int, ignore_index: int
) -> torch.Tensor | None:
    """What the rows of all ranks weigh, for a mean. IndexError where a target names no class.

    Where nothing is reduced here, because the loss is no mean, only the ranks that hold such a target know of it.
    """
    if reduction == "mean" and isinstance(totals, DTensor):
        totals = totals.redistribute(placements=[Replicate()] * totals.device_mesh.ndim)
    own = totals.to_local() if isinstance(totals, DTensor) else totals
    text = f"cross_entropy: a target on another rank is out of bounds for {count} classes"
    if looks_at_values(own):
        if own.numel() and own[1]:  # a rank outside the mesh holds nothing
            mine = target.to_local() if isinstance(target, DTensor) else target
            check_targets("cross_entropy", mine, count, ignore_index)
            raise IndexError(text)
    elif own.device.type != "meta":
        torch._assert_async(own[1] == 0, text.replace(" on another rank", ""))
    return totals[0] if reduction == "mean" else None


# ------------------------------------------------------------ class indices
class _Indices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, totals: torch.Tensor | None,
        reduction: str, ignore_index: int, smoothing: float,
    ) -> torch.Tensor:  # fmt: skip
        per_row = reduction == "none"
        loss, top, log_sum, counted = _ops.cross_entropy(logits, target, weight, per_row, ignore_index, smoothing)
        count = logits.shape[class_dim(logits.ndim)]
        totals = counted if totals is None else totals
        total = settled_total(totals, reduction, target, count, ignore_index)
        ctx.rest = (ignore_index, smoothing)
        ctx.reduction = reduction
        ctx.save_for_backward(logits, target, weight, top, log_sum, total)
        return loss if total is None else mean_of(loss, total, smoothing)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, weight, top, log_sum, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            return in_parts((logits,), logits, target, weight, ctx.reduction, grad, *ctx.rest)[0], *(None,) * 6
        grad = grad.to(top.dtype)
        if total is not None:
            grad = grad / total
        return _ops.cross_entropy_backward(grad, logits, target, weight, top, log_sum, *ctx.rest), *(None,) * 6


def mean_of(loss: torch.Tensor, total: torch.Tensor, smoothing: float) -> torch.Tensor:
    """`loss / total`, nan where nothing weighs anything: smoothing may leave a loss even there."""
    return loss / (total / total * total if smoothing else total)


def in_parts(
    inputs: tuple[torch.Tensor, ...], logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None,
    reduction: str, grad: torch.Tensor, ignore_index: int = -100, smoothing: float = 0.0,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Gradients of `inputs`, of which `logits` are made, that can be differentiated again; None where none flows."""
    acc = accumulation_dtype(logits.dtype)
    weight = None if weight is None else weight.to(acc)
    target = target.to(acc) if target.is_floating_point() else target
    how: Any = _REDUCTIONS.index(reduction)
    loss = torch._C._nn.cross_entropy_loss(logits.to(acc), target, weight, how, ignore_index, smoothing)
    return torch.autograd.grad(loss, inputs, grad.to(acc), create_graph=True, allow_unused=True)


# ------------------------------------------------------------ class probabilities
class _Probabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str,
        smoothing: float,
    ) -> torch.Tensor:  # fmt: skip
        loss, top, log_sum, mass = _ops.cross_entropy_prob(logits, target, weight, reduction == "none", smoothing)
        ctx.smoothing, ctx.reduction, ctx.rows = smoothing, reduction, top.numel() if reduction == "mean" else None
        ctx.save_for_backward(logits, target, weight, top, log_sum, mass)
        return loss if ctx.rows is None else loss / ctx.rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, weight, top, log_sum, mass = ctx.saved_tensors
        if torch.is_grad_enabled():
            wanted = [t for t, on in zip((logits, target, weight), ctx.needs_input_grad, strict=False) if on]
            found = iter(in_parts(tuple(wanted), logits, target, weight, ctx.reduction, grad, smoothing=ctx.smoothing))
            return *(next(found) if on else None for on in ctx.needs_input_grad[:3]), None, None
        grad = grad.to(top.dtype)
        if ctx.rows is not None:
            grad = grad / ctx.rows
        of_logits = of_target = of_weight = None
        if ctx.needs_input_grad[0]:
            of_logits = _ops.cross_entropy_prob_backward(
                grad, logits, target, weight, top, log_sum, mass, ctx.smoothing
            )
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            c = class_dim(logits.ndim)
            per_class = (top.unsqueeze(c) - logits.to(top.dtype)) + log_sum.unsqueeze(c)
            per_class = per_class * (grad.unsqueeze(c) if grad.ndim else grad)
            if ctx.needs_input_grad[1]:
                of_target = per_class * (1 - ctx.smoothing)
                if weight is not None:
                    of_target = of_target * along_classes(weight.to(top.dtype), logits.ndim)
                of_target = of_target.to(target.dtype)
            if ctx.needs_input_grad[2]:
                p = target.to(top.dtype) * (1 - ctx.smoothing) + ctx.smoothing / logits.shape[c]
                of_weight = (per_class * p).sum([d for d in range(logits.ndim) if d != c]).to(weight.dtype)
        return of_logits, of_target, of_weight, None, None
