"""The operators behind `loss.linear_cross_entropy`: a linear layer and its cross entropy, without the logits.

Logits are made for a tile of rows and classes at a time, reduced to the rows' statistics (see `loss.rows`) and
dropped. A tile of classes is merged with the next as what a rank holds is merged with the other ranks':

             classes of this rank
            ┌────────┬────────┐
    rows    │ tile 0 │ tile 1 │  ──merge──▶  (m, s, x) of these rows on this rank ──one gather, merge──▶ of all classes
            ├────────┼────────┤
            │ tile 2 │ tile 3 │  ──merge──▶  ...
            └────────┴────────┘

Backward makes every tile again, turns it into the gradient of its logits, and adds it to three sums:

    hidden   G W       a sum over the classes: pending over the axis that shards them (nothing is sent here)
    weight   G^T h     a sum over the rows: taken in float32; pending over axes that shard rows
    bias     sum G

So a call keeps two numbers a row, and works in the space of one tile, whatever the number of rows and classes. The
price is one more matrix product than with logits that are kept: four in place of three.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dtensor.propagation_rules.build import accumulation_dtype, gather_stacked
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, built_in, register
from dtensor.rules.rule import Dims, Kernel, Rule, linear

from .kernels import Forward, classes_of, library
from .rows import Classes, Runs, block_gradient, block_statistics, finish, merge

__all__ = ["Gradients", "TILE_ELEMENTS", "backward", "forward", "tile_sizes"]

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

TILE_ELEMENTS = {"cpu": 1 << 21}
OTHER_TILE = 1 << 26
TILE_CLASSES = 1 << 15


# ------------------------------------------------------------ tiles
def tile_sizes(n_rows: int, n_classes: int, device: str, rows: int, classes: int) -> tuple[int, int]:
    """(rows, classes) of a tile; zeros among the arguments are chosen so that a tile has some `TILE_ELEMENTS`."""
    classes = min(classes or TILE_CLASSES, max(n_classes, 1))
    rows = rows or max(TILE_ELEMENTS.get(device, OTHER_TILE) // classes, 1)
    return min(rows, max(n_rows, 1)), classes


def _steps(n: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of pieces of `size`; one empty piece where there is nothing."""
    return ((start, min(size, n - start)) for start in range(0, max(n, 1), size))


def _part(runs: Runs, start: int, length: int) -> Runs:
    """The intervals of `length` held classes from the `start`-th on.

    Example: of ((10, 4), (30, 4)), three from the third: ((12, 2), (30, 1)).
    """
    out = []
    for at, n in runs:
        low, high = max(start, 0), min(start + length, n)
        if high > low:
            out.append((at + low, high - low))
        start -= n
    return tuple(out)


def _logits(h: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[rows, classes] of a tile, in the dtype of sums."""
    return (h @ w.t() if bias is None else torch.addmm(bias, h, w.t())).to(dtype)


def _narrowed(classes: Classes, start: int, length: int) -> Classes:
    runs = _part(classes.runs, start, length)
    return Classes(runs, classes.count, classes.weight, classes.ignore_index, classes.smoothing)


# ------------------------------------------------------------ what one rank computes
def _statistics(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, classes: Classes,
    tile: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """Statistics of all rows over the classes of `weight`, [3 or 5, *target.shape]."""
    h, t, acc = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1), accumulation_dtype(hidden.dtype)
    n = 5 if classes.smoothing else 3
    out = hidden.new_empty((n, len(t)), dtype=acc)
    rows, wide = tile_sizes(len(t), len(weight), hidden.device.type, *tile)
    for r, m in _steps(len(t), rows):
        of_tiles = []
        for v, k in _steps(len(weight), wide):
            x = _logits(h[r : r + m], weight[v : v + k], None if bias is None else bias[v : v + k], acc)
            of_tiles.append(x.new_empty((n, m)))
            block_statistics(x, t[r : r + m], _narrowed(classes, v, k), of_tiles[-1], True)
        out[:, r : r + m] = of_tiles[0] if len(of_tiles) == 1 else merge(torch.stack(of_tiles))
    return out.view(n, *target.shape)


def _gradients(
    grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor,
    top: torch.Tensor, log_sum: torch.Tensor, classes: Classes, tile: tuple[int, int], wanted: tuple[bool, bool, bool],
) -> Gradients:  # fmt: skip
    """Gradients of hidden, weight and bias from the classes of `weight`; None for those not wanted."""
    acc, h, t = top.dtype, hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    g, top, log_sum = grad.reshape(-1) if grad.ndim else grad, top.reshape(-1), log_sum.reshape(-1)
    of_hidden = torch.empty_like(h) if wanted[0] else None
    of_weight = torch.zeros_like(weight, dtype=acc) if wanted[1] else None
    of_bias = weight.new_zeros(len(weight), dtype=acc) if wanted[2] else None
    rows, wide = tile_sizes(len(t), len(weight), hidden.device.type, *tile)
    for r, m in _steps(len(t), rows):
        some = slice(r, r + m)
        row_sum = h.new_zeros((m, h.shape[1]), dtype=acc)
        for v, k in _steps(len(weight), wide):
            w = weight[v : v + k]
            x = _logits(h[some], w, None if bias is None else bias[v : v + k], acc).sub_(top[some].unsqueeze(1))
            block_gradient(g[some] if g.ndim else g, x, t[some], log_sum[some], _narrowed(classes, v, k))
            if of_bias is not None:
                of_bias[v : v + k] += x.sum(0)
            low = x.to(weight.dtype)
            if of_hidden is not None:
                _add_product(row_sum, low, w)
            if of_weight is not None:
                _add_product(of_weight[v : v + k], low.t(), h[some])
        if of_hidden is not None:
            of_hidden[some] = row_sum
    return (
        None if of_hidden is None else of_hidden.view(hidden.shape),
        None if of_weight is None else of_weight.to(weight.dtype),
        None if of_bias is None else of_bias.to(weight.dtype),
    )


def _add_product(to: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """to += a @ b, where the sum may be of higher precision than the factors."""
    if a.dtype == to.dtype:
        to.addmm_(a, b)
    else:
        to += a @ b


# ------------------------------------------------------------ the operators on plain tensors
def forward(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None,
    class_weight: torch.Tensor | None, per_row: bool, ignore_index: int, smoothing: float, rows: int, columns: int,
) -> Forward:  # fmt: skip
    """Loss (rows or sum), max, log sum, [weight of the rows that count, bad targets]."""
    n = len(weight)
    classes = classes_of(((0, n),), n, class_weight, hidden.dtype, ignore_index, smoothing)
    return finish(_statistics(hidden, weight, bias, target, classes, (rows, columns)), target, classes, per_row)


def backward(
    grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None,
    class_weight: torch.Tensor | None, top: torch.Tensor, log_sum: torch.Tensor, ignore_index: int, smoothing: float,
    rows: int, columns: int, of_hidden: bool, of_weight: bool, of_bias: bool,
) -> Gradients:  # fmt: skip
    """Gradients of hidden, weight and bias."""
    n = len(weight)
    classes = classes_of(((0, n),), n, class_weight, hidden.dtype, ignore_index, smoothing)
    tile, wanted = (rows, columns), (of_hidden, of_weight, of_bias)
    return _gradients(grad, hidden, weight, bias, target, top, log_sum, classes, tile, wanted)


library.define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight,"
    " bool per_row, int ignore_index, float smoothing, int rows, int columns) -> (Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "linear_cross_entropy_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor target, Tensor? bias,"
    " Tensor? class_weight, Tensor top, Tensor log_sum, int ignore_index, float smoothing, int rows, int columns,"
    " bool of_hidden, bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor)"
)
library.impl("linear_cross_entropy", forward, "CompositeExplicitAutograd")
library.impl("linear_cross_entropy_backward", backward, "CompositeExplicitAutograd")


@torch.library.impl(library, "linear_cross_entropy", "Meta")
def _forward_shapes(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None,
    class_weight: torch.Tensor | None, per_row: bool, *_: Any,
) -> Forward:  # fmt: skip
    out = target.new_empty(target.shape, dtype=accumulation_dtype(hidden.dtype))
    return out if per_row else out.new_empty(()), out.clone(), out.clone(), out.new_empty(2)


@torch.library.impl(library, "linear_cross_entropy_backward", "Meta")
def _backward_shapes(
    grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *rest: Any
) -> Gradients:
    of_hidden, of_weight, of_bias = rest[-3:]
    return (
        torch.empty_like(hidden) if of_hidden else None,
        torch.empty_like(weight) if of_weight else None,
        weight.new_empty(len(weight)) if of_bias else None,
    )


# ------------------------------------------------------------ their rules
def _dims(call: Call) -> tuple[int, tuple[int, ...], frozenset[int], dict[str, Dims]]:
    """The factor of the classes, all sizes, the whole factors, and dims by argument.

    Factors: one a row dim, then features, classes, and class weights.
    """
    *rows, d = tuple(call["hidden"].shape)
    n, v = len(rows), call["weight"].shape[0]
    per_row: Dims = tuple((i,) for i in range(n))
    grad = call.get("grad")
    dims: dict[str, Dims] = {
        "hidden": (*per_row, (n,)), "weight": ((n + 1,), (n,)), "target": per_row, "bias": ((n + 1,),),
        "class_weight": ((n + 2,),), "top": per_row, "log_sum": per_row,
        "grad": per_row if grad is not None and grad.ndim else (),
    }  # fmt: skip
    return n + 1, (*rows, d, v, v), frozenset({n, n + 1, n + 2}), dims


def _forward_rule(call: Call) -> Rule:
    v, sizes, whole, dims = _dims(call)
    rows = dims["target"]
    outputs: tuple[Dims, ...] = (rows if call["per_row"] else (), rows, rows, ((),))
    # given no cost: whoever calls this operator wants the weight left where it is
    kernel = Kernel("linear cross entropy", frozenset({v}), ("replicate",) * 4, _run_forward)
    return Rule(tuple(dims[n] for n in call.names), outputs, sizes, whole, kernels=(kernel,))


def _classes(ctx: KernelContext) -> Classes:
    """The classes that this rank holds of the linear layer's weight."""
    at, a = ctx.call.index("weight"), ctx.call
    assert at is not None
    spec, w = ctx.in_specs[at], ctx.optional("class_weight")
    return classes_of(ctx.intervals(at, 0), spec.shape[0], w, spec.dtype, a["ignore_index"], a["smoothing"])


def _run_forward(ctx: KernelContext) -> Forward:
    hidden, weight, target = map(ctx.tensor, ("hidden", "weight", "target"))
    classes, tile = _classes(ctx), (ctx.call["rows"], ctx.call["columns"])
    stats = _statistics(hidden, weight, ctx.optional("bias"), target, classes, tile)
    return finish(merge(gather_stacked(ctx, stats)), target, classes, ctx.call["per_row"])


def _backward_rule(call: Call) -> Rule:
    v, sizes, whole, dims = _dims(call)
    outputs = tuple(dims[name] for name in ("hidden", "weight", "bias"))  # of those not wanted, too
    kernel = Kernel("linear cross entropy backward", frozenset({v}), ("sum", "shard", "shard"), _run_backward)
    return Rule(tuple(dims[n] for n in call.names), outputs, sizes, whole, linear=(linear(0),), kernels=(kernel,))


def _run_backward(ctx: KernelContext) -> Gradients:
    grad, hidden, weight, target = map(ctx.tensor, ("grad", "hidden", "weight", "target"))
    a, bias, top, log_sum = ctx.call, ctx.optional("bias"), ctx.tensor("top"), ctx.tensor("log_sum")
    tile, wanted = (a["rows"], a["columns"]), (a["of_hidden"], a["of_weight"], a["of_bias"])
    return _gradients(grad, hidden, weight, bias, target, top, log_sum, _classes(ctx), tile, wanted)


with built_in():
    register("shardwright.linear_cross_entropy", _forward_rule)
    register("shardwright.linear_cross_entropy_backward", _backward_rule)
