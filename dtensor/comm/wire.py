"""What travels over a process group: tensors as flat buffers of a dtype that every backend carries.

What a backend cannot carry is carried as something else of the same width (bool as uint8, int16 as the bits of
float16). What it cannot reduce, or reduces differently than `dtensor.comm.reduce_ops.reduce_tensors` says, is encoded
first or gathered and reduced here: `dtensor.comm.encodings`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = [
    "as_one", "carried", "eager", "flat_of", "items_of", "packed", "padded", "spaced", "traced", "unflat", "waited",
]  # fmt: skip

# dtypes that backends do not carry, and what they are carried as: the same bits, the same number of elements
_CARRIER = {
    torch.int16: torch.float16, torch.uint16: torch.float16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    torch.complex32: torch.int32, torch.complex64: torch.int64, torch.bool: torch.uint8,
}  # fmt: skip
_CARRIER |= {
    d: torch.uint8 for n in dir(torch) if n.startswith("float8") and isinstance(d := getattr(torch, n), torch.dtype)
}


def traced(x: torch.Tensor) -> bool:
    """True for a tensor of a trace, which has no values and of which a graph is made."""
    return type(x).__name__ in ("FakeTensor", "FunctionalTensor")


def eager(x: torch.Tensor) -> bool:
    """False for tensors without values, on meta or of a trace: their collectives must be functional ones."""
    return not x.is_meta and not traced(x)


def waited(x: torch.Tensor) -> torch.Tensor:
    """`x` itself, if it is the result of a collective that nobody has waited for yet."""
    wait: Callable[[], torch.Tensor] | None = getattr(x, "trigger_wait", None)
    return x if wait is None else wait()


def carried(x: torch.Tensor) -> torch.Tensor:
    """A view of `x`, which may have gaps, as a dtype that every backend carries."""
    if x.dtype == torch.complex128:
        return torch.view_as_real(x)
    carrier = _CARRIER.get(x.dtype)
    return x if carrier is None else x.view(carrier)


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


def unflat(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
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
