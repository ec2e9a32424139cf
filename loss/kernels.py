"""The operators behind `loss_parallel`: cross entropy in one piece, with rules for sharded classes.

`F.cross_entropy` is log_softmax followed by nll_loss, and over sharded classes each of them communicates.
In one piece a single small gather is enough. Per row i, with classes cut over k ranks:

    every rank     top_i = max of its logits      sum_i = sum exp(x - top_i)      x_it if it holds class t_i
    one gather     k such triples of every row (and two more numbers for label smoothing)
    every rank     m_i = max over all             l_i = log sum exp(x - m_i)
                   loss_i = w_t (l_i + m_i - x_it)

Backward needs m_i and l_i only, sends nothing, and no log-probabilities are kept:

    grad_ij = g_i w_t (exp(x_ij - m_i - l_i) - [j = t_i])

The operators return sums, never means: the mean is a division of two sums (see `loss.cross_entropy`), which
keeps it right when ranks hold different numbers of rows that count. All results are in float32 for lower
precisions. Rows are free to be sharded; the weight is always whole.

Literature: the vocabulary-parallel cross entropy of Megatron-LM (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor.factors import Dims, Kernel, Rule, linear
from dtensor.kernel import KernelContext
from dtensor.registry import Call, register
from dtensor.spec import Interval
from propagation_rules.classes import check_targets, local_slots
from propagation_rules.loss import (
    accumulation_dtype,
    combine_statistics,
    finite_top,
    local_max_and_sum,
    log_sum_exp,
)

__all__ = [
    "Forward", "Runs", "along_classes", "class_dim", "index_backward", "index_forward", "library", "own_weights",
    "relative_sum", "widened",
]  # fmt: skip

library = torch.library.Library("shardwright", "FRAGMENT")
Runs = tuple[Interval, ...]
Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def class_dim(ndim: int) -> int:
    """The dim that holds the classes: 1, or 0 for a tensor of one dim."""
    return 1 if ndim > 1 else 0


# ------------------------------------------------------------ what one rank computes
def _statistics(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, runs: Runs, smoothing: float
) -> torch.Tensor:
    """Per row: max, sum of exponentials, the target's logit if it is here; for smoothing sum(w (x - max)), sum(w)."""
    c = class_dim(x.ndim)
    slot, mine = local_slots(target, runs)
    top, total = (t.squeeze(c) for t in local_max_and_sum(x, c))
    zero = torch.zeros_like(top)
    picked = torch.where(mine, x.gather(c, slot.unsqueeze(c)).squeeze(c), zero) if x.shape[c] else zero
    stats = [top, total, picked]
    if smoothing:
        w = torch.ones_like(x) if weight is None else along_classes(own_weights(weight, runs), x.ndim)
        stats += [(w * (x - finite_top(top).unsqueeze(c))).sum(c), w.expand_as(x).sum(c)]
    return torch.stack(stats)


def relative_sum(stats: torch.Tensor, tops: torch.Tensor, masses: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """sum(w (x - top)) over all positions, from each one's sum(w (x - its own max)) and sum(w)."""
    shift = torch.where(masses == 0, torch.zeros_like(tops), masses * (finite_top(tops) - top))
    return (stats + shift).sum(0)


def _finish(
    stats: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, classes: int, per_row: bool,
    ignore_index: int, smoothing: float,
) -> Forward:  # fmt: skip
    """Loss (rows or their sum), max, log sum and the number (weight) of rows that count, from all ranks' statistics."""
    top, log_sum = log_sum_exp(stats[:, 0], stats[:, 1])
    counts = target != ignore_index
    scale = torch.ones_like(top) if weight is None else weight.take(torch.where(counts, target, 0))
    loss = scale * (log_sum + (top - stats[:, 2].sum(0)))
    if smoothing:
        mass = classes if weight is None else weight.sum()
        spread = mass * log_sum - relative_sum(stats[:, 3], stats[:, 0], stats[:, 4], top)
        loss = (1 - smoothing) * loss + smoothing / classes * spread
    zero = torch.zeros_like(top)
    loss, scale = torch.where(counts, loss, zero), torch.where(counts, scale, zero)
    return loss if per_row else loss.sum(), top, log_sum, scale.sum()


def _gradient(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, top: torch.Tensor,
    log_sum: torch.Tensor, runs: Runs, classes: int, ignore_index: int, smoothing: float,
) -> torch.Tensor:  # fmt: skip
    """Gradient of the local logits; `x` is overwritten."""
    c = class_dim(x.ndim)
    counts = target != ignore_index
    grad = torch.where(counts, grad, torch.zeros_like(top))
    scale = grad if weight is None else grad * weight.take(torch.where(counts, target, 0))
    hot = (1 - smoothing) * scale
    cold = smoothing / classes * grad
    mass = classes if weight is None else weight.sum()
    out = x.sub_(top.unsqueeze(c)).sub_(log_sum.unsqueeze(c)).exp_().mul_((hot + cold * mass).unsqueeze(c))
    if smoothing:
        out -= cold.unsqueeze(c) * (1 if weight is None else along_classes(own_weights(weight, runs), x.ndim))
    slot, mine = local_slots(target, runs)
    if x.shape[c]:
        out.scatter_add_(c, slot.unsqueeze(c), torch.where(mine, -hot, torch.zeros_like(hot)).unsqueeze(c))
    # rows that do not count may hold inf or nan logits: their gradient is 0 all the same
    return torch.where(counts.unsqueeze(c), out, torch.zeros((), dtype=out.dtype, device=out.device))


def own_weights(weight: torch.Tensor, runs: Runs) -> torch.Tensor:
    """The weights of this rank's classes."""
    parts = [weight.narrow(0, start, length) for start, length in runs]
    return torch.cat(parts) if parts else weight[:0]


def along_classes(weight: torch.Tensor, ndim: int) -> torch.Tensor:
    """`weight` shaped to multiply logits of `ndim` dims."""
    return weight.view(-1, *[1] * (ndim - 2)) if ndim > 1 else weight


def widened(*tensors: torch.Tensor | None, dtype: torch.dtype) -> list[Any]:
    """The tensors in the dtype that sums of `dtype` are taken in; None stays None."""
    return [t if t is None else t.to(accumulation_dtype(dtype)) for t in tensors]


# ------------------------------------------------------------ the operators on plain tensors
def index_forward(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, per_row: bool, ignore_index: int,
    smoothing: float,
) -> Forward:  # fmt: skip
    """Class indices as targets: loss (rows or sum), max, log sum, and the weight of the rows that count."""
    x, w = widened(logits, weight, dtype=logits.dtype)
    classes = x.shape[class_dim(x.ndim)]
    check_targets("cross_entropy", target, classes, ignore_index)
    stats = _statistics(x, target, w, ((0, classes),), smoothing)
    return _finish(stats[None], target, w, classes, per_row, ignore_index, smoothing)


def index_backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, top: torch.Tensor,
    log_sum: torch.Tensor, ignore_index: int, smoothing: float,
) -> torch.Tensor:  # fmt: skip
    """Gradient of the logits."""
    x, w = widened(logits, weight, dtype=logits.dtype)
    x = x.clone() if x is logits else x
    classes = x.shape[class_dim(x.ndim)]
    out = _gradient(grad, x, target, w, top, log_sum, ((0, classes),), classes, ignore_index, smoothing)
    return out.to(logits.dtype)


library.define(
    "cross_entropy(Tensor logits, Tensor target, Tensor? weight, bool per_row, int ignore_index, float smoothing)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor? weight, Tensor top, Tensor log_sum,"
    " int ignore_index, float smoothing) -> Tensor"
)
library.impl("cross_entropy", index_forward, "CompositeExplicitAutograd")
library.impl("cross_entropy_backward", index_backward, "CompositeExplicitAutograd")


# ------------------------------------------------------------ their rules
def _dims(call: Call) -> tuple[int, tuple[int, ...], dict[str, Dims]]:
    """Class dim, sizes of the factors (one a dim of the logits, one for the weight), dims by argument."""
    shape = tuple(call["logits"].shape)
    c = class_dim(len(shape))
    rows: Dims = tuple((d,) for d in range(len(shape)) if d != c)
    grad = call.get("grad")
    dims: dict[str, Dims] = {
        "logits": tuple((d,) for d in range(len(shape))),
        "target": rows,
        "weight": ((len(shape),),),
        "top": rows,
        "log_sum": rows,
        "grad": rows if grad is not None and grad.ndim else (),
    }
    return c, (*shape, shape[c]), dims


def _forward_rule(call: Call) -> Rule:
    c, sizes, dims = _dims(call)
    rows = dims["target"]
    outputs: tuple[Dims, ...] = (rows if call["per_row"] else (), rows, rows, ())
    # given no cost: whoever calls this operator wants the logits left where they are, whatever that costs
    kernel = Kernel("cross entropy", frozenset({c}), ("replicate",) * 4, _run_forward)
    whole = frozenset({c, len(sizes) - 1})
    return Rule(tuple(dims[n] for n in call.names), outputs, sizes, whole, kernels=(kernel,))


def _run_forward(ctx: KernelContext) -> Forward:
    logits, target = ctx.tensor("logits"), ctx.tensor("target")
    x, w = widened(logits, ctx.optional("weight"), dtype=logits.dtype)
    c, a = class_dim(x.ndim), ctx.call
    classes = ctx.in_specs[0].shape[c]
    check_targets("cross_entropy", target, classes, a["ignore_index"])
    stats = combine_statistics(ctx, _statistics(x, target, w, ctx.intervals(0, c), a["smoothing"]))
    return _finish(stats, target, w, classes, a["per_row"], a["ignore_index"], a["smoothing"])


def _backward_rule(call: Call) -> Rule:
    c, sizes, dims = _dims(call)
    kernel = Kernel("cross entropy backward", frozenset({c}), ("shard",), _run_backward)
    whole = frozenset({c, len(sizes) - 1})
    inputs = tuple(dims[n] for n in call.names)
    return Rule(inputs, (dims["logits"],), sizes, whole, linear=(linear(0),), kernels=(kernel,))


def _run_backward(ctx: KernelContext) -> torch.Tensor:
    logits, grad = ctx.tensor("logits"), ctx.tensor("grad")
    x, w = widened(logits, ctx.optional("weight"), dtype=logits.dtype)
    x = x.clone() if x is logits else x
    c, a = class_dim(x.ndim), ctx.call
    out = _gradient(
        grad, x, ctx.tensor("target"), w, ctx.tensor("top"), ctx.tensor("log_sum"), ctx.intervals(1, c),
        ctx.in_specs[1].shape[c], a["ignore_index"], a["smoothing"],
    )  # fmt: skip
    return out.to(logits.dtype)


register("shardwright.cross_entropy", _forward_rule)
register("shardwright.cross_entropy_backward", _backward_rule)
