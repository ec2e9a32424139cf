"""Parts of a tensor and their backwards: dims that are cut into stay whole, the others are free.

A slice that keeps its whole dim keeps the dim's shard. All of these only move elements (and zeros), so every
pending reduction passes.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from dtensor.factors import Kernel, Rule, linear, passes
from dtensor.kernel import KernelContext
from dtensor.registry import Call, register
from propagation_rules.labelled import but, labelled, local_size

MOVES = (passes(0),)


def _keeps(size: int, start: int | None, end: int | None, step: int) -> bool:
    """True when a slice takes its whole dim."""
    low = 0 if start is None else start + size if start < 0 else start
    return low <= 0 and (end is None or end >= size) and step == 1


# ------------------------------------------------------------ select and slice
def select(call: Call) -> Rule:
    """The dim goes."""
    n, dim = call.inputs[0].ndim, call.dim()
    kept = but(n, dim)
    return labelled(call, [kept], [kept[:dim] + kept[dim + 1 :]], linear=MOVES)


def select_backward(call: Call) -> Rule:
    """The gradient among zeros; the dim counts in the input's dims."""
    n = len(call["input_sizes"])
    dim = call["dim"] % n
    kept = but(n, dim)
    return local_size("input_sizes", labelled(call, [kept[:dim] + kept[dim + 1 :]], [kept], linear=MOVES))


def slice_(call: Call) -> Rule:
    """The dim is free when the slice takes all of it."""
    n, dim = call.inputs[0].ndim, call.dim()
    full = _keeps(call.inputs[0].shape[dim], call["start"], call["end"], call["step"])
    kept = but(n) if full else but(n, dim)
    return labelled(call, [kept], [kept], linear=MOVES)


def slice_backward(call: Call) -> Rule:
    """As `slice_`, the other way round."""
    sizes = call["input_sizes"]
    dim = call["dim"] % len(sizes)
    full = _keeps(sizes[dim], call["start"], call["end"], call["step"])
    kept = but(len(sizes)) if full else but(len(sizes), dim)
    return local_size("input_sizes", labelled(call, [kept], [kept], linear=MOVES))


def narrow_copy(call: Call) -> Rule:
    """The dim stays whole."""
    kept = but(call.inputs[0].ndim, call.dim())
    return labelled(call, [kept], [kept], linear=MOVES)


def select_scatter(call: Call) -> Rule:
    """The source takes the place of one index of the dim."""
    n, dim = call.inputs[0].ndim, call.dim()
    kept = but(n, dim)
    return labelled(call, [kept, kept[:dim] + kept[dim + 1 :]], [kept], linear=(passes(0, 1),))


def slice_scatter(call: Call) -> Rule:
    """The source takes the place of a slice."""
    n, dim = call.inputs[0].ndim, call.dim()
    full = _keeps(call.inputs[0].shape[dim], call["start"], call["end"], call["step"])
    kept = but(n) if full else but(n, dim)
    return labelled(call, [kept, kept], [kept], linear=(passes(0, 1),))


def split(call: Call) -> Rule:
    """The dim stays whole."""
    kept = but(call.inputs[0].ndim, call.dim())
    return labelled(call, [kept], [kept] * len(call.outputs), linear=MOVES)


# ------------------------------------------------------------ diagonals
def _diagonal_dims(n: int, call: Call) -> tuple[list[Hashable], list[Hashable]]:
    pair = (call["dim1"] % n, call["dim2"] % n)
    kept = but(n, *pair)
    return kept, [d for d in kept if d is not None] + [None]


def diagonal_backward(call: Call) -> Rule:
    """The gradient on the diagonal of zeros."""
    kept, short = _diagonal_dims(len(call["input_sizes"]), call)
    return local_size("input_sizes", labelled(call, [short], [kept], linear=MOVES))


def diagonal_scatter(call: Call) -> Rule:
    """The source takes the place of the diagonal."""
    kept, short = _diagonal_dims(call.inputs[0].ndim, call)
    return labelled(call, [kept, short], [kept], linear=(passes(0, 1),))


def unfold_backward(call: Call) -> Rule:
    """Windows that overlap add up: linear only."""
    n = len(call["input_sizes"])
    if n == 0:
        return local_size("input_sizes", labelled(call, [[None]], [[]], linear=(linear(0),)))
    kept = but(n, call["dim"] % n)
    return local_size("input_sizes", labelled(call, [[*kept, None]], [kept], linear=(linear(0),)))


def triangle(call: Call) -> Rule:
    """By hand: rows and columns are cut by a kernel, which knows where in the matrix its part lies."""
    n = call.inputs[0].ndim
    labels = list(range(n))
    kernel = Kernel("triangle", frozenset({n - 2, n - 1}), ("shard",), _run_triangle)
    return labelled(call, [labels], [labels], whole=(n - 2, n - 1), linear=MOVES, kernels=(kernel,))


def _run_triangle(ctx: KernelContext) -> torch.Tensor:
    x = ctx.inputs[0]
    rows = ctx.indices(0, x.ndim - 2, x.device)[:, None]
    columns = ctx.indices(0, x.ndim - 1, x.device)[None, :]
    name, k = ctx.call.op._schema.name, int(str(ctx.arguments["diagonal"]))
    cleared = columns - rows > k if "tril" in name else columns - rows < k
    if ctx.call.op._schema.name.endswith("_"):
        return x.masked_fill_(cleared, 0)
    return x.masked_fill(cleared, 0)


register("aten.select aten.select_copy", select, values="index")
register("aten.select_backward", select_backward, values="index")
register("aten.slice aten.slice_copy", slice_)
register("aten.slice_backward", slice_backward)
register("aten.narrow_copy", narrow_copy)
register("aten.select_scatter", select_scatter, values="index")
register("aten.slice_scatter", slice_scatter)
register("aten.split aten.split_copy aten.split_with_sizes aten.split_with_sizes_copy", split)
register("aten.unsafe_split aten.unsafe_split_with_sizes aten.chunk aten.unsafe_chunk", split)
register("aten.diagonal_backward", diagonal_backward)
register("aten.diagonal_scatter", diagonal_scatter)
register("aten.unfold_backward", unfold_backward)
register("aten.tril aten.triu", triangle, values="diagonal")
