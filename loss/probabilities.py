"""The operators for targets that are class probabilities, with rules for sharded classes.

With p' = (1 - smoothing) p + smoothing / C and class weights w, per row i:

    mass_i = sum_j p'_ij w_j        loss_i = mass_i l_i - sum_j p'_ij w_j (x_ij - m_i)

with m_i, l_i as in `loss.kernels`. So four numbers a row and rank are gathered once: max, sum of
exponentials, mass, and the last sum (relative to the rank's own max). Backward sends nothing:

    grad x_ij = g_i (mass_i exp(x_ij - m_i - l_i) - p'_ij w_j)
"""

from __future__ import annotations

import torch

from dtensor.propagation_rules.build import (
    accumulation_dtype,
    finite_top,
    gather_stacked,
    local_max_and_sum,
    log_sum_exp,
)
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import built_in, register

from .kernels import Forward, all_classes, backward_rule, forward_rule, library, local_classes
from .rows import Classes, along_classes, blocks, class_dim, merged_relative, own_weights, piece, row_shift

__all__ = ["probability_backward", "probability_forward"]


# ------------------------------------------------------------ what one rank computes
def _weighted(p: torch.Tensor, classes: Classes, dtype: torch.dtype) -> torch.Tensor:
    """p' w of the classes that are here."""
    s = classes.smoothing
    p = p.to(dtype)
    p = p * (1 - s) + s / classes.count if s else p
    return p if classes.weight is None else p * along_classes(own_weights(classes.weight, classes.runs), p.ndim)


def _statistics(logits: torch.Tensor, target: torch.Tensor, classes: Classes) -> torch.Tensor:
    """Per row: max, sum of exponentials, mass, sum of p' w (x - max)."""
    c, acc = class_dim(logits.ndim), accumulation_dtype(logits.dtype)
    rows = (*logits.shape[:c], *logits.shape[c + 1 :])
    out = logits.new_empty((4, *rows), dtype=acc)
    for block in blocks(logits, c):
        x, place = piece(logits, block).to(acc), piece(out, block, row_shift(block, c) + 1)
        pw = _weighted(piece(target, block), classes, acc)
        top, total = local_max_and_sum(x, c)
        place[0], place[1], place[2] = top.squeeze(c), total.squeeze(c), pw.sum(c)
        torch.sum((x - finite_top(top)).mul_(pw), c, out=place[3])
        del x, pw
    return out


def _finish(stats: torch.Tensor, per_row: bool) -> Forward:
    top, log_sum = log_sum_exp(stats[:, 0], stats[:, 1])
    mass = stats[:, 2].sum(0)
    loss = mass * log_sum - merged_relative(stats[:, 3], stats[:, 0], stats[:, 2], top)
    return loss if per_row else loss.sum(), top, log_sum, mass


def _gradient(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, top: torch.Tensor, log_sum: torch.Tensor,
    mass: torch.Tensor, classes: Classes,
) -> torch.Tensor:  # fmt: skip
    c, acc = class_dim(logits.ndim), top.dtype
    out = torch.empty_like(logits)
    share = log_sum.neg().exp_().mul_(mass)
    for block in blocks(logits, c):
        shift, x, place = row_shift(block, c), piece(logits, block), piece(out, block)
        m, part = (piece(t, block, shift).unsqueeze(c) for t in (top, share))
        work = place if out.dtype == acc else torch.empty_like(x, dtype=acc)
        torch.sub(x, m, out=work).exp_().mul_(part).sub_(_weighted(piece(target, block), classes, acc))
        work.mul_(piece(grad, block, shift).unsqueeze(c) if grad.ndim else grad)
        if work is not place:
            place.copy_(work)
        del work
    return out


# ------------------------------------------------------------ the operators on plain tensors
def probability_forward(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, per_row: bool, smoothing: float
) -> Forward:
    """Loss (rows or sum), and max, log sum and mass of every row."""
    return _finish(_statistics(logits, target, all_classes(logits, weight, -100, smoothing))[None], per_row)


def probability_backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, top: torch.Tensor,
    log_sum: torch.Tensor, mass: torch.Tensor, smoothing: float,
) -> torch.Tensor:  # fmt: skip
    """Gradient of the logits."""
    return _gradient(grad, logits, target, top, log_sum, mass, all_classes(logits, weight, -100, smoothing))


library.define(
    "cross_entropy_prob(Tensor logits, Tensor target, Tensor? weight, bool per_row, float smoothing)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "cross_entropy_prob_backward(Tensor grad, Tensor logits, Tensor target, Tensor? weight, Tensor top, Tensor log_sum,"
    " Tensor mass, float smoothing) -> Tensor"
)
library.impl("cross_entropy_prob", probability_forward, "CompositeExplicitAutograd")
library.impl("cross_entropy_prob_backward", probability_backward, "CompositeExplicitAutograd")


@torch.library.impl(library, "cross_entropy_prob", "Meta")
def _forward_shapes(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, per_row: bool, *_: object
) -> Forward:
    c = class_dim(logits.ndim)
    rows = logits.new_empty((*logits.shape[:c], *logits.shape[c + 1 :]), dtype=accumulation_dtype(logits.dtype))
    return rows if per_row else rows.new_empty(()), rows.clone(), rows.clone(), rows.clone()


@torch.library.impl(library, "cross_entropy_prob_backward", "Meta")
def _gradient_shape(grad: torch.Tensor, logits: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(logits)


# ------------------------------------------------------------ their rules
def _run_forward(ctx: KernelContext) -> Forward:
    stats = _statistics(ctx.tensor("logits"), ctx.tensor("target"), local_classes(ctx))
    return _finish(gather_stacked(ctx, stats), ctx.call["per_row"])


def _run_backward(ctx: KernelContext) -> torch.Tensor:
    grad, logits, target = map(ctx.tensor, ("grad", "logits", "target"))
    top, log_sum, mass = map(ctx.tensor, ("top", "log_sum", "mass"))
    return _gradient(grad, logits, target, top, log_sum, mass, local_classes(ctx))


with built_in():
    register("shardwright.cross_entropy_prob", forward_rule(_run_forward, last=True))
    register("shardwright.cross_entropy_prob_backward", backward_rule(_run_backward))
