"""What casting does to numbers and to pending reductions."""

from __future__ import annotations

import torch

from dtensor.rules.registry import Call

__all__ = ["accumulation_dtype", "cast_passes", "is_exact", "separate_statistics"]

Ops = tuple[tuple[str, str], ...]
"""Reduction of the inputs -> of the outputs, as in `dtensor.rules.rule.Linear`."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are taken in: float32 for lower precisions."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def separate_statistics(call: Call, saved: str, *parameters: str) -> bool:
    """True where the statistics that a norm saved are not of the dtype in which torch's CPU kernel reads them.

    It reads them in the dtype of the first of its `parameters` that is given. Kernels of rules leave float32, where
    torch's own forward may leave a lower precision; which of them ran depends on the layouts that the forward had.
    """
    given = dict(zip(call.names, call.inputs, strict=True))
    read = next((given[n].dtype for n in parameters if n in given), None)
    return given[saved].mesh.device_type == "cpu" and read not in (None, given[saved].dtype)


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
