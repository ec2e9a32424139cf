"""Composites of torch that work on memory in C++: on DTensors, the same by ops.

Most composites are made of ops and need nothing here. These read a tensor's memory (the places of `tensor_split`) or
write into a plain tensor that they make themselves and return (`vander`, `pad_sequence`). Dispatch would see too
late what they do, so they are caught above autograd, by a kernel of the dispatch key `PythonTLSSnapshot`: it is asked
first, and only tensors of Python classes have it, so calls on plain tensors are never touched. What runs instead is
ordinary code on DTensors, with its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor import dispatch as hot
from dtensor.dispatch_call import flat, is_dtensor
from dtensor.placement import Replicate

__all__ = ["instead_of"]

_libraries: dict[str, torch.library.Library] = {}


def instead_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a function in place of the op `name`, as `aten::vander`, on calls that have a DTensor among the arguments.

    Where it returns NotImplemented the op runs after all.
    """

    def register(f: Callable[..., Any]) -> Callable[..., Any]:
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op: hot.Op = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if any(map(is_dtensor, flat(args, kwargs))):
                out = f(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            return op.redispatch(keys.remove(torch._C.DispatchKey.PythonTLSSnapshot), *args, **kwargs)

        library = _libraries.setdefault(space, torch.library.Library(space, "IMPL"))
        library.impl(rest, kernel, "PythonTLSSnapshot", with_keyset=True)
        return f

    return register


@instead_of("aten::tensor_split.tensor_indices_or_sections")
def _tensor_split(x: torch.Tensor, where: torch.Tensor, dim: int = 0) -> Any:
    return torch.tensor_split(x, where.tolist(), dim)


@instead_of("aten::vander")
def _vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:
    count = x.shape[0] if N is None else N
    if count < 0:
        raise RuntimeError("N must be non-negative.")
    if count > 1:
        powers = torch.linalg.vander(x, N=count)
    else:
        dtype = torch.promote_types(x.dtype, torch.int64)
        powers = torch.ones_like(x, dtype=dtype).unsqueeze(-1)[:, :count]
    return powers if increasing else powers.flip(-1)


@instead_of("aten::dist")
def _dist(x: torch.Tensor, y: torch.Tensor, p: float = 2) -> Any:
    """The largest difference: its gradient finds where that is by comparing, so the difference is made only once."""
    if p != math.inf:
        return NotImplemented
    d: Any = x - y
    if d._spec.has_partial():
        d = d.redistribute(placements=[Replicate() if q.is_partial() else q for q in d.placements])
    return torch.linalg.vector_norm(d, p)


@instead_of("aten::pad_sequence")
def _pad_sequence(
    sequences: Sequence[torch.Tensor], batch_first: bool = False, padding_value: float = 0.0,
    padding_side: str = "right",
) -> torch.Tensor:  # fmt: skip
    if padding_side not in ("left", "right"):
        raise RuntimeError(f"Expected padding_side to be one of left or right, but got {padding_side}.")
    longest = max(s.shape[0] for s in sequences)
    padded = []
    for s in sequences:
        missing = longest - s.shape[0]
        ends = [0, missing] if padding_side == "right" else [missing, 0]
        padded.append(torch.nn.functional.pad(s, [0, 0] * (s.ndim - 1) + ends, value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


@instead_of("aten::_pack_padded_sequence")
def _pack_padded_sequence(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, Any]:
    """The steps of all sequences that are long enough, one time after the other; sizes are read by Python."""
    counts = lengths.tolist()
    if any(a < b for a, b in zip(counts, counts[1:], strict=False)) or not counts or counts[-1] <= 0:
        raise RuntimeError("pack_padded_sequence: lengths must be positive and in decreasing order")
    steps = x.transpose(0, 1) if batch_first else x
    if len(counts) != steps.shape[1]:
        raise RuntimeError(f"pack_padded_sequence: {len(counts)} lengths for a batch of {steps.shape[1]}")
    sizes = [sum(n > t for n in counts) for t in range(counts[0])]
    return torch.cat([steps[t, :b] for t, b in enumerate(sizes)]), torch.tensor(sizes)


@instead_of("aten::_pad_packed_sequence")
def _pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = batch_sizes.tolist()
    if 0 < total_length < len(sizes):
        raise RuntimeError(f"pad_packed_sequence: total_length={total_length} is less than the longest, {len(sizes)}")
    fill = lambda t, n: torch.nn.functional.pad(  # noqa: E731
        t, [0, 0] * (t.ndim - 1) + [0, n - t.shape[0]], value=padding_value
    )
    steps = fill(torch.stack([fill(part, sizes[0]) for part in data.split(sizes)]), max(len(sizes), total_length))
    lengths = torch.tensor([sum(b > i for b in sizes) for i in range(sizes[0])])
    return (steps.transpose(0, 1) if batch_first else steps), lengths


@instead_of("aten::fill_diagonal_")
def _fill_diagonal(x: torch.Tensor, value: Any, wrap: bool = False) -> torch.Tensor:
    """By views of the diagonal: torch strides over the memory, which has gaps in a view."""
    torch.empty(x.shape, device="meta").fill_diagonal_(value, wrap)  # torch's own checks
    rows, columns = x.shape[:2]
    for start in range(0, rows, columns + 1) if wrap and x.ndim == 2 else (0,):
        part: torch.Tensor = x[start:] if start else x
        while part.ndim > 1:
            part = part.diagonal(0, 0, 1)
        part.fill_(value)
    return x
