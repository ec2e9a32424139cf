"""Differentiable cross entropy of DTensors, made of the operators in `loss.kernels` and `loss.probabilities`.

The operators give sums. The mean divides the sum over all rows by what all rows weigh; on a mesh whose other
axes shard the rows both are pending sums, and the denominator is reduced first (one small all-reduce):

    loss{P:dp} / total       total = all rows that count, on every rank
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dtensor import DTensor, Replicate
from loss import kernels as _kernels
from loss import probabilities as _probabilities
from loss.kernels import class_dim
from propagation_rules.loss import accumulation_dtype

__all__ = ["cross_entropy"]

_ops = torch.ops.shardwright
_registered = (_kernels, _probabilities)


def cross_entropy(
    logits: DTensor, target: DTensor, weight: DTensor | None, reduction: str, ignore_index: int, smoothing: float
) -> torch.Tensor:
    """Cross entropy as `F.cross_entropy` defines it, layouts as they come.

    Args:
        logits: [rows..., classes, ...] with classes in dim 1 (dim 0 when it has one dim).
        target: class indices, without the class dim, or probabilities, with it.
        weight: [classes], replicated.
        reduction: "none", "sum" or "mean".
    """
    low = logits.dtype if not torch.is_autocast_enabled(logits.device.type) else accumulation_dtype(logits.dtype)
    if target.ndim == logits.ndim:
        loss = _Probabilities.apply(logits, target, weight, reduction, smoothing)
    else:
        loss = _Indices.apply(logits, target, weight, reduction, ignore_index, smoothing)
    return loss.to(low)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """A scalar with no reduction pending."""
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) if isinstance(x, DTensor) else x


class _Indices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str,
        ignore_index: int, smoothing: float,
    ) -> torch.Tensor:  # fmt: skip
        per_row = reduction == "none"
        loss, top, log_sum, total = _ops.cross_entropy(logits, target, weight, per_row, ignore_index, smoothing)
        ctx.rest = (ignore_index, smoothing)
        total = _whole(total) if reduction == "mean" else None
        ctx.save_for_backward(logits, target, weight, top, log_sum, total)
        return loss if total is None else loss / total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, weight, top, log_sum, total = ctx.saved_tensors
        grad = grad.to(top.dtype)
        if total is not None:
            grad = grad / total
        return _ops.cross_entropy_backward(grad, logits, target, weight, top, log_sum, *ctx.rest), *(None,) * 5


class _Probabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str,
        smoothing: float,
    ) -> torch.Tensor:  # fmt: skip
        loss, top, log_sum, mass = _ops.cross_entropy_prob(logits, target, weight, reduction == "none", smoothing)
        ctx.smoothing, ctx.rows = smoothing, top.numel() if reduction == "mean" else None
        ctx.save_for_backward(logits, target, weight, top, log_sum, mass)
        return loss if ctx.rows is None else loss / ctx.rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, weight, top, log_sum, mass = ctx.saved_tensors
        grad = grad.to(top.dtype)
        if ctx.rows is not None:
            grad = grad / ctx.rows
        of_logits = of_target = None
        if ctx.needs_input_grad[0]:
            of_logits = _ops.cross_entropy_prob_backward(
                grad, logits, target, weight, top, log_sum, mass, ctx.smoothing
            )
        if ctx.needs_input_grad[1]:
            of_target = _target_gradient(grad, logits, weight, top, log_sum, 1 - ctx.smoothing).to(target.dtype)
        return of_logits, of_target, None, None, None


def _target_gradient(
    grad: torch.Tensor, logits: torch.Tensor, weight: torch.Tensor | None, top: torch.Tensor, log_sum: torch.Tensor,
    keep: float,
) -> torch.Tensor:  # fmt: skip
    """-keep * grad * w * log_softmax(logits)."""
    c = class_dim(logits.ndim)
    minus_log = (top.unsqueeze(c) - logits.to(top.dtype)) + log_sum.unsqueeze(c)
    out = minus_log * (grad.unsqueeze(c) if grad.ndim else grad) * keep
    if weight is not None:
        out = out * weight.to(top.dtype).view(-1, *[1] * (logits.ndim - 2))
    return out
