"""Sorting and order statistics: the dim they work along is whole, all others are free.

The largest k of a dim that is cut are among the largest k of each part, so each rank sends those, with their global
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

from .build.exchange import cutting, places, row
from .build.gathered import as_bits, from_bits, output_spec
from .reduce import reduced_rule

__all__ = ["along"]


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
    kernel = Kernel("candidates", frozenset({d}), ("replicate", "replicate"), _run, sent, 1, "all_gather")
    return replace(rule, kernels=(kernel,))


def _run(ctx: KernelContext) -> tuple[torch.Tensor, torch.Tensor]:
    x, spec, d, out = ctx.inputs[0], ctx.in_specs[0], ctx.call.dim(), output_spec(ctx)
    if "largest" in ctx.call.arguments:
        count, largest = int(ctx.call["k"]), bool(ctx.call["largest"])
    else:
        count, largest = _nearest(ctx.call)
    more = min(count + 1, spec.shape[d])
    best, at = x.topk(min(more, x.shape[d]), d, largest)
    sent = torch.stack((as_bits(best), ctx.indices(0, d, x.device)[at]))
    axes = cutting(spec, d)
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
