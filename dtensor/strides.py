"""The order in which dims lie in memory: that of a local tensor follows the strides of its spec.

What a view may do is decided by the global strides, so the parts must agree with them on every rank. Local ops keep
the order by themselves; what was moved, or made by a kernel, is brought into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["dense", "in_order", "stride_like"]


def in_order(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """`local` itself where its dims lie in memory in the order of `stride`, else a copy that does.

    Views are decided by the global strides, so the local ones must agree with them.
    """
    if len(stride) != local.ndim:
        return local
    dims = [d for d in range(local.ndim) if local.shape[d] > 1]
    asked = [local.stride(d) for d in sorted(dims, key=lambda d: -stride[d])]
    if asked == sorted(asked, reverse=True):
        return local
    order = sorted(range(local.ndim), key=lambda d: (-stride[d], d))
    back = sorted(range(local.ndim), key=order.__getitem__)
    return local.permute(order).contiguous().permute(back)


def dense(t: torch.Tensor) -> bool:
    """True when the elements fill one block of memory, in some order of the dims."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != step:
            return t.numel() == 0
        step *= size
    return True


def stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense global tensor whose dims lie in memory in the order of `local`'s."""
    stride, step = [0] * local.ndim, 1
    for d in sorted(range(local.ndim), key=lambda d: (local.stride(d), -d)):
        stride[d] = step
        step *= max(shape[d], 1)
    return tuple(stride)
