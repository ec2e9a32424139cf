"""Bags of embeddings: sums, means or maxima of looked-up rows.

    everything replicated, or the table cut by width     the op itself, on each rank's columns
    anything else, sums and means                        lookup, weights, sum per bag, each with a rule of its own
    anything else, maxima                                the table by width or replicated, the rest replicated

Taken apart, a table cut by rows stays so: each rank sums what it holds, the bags are a pending sum, and the table's
gradient is made shard by shard (`embedding`). Indices that are cut stay so as well. Where a gradient is needed that is
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
from dtensor.placement import Placement, Replicate
from dtensor.spec import Spec, contiguous_stride
from dtensor.tensor import DTensor

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
