"""Sorting a vector that is sharded: each rank gets its part of the sorted one, nobody holds all of it.

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

Sorting and order statistics: the dim they work along is replicated, all others are free.

The largest k of a dim that is sharded are among the largest k of each part, so each rank sends those, with their global
indices, and all choose from them alike:

    rank 0 holds 5 1 9, rank 1 holds 7 8 2      largest 2: 9@2 5@0 and 8@4 7@3, of which 9@2 8@4

So does the k-th smallest, for a k near either end. NaN counts as the largest, as torch has it. Of equal values torch
gives the index of one, which one is a matter of its algorithm: each rank sends one candidate more than is needed, so
that all see where values are equal, and on CPU they then gather the dim and ask torch. A full sort, a median or a mode
moves the shard to another dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dtensor.placement import Replicate
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Kernel, Rule

from .build.exchange import axes_of, places, row
from .build.gathered import as_bits, from_bits, gather_stacked, output_spec
from .reduce import reduced_rule

__all__ = ["along"]

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
    kernel = Kernel("sort", frozenset({0}), ("shard", "shard"), _run_sort, sent // calls, calls, "all_to_all")
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


def _run_sort(ctx: KernelContext) -> tuple[torch.Tensor, torch.Tensor]:
    x, spec, out = ctx.inputs[0], ctx.in_specs[0], output_spec(ctx)
    axes = axes_of(spec, 0)
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
    splits = torch.cat((torch.zeros_like(ends), every[:, 0] + equal, ends), 1)
    lengths = splits.diff(dim=1).tolist()
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


def along(call: Call) -> Rule:
    """Outputs have the input's dims, the one named `dim` whole and of a size of its own (topk)."""
    x = call.inputs[0]
    d = call.dim()
    dims: Dims = tuple((i,) for i in range(x.ndim))
    if not dims:
        return Rule((dims,), tuple(dims for _ in call.outputs), ())
    size = max((m.shape[d] for m in call.outputs if m is not None), default=x.shape[d])
    out = dims if size == x.shape[d] else (*dims[:d], (x.ndim,), *dims[d + 1 :])
    return Rule((dims,), tuple(out for _ in call.outputs), (*x.shape, size), frozenset({d, x.ndim}))


def topk(call: Call) -> Rule:
    """The parts' candidates are compared."""
    return _comparing(call, along(call), int(call["k"]))


def reduced_along(call: Call) -> Rule:
    """One dim is reduced by an op that must see all of it."""
    rule = reduced_rule(call)
    return replace(rule, whole=frozenset({call.dim()}))


def kthvalue(call: Call) -> Rule:
    """As the last of the `k` smallest, or of the `n - k + 1` largest."""
    return _comparing(call, reduced_along(call), _nearest(call)[0])


def _nearest(call: Call) -> tuple[int, bool]:
    """How many candidates, and whether of the largest."""
    k, n = int(call["k"]), call.inputs[0].shape[call.dim()] if call.inputs[0].ndim else 1
    return min((k, False), (n - k + 1, True))


def _comparing(call: Call, rule: Rule, count: int) -> Rule:
    x, d = call.inputs[0], call.dim()
    if not x.ndim:
        return rule
    sent = 2 * (count + 1) * row(x, d) * torch.int64.itemsize // x.dtype.itemsize
    kernel = Kernel("candidates", frozenset({d}), ("replicate", "replicate"), _run_candidates, sent, 1, "all_gather")
    return replace(rule, kernels=(kernel,))


def _run_candidates(ctx: KernelContext) -> tuple[torch.Tensor, torch.Tensor]:
    x, spec, d, out = ctx.inputs[0], ctx.in_specs[0], ctx.call.dim(), output_spec(ctx)
    if "largest" in ctx.call.arguments:
        count, largest = int(ctx.call["k"]), bool(ctx.call["largest"])
    else:
        count, largest = _nearest(ctx.call)
    more = min(count + 1, spec.shape[d])
    best, at = x.topk(min(more, x.shape[d]), d, largest)
    sent = torch.stack((as_bits(best), ctx.indices(0, d, x.device)[at]))
    axes = axes_of(spec, d)
    comm = spec.mesh.comm(axes)
    sizes = [min(more, sum(n for _, n in runs)) for runs in places(spec, d)]
    values, indices = torch.cat(
        comm.all_gather(sent, [(*sent.shape[: d + 1], n, *sent.shape[d + 2 :]) for n in sizes]), d + 1
    )
    value, at = from_bits(values, x.dtype).topk(more, d, largest)
    if x.device.type == "cpu" and _some_equal(value, d):
        return _of_the_whole(ctx, d, axes)
    value, index = value.narrow(d, 0, count), indices.gather(d, at).narrow(d, 0, count)
    if "largest" not in ctx.call.arguments:
        value, index = value.narrow(d, count - 1, 1), index.narrow(d, count - 1, 1)
    return value.reshape(out.local_shape), index.reshape(out.local_shape)


def _some_equal(ordered: torch.Tensor, d: int) -> bool:
    """Whether neighbours along `d` are equal, NaN among them."""
    n = ordered.shape[d]
    if n < 2:
        return False
    a, b = ordered.narrow(d, 0, n - 1), ordered.narrow(d, 1, n - 1)
    return bool(((a == b) | ((a != a) & (b != b))).any())


def _of_the_whole(ctx: KernelContext, d: int, axes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the op itself gives, on the gathered dim."""
    spec = ctx.in_specs[0]
    whole = tuple(Replicate() if a in axes else p for a, p in enumerate(spec.placements))
    x = redistribute_local(ctx.inputs[0], spec, spec.with_placements(whole))
    value, index = ctx.call.op(x, **{n: v for n, v in ctx.call.arguments.items() if n != "self"})
    return value, index


register("aten.topk", topk)
register("aten.kthvalue", kthvalue)
register("aten.median.dim aten.mode aten.nanmedian.dim", reduced_along)
