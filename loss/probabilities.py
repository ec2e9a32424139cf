"""The operators for targets that are class probabilities, with rules for sharded classes.

With p' = (1 - smoothing) p + smoothing / C and class weights w, per row i:

    mass_i = sum_j p'_ij w_j        loss_i = mass_i l_i - sum_j p'_ij w_j (x_ij - m_i)

with m_i, l_i as in `loss.kernels`. So four numbers a row and rank are gathered once: max, sum of
exponentials, mass, and the last sum (relative to the rank's own max). Backward sends nothing:

    grad x_ij = g_i (mass_i exp(x_ij - m_i - l_i) - p'_ij w_j)
"""

from __future__ import annotations

import torch

from dtensor.factors import Dims, Kernel, Rule, linear
from dtensor.kernel import KernelContext
from dtensor.registry import Call, register
from loss.kernels import Forward, Runs, along_classes, class_dim, library, own_weights, relative_sum, widened
from propagation_rules.loss import combine_statistics, finite_top, local_max_and_sum, log_sum_exp

__all__ = ["probability_backward", "probability_forward"]


def _weighted(
    p: torch.Tensor, weight: torch.Tensor | None, runs: Runs, classes: int, smoothing: float
) -> torch.Tensor:
    """p' w of the local classes."""
    p = p * (1 - smoothing) + smoothing / classes if smoothing else p
    return p if weight is None else p * along_classes(own_weights(weight, runs), p.ndim)


def _statistics(x: torch.Tensor, pw: torch.Tensor) -> torch.Tensor:
    c = class_dim(x.ndim)
    top, total = (t.squeeze(c) for t in local_max_and_sum(x, c))
    return torch.stack([top, total, pw.sum(c), (pw * (x - finite_top(top).unsqueeze(c))).sum(c)])


def _finish(stats: torch.Tensor, per_row: bool) -> Forward:
    top, log_sum = log_sum_exp(stats[:, 0], stats[:, 1])
    mass = stats[:, 2].sum(0)
    loss = mass * log_sum - relative_sum(stats[:, 3], stats[:, 0], stats[:, 2], top)
    return loss if per_row else loss.sum(), top, log_sum, mass


def _gradient(
    grad: torch.Tensor, x: torch.Tensor, pw: torch.Tensor, top: torch.Tensor, log_sum: torch.Tensor, mass: torch.Tensor
) -> torch.Tensor:
    c = class_dim(x.ndim)
    softmax = (x - top.unsqueeze(c)).sub_(log_sum.unsqueeze(c)).exp_()
    return (softmax.mul_(mass.unsqueeze(c)).sub_(pw)).mul_(grad.unsqueeze(c) if grad.ndim else grad)


# ------------------------------------------------------------ the operators on plain tensors
def probability_forward(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, per_row: bool, smoothing: float
) -> Forward:
    """Loss (rows or sum), and max, log sum and mass of every row."""
    x, p, w = widened(logits, target, weight, dtype=logits.dtype)
    classes = x.shape[class_dim(x.ndim)]
    return _finish(_statistics(x, _weighted(p, w, ((0, classes),), classes, smoothing))[None], per_row)


def probability_backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, top: torch.Tensor,
    log_sum: torch.Tensor, mass: torch.Tensor, smoothing: float,
) -> torch.Tensor:  # fmt: skip
    """Gradient of the logits."""
    x, p, w = widened(logits, target, weight, dtype=logits.dtype)
    classes = x.shape[class_dim(x.ndim)]
    pw = _weighted(p, w, ((0, classes),), classes, smoothing)
    return _gradient(grad, x, pw, top, log_sum, mass).to(logits.dtype)


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


# ------------------------------------------------------------ their rules
def _dims(call: Call) -> tuple[int, tuple[int, ...], dict[str, Dims]]:
    shape = tuple(call["logits"].shape)
    c = class_dim(len(shape))
    every: Dims = tuple((d,) for d in range(len(shape)))
    rows: Dims = tuple((d,) for d in range(len(shape)) if d != c)
    grad = call.get("grad")
    dims: dict[str, Dims] = {
        "logits": every, "target": every, "weight": ((len(shape),),), "top": rows, "log_sum": rows, "mass": rows,
        "grad": rows if grad is not None and grad.ndim else (),
    }  # fmt: skip
    return c, (*shape, shape[c]), dims


def _forward_rule(call: Call) -> Rule:
    c, sizes, dims = _dims(call)
    rows = dims["top"]
    kernel = Kernel("cross entropy", frozenset({c}), ("replicate",) * 4, _run_forward)  # no cost: as in loss.kernels
    outputs: tuple[Dims, ...] = (rows if call["per_row"] else (), rows, rows, rows)
    return Rule(
        tuple(dims[n] for n in call.names), outputs, sizes, frozenset({c, len(sizes) - 1}), kernels=(kernel,)
    )


def _run_forward(ctx: KernelContext) -> Forward:
    logits = ctx.tensor("logits")
    x, p, w = widened(logits, ctx.tensor("target"), ctx.optional("weight"), dtype=logits.dtype)
    c = class_dim(x.ndim)
    pw = _weighted(p, w, ctx.intervals(0, c), ctx.in_specs[0].shape[c], ctx.call["smoothing"])
    return _finish(combine_statistics(ctx, _statistics(x, pw)), ctx.call["per_row"])


def _backward_rule(call: Call) -> Rule:
    c, sizes, dims = _dims(call)
    kernel = Kernel("cross entropy backward", frozenset({c}), ("shard",), _run_backward)
    inputs, whole = tuple(dims[n] for n in call.names), frozenset({c, len(sizes) - 1})
    return Rule(inputs, (dims["logits"],), sizes, whole, linear=(linear(0),), kernels=(kernel,))


def _run_backward(ctx: KernelContext) -> torch.Tensor:
    logits = ctx.tensor("logits")
    x, p, w = widened(logits, ctx.tensor("target"), ctx.optional("weight"), dtype=logits.dtype)
    c = class_dim(x.ndim)
    pw = _weighted(p, w, ctx.intervals(1, c), ctx.in_specs[1].shape[c], ctx.call["smoothing"])
    rows = (ctx.tensor(name) for name in ("top", "log_sum", "mass"))
    return _gradient(ctx.tensor("grad"), x, pw, *rows).to(logits.dtype)


register("shardwright.cross_entropy_prob", _forward_rule)
register("shardwright.cross_entropy_prob_backward", _backward_rule)
