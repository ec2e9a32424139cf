"""Numeric ops of no family: trilinear products, block matrices, places in sorted sequences.

searchsorted    n, ... -> ...          a place is the number of smaller elements, so cutting n leaves a sum
trilinear       three tensors broadcast against each other, some dims summed
"""

from __future__ import annotations

from collections.abc import Hashable

from dtensor.rules.registry import Call, pattern, register, tensor_names
from dtensor.rules.rule import Linear, Rule, linear, passes

from .build.labelled import labelled
from .matmul import product
from .pointwise import pointwise
from .reduce import reduction

__all__ = ["searchsorted", "trilinear"]


def searchsorted(call: Call) -> Rule:
    """One sequence for all values, or one a row."""
    rows = [f"r{d}" for d in range(call["sorted_sequence"].ndim - 1)]
    sequence = " ".join([*rows, "[n]"])
    values = "" if call.index("self") is None else " ".join([*rows, "v"]) if rows else "..."
    texts = {"sorted_sequence": sequence, "self": values, "sorter": sequence}
    return pattern(f"{', '.join(texts[name] for name in tensor_names(call.op))} -> {values}")(call)


# ------------------------------------------------------------ products
def trilinear(call: Call) -> Rule:
    """Every tensor lacks the dims in its `expand` list; the dims in `sumdim` are summed."""
    tensors = list(call.inputs)
    n = tensors[0].ndim + len(call["expand1"])
    labels: list[list[Hashable]] = [[d for d in range(n) if d not in call[f"expand{i}"]] for i in (1, 2, 3)]
    wide = {d: max(s.shape[t.index(d)] for s, t in zip(tensors, labels, strict=True) if d in t) for d in range(n)}
    ins = [
        [d if s.shape[j] == wide[d] else None for j, d in enumerate(t)]  # type: ignore[index]
        for s, t in zip(tensors, labels, strict=True)
    ]
    out = [d for d in range(n) if d not in call["sumdim"]]
    return labelled(call, ins, [out], linear=tuple(linear(i) for i in range(3)))


def block_diag(call: Call) -> Rule:
    """The blocks are whole; what lies outside them is zero, in every part of a pending tensor too."""
    ins = tuple(((),) * s.ndim for s in call.inputs)
    every = Linear(frozenset(range(len(ins))), passes(0).ops)
    return Rule(ins, (((),) * 2,), (), linear=(every,))


register("aten._euclidean_dist", pattern("... m [k], ... n [k] -> ... m n"))
register("aten._foreach_mm", product("m k, k n -> m n"))
register("aten._is_all_true", reduction("band", ("band", "min")))
register("aten._is_any_true", reduction("bor", ("bor", "max")))
register("aten._trilinear", trilinear)
register("aten.alias_copy aten.detach_copy aten.lift aten.lift_fresh_copy", pointwise("any:0"))
register("aten.block_diag", block_diag)
register("aten.bucketize.Scalar", pattern("[n] ->"))
register("aten.bucketize.Tensor", pattern("..., [n] -> ..."))
register("aten.linalg__powsum aten._foreach_powsum", reduction("sum"))
register("aten.searchsorted", searchsorted)
