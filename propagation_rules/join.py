"""cat and stack: the joined dim stays whole, the others are free; pending inputs pass together."""

from __future__ import annotations

from collections.abc import Hashable

from dtensor.factors import Rule, passes
from dtensor.registry import Call, register
from propagation_rules.labelled import every_dim, labelled


def cat(call: Call) -> Rule:
    """By hand: any number of inputs, among them 1-d tensors without elements, which count for nothing."""
    out = call.outputs[0]
    assert out is not None
    n = len(out.shape)
    dim = int(call["dim"]) % n
    kept: list[Hashable] = [None if d == dim else d for d in range(n)]
    if len(call.inputs) == 1:
        kept = every_dim(n)
    groups = (passes(*range(len(call.inputs))),) if all(s.dtype == out.dtype for s in call.inputs) else ()
    return labelled(call, [[None] if s.ndim == 1 != n else kept for s in call.inputs], [kept], linear=groups)


def stack(call: Call) -> Rule:
    """The new dim carries no factor."""
    n = call.inputs[0].ndim
    dim = int(call["dim"]) % (n + 1)
    order = every_dim(n)
    groups = (passes(*range(len(call.inputs))),) if len({s.dtype for s in call.inputs}) == 1 else ()
    return labelled(call, [order] * len(call.inputs), [[*order[:dim], None, *order[dim:]]], linear=groups)


register("aten.cat aten.concat aten.concatenate", cat)
register("aten.stack aten._stack", stack)
