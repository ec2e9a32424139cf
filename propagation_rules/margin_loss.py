"""Margin losses over classes: samples are free, the classes of one sample stay together.

    multi_margin_loss         n [c], n, [c] -> n (none), 1 (sum, mean)
    multilabel_margin_loss    n [c], n [c] -> n or 1, n [c]

As with `elementwise_loss`, the mean of a shard is its sum over the global number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, linear
from dtensor.spec import Spec

from .build.empty_shards import is_empty_shard
from .build.labelled import labelled

NONE, MEAN, SUM = 0, 1, 2


def margin_loss(call: Call) -> Rule:
    """Forward and backward: the tensors are known by their names."""
    at = call.index("self")
    assert at is not None
    x, none = call.inputs[at], call["reduction"] == NONE
    row: list[Hashable] = ["n"] if x.ndim == 2 else []
    per_row: list[Hashable] = row if none else []
    classes = [*row, None]
    target = row if "multi_margin" in call.op._schema.name else classes
    backward = "grad_output" in call.names

    def labels(name: str, ndim: int) -> list[Hashable]:
        known: dict[str, list[Hashable]] = {
            "self": classes, "target": target, "is_target": classes, "grad_output": per_row, "weight": [None],
        }  # fmt: skip
        return known[name] if len(known[name]) == ndim else [None] * ndim

    outs = [classes] if backward else [per_row, classes][: len(call.outputs)]
    rule = labelled(
        call, [labels(n, s.ndim) for n, s in zip(call.names, call.inputs, strict=True)],
        [o if m is None or len(o) == len(m.shape) else [None] * len(m.shape)
         for o, m in zip(outs, call.outputs, strict=True)],
        linear=(linear(0),) if backward else (),
    )  # fmt: skip
    return replace(rule, bind=lambda ins, outs: _over_rows(call, ins[at], outs))


def _over_rows(call: Call, x: Spec, outs: Sequence[Spec | None]) -> Callable[..., object] | None:
    """The op with reduction=sum, over the global number of rows, where they are cut; zeros where there are none."""
    if not x.is_sharded_on(0) or x.ndim < 2:
        return None
    op, mean = call.op, call["reduction"] == MEAN
    at = next(i for i, a in enumerate(op._schema.arguments) if a.name == "reduction")
    empty = is_empty_shard(x)

    def run(*args: Any, **kwargs: Any) -> object:
        if empty:
            made = tuple(
                None if s is None else args[0].new_zeros(s.local_shape, dtype=s.dtype) for s in outs
            )  # fmt: skip
            return made[0] if len(made) == 1 else made
        if not mean:
            return op(*args, **kwargs)
        if at < len(args):
            args = (*args[:at], SUM, *args[at + 1 :])
        else:
            kwargs = {**kwargs, "reduction": SUM}
        got = op(*args, **kwargs)
        return got / x.shape[0] if isinstance(got, torch.Tensor) else (got[0] / x.shape[0], *got[1:])

    return run


register(
    "aten.multi_margin_loss aten.multi_margin_loss_backward aten.multilabel_margin_loss_forward "
    "aten.multilabel_margin_loss_backward", margin_loss, values="p margin",
)  # fmt: skip
