"""Sorting a vector that is cut: each rank gets its part of the sorted one, nobody holds all of it.

    rank 0 holds 5 1 9 3, rank 1 holds 4 8 2 7          sorted 1 2 3 4 | 5 7 8 9
    1. each sorts its part                               1 3 5 9 and 2 4 7 8
    2. together they look for the key at the boundary    4 keys lie below 5
    3. one all-to-all: what lies below goes left         rank 0 keeps 1 3, gets 2 4; rank 1 keeps 7 8, gets 5 9
    4. each sorts what it has

Keys are integers in the order of the values (NaN last, or first when descending; -0 equals 0). Step 2 finds those at
all boundaries at once, four bits a round, from counts that all ranks add up. Of equal keys those on earlier positions
come first, so the sort is always stable, and each position knows how many of its own go below. How much goes where
depends on the data, but every rank knows all of it from the gathered counts; which collectives are called does not.

Tensors of several dims are sorted after their shard was moved to another dim, which costs less.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Kernel, Rule

from .build.exchange import cutting, places
from .build.gathered import gather_stacked, output_spec
from .order import along

LOWEST = torch.iinfo(torch.int64).min
DIGIT = 4  # bits of a key found in one round
ROUNDS = 64 // DIGIT


def sort(call: Call) -> Rule:
    """Of a vector the kernel sorts the parts."""
    rule, x = along(call), call.inputs[0]
    if x.ndim != 1 or x.dtype.is_complex:
        return rule
    sent = x.local_numel_bound * (x.dtype.itemsize + 8) // x.dtype.itemsize
    calls = ROUNDS + 2  # each is stated to send its share of what the one exchange does
    kernel = Kernel("sort", frozenset({0}), ("shard", "shard"), _run, sent // calls, calls, "all_to_all")
    return replace(rule, kernels=(kernel,))


def sort_keys(x: torch.Tensor, descending: bool) -> torch.Tensor:
    """Integers in the order in which torch sorts the values of `x`."""
    if x.is_floating_point():
        bits = (x.double() + 0.0).view(torch.int64)
        keys = torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)
        keys = torch.where(x != x, torch.iinfo(torch.int64).max, keys)
    else:
        keys = x.long()
    return ~keys if descending else keys


def _boundary_keys(ctx: KernelContext, keys: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The key at each of the places `starts` of the sorted whole; `keys` are this rank's, ascending."""
    found = torch.full_like(starts, LOWEST)
    digits = torch.arange(1, 1 << DIGIT, device=keys.device)
    for shift in range(64 - DIGIT, -1, -DIGIT):
        tried = found[:, None] + (digits << shift)
        below = ctx.all_reduce(torch.searchsorted(keys, tried), "sum")
        found = found + ((below <= starts[:, None]).sum(1) << shift)
    return found


def _run(ctx: KernelContext) -> tuple[torch.Tensor, torch.Tensor]:
    x, spec, out = ctx.inputs[0], ctx.in_specs[0], output_spec(ctx)
    axes = cutting(spec, 0)
    comm = spec.mesh.comm(axes)
    descending = bool(ctx.call["descending"])
    value, at = x.sort(stable=True, dim=0, descending=descending)
    index = ctx.indices(0, 0, x.device)[at]
    keys = sort_keys(value, descending)

    sizes = [sum(n for _, n in runs) for runs in places(spec, 0)]
    starts = torch.tensor([sum(sizes[:q]) for q in range(1, comm.size)], device=x.device)
    edge = _boundary_keys(ctx, keys, starts)
    less = torch.searchsorted(keys, edge)
    counts = torch.stack((less, torch.searchsorted(keys, edge, right=True) - less))
    every = gather_stacked(ctx, counts)
    wanted = starts - every[:, 0].sum(0)  # of the equal ones, how many lie before the boundary
    equal = (wanted - (every[:, 1].cumsum(0) - every[:, 1])).clamp(min=0).minimum(every[:, 1])
    ends = torch.tensor(sizes, device=x.device)[:, None]
    cuts = torch.cat((torch.zeros_like(ends), every[:, 0] + equal, ends), 1)
    lengths = cuts.diff(dim=1).tolist()
    if not torch.equal(every[comm.rank], counts):  # a world that computes nothing
        return x.new_zeros(out.local_shape), index.new_zeros(out.local_shape)

    width = value.dtype.itemsize
    both = torch.cat((value.view(torch.uint8).reshape(-1, width), index.view(torch.uint8).reshape(-1, 8)), 1)
    parts = comm.all_to_all(list(both.split(lengths[comm.rank])), [(row[comm.rank], width + 8) for row in lengths])
    got = torch.cat(parts)
    values = got[:, :width].clone(memory_format=torch.contiguous_format).view(x.dtype).reshape(-1)
    indices = got[:, width:].clone(memory_format=torch.contiguous_format).view(torch.int64).reshape(-1)
    value, at = values.sort(stable=True, dim=0, descending=descending)
    return value, indices[at]


register("aten.sort", sort)
