"""Where the largest and smallest elements are: argmax, argmin, max and min along a dim.

Indices are not a matter of local op plus reduction: a shard's index is local, and the winner is on one rank only.
Each rank sends its best value and the global index of it; all ranks choose alike. As torch does, the first of
equals wins and NaN beats everything:

    rank 0 holds [3, 7]: (7, 1)      rank 1 holds [7, 5]: (7, 2)      argmax = 1
    an empty shard sends the least number and an index beyond all others
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Kernel, Rule

from .build.gathered import as_bits, from_bits, gather_stacked, output_spec
from .reduce import least, reduced_dims, reduced_rule

BEYOND = torch.iinfo(torch.int64).max


def extreme(call: Call) -> Rule:
    """Reduced dims are whole; a kernel compares the shards' candidates."""
    gone = reduced_dims(call)
    n = len(call.outputs)
    kernel = Kernel("extreme", frozenset(gone), ("replicate",) * n, _run)
    return replace(reduced_rule(call), whole=frozenset(gone), kernels=(kernel,))


def _candidates(ctx: KernelContext, of: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Best value and its global index of this shard, reduced dims kept with size 1."""
    x, gone = ctx.inputs[0], reduced_dims(ctx.call)
    x = x.to(torch.uint8) if x.dtype == torch.bool else x  # argmax takes no booleans
    kept = [1 if d in gone else n for d, n in enumerate(x.shape)]
    if not all(x.shape[d] for d in gone):
        return x.new_full(kept, least(x.dtype, of)), torch.full(kept, BEYOND, dtype=torch.int64, device=x.device)
    pick = torch.argmax if of == "max" else torch.argmin
    if len(gone) == 1:
        at = pick(x, gone[0], keepdim=True)
        return x.gather(gone[0], at), ctx.indices(0, gone[0], x.device)[at]
    flat = pick(x)
    value = x.reshape(-1)[flat].reshape(kept)
    index, size = torch.zeros_like(flat), 1
    for d in reversed(range(x.ndim)):
        index = index + ctx.indices(0, d, x.device)[flat % x.shape[d]] * size
        flat, size = flat // x.shape[d], size * ctx.in_specs[0].shape[d]
    return value, index.reshape(kept)


def _run(ctx: KernelContext) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    of = "max" if "max" in ctx.call.op._schema.name else "min"
    value, index = _candidates(ctx, of)
    sent = gather_stacked(ctx, torch.stack((as_bits(value), index)))
    values, indices = from_bits(sent[:, 0], value.dtype), sent[:, 1]
    best = values.amax(0) if of == "max" else values.amin(0)
    wins = (values == best) | ((values != values) & (best != best))
    first = torch.where(wins, indices, BEYOND).amin(0)
    out = output_spec(ctx)
    if len(ctx.out_specs) == 1:
        return first.reshape(out.local_shape)
    return best.reshape(out.local_shape).to(out.dtype), first.reshape(out.local_shape)


register("aten.argmax aten.argmin aten.max.dim aten.min.dim", extreme)
