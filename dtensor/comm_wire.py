"""What travels over a process group: tensors as flat buffers of a dtype that every backend carries and reduces.

What a backend cannot carry is carried as something else of the same width (bool as uint8, int16 as the bits of
float16); what it cannot reduce, or reduces differently than `dtensor.reductions.reduce_tensors` says, is encoded first
or gathered and reduced here:

    max, min of floats   as integers of the same order in which NaN is the extreme: gloo and NCCL may drop NaN
    sum of booleans      as max of uint8
    complex              sums as pairs of reals, products gathered
    bit operations       native on gloo, gathered on NCCL
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtensor.comm import Pending, Shape
from dtensor.reductions import check_reduction

__all__ = [
    "OPS", "Reduction", "Step", "as_one", "carried", "carrier_of", "eager", "flat_of", "items_of", "packed", "padded",
    "put", "reduction", "shaped", "spaced", "unflat", "waited",
]  # fmt: skip

Step = Callable[[torch.Tensor], torch.Tensor]

# dtypes that backends do not carry, and what they are carried as: the same bits, the same number of elements
_CARRIER = {
    torch.int16: torch.float16, torch.uint16: torch.float16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    torch.complex32: torch.int32, torch.complex64: torch.int64, torch.bool: torch.uint8,
}  # fmt: skip
_CARRIER |= {
    d: torch.uint8 for n in dir(torch) if n.startswith("float8") and isinstance(d := getattr(torch, n), torch.dtype)
}
# dtypes that backends do not reduce, and what they are converted to first
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_WIDER |= {d: torch.float32 for d, c in _CARRIER.items() if c == torch.uint8 and d != torch.bool}


def eager(x: torch.Tensor) -> bool:
    """False for tensors without values, of which a graph is made: its collectives must be functional ones."""
    return type(x).__name__ not in ("FakeTensor", "FunctionalTensor")


def waited(x: torch.Tensor) -> torch.Tensor:
    """`x` itself, if it is the result of a collective that nobody has waited for yet."""
    wait: Callable[[], torch.Tensor] | None = getattr(x, "trigger_wait", None)
    return x if wait is None else wait()


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """What elements of `dtype` are carried as, one for one (`dtype` itself also for complex128, carried as pairs)."""
    return _CARRIER.get(dtype, dtype)


def carried(x: torch.Tensor) -> torch.Tensor:
    """A view of `x`, which may have gaps, as a dtype that every backend carries."""
    if x.dtype == torch.complex128:
        return torch.view_as_real(x)
    carrier = _CARRIER.get(x.dtype)
    return x if carrier is None else x.view(carrier)


def put(pending: Pending[list[torch.Tensor]], into: Sequence[torch.Tensor] | None) -> Pending[list[torch.Tensor]]:
    """Parts that arrive, copied to where they are wanted."""
    if into is None:
        return pending

    def finish() -> list[torch.Tensor]:
        for to, part in zip(into, pending.wait()):
            to.copy_(part)
        return list(into)

    return Pending(finish=finish)


def flat_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as a contiguous 1-D tensor of a dtype that every backend carries (complex128: pairs of reals)."""
    if x.is_conj():
        x = x.resolve_conj()
    if x.is_neg():
        x = x.resolve_neg()
    x = x.reshape(-1)
    if not x.is_contiguous():
        x = x.contiguous()
    if x.dtype == torch.complex128:
        return torch.view_as_real(x).view(-1)
    carrier = _CARRIER.get(x.dtype)
    return x if carrier is None else x.view(carrier)


def items_of(dtype: torch.dtype) -> int:
    """Elements of the carrier for one element of `dtype`."""
    return 2 if dtype == torch.complex128 else 1


def unflat(flat: torch.Tensor, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """A view of `flat`, as `flat_of` made it, as a tensor of `shape` and `dtype`."""
    if dtype == torch.complex128:
        return torch.view_as_complex(flat.view(-1, 2)).view(tuple(shape))
    return (flat if flat.dtype == dtype else flat.view(dtype)).view(tuple(shape))


def padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """`flat` with zeros behind it, `numel` elements in all."""
    if flat.numel() == numel:
        return flat
    return torch.cat([flat, flat.new_zeros(numel - flat.numel())])


def as_one(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts in one flat tensor: a view where they follow each other in memory, else a copy."""
    some = [f for f in flats if f.numel()]
    if not some:
        return flats[0]
    at, storage = some[0].storage_offset(), some[0].untyped_storage()._cdata  # tensors without data have one too
    for f in some:
        if f.storage_offset() != at or f.untyped_storage()._cdata != storage:
            return torch.cat(list(flats))
        at += f.numel()
    return some[0].as_strided((at - some[0].storage_offset(),), (1,))


def packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts in one flat tensor of their dtype: a view where they follow each other, else one copy."""
    if all(p.is_contiguous() and not p.is_conj() and not p.is_neg() for p in parts):
        return as_one([p.view(-1) for p in parts])
    out = torch.empty(sum(p.numel() for p in parts), dtype=parts[0].dtype, device=parts[0].device)
    at = 0
    for p in parts:
        out[at : at + p.numel()].view(p.shape).copy_(p)
        at += p.numel()
    return out


def spaced(parts: Sequence[torch.Tensor], numel: int) -> torch.Tensor:
    """The parts in one flat tensor, `numel` elements from one to the next, zeros between."""
    out = torch.empty(len(parts) * numel, dtype=parts[0].dtype, device=parts[0].device)
    for i, p in enumerate(parts):
        slot = out[i * numel : (i + 1) * numel]
        slot[: p.numel()].view(p.shape).copy_(p)
        slot[p.numel() :].zero_()
    return out


def shaped(got: torch.Tensor, decode: Step | None, shape: Shape) -> torch.Tensor:
    """What a reduction gave, decoded, as a tensor of `shape`."""
    return (got if decode is None else decode(got)).view(tuple(shape))


OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT, "band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip


class Reduction(NamedTuple):
    """How a backend reduces: `encode`, reduce with the backend's `wire` op, `decode`. `wire` None: gather instead."""

    wire: str | None
    encode: Step | None = None
    decode: Step | None = None


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _ordered(op: str, dtype: torch.dtype) -> Reduction:
    """max or min of floats by integers of the same order, NaN beyond the infinity that `op` looks for."""
    wide = dtype if dtype in _BITS else torch.float32
    bits = _BITS[wide]
    mask, nan = torch.iinfo(bits).max, torch.iinfo(bits).max if op == "max" else torch.iinfo(bits).min

    def encode(x: torch.Tensor) -> torch.Tensor:
        b = x.to(wide).contiguous().view(bits)
        return torch.where(b < 0, b ^ mask, b).masked_fill_(x.isnan(), nan)

    def decode(b: torch.Tensor) -> torch.Tensor:
        return torch.where(b < 0, b ^ mask, b).view(wide).to(dtype)

    return Reduction(op, encode, decode)


@functools.cache
def reduction(op: str, dtype: torch.dtype, size: int, native_bits: bool) -> Reduction:
    """How a group of `size` reduces `dtype` with `op`. Raises as `check_reduction` does."""
    p = check_reduction(op, dtype)
    if op in ("band", "bor", "bxor") and not native_bits and dtype != torch.bool:
        return Reduction(None)
    if dtype == torch.bool:
        return _bool_reduction(op)
    if dtype in _WIDER:
        wide = _WIDER[dtype]
        inner = reduction(op, wide, size, native_bits)
        enc, dec = inner.encode, inner.decode
        return Reduction(
            inner.wire,
            (lambda x: enc(x.to(wide))) if enc else (lambda x: x.to(wide)),
            (lambda x: dec(x).to(dtype)) if dec else (lambda x: x.to(dtype)),
        )
    if dtype == torch.uint64:
        return Reduction(None)
    if dtype.is_complex:
        if op not in ("sum", "avg") or dtype == torch.complex32:
            return Reduction(None)
        return Reduction(op, lambda x: torch.view_as_real(x.resolve_conj()), torch.view_as_complex)
    if p is not None:
        if p == 0:
            return Reduction("sum")
        return Reduction("sum", lambda x: x**p, lambda x: x ** (1 / p))
    if dtype.is_floating_point:
        return _ordered(op, dtype) if op in ("max", "min") else Reduction(op)
    if op == "avg":
        return Reduction("sum", None, lambda x: torch.div(x, size, rounding_mode="trunc"))
    return Reduction(op)


def _bool_reduction(op: str) -> Reduction:
    def encode(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(torch.uint8)

    if op == "bxor":
        return Reduction("sum", encode, lambda x: (x & 1).view(torch.bool))  # parity survives uint8's wrap-around
    return Reduction("max" if op in ("sum", "max", "bor") else "min", encode, lambda x: x.view(torch.bool))
