"""glu: one half of a dim gates the other, so that dim is whole and the others are free."""

from __future__ import annotations

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Rule, linear


def glu(call: Call) -> Rule:
    """Forward and backward, whose halved tensors have the split dim as a factor of their own."""
    at = call.index("self")
    assert at is not None
    x = call.inputs[at]
    d, half = call.dim(of=at), x.ndim
    full: Dims = tuple((i,) for i in range(x.ndim))
    halved: Dims = (*full[:d], (half,), *full[d + 1 :])
    backward = len(call.inputs) == 2
    return Rule(
        (halved, full) if backward else (full,),
        (full,) if backward else (halved,),
        (*x.shape, x.shape[d] // 2),
        frozenset({d, half}),
        linear=(linear(0),) if backward else (),
    )


register("aten.glu aten.glu_backward", glu)
