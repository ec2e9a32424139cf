"""Connectionist temporal classification: the batch is free where targets have a row a sample.

    _ctc_loss        [t] n [c], n [s] -> n, n [t] [2s+1]          lengths are lists of numbers, a sample each
    its backward     n, [t] n [c], n [s], n, n [t] [2s+1] -> [t] n [c]

The second result is as wide as the longest target: on each rank it is widened to that of all samples. Nobody reads
what lies beyond a sample's own. Targets strung together in one dim are found by the lengths of all samples before,
so nothing is cut there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, linear
from dtensor.spec import Spec

from .build.labelled import labelled

LENGTHS = ("input_lengths", "target_lengths")


def ctc_loss(call: Call) -> Rule:
    """Forward and backward; lengths become those of this rank's samples."""
    x, target = call["log_probs"], call["targets"]
    n: Hashable = "n" if x.ndim == 3 and target.ndim == 2 else None
    probabilities: list[Hashable] = [None, n, None] if x.ndim == 3 else [None, None]
    per_sample: list[Hashable] = [n] if x.ndim == 3 else []
    labels: dict[str, list[Hashable]] = {
        "log_probs": probabilities, "targets": [n, None] if target.ndim == 2 else [None], "grad": per_sample,
        "neg_log_likelihood": per_sample, "log_alpha": [*per_sample, None, None],
    }  # fmt: skip
    backward = "grad" in call.names
    outs = ["log_probs"] if backward else ["neg_log_likelihood", "log_alpha"]
    rule = labelled(
        call, [_fit(labels[m], s.ndim) for m, s in zip(call.names, call.inputs, strict=True)],
        [[] if s is None else _fit(labels[m], len(s.shape)) for m, s in zip(outs, call.outputs, strict=True)],
        linear=(linear(0),) if backward else (), filled=True,
    )  # fmt: skip
    at = call.names.index("log_probs")

    def localize(ins: Sequence[Spec], _: Sequence[Spec | None]) -> Mapping[str, object]:
        spec = ins[at]
        if spec.mesh.coord is None or n is None:
            return {}
        runs = spec.intervals_of(spec.mesh.coord)[1]
        return {name: [call[name][i] for s, m in runs for i in range(s, s + m)] for name in LENGTHS}

    def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
        table = None if backward else outs[1]
        if table is None or not table.is_sharded_on(0):
            return None
        width = table.local_shape[2]

        def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            loss, made = call.op(*args, **kwargs)
            return loss, torch.nn.functional.pad(made, (0, width - made.shape[2]), value=-math.inf)

        return run

    return replace(rule, localize=localize, bind=bind)


def _fit(labels: list[Hashable], ndim: int) -> list[Hashable]:
    return labels if len(labels) == ndim else [None] * ndim


register("aten._ctc_loss.default aten._ctc_loss_backward.default", ctc_loss)
