"""Small statistics of every shard, gathered over a kernel's axes, so that all ranks combine them alike.

    softmax over a sharded dim     [2, rows]: max and sum of exponentials        one all-gather
    argmax                         [2, rows]: best value and its index           one all-gather
    variance                       [3, rows]: count, mean, squared deviations    one all-gather

What is gathered is as large as the result times the number of positions, not as large as the input. Kernels
that send so little are given no cost, so that a sharded dim stays as it is.
"""

from __future__ import annotations

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.spec import Spec

__all__ = ["as_bits", "from_bits", "gather_stacked", "output_spec"]


def gather_stacked(ctx: KernelContext, x: torch.Tensor) -> torch.Tensor:
    """`x` of all positions of the kernel's axes, stacked in front: [positions, *x.shape]. Same shape everywhere."""
    if not ctx.axes:
        return x.unsqueeze(0)
    comm = ctx.in_specs[0].mesh.comm(ctx.axes)
    return torch.stack(comm.all_gather(x.contiguous(), [tuple(x.shape)] * comm.size))


def output_spec(ctx: KernelContext, i: int = 0) -> Spec:
    """Layout in which output `i`, which exists, must leave."""
    spec = ctx.out_specs[i]
    assert spec is not None
    return spec


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """Real numbers as int64 without loss, to travel together with indices."""
    return x.double().view(torch.int64) if x.is_floating_point() else x.long()


def from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `as_bits` was made from."""
    return bits.contiguous().view(torch.float64).to(dtype) if dtype.is_floating_point else bits.to(dtype)
