"""Embedding tables: the dims of the indices and the width are free; the vocabulary `v` has kernels.

With the vocabulary sharded, each rank holds some rows of the table, looks up the indices that fall into them and
gives zeros for the rest. What comes out is an ordinary pending sum: nothing about the indices is kept, so it can
be used, reduced and differentiated like any other, any number of times.

    table of 6 rows over 2 ranks, indices 1 4     rank 0 (rows 0-2): row1 0      rank 1 (rows 3-5): 0 row4

The gradient of the table can be made shard by shard too: a rank adds up the rows that it holds. But the gradient
op does not see the table, only its number of rows; from its inputs alone the whole gradient and a sharded one
cost the same. So a lookup that needs a gradient is a step of autograd of its own, which gives that number as
`dtensor.dispatch.composites.Rows`: it knows how the table lies, and a strategy whose gradient would have to move again
to lie like the table is priced with that move. So the kernel is free where the table is sharded by rows and costs
a gather where it is not, and a rank makes no gradient of the whole table where another way is cheaper:

    table 8@tp of [v, d], gradient of the output sharded by rows of the batch, b of them
    as it comes     a whole [v, d] on every rank, pending, then a reduce-scatter      v*d*(k-1)/k received
    sharded by width    all-to-all to shard d, the gradient sharded by d, all-to-all to shard v   (b*d + v*d)/k*(k-1)/k
    kernel for v    the output's gradient is gathered                                 b*d*(k-1)/k

Bags of embeddings: sums, means or maxima of looked-up rows.

    everything replicated, or the table sharded by width     the op itself, on each rank's columns
    anything else, sums and means                        lookup, weights, sum per bag, each with a rule of its own
    anything else, maxima                                the table by width or replicated, the rest replicated

Taken apart, a table sharded by rows stays so: each rank sums what it holds, the bags are a pending sum, and the table's
gradient is made shard by shard (`embedding`). Sharded indices stay so as well. Where a gradient is needed that is
done above autograd, which then differentiates the parts.

Not rules: the shapes of the side outputs depend on the device's kernel, and `F.embedding_bag` makes plain offsets for
indices of two dims, which count as replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dtensor.dispatch.call import replicated_on
from dtensor.dispatch.composites import (
    MAX,
    MEAN,
    bag_arguments,
    bag_in_parts,
    bags_of,
    by_width_only,
    picked_rows,
    whole,
)
from dtensor.dispatch.hit import special
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Choice, Dims, Kernel, Rule, linear, passes
from dtensor.spec import Spec, contiguous_stride
from dtensor.tensor import DTensor

from .build.classes import check_indices, local_slots
from .build.gathered import output_spec


def _check(call: str, indices: torch.Tensor, rows: int) -> None:
    check_indices(call, indices, rows, f"out of range for a table of {rows} rows")


# ------------------------------------------------------------ lookup
def embedding(call: Call) -> Rule:
    """`[v] d, i... -> i... d`, moving elements of the table only; a kernel for v."""
    table, indices = call.inputs
    n = indices.ndim
    rows: Dims = tuple((i,) for i in range(n))
    v, d = n, n + 1
    kernel = Kernel("embedding", frozenset({v}), ("sum",), _run_embedding)

    def price_later(axis: int, choice: Choice) -> tuple[str, int, int] | None:
        """Where the indices are sharded the result is wanted sharded too; the kernel leaves it pending.

        Counted where that and the indices are more than the table, which is not gathered to save a launch.
        """
        size, n_bytes = indices.numel * table.shape[1], table.dtype.itemsize
        more = size * n_bytes + indices.numel * indices.dtype.itemsize > table.numel * n_bytes
        cut = isinstance(indices.placements[axis], (Shard, StridedShard))
        return ("reduce_scatter", size, 1) if cut and more and choice.kernel is not None else None

    return Rule(
        (((v,), (d,)), rows), ((*rows, (d,)),), (*indices.shape, *table.shape), frozenset({v}),
        linear=(passes(0),), kernels=(kernel,), price_later=price_later,
    )  # fmt: skip


def _run_embedding(ctx: KernelContext) -> torch.Tensor:
    table, indices = ctx.inputs
    _check("embedding", indices, ctx.in_specs[0].shape[0])
    if table.shape[0] == 0:
        return table.new_zeros((*indices.shape, table.shape[1]))
    slot, mine = local_slots(indices, ctx.intervals(0, 0))
    return torch.nn.functional.embedding(slot, table).masked_fill_(~mine.unsqueeze(-1), 0)


# ------------------------------------------------------------ gradient of the table
def embedding_backward(call: Call) -> Rule:
    """`i... d, i... -> [v] d`, linear in the gradient. A kernel for v.

    Scaling by frequency counts all indices, so their dims are replicated then.
    """
    grad, indices = call.inputs
    n = indices.ndim
    rows: Dims = tuple((i,) for i in range(n))
    v, d = n, n + 1
    shape = (int(call["num_weights"]), grad.shape[-1])
    kernel = Kernel("embedding gradient", frozenset({v}), ("shard",), _run_embedding_backward)
    whole = frozenset({v, *range(n)}) if call["scale_grad_by_freq"] else frozenset({v})
    layout = getattr(call["num_weights"], "layout", (None,) * grad.mesh.ndim)
    splits = [p if isinstance(p, Shard) else None for p in layout]

    def price_later(axis: int, choice: Choice) -> tuple[str, int, int] | None:
        """The move of the gradient to the layout of the table.

        A whole gradient is memory as well: where another way receives less, it is not made to save a launch.
        """
        cut, out, size, k = splits[axis], choice.outputs[0], shape[0] * shape[1], grad.mesh.shape[axis]
        if cut is None:
            return ("all_gather", size // k, 1) if out == v else None
        if out == (v, d)[cut.dim]:
            return None
        if isinstance(out, Partial):
            return "reduce_scatter", size, 4 if 2 * grad.numel < size else 1
        return ("all_to_all", size // k, 1) if isinstance(out, int) else None

    return Rule(
        ((*rows, (d,)), rows), (((v,), (d,)),), (*indices.shape, *shape), whole, linear=(linear(0),), kernels=(kernel,),
        price_later=price_later,
    )  # fmt: skip


def _run_embedding_backward(ctx: KernelContext) -> torch.Tensor:
    grad, indices = ctx.inputs
    out = output_spec(ctx)
    mesh = out.mesh
    runs = out.intervals_of(mesh.coord)[0] if mesh.coord is not None else ()
    count = sum(length for _, length in runs)
    padding = int(ctx.call["padding_idx"])
    _check("embedding gradient", indices, int(ctx.call["num_weights"]))
    slot, mine = local_slots(indices, runs)
    if padding >= 0:
        mine &= indices != padding
    # One row more than there are, for what lies elsewhere; scaling by frequency counts each row by itself.
    slot = torch.where(mine, slot, count)
    got: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        grad.masked_fill(~mine.unsqueeze(-1), 0), slot, count + 1, -1, bool(ctx.call["scale_grad_by_freq"])
    )
    return got[:count].contiguous()


# ------------------------------------------------------------ renormalising looked-up rows in place
def embedding_renorm(call: Call) -> Rule:
    """`[v] [d], [i] -> [v] d`: written rows by a kernel for v, rows sharded by width by the same kernel for d."""
    table, indices = call.inputs
    n = indices.ndim
    rows: Dims = tuple((i,) for i in range(n))
    v, d = n, n + 1
    kernel = Kernel("embedding renorm", frozenset({v, d}), ("shard",), _run_renorm, max(indices.numel, 1), 1)
    return Rule(
        (((v,), (d,)), rows),
        (((v,), (d,)),),
        (*indices.shape, *table.shape),
        frozenset(range(n + 2)),
        kernels=(kernel,),
    )


def _run_renorm(ctx: KernelContext) -> torch.Tensor:
    table, indices = ctx.inputs
    _check("embedding_renorm_", indices, ctx.in_specs[0].shape[0])
    limit, order = float(ctx.arguments["max_norm"]), float(ctx.arguments["norm_type"])  # type: ignore[arg-type]
    d = len(ctx.in_specs[1].shape) + 1
    across = tuple(a for a, f in zip(ctx.axes, ctx.factors, strict=True) if f == d)
    named = torch.unique(indices)
    slot, here = local_slots(named, ctx.intervals(0, 0))
    mine = slot[here]
    picked = table.index_select(0, mine) if table.shape[0] else table
    if order == float("inf"):
        size = picked.abs().amax(1) if picked.shape[1] else picked.new_zeros(picked.shape[0])
    else:
        size = picked.abs().pow(order).sum(1)
    if across:
        comm = ctx.in_specs[0].mesh.comm(across[0] if len(across) == 1 else across)
        size = comm.all_reduce(size, "max" if order == float("inf") else "sum")
    if order != float("inf"):
        size = size.pow(1 / order)
    scale = torch.where(size > limit, limit / (size + 1e-7), torch.ones_like(size))
    if mine.numel():
        table.index_copy_(0, mine, picked * scale.unsqueeze(1))
    return table


register("aten.embedding", embedding)
register("aten.embedding_dense_backward", embedding_backward)
register("aten.embedding_renorm", embedding_renorm, values="max_norm norm_type")


aten = torch.ops.aten


# ------------------------------------------------------------ forward
@special("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def _embedding_bag(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = bag_arguments(aten._embedding_bag.default, args, kwargs)
    table = named["weight"]
    others = [t for t in named.values() if isinstance(t, DTensor) and t is not table]
    by_width = by_width_only(table)
    fused = by_width == table.placements and all(t._spec.is_replicated() for t in others)
    if named["mode"] == MAX or fused or not named["indices"].numel():
        return _op_itself(named, by_width)
    return bag_in_parts(named)


def _op_itself(named: Mapping[str, Any], by_width: tuple[Placement, ...]) -> tuple[DTensor, ...]:
    table = named["weight"]
    mesh = table.device_mesh
    local = {n: whole(t) if isinstance(t, DTensor) else t for n, t in named.items() if n != "weight"}
    outs = aten._embedding_bag.default(table.redistribute(placements=by_width).to_local(), **local)
    made = []
    for i, t in enumerate(outs):
        cut = i == 0 or (i == 3 and t.ndim == 2)
        shape = (t.shape[0], table.shape[1]) if cut else t.shape
        layout = by_width if cut else (Replicate(),) * mesh.ndim
        spec = Spec.make(mesh, layout, shape, contiguous_stride(shape), t.dtype)
        made.append(DTensor(t, spec, requires_grad=False))
    return tuple(made)


# ------------------------------------------------------------ backward
@special("aten._embedding_bag_backward.default")
def _backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = bag_arguments(aten._embedding_bag_backward.default, args, kwargs)
    return _replicated(aten._embedding_bag_backward.default, named) if _at_once(named) else _apart(named)


@special("aten._embedding_bag_dense_backward.default")
def _dense_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = bag_arguments(aten._embedding_bag_dense_backward.default, args, kwargs)
    return _replicated(aten._embedding_bag_dense_backward.default, named) if _at_once(named) else _apart(named)


def _at_once(named: Mapping[str, Any]) -> bool:
    """Whether the op itself should run, on replicated inputs: where what it does is more than its parts.

    Scaled by frequency, CPU kernels do not divide by the counts that a lookup's gradient divides by.
    """
    grad, indices = named["grad"], named["indices"]
    if named["mode"] == MAX or named.get("sparse") or named["scale_grad_by_freq"] or not indices.numel():
        return True
    if "offsets" not in named and named["offset2bag"].numel() != indices.numel():
        return True
    return grad._spec.is_replicated() and indices._spec.is_replicated()


def _apart(named: Mapping[str, Any]) -> Any:
    """Each index gets its bag's gradient, weighted; then the gradient of a plain lookup."""
    of = named["offset2bag"] if "offsets" not in named else bags_of(named)[0]
    grad = named["grad"]
    if named["mode"] == MEAN:
        grad = grad / named["bag_size"].clamp(min=1).to(grad.dtype).unsqueeze(1)
    grad = aten.index_select(grad, 0, of)
    weights = named["per_sample_weights"]
    grad = grad if weights is None else grad * weights.unsqueeze(1)
    return aten.embedding_dense_backward(
        grad, named["indices"], named["num_weights"], named["padding_idx"], named["scale_grad_by_freq"]
    )


@special("aten._embedding_bag_per_sample_weights_backward.default")
def _weights_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = bag_arguments(aten._embedding_bag_per_sample_weights_backward.default, args, kwargs)
    if not named["indices"].numel():
        return _replicated(aten._embedding_bag_per_sample_weights_backward.default, named)
    return (aten.index_select(named["grad"], 0, bags_of(named)[0]) * picked_rows(named)).sum(1)


def _replicated(op: torch._ops.OpOverload, named: Mapping[str, Any]) -> DTensor:
    """`op` on replicated inputs."""
    mesh = next(t.device_mesh for t in named.values() if isinstance(t, DTensor))
    got = op(**{n: whole(t) if isinstance(t, DTensor) else t for n, t in named.items()})
    made: DTensor = replicated_on(mesh, got)
    return made
