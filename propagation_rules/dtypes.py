"""What casting does to numbers and to pending reductions."""

from __future__ import annotations

import torch

__all__ = ["accumulation_dtype", "cast_passes", "is_exact"]

Ops = tuple[tuple[str, str], ...]
"""Reduction of the inputs -> of the outputs, as in `dtensor.factors.Linear`."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are taken in: float32 for lower precisions."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def is_exact(dtype: torch.dtype) -> bool:
    """True for integers and booleans, whose averages are rounded."""
    return not (dtype.is_floating_point or dtype.is_complex)


def cast_passes(src: torch.dtype, dst: torch.dtype) -> Ops:
    """The reductions that casting `src` to `dst` passes.

    All where nothing is cast; none from booleans, to booleans and from floating to integer, which round.
    Averages of integers are rounded themselves, so they pass no cast. The parts of an unsigned sum may have
    wrapped around: they add up in their own dtype only.
    """
    if src == dst:
        return (("*", "*"),)
    order = (("max", "max"), ("min", "min"))
    if src == torch.bool or dst == torch.bool:
        return ()
    if not src.is_signed:
        return order if not dst.is_complex and (dst.is_floating_point or dst.itemsize > src.itemsize) else ()
    if dst.is_floating_point:
        if src.is_complex:
            return ()
        return (("sum", "sum"), *order) if is_exact(src) else (("sum", "sum"), ("avg", "avg"), *order)
    if dst.is_complex:
        return (("sum", "sum"),) if is_exact(src) else (("sum", "sum"), ("avg", "avg"))
    if is_exact(src) and dst.itemsize >= src.itemsize:
        return (("sum", "sum"), *order) if dst.is_signed else (("sum", "sum"),)
    return ()
