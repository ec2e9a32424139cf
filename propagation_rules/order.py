"""Sorting and order statistics: the dim they work along is whole, all others are free."""

from __future__ import annotations

from dataclasses import replace

from dtensor.factors import Dims, Rule
from dtensor.registry import Call, register
from propagation_rules.reduce import reduced_rule

__all__ = ["along"]


def along(call: Call) -> Rule:
    """Outputs have the input's dims, the one named `dim` whole and of a size of its own (topk)."""
    x = call.inputs[0]
    d = call.dim()
    dims: Dims = tuple((i,) for i in range(x.ndim))
    if not dims:
        return Rule((dims,), tuple(dims for _ in call.outputs), ())
    size = max((m.shape[d] for m in call.outputs if m is not None), default=x.shape[d])
    out = dims if size == x.shape[d] else (*dims[:d], (x.ndim,), *dims[d + 1 :])
    return Rule((dims,), tuple(out for _ in call.outputs), (*x.shape, size), frozenset({d, x.ndim}))


def reduced_along(call: Call) -> Rule:
    """One dim is reduced by an op that must see all of it."""
    rule = reduced_rule(call)
    return replace(rule, whole=frozenset({call.dim()}))


register("aten.sort aten.topk", along)
register("aten.kthvalue aten.median.dim aten.mode aten.nanmedian.dim", reduced_along)
