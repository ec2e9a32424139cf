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

__all__ = [
    "as_bits", "finite_top", "from_bits", "gather_stacked", "local_max_and_sum", "log_sum_exp", "merged_sums",
    "output_spec",
]  # fmt: skip


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


# ------------------------------------------------------------ softmax
def finite_top(top: torch.Tensor) -> torch.Tensor:
    """A maximum that can be subtracted: 0 in place of -inf."""
    return torch.where(top == float("-inf"), torch.zeros_like(top), top)


def local_max_and_sum(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Max over `dim` and sum of exp(x - max), both with `dim` kept; -inf and 0 for an empty shard."""
    if x.shape[dim] == 0:
        low = x.new_full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), float("-inf"))
        return low, torch.zeros_like(low)
    top = x.amax(dim, keepdim=True)
    return top, (x - finite_top(top)).exp_().sum(dim, keepdim=True)


def merged_sums(tops: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Max and sum of exp(x - max) of all positions, from theirs, stacked in front."""
    top = tops.amax(0)
    scale = torch.where(sums == 0, torch.zeros_like(tops), (tops - top).exp())
    return top, (sums * scale).sum(0)


def log_sum_exp(tops: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(max, log(sum(exp(x - max)))) from the positions' maxima and sums, stacked in front.

    They are kept apart: added up, large logits would take the logarithm's digits.
    """
    top, total = merged_sums(tops, sums)
    return top, total.log()
