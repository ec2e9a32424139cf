"""Weight normalisation, g v / |v|, the norm taken over all dims but one: that one is free.

_weight_norm_interface    d [n ...], d 1 ... -> d [n ...], d 1 ...       linear in the lengths g
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Linear, Rule, linear

from .build.labelled import labelled


def weight_norm(call: Call) -> Rule:
    """Forward and backward: every tensor has the free dim, or is one of numbers along it."""
    d = int(call["dim"]) % call.inputs[0].ndim
    n = call.inputs[0].shape[d]

    def labels(shape: Sequence[int]) -> list[Hashable]:
        at = d if len(shape) > d and shape[d] == n else None
        return [i if i == at else None for i in range(len(shape))]

    backward = "grad_w" in call.names
    lengths = Linear(frozenset({1}), (("sum", "sum"), ("avg", "avg")), frozenset({1}))
    return labelled(
        call, [labels(s.shape) for s in call.inputs], [[] if m is None else labels(m.shape) for m in call.outputs],
        linear=(linear(0) if backward else lengths,), filled=True,
    )  # fmt: skip


register("aten._weight_norm_interface aten._weight_norm_interface_backward", weight_norm)
