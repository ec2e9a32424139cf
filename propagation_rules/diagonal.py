"""Diagonals: taken out, put back, put among zeros.

Of a matrix whose rows (or columns) are sharded, each rank holds the part of the diagonal that crosses them:

    4 x 4 on 2 ranks, offset 1      rows [0, 2) hold entries 0 1, rows [2, 4) entry 2       as they lie
                                    the diagonal of 3 over 2 ranks is 0 1 | 2               as they leave

A kernel reads or writes that part and exchanges it (`build.exchange`) with the even shards of the diagonal
as a dim of its own. Where both dims are sharded, by two axes, one of them is moved.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from dtensor.redistribute.executor.run import resolved
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Linear, Rule, passes
from dtensor.spec import Spec, in_order

from .build.exchange import Places, Run, axes_of, exchange, places
from .build.exchange_rules import MOVES, exchanging
from .build.gathered import output_spec
from .build.labelled import labelled, local_size

CUT = "diagonal"  # the label of the dim that is sharded, of the two, and of the diagonal


def _labels(n: int, call: Call, sharded: int) -> tuple[list[Hashable], list[Hashable]]:
    """Labels of a matrix of `n` dims and of its diagonal; the dim `split` of the pair goes with the diagonal."""
    pair = {call["dim1"] % n, call["dim2"] % n}
    full: list[Hashable] = [CUT if d == sharded else None if d in pair else d for d in range(n)]
    return full, [d for d in range(n) if d not in pair] + [CUT]


def _pair(call: Call, n: int) -> tuple[int, int]:
    return call["dim1"] % n, call["dim2"] % n


def _cut_dim(call: Call, matrix: Spec | None, n: int) -> int:
    """The dim of the pair that the kernel shards: the first one, unless the second is sharded and the first is not."""
    first, second = _pair(call, n)
    return second if matrix is not None and axes_of(matrix, second) and not axes_of(matrix, first) else first


# ------------------------------------------------------------ rules
def diagonal(call: Call) -> Rule:
    """The diagonal is a new last dim."""
    x = call.inputs[0]
    sharded = _cut_dim(call, x, x.ndim)
    full, short = _labels(x.ndim, call, sharded)
    rule = labelled(call, [full], [short], resized=(CUT,), linear=MOVES)
    length = call.outputs[0].shape[-1] if call.outputs[0] is not None else 0
    run = lambda ctx: _take(ctx, sharded)  # noqa: E731
    return replace(rule, kernels=exchanging(call, rule.inputs[0][sharded], [length], run))


def _put_rule(call: Call, n: int, scatters: bool, linear: tuple[Linear, ...]) -> Rule:
    sharded = _cut_dim(call, call.inputs[0] if scatters else None, n)
    full, short = _labels(n, call, sharded)
    inputs = [full, short] if scatters else [short]
    rule = labelled(call, inputs, [full], resized=(CUT,), linear=linear)
    run = lambda ctx: _put(ctx, sharded)  # noqa: E731
    return replace(rule, kernels=exchanging(call, rule.outputs[0][sharded], [call.inputs[-1].local_numel_bound], run))


def diagonal_backward(call: Call) -> Rule:
    """The gradient on the diagonal of zeros."""
    return local_size("input_sizes", _put_rule(call, len(call["input_sizes"]), False, MOVES))


def diagonal_scatter(call: Call) -> Rule:
    """The source takes the place of the diagonal."""
    return _put_rule(call, call.inputs[0].ndim, True, (passes(0, 1),))


def diag_embed(call: Call) -> Rule:
    """The last dim becomes the diagonal of two new ones."""
    return _put_rule(call, call.inputs[0].ndim + 1, False, MOVES)


# ------------------------------------------------------------ kernels
def _crossing(call: Call, matrix: Spec, sharded: int) -> tuple[int, int, Places, Places]:
    """The other dim, by how much its index is larger than that of `sharded`, and per position the indices of `sharded`
    on the diagonal and the entries of the diagonal that they are.
    """  # noqa: D205 - one sentence
    first, second = _pair(call, matrix.ndim)
    other = second if sharded == first else first
    shift = int(call["offset"]) * (1 if sharded == first else -1)
    low, high = max(-shift, 0), min(matrix.shape[sharded], matrix.shape[other] - shift)
    held = tuple(
        tuple((max(a, low), min(a + n, high) - max(a, low)) for a, n in runs if max(a, low) < min(a + n, high))
        for runs in places(matrix, sharded)
    )
    return other, shift, held, tuple(tuple((a - low, n) for a, n in runs) for runs in held)


def _index(
    ctx: KernelContext, matrix: Spec, sharded: int, held: Places, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Where this rank's part of the diagonal lies: local index and global index of the dim that is sharded."""
    axes = axes_of(matrix, sharded)
    at = matrix.mesh.comm(axes).rank if axes else 0
    local, world, before = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)], 0
    for start, length in places(matrix, sharded)[at]:
        for a, n in held[at]:
            if start <= a < start + length:
                world.append(torch.arange(a, a + n))
                local.append(world[-1] - start + before)
        before += length
    return torch.cat(local).to(device), torch.cat(world).to(device)


def _take(ctx: KernelContext, sharded: int) -> torch.Tensor:
    x, spec, out = resolved(ctx.inputs[0]), ctx.in_specs[0], output_spec(ctx)
    other, shift, held, entries = _crossing(ctx.call, spec, sharded)
    local, world = _index(ctx, spec, sharded, held, x.device)
    mine = x.movedim((sharded, other), (-2, -1))[..., local, world + shift]
    last = out.ndim - 1
    (made,) = exchange(
        out.mesh, axes_of(spec, sharded), last, [mine], [Run(0, 0, out.shape[last])], [entries], [places(out, last)]
    )
    return in_order(made, out.stride)


def _put(ctx: KernelContext, sharded: int) -> torch.Tensor:
    src, spec, out = ctx.inputs[-1], ctx.in_specs[-1], output_spec(ctx)
    other, shift, held, entries = _crossing(ctx.call, out, sharded)
    last = spec.ndim - 1
    (mine,) = exchange(
        out.mesh, axes_of(spec, last), last, [src.to(out.dtype)], [Run(0, 0, spec.shape[last])],
        [places(spec, last)], [entries],
    )  # fmt: skip
    whole = ctx.inputs[0].clone() if len(ctx.inputs) > 1 else mine.new_zeros(out.local_shape)
    local, world = _index(ctx, out, sharded, held, mine.device)
    whole.movedim((sharded, other), (-2, -1))[..., local, world + shift] = mine
    return whole


register("aten.diagonal aten.diagonal_copy", diagonal)
register("aten.diag_embed", diag_embed)
register("aten.diagonal_backward", diagonal_backward)
register("aten.diagonal_scatter", diagonal_scatter)
