"""Scans: cumsum, cumprod, logcumsumexp, cummax, cummin along a dim.

Along a sharded dim each rank scans its shard, sends the total of it, and continues from what the shards before
it hold:

    cumsum    rank 0: [1, 2] -> [1, 3], total 3     rank 1: [4, 5] -> [4, 9] + 3 = [7, 12]

cumprod and logcumsumexp do the same with products and log-sum-exps, cummax and cummin with the best element and
its global index (the last of equals, a NaN before all else). Positions of a kernel's axes hold ascending runs of
the dim, nested shards included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Kernel, Linear, Rule

from .build.dtypes import accumulation_dtype, cast_passes, is_exact
from .build.gathered import as_bits, from_bits, gather_stacked, output_spec

Fold = tuple[
    Callable[[torch.Tensor, int], torch.Tensor],
    Callable[[torch.Tensor, int], torch.Tensor],
    Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
]
"""Scan along a dim; fold of a dim, kept; combination of two."""

FOLDS: dict[str, Fold] = {
    "cumsum": (torch.cumsum, lambda x, d: x.sum(d, keepdim=True), torch.add),
    "cumprod": (torch.cumprod, lambda x, d: x.prod(d, keepdim=True), torch.mul),
    "logcumsumexp": (torch.logcumsumexp, lambda x, d: x.logsumexp(d, keepdim=True), torch.logaddexp),
}


def scan(call: Call) -> Rule:
    """The scanned dim is replicated, with a kernel; cumsum is linear."""
    x, out = call.inputs[0], call.outputs[0]
    assert out is not None
    dims: Dims = tuple((d,) for d in range(x.ndim))
    name = _name(call)
    passed = [op for op, _ in cast_passes(x.dtype, out.dtype)] if name == "cumsum" else []
    sums = [op for op in ("sum", "avg") if op in passed or ("*" in passed and not (op == "avg" and is_exact(x.dtype)))]
    groups = (Linear(frozenset({0}), tuple((op, op) for op in sums)),) if sums else ()
    if not dims:
        return Rule((dims,), (dims,), (), linear=groups)
    d = call.dim()
    kernels: tuple[Kernel, ...] = ()
    if not (name == "logcumsumexp" and x.dtype.is_complex):
        kernels = (Kernel(f"scan {name}", frozenset({d}), ("shard",), _run),)
    return Rule((dims,), (dims,), tuple(x.shape), frozenset({d}), linear=groups, kernels=kernels)


def _name(call: Call) -> str:
    return str(call.op._schema.name).rpartition("::")[2].rstrip("_")


def _run(ctx: KernelContext) -> torch.Tensor:
    out = output_spec(ctx)
    d = ctx.call.dim()
    through, fold, combine = FOLDS[_name(ctx.call)]
    x = ctx.inputs[0].to(out.dtype).to(accumulation_dtype(out.dtype))
    totals = gather_stacked(ctx, fold(x, d))
    mine = through(x, d)
    before = _position(ctx)
    if before:
        mine = combine(mine, fold(totals[:before], 0).squeeze(0))
    return mine.to(out.dtype)


def _position(ctx: KernelContext) -> int:
    """This rank's position along the kernel's axes."""
    return ctx.in_specs[0].mesh.comm(ctx.axes).rank


# ------------------------------------------------------------ extremes so far
def extreme_scan(call: Call) -> Rule:
    """Values and indices; the scanned dim is replicated, with a kernel."""
    x = call.inputs[0]
    dims: Dims = tuple((d,) for d in range(x.ndim))
    if not dims:
        return Rule((dims,), (dims, dims), ())
    kernel = Kernel(f"scan {_name(call)}", frozenset({call.dim()}), ("shard", "shard"), _run_extreme)
    return Rule((dims,), (dims, dims), tuple(x.shape), frozenset({call.dim()}), kernels=(kernel,))


def _run_extreme(ctx: KernelContext) -> tuple[torch.Tensor, torch.Tensor]:
    x, d, mine = ctx.inputs[0], ctx.call.dim(), _position(ctx)
    largest = _name(ctx.call) == "cummax"
    values, slots = (torch.cummax if largest else torch.cummin)(x, d)
    at = ctx.indices(0, d, x.device)[slots]
    kept = [1 if e == d else n for e, n in enumerate(x.shape)]
    last = (values.narrow(d, -1, 1), at.narrow(d, -1, 1)) if x.shape[d] else (x.new_zeros(kept), at.new_full(kept, -1))
    sent = gather_stacked(ctx, torch.stack((as_bits(last[0]), last[1])))
    for before, index in zip(from_bits(sent[:mine, 0], x.dtype).flip(0), sent[:mine, 1].flip(0), strict=True):
        beaten = (values < before) if largest else (values > before)
        takes = (index >= 0) & (values == values) & (beaten | (before != before))
        values, at = torch.where(takes, before, values), torch.where(takes, index, at)
    return values, at


register("aten.cumsum aten.cumprod aten.logcumsumexp", scan)
register("aten.cummax aten.cummin", extreme_scan)
