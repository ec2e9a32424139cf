"""Fourier transforms: the dims that are transformed stay whole, the others are free; linear.

A dim that is real on one side has another size there: `b [n] c -> b [half] c`. The libraries fail on tensors
without elements, so empty shards compute nothing.
"""

from __future__ import annotations

from dataclasses import replace

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, linear

from .build.empty_shards import is_empty_shard, zeros_of
from .build.labelled import but, labelled

__all__ = ["transform"]


def transform(call: Call) -> Rule:
    """The transformed dims have another size in what is real on one side"""
    labels = but(call.inputs[0].ndim, *call.dims()) if call["dim"] else list(range(call.inputs[0].ndim))
    rule = labelled(call, [labels], [labels], linear=(linear(0),))
    return replace(rule, bind=lambda ins, outs: zeros_of(outs) if is_empty_shard(ins[0]) else None)


register("aten._fft_c2c aten._fft_c2r aten._fft_r2c", transform)
