"""What a reduction over positions means: the definition that every communicator follows.

sum, product      in the tensor's dtype; of booleans: or, and
avg               sum / size; of integers truncated toward zero, of booleans: and
max, min          NaN wins, as in torch.maximum
band, bor, bxor   integers and booleans
norm<p>           (sum of x**p) ** (1/p) in float64, with signs: the norm of parts that are not negative; norm0 is
                  their sum

Every kind holds every number, so that one may be written to a pending tensor, or joined with it, whatever it is: on
the first position beside zeros (sum, bxor, norms) or ones (product), else on all. Hence the signs: parts of one sign
make a number of that sign, so that -3 beside zeros is -3. And hence the width: 40000 beside zeros is itself in float16
as well, whose square is not, and the average of four times 100 is 100 in int8, too. What is too large or too small for
that, no device makes either: a power that is no float64 (only in float64, and in orders above 8), an average of int64
or of floats beyond the largest number divided by the count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dtensor.placement import REDUCE_OPS, Partial

__all__ = ["Fold", "Reducing", "check_reduction", "divided", "fold_of", "power", "reduce_tensors", "root", "wide"]

_Pairwise = Callable[..., torch.Tensor]
"""Of two tensors of one shape, and `out`."""


class Reducing(NamedTuple):
    """What is reduced: tensors of `dtype` with `op`; converted to the dtype `wire` first and back at last, if any."""

    op: str
    dtype: torch.dtype
    wire: torch.dtype | None = None

    @property
    def reduced(self) -> torch.dtype:
        """The dtype that is reduced."""
        return self.wire or self.dtype


def check_reduction(op: str, dtype: torch.dtype) -> float | None:
    """p of `norm<p>`, else None. Raises ValueError for an unknown `op`, TypeError where `dtype` does not have it."""
    p = None if op in REDUCE_OPS else Partial(op).norm
    if op in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"reduction {op!r} is for integers and booleans, got {dtype}")
    if op in ("max", "min") and dtype.is_complex:
        raise TypeError(f"reduction {op!r} has no meaning for complex numbers, got {dtype}")
    if p is not None and not dtype.is_floating_point:
        raise TypeError(f"reduction {op!r} is for real floating point numbers, got {dtype}")
    return p


_PAIRWISE: dict[str, _Pairwise] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
_BOOL = {"sum": "bor", "max": "bor", "avg": "band", "product": "band", "min": "band"}
_NARROW = frozenset(
    d for d in (getattr(torch, n, None) for n in dir(torch) if n.startswith("float8")) if isinstance(d, torch.dtype)
)
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32})


def wide(op: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that `dtype` is reduced in with `op`; what it gives is rounded once, at the end."""
    if op == "avg" and dtype in _INTEGERS:
        return torch.int64
    if dtype in _NARROW or dtype in _WIDER:
        return _WIDER.get(dtype, torch.float32)
    return torch.float64 if op not in REDUCE_OPS and Partial(op).norm else dtype


def power(x: torch.Tensor, p: float) -> torch.Tensor:
    """What the parts of a norm of order `p` are added up as: their p-th powers, with their signs."""
    return x * x.abs() if p == 2 else torch.copysign(x.abs() ** p, x)


def root(x: torch.Tensor, p: float) -> torch.Tensor:
    """The norm that a sum of `power` is."""
    return torch.copysign(x.abs().sqrt_() if p == 2 else x.abs() ** (1 / p), x)


class Fold(NamedTuple):
    """`reduce_tensors` part by part: `pairwise` of two tensors, and by how many an average is divided at the end."""

    pairwise: _Pairwise
    by: int

    def add(self, total: torch.Tensor, more: torch.Tensor) -> None:
        """Put what both are together in place of the first, in its dtype."""
        self.pairwise(total, more if more.dtype is total.dtype else more.to(total.dtype), out=total)

    def finish(self, total: torch.Tensor) -> torch.Tensor:
        """`total`, which all parts are in, as the result: the same memory."""
        return total if self.by == 1 else divided(total, self.by)


def fold_of(op: str, dtype: torch.dtype, parts: int) -> Fold | None:
    """How as many tensors of `dtype` are reduced part by part; None where that is not the way.

    So it is with norms, and with dtypes that are added up in a wider one. Raises as `check_reduction` does.
    """
    check_reduction(op, dtype)
    if op not in _PAIRWISE or wide(op, dtype) is not dtype:
        return None
    if dtype == torch.bool:
        return Fold(_PAIRWISE[_BOOL.get(op, op)], 1)
    return Fold(_PAIRWISE[op], parts if op == "avg" else 1)


def reduce_tensors(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """What reducing `tensors` (equal shapes and dtypes, one a position) gives: a new tensor of that dtype.

    The definition that every communicator follows; floating point sums are taken in position order.
    Raises ValueError for an unknown `op`, TypeError for a dtype that has no reduction like that.
    """
    first = tensors[0]
    dtype = first.dtype
    p = check_reduction(op, dtype)
    if len(tensors) == 1:
        return first.clone(memory_format=torch.contiguous_format)
    in_wide = wide(op, dtype)
    if in_wide is not dtype:
        return reduce_tensors([t.to(in_wide) for t in tensors], op).to(dtype)
    if p:
        return root(reduce_tensors([power(t, p) for t in tensors], "sum"), p)
    name = "sum" if p == 0 else _BOOL.get(op, op) if dtype == torch.bool else op
    both = _PAIRWISE[name]
    total = both(first, tensors[1]).contiguous()
    for t in tensors[2:]:
        total = both(total, t, out=total)
    return divided(total, len(tensors)) if name == "avg" else total


def divided(total: torch.Tensor, k: int) -> torch.Tensor:
    """A sum of `k` as their average, in place."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total.div_(k)
    return total.div_(k, rounding_mode="trunc")
