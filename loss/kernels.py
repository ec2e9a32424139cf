"""The operators behind `loss_parallel`: cross entropy in one piece, with rules for sharded classes.

`F.cross_entropy` is log_softmax followed by nll_loss, and over sharded classes each of them communicates.
In one piece a single small gather is enough. Per row i, with classes sharded over k ranks:

    every rank     its statistics of every row: max, sum exp(x - max), x_it if it holds class t_i
    one gather     k such triples of every row (and two more numbers for label smoothing)
    every rank     m_i = max over all             l_i = log sum exp(x - m_i)
                   loss_i = w_t (l_i + m_i - x_it)

Backward needs m_i and l_i only, sends nothing, and no log-probabilities are kept:

    grad_ij = g_i w_t (exp(x_ij - m_i - l_i) - [j = t_i])

The operators return sums, never means: the mean is a division of two sums (see `loss.cross_entropy`), which
keeps it right when ranks hold different numbers of rows that count. With the sum of the weights goes the number of
targets that name no class. All results are in float32 for lower precisions. Rows are free to be sharded; the weight
is always whole. The arithmetic is in `loss.rows`.

Literature: the vocabulary-parallel cross entropy of Megatron-LM (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor.propagation_rules.build import accumulation_dtype, gather_stacked
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, built_in, register
from dtensor.rules.rule import Dims, Kernel, Rule, linear

from .rows import Classes, Runs, class_dim, finish, merge, row_gradient, row_statistics

__all__ = [
    "Forward", "all_classes", "backward_rule", "classes_of", "forward_rule", "index_backward", "index_forward",
    "library", "local_classes",
]  # fmt: skip

library = torch.library.Library("shardwright", "FRAGMENT")
Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def classes_of(
    runs: Runs, count: int, weight: torch.Tensor | None, dtype: torch.dtype, ignore_index: int, smoothing: float
) -> Classes:
    """The classes of a call on logits of `dtype`."""
    w = None if weight is None else weight.to(accumulation_dtype(dtype))
    return Classes(runs, count, w, ignore_index, smoothing)


def all_classes(logits: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, smoothing: float) -> Classes:
    """The classes of a call on whole logits."""
    n = logits.shape[class_dim(logits.ndim)]
    return classes_of(((0, n),), n, weight, logits.dtype, ignore_index, smoothing)


# ------------------------------------------------------------ the operators on plain tensors
def index_forward(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, per_row: bool, ignore_index: int,
    smoothing: float,
) -> Forward:  # fmt: skip
    """Class indices as targets: loss (rows or sum), max, log sum, [weight of the rows that count, bad targets]."""
    classes = all_classes(logits, weight, ignore_index, smoothing)
    return finish(row_statistics(logits, target, classes), target, classes, per_row)


def index_backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, top: torch.Tensor,
    log_sum: torch.Tensor, ignore_index: int, smoothing: float,
) -> torch.Tensor:  # fmt: skip
    """Gradient of the logits."""
    classes = all_classes(logits, weight, ignore_index, smoothing)
    return row_gradient(grad, logits, target, top, log_sum, classes)


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


@torch.library.impl(library, "cross_entropy", "Meta")
def _index_shapes(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, per_row: bool, *_: Any
) -> Forward:
    """Shapes and dtypes alone: the blocks of a large call need not be walked for them."""
    rows = target.new_empty(target.shape, dtype=accumulation_dtype(logits.dtype))
    return rows if per_row else rows.new_empty(()), rows.clone(), rows.clone(), rows.new_empty(2)


@torch.library.impl(library, "cross_entropy_backward", "Meta")
def _gradient_shape(grad: torch.Tensor, logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(logits)


# ------------------------------------------------------------ their rules
Run = Callable[[KernelContext], Any]


def _dims(call: Call) -> tuple[int, tuple[int, ...], dict[str, Dims]]:
    """Class dim, sizes of the factors (one a dim of the logits, one for the weight), dims by argument."""
    shape = tuple(call["logits"].shape)
    c = class_dim(len(shape))
    every: Dims = tuple((d,) for d in range(len(shape)))
    rows: Dims = tuple((d,) for d in range(len(shape)) if d != c)
    grad = call.get("grad")
    dims: dict[str, Dims] = {
        "logits": every, "target": every if call["target"].ndim == len(shape) else rows, "weight": ((len(shape),),),
        "top": rows, "log_sum": rows, "mass": rows, "grad": rows if grad is not None and grad.ndim else (),
    }  # fmt: skip
    return c, (*shape, shape[c]), dims


def forward_rule(run: Run, last: bool) -> Callable[[Call], Rule]:
    """The rule of a forward; `last`: whether its last output has an element a row, or two for all rows."""

    def build(call: Call) -> Rule:
        c, sizes, dims = _dims(call)
        rows = dims["top"]
        outputs: tuple[Dims, ...] = (rows if call["per_row"] else (), rows, rows, rows if last else ((),))
        # given no cost: whoever calls this operator wants the logits left where they are, whatever that costs
        kernel = Kernel("cross entropy", frozenset({c}), ("replicate",) * 4, run)
        kept = frozenset({c, len(sizes) - 1})
        return Rule(tuple(dims[n] for n in call.names), outputs, sizes, kept, kernels=(kernel,))

    return build


def backward_rule(run: Run) -> Callable[[Call], Rule]:
    """The rule of a backward, linear in the gradient."""

    def build(call: Call) -> Rule:
        c, sizes, dims = _dims(call)
        kernel = Kernel("cross entropy backward", frozenset({c}), ("shard",), run)
        kept, inputs = frozenset({c, len(sizes) - 1}), tuple(dims[n] for n in call.names)
        return Rule(inputs, (dims["logits"],), sizes, kept, linear=(linear(0),), kernels=(kernel,))

    return build


def local_classes(ctx: KernelContext) -> Classes:
    """The classes that this rank holds of the logits."""
    at, a = ctx.call.names.index("logits"), ctx.call
    spec, weight = ctx.in_specs[at], ctx.optional("weight")
    c = class_dim(len(spec.shape))
    ignore = a.get("ignore_index", -100)
    return classes_of(ctx.intervals(at, c), spec.shape[c], weight, spec.dtype, ignore, a["smoothing"])


def _run_forward(ctx: KernelContext) -> Forward:
    target, classes = ctx.tensor("target"), local_classes(ctx)
    stats = merge(gather_stacked(ctx, row_statistics(ctx.tensor("logits"), target, classes)))
    return finish(stats, target, classes, ctx.call["per_row"])


def _run_backward(ctx: KernelContext) -> torch.Tensor:
    grad, logits, target, top, log_sum = map(ctx.tensor, ("grad", "logits", "target", "top", "log_sum"))
    return row_gradient(grad, logits, target, top, log_sum, local_classes(ctx))


with built_in():
    register("shardwright.cross_entropy", forward_rule(_run_forward, last=False))
    register("shardwright.cross_entropy_backward", backward_rule(_run_backward))
