"""How a group reduces what it does not reduce by itself: encoded, reduced with an op of the group's own, decoded.

    op            dtype                      travels as                    reduced with   decoded
    any           floats, int8 to int64      itself                        the op         -
    avg           int64                      itself                        sum            divided, toward zero
    avg           other integers             int64                         sum            divided, toward zero, and back
    norm<p>       floats                     float64, powers with signs    sum            root, and back
    max, min      float32, float64           integers of the same order    the op         the float of that order
    max, min      other floats               float32, as those             the op         and back
    any           int16, uint16, uint32      the next wider signed one     the op         the low bits
    any           float8                     float32                       the op         rounded
    sum, max, or  bool                       uint8                         max            -
    avg, min, and, product   bool            uint8                         min            -
    bxor          bool                       uint8                         sum            the last bit
    sum, avg      complex64, complex128      pairs of reals                the op         -
    else: product and complex32, uint64, bits on NCCL     gathered, reduced here by `dtensor.comm.reduce_ops`

gloo and NCCL may drop a NaN from a max or a min, so floats travel as integers. The bits of a float read as an integer
are in order but for the negative ones, which run backwards, and the NaNs, which lie beyond both infinities:

    NaN of sign -, -inf .. -0.0, 0.0 .. inf, NaN of sign +        negative bits reversed: this order
    -inf .. -0.0, 0.0 .. inf, NaN of either sign                  less the number of NaNs of a sign, which wraps: max
    NaN of either sign, -inf .. -0.0, 0.0 .. inf                  more by it: min

Every element is encoded by itself, in its place, so that parts may be sharded before or after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from dtensor.comm.reduce_ops import check_reduction, power, root, wide

__all__ = ["Reduction", "Step", "reduction", "widened"]

Step = Callable[[torch.Tensor], torch.Tensor]


class Reduction(NamedTuple):
    """How a backend reduces: `encode`, reduce with the backend's `wire` op, `decode`. `wire` None: gather instead.

    `decode` may write to what was reduced.
    """

    wire: str | None
    encode: Step | None = None
    decode: Step | None = None


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_NANS = {torch.float32: (1 << 23) - 1, torch.float64: (1 << 52) - 1}
"""NaNs of one sign."""

# dtypes that backends do not reduce, and what they are converted to first
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_WIDER |= {
    d: torch.float32 for n in dir(torch) if n.startswith("float8") and isinstance(d := getattr(torch, n), torch.dtype)
}
_GATHERED = Reduction(None)


@functools.cache
def reduction(op: str, dtype: torch.dtype, size: int, native_bits: bool) -> Reduction:
    """How a group of `size` reduces `dtype` with `op`. Raises as `check_reduction` does.

    `native_bits`: the group has the bit operations.
    """
    p = check_reduction(op, dtype)
    if op in ("band", "bor", "bxor") and not native_bits and dtype != torch.bool:
        return _GATHERED
    if dtype == torch.bool:
        return _of_bool(op)
    wider = wide(op, dtype) if p is not None or op == "avg" else _WIDER.get(dtype, dtype)
    if wider is not dtype:
        return widened(reduction(op, wider, size, native_bits), wider, dtype)
    if dtype == torch.uint64:
        return _GATHERED
    if dtype.is_complex:
        if op not in ("sum", "avg") or dtype == torch.complex32:
            return _GATHERED
        return Reduction(op, lambda x: torch.view_as_real(x.resolve_conj()), torch.view_as_complex)
    if p is not None:
        if p == 0:
            return Reduction("sum")
        return Reduction("sum", lambda x: power(x, p), lambda x: root(x, p))
    if dtype.is_floating_point and op in ("max", "min"):
        if dtype in _BITS:
            return _ordered(op, dtype)
        return widened(_ordered(op, torch.float32), torch.float32, dtype)
    if op == "avg" and not dtype.is_floating_point:
        return Reduction("sum", None, lambda x: x.div_(size, rounding_mode="trunc"))
    return Reduction(op)


def widened(inner: Reduction, wide: torch.dtype, dtype: torch.dtype) -> Reduction:
    """`inner`, which is of `wide`, for another `dtype` that is converted to it (`type` takes less time than `to`)."""
    enc, dec = inner.encode, inner.decode
    return Reduction(
        inner.wire,
        (lambda x: enc(x.type(wide))) if enc else (lambda x: x.type(wide)),
        (lambda x: dec(x).type(dtype)) if dec else (lambda x: x.type(dtype)),
    )


def _ordered(op: str, dtype: torch.dtype) -> Reduction:
    """max or min of floats by integers of the same order, NaN beyond the infinity that `op` looks for."""
    bits = _BITS[dtype]
    sign, all_but_sign = 8 * bits.itemsize - 1, torch.iinfo(bits).max
    turn = -_NANS[dtype] if op == "max" else _NANS[dtype]

    def encode(x: torch.Tensor) -> torch.Tensor:
        b = x.contiguous().view(bits)
        return (b >> sign).bitwise_and_(all_but_sign).bitwise_xor_(b).add_(turn)

    def decode(c: torch.Tensor) -> torch.Tensor:
        c = c.sub_(turn)
        return (c >> sign).bitwise_and_(all_but_sign).bitwise_xor_(c).view(dtype)

    return Reduction(op, encode, decode)


def _of_bool(op: str) -> Reduction:
    def encode(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(torch.uint8)

    if op == "bxor":
        # parity survives uint8's wrap-around
        return Reduction("sum", encode, lambda x: x.bitwise_and_(1).view(torch.bool))
    return Reduction("max" if op in ("sum", "max", "bor") else "min", encode, lambda x: x.view(torch.bool))
