"""Numeric ops of no family: trilinear products, block matrices, places in sorted sequences.

searchsorted    n, ... -> ...          a place is the number of smaller elements, so sharding n leaves a sum
trilinear       three tensors broadcast against each other, some dims summed

Fourier transforms: the dims that are transformed stay replicated, the others are free; linear.

A dim that is real on one side has another size there: `b [n] c -> b [half] c`. The libraries fail on tensors
without elements, so empty shards compute nothing.

Distances between the rows of two matrices, or of one.

    _cdist_forward     ... p [m], ... r [m] -> ... p r
    its backward       ... p r, ... p [m], ... r [m], ... p r -> ... p [m]        linear in the gradient

The distances within one matrix (`pdist`) pair every row with every other in one flat dim, so nothing of it is
free.

Cells of recurrent networks: the batch is free.

The gates of a cell lie side by side in one dim, so that dim is replicated. Where no accelerator fuses them, torch takes
cells and layers apart into matmul, chunk and pointwise ops, which have rules of their own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from dtensor.rules.registry import Call, pattern, register, tensor_names
from dtensor.rules.rule import Linear, Rule, linear, passes

from .build.empty_shards import is_empty_shard, zeros_of
from .build.labelled import but, labelled
from .matmul import product
from .pointwise import pointwise
from .reduce import reduction

__all__ = ["searchsorted", "transform", "trilinear"]


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
    """The blocks are replicated; what lies outside them is zero, in every part of a pending tensor too."""
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


def transform(call: Call) -> Rule:
    """The transformed dims have another size in what is real on one side"""
    labels = but(call.inputs[0].ndim, *call.dims()) if call["dim"] else list(range(call.inputs[0].ndim))
    rule = labelled(call, [labels], [labels], linear=(linear(0),))
    return replace(rule, bind=lambda ins, outs: zeros_of(outs) if is_empty_shard(ins[0]) else None)


register("aten._fft_c2c aten._fft_c2r aten._fft_r2c", transform)


@dataclass(frozen=True, slots=True)
class _filled:  # noqa: N801 - used as a function
    """A pattern whose op gives zeros on empty shards."""

    of: pattern

    def __call__(self, call: Call) -> Rule:
        return replace(
            self.of(call), bind=lambda ins, outs: zeros_of(outs) if any(not s.local_numel for s in ins) else None
        )

    @property
    def text_form(self) -> str:
        """Printed form."""
        return self.of.text_form


register("aten._cdist_forward", _filled(pattern("... p [m], ... r [m] -> ... p r")), values="p")
register(
    "aten._cdist_backward",
    _filled(pattern("... p r, ... p [m], ... r [m], ... p r -> ... p [m]", linear="0")),
    values="p",
)
register("aten._pdist_forward", pattern("[n] [m] -> [k]"), values="p")
register("aten._pdist_backward", pattern("[k], [n] [m], [k] -> [n] [m]", linear="0"), values="p")


register("aten._thnn_fused_lstm_cell", pattern("n [g], n [g], n [h], [g], [g] -> n [h], n [h], n [w]"))
register("aten._thnn_fused_gru_cell", pattern("n [g], n [g], n [h], [g], [g] -> n [h], n [w]"))
