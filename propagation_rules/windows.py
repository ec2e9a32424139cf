"""Windows over a dim, and their backward.

Where the dim is sharded, each rank makes the windows that are its part of the new dim. It asks for the elements that
they span, most of which it holds (`propagation_rules.build.exchange`):

    10 elements, windows of 4 in steps of 2, on 2 ranks     windows 0 1 span [0, 6), windows 2 3 span [4, 10)

In the backward each rank adds up its windows over their span, and the parts of the spans are summed where they belong.

Patches of images as columns (`unfold`), and images as sums of patches (`fold`).

    im2col    n c [h] [w] -> n (c [k]) [l]        col2im    n (c [k]) [l] -> n c [h] [w]

`k` counts the places of a window, `l` the windows. Both are linear: im2col writes zeros for the padding.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, linear
from dtensor.spec import in_order

from .build.empty_shards import zeros_of
from .build.exchange import Places, Run, axes_of, exchange, places, row
from .build.exchange_rules import MOVES, exchanging
from .build.gathered import output_spec
from .build.labelled import Labels, every_dim, labelled, local_size


def _spans(windows: Places, size: int, step: int) -> Places:
    """Per position the elements that its windows span."""
    return tuple(tuple((w * step, (n - 1) * step + size) for w, n in runs) for runs in windows)


def unfold(call: Call) -> Rule:
    """Windows over a dim, in a new last dim, which stays replicated."""
    n, size = call.inputs[0].ndim, int(call["size"])
    if n == 0:
        return labelled(call, [[]], [[None]], linear=MOVES)
    dim, free = int(call["dimension"]) % n, every_dim(n)
    rule = labelled(call, [free], [[*free, None]], resized=(dim,), linear=MOVES)
    if size == 0:
        return rule
    return replace(rule, kernels=exchanging(call, [dim], [size * row(call.inputs[0], dim)], _run))


def _run(ctx: KernelContext) -> torch.Tensor:
    spec, out = ctx.in_specs[0], output_spec(ctx)
    dim, size, step = int(ctx.call["dimension"]) % spec.ndim, int(ctx.call["size"]), int(ctx.call["step"])
    axes = axes_of(spec, dim)
    spans = _spans(places(out, dim), size, step)
    reach = [Run(0, 0, spec.shape[dim])]
    (x,) = exchange(spec.mesh, axes, dim, ctx.inputs, reach, [places(spec, dim)], [spans])
    parts, at = [], 0
    for _, length in spans[_position(ctx, axes)]:
        parts.append(x.narrow(dim, at, length).unfold(dim, size, step))
        at += length
    if not parts:
        return x.new_empty(out.local_shape)
    return in_order(torch.cat(parts, dim), out.stride)


def _position(ctx: KernelContext, axes: tuple[int, ...]) -> int:
    mesh = ctx.in_specs[0].mesh
    return mesh.comm(axes).rank if axes else 0


def unfold_backward(call: Call) -> Rule:
    """Windows that overlap add up: linear only."""
    n = len(call["input_sizes"])
    if n == 0:
        return local_size("input_sizes", labelled(call, [[None]], [[]], linear=(linear(0),)))
    dim, free, g = call["dim"] % n, every_dim(n), call.inputs[0]
    rule = labelled(call, [[*free, None]], [free], resized=(dim,), linear=(linear(0),))
    if g.shape[-1]:
        rule = replace(rule, kernels=exchanging(call, [dim], [row(g, dim)], _run_backward))
    return local_size("input_sizes", rule)


def _run_backward(ctx: KernelContext) -> torch.Tensor:
    g, spec, out = ctx.inputs[0], ctx.in_specs[0], output_spec(ctx)
    dim, size, step = ctx.call["dim"] % out.ndim, int(ctx.call["size"]), int(ctx.call["step"])
    axes = axes_of(spec, dim)
    windows = places(spec, dim)
    spans, at = _spans(windows, size, step), _position(ctx, axes)
    parts, before = [g.new_zeros([0 if d == dim else n for d, n in enumerate(g.shape[:-1])])], 0
    for (_, n), (_, length) in zip(windows[at], spans[at], strict=True):
        shape = [length if d == dim else m for d, m in enumerate(g.shape[:-1])]
        parts.append(torch.ops.aten.unfold_backward(g.narrow(dim, before, n), shape, dim, size, step))
        before += n
    reach = [Run(0, 0, out.shape[dim])]
    (x,) = exchange(spec.mesh, axes, dim, [torch.cat(parts, dim)], reach, [spans], [places(out, dim)], adds=True)
    return x


register("aten.unfold aten.unfold_copy", unfold)
register("aten.unfold_backward", unfold_backward)


def patches(call: Call) -> Rule:
    """One builder for both ways, with and without a batch."""
    to_columns = call.op._schema.name == "aten::im2col"
    window = int(call["kernel_size"][0]) * int(call["kernel_size"][-1])
    x = call.inputs[0]
    batch = ["n"] if x.ndim - to_columns == 3 else []
    channels = x.shape[len(batch)] if to_columns else x.shape[len(batch)] // window
    image: Labels = [*batch, "c", None, None]
    columns: Labels = [*batch, ("c", "k"), None]
    return labelled(
        call, [image if to_columns else columns], [columns if to_columns else image],
        sizes={"c": channels, "k": window}, whole=["k"], linear=(linear(0),),
        bind=lambda ins, outs: zeros_of(outs) if not ins[0].local_numel else None,
    )  # fmt: skip


register("aten.im2col aten.col2im", patches)
