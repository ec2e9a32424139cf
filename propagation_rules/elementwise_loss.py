"""Losses that compare two tensors element by element: mse, smooth l1, huber, binary cross entropy, soft margin.

    reduction=none      pointwise
    reduction=sum       every dim is a factor that the output lacks: P(sum)
    reduction=mean      the local sum over the count of the whole: P(sum)

The gradient of the mean needs the same care: the op on a shard would divide by the shard's count. So both run
with reduction=sum locally and divide by the global count themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Bind, Dims, Rule, linear
from dtensor.spec import Spec

from .pointwise import NUMBERS, broadcast_dims, broadcast_shape

NONE, MEAN, SUM = 0, 1, 2


def _dims(call: Call) -> tuple[torch.Size, tuple[Dims, ...]]:
    """The shape all but the gradient broadcast to, and the dims of every input."""
    shape = broadcast_shape(s.shape for s, n in zip(call.inputs, call.names, strict=True) if n != "grad_output")
    reduced = call["reduction"] != NONE
    dims = tuple(
        () if n == "grad_output" and reduced and s.ndim == 0 else broadcast_dims(s.shape, shape)
        for s, n in zip(call.inputs, call.names, strict=True)
    )
    return shape, dims


def _over_count(call: Call, elements: int) -> Bind:
    """The op with reduction=sum, over the global count, wherever an input is cut."""
    count = elements or math.nan  # the mean of nothing
    op = call.op
    at = next(i for i, a in enumerate(op._schema.arguments) if a.name == "reduction")

    def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
        if not any(s.is_sharded_on(d) for s in ins for d in range(s.ndim)):
            return None

        def run(*args: object, **kwargs: object) -> object:
            if at < len(args):
                return op(*args[:at], SUM, *args[at + 1 :], **kwargs) / count
            return op(*args, **{**kwargs, "reduction": SUM}) / count

        return run

    return bind


def loss(call: Call) -> Rule:
    """The loss itself; nothing pending passes."""
    shape, dims = _dims(call)
    if call["reduction"] == NONE:
        return Rule(dims, (tuple((d,) for d in range(len(shape))),), tuple(shape))
    rule = Rule(dims, ((),), tuple(shape))
    return replace(rule, bind=_over_count(call, math.prod(shape))) if call["reduction"] == MEAN else rule


def loss_backward(call: Call) -> Rule:
    """Its gradient: pointwise, and linear in the incoming gradient."""
    shape, dims = _dims(call)
    at = call.index("grad_output")
    assert at is not None
    outs = tuple(() if m is None else broadcast_dims(m.shape, shape) for m in call.outputs)
    rule = Rule(dims, outs, tuple(shape), linear=(linear(at),))
    return replace(rule, bind=_over_count(call, math.prod(shape))) if call["reduction"] == MEAN else rule


register(
    "aten.binary_cross_entropy aten.binary_cross_entropy_with_logits aten.huber_loss aten.mse_loss aten.smooth_l1_loss "
    "aten.soft_margin_loss",
    loss, values=NUMBERS,
)  # fmt: skip
register(
    "aten.binary_cross_entropy_backward aten.huber_loss_backward aten.mse_loss_backward aten.smooth_l1_loss_backward "
    "aten.soft_margin_loss_backward",
    loss_backward, values=NUMBERS,
)  # fmt: skip
