"""Bags of embeddings: sums, means or maxima of looked-up rows.

    everything replicated, or the table cut by width     the op itself, on each rank's columns
    anything else, sums and means                        lookup, weights, sum per bag, each with a rule of its own
    anything else, maxima                                the table by width or replicated, the rest replicated

Taken apart, a table cut by rows stays so: each rank sums what it holds, the bags are a pending sum, and the table's
gradient is made shard by shard (`embedding`). Indices that are cut stay so as well.

Not rules: the shapes of the side outputs depend on the device's kernel, and `F.embedding_bag` makes plain offsets for
indices of two dims, which count as replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtensor import dispatch as hot
from dtensor.dispatch import special
from dtensor.dispatch_call import replicated_on
from dtensor.errors import MeshError, MixedTensorError, explain_error
from dtensor.placement import Placement, Replicate, Shard
from dtensor.spec import Spec, contiguous_stride
from dtensor.tensor import DTensor

from .embedding import rows_are_cut

aten = torch.ops.aten
SUM, MEAN, MAX = range(3)


def _named(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, plain tensors made replicated ones; MeshError where the meshes differ."""
    named = {a.name: a.default_value for a in op._schema.arguments}
    named |= dict(zip(named, args, strict=False)) | dict(kwargs)
    tensors = [t for t in named.values() if isinstance(t, DTensor)]
    mesh = tensors[0].device_mesh
    if any(t.device_mesh != mesh for t in tensors):
        raise MeshError(f"embedding_bag: the tensors live on different meshes, {[str(t.device_mesh) for t in tensors]}")
    plain = {n: t for n, t in named.items() if isinstance(t, torch.Tensor) and not isinstance(t, DTensor)}
    for n, t in plain.items():
        if n != "offsets" and t.numel() > 1 and not getattr(hot._flags, "implicit", False):
            raise MixedTensorError(
                explain_error(
                    "embedding_bag", ", ".join(f"{m}: {v._spec}" for m, v in named.items() if isinstance(v, DTensor)),
                    f"got mixed torch.Tensor and DTensor; argument {n!r} is plain",
                    "distribute_tensor(x, mesh, placements) for the plain tensor",
                )
            )  # fmt: skip
    return named | {n: replicated_on(mesh, t) for n, t in plain.items()}


def _whole(t: DTensor) -> torch.Tensor:
    return t.redistribute(placements=[Replicate()] * t.device_mesh.ndim).to_local()


def _bags(named: Mapping[str, Any]) -> tuple[DTensor, int]:
    """For every index the bag it is in, and the number of bags."""
    starts = _whole(named["offsets"])
    bags = starts.numel() - bool(named.get("include_last_offset"))
    at = torch.arange(named["indices"].shape[0], device=starts.device, dtype=starts.dtype)
    of = torch.searchsorted(starts[:bags].contiguous(), at, right=True) - 1
    return replicated_on(named["indices"].device_mesh, of.to(torch.int64)), bags


# ------------------------------------------------------------ forward
@special("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def _embedding_bag(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten._embedding_bag.default, args, kwargs)
    table = named["weight"]
    others = [t for t in named.values() if isinstance(t, DTensor) and t is not table]
    by_width = _by_width(table)
    fused = by_width == table.placements and all(t._spec.is_replicated() for t in others)
    if named["mode"] == MAX or fused or not named["indices"].numel():
        return _op_itself(named, by_width)
    of, bags = _bags(named)
    rows = _picked(named)
    out = aten.index_add(table.new_zeros((bags, table.shape[1])), 0, of, rows)
    if named["mode"] == SUM:
        zeros = replicated_on(table.device_mesh, torch.zeros(bags, dtype=torch.int64, device=table.device))
        return out, of, zeros, zeros.clone()
    kept = (named["indices"] != named["padding_idx"]).to(torch.int64)
    sizes = aten.index_add(kept.new_zeros(bags), 0, of, kept)
    sizes = sizes.redistribute(placements=[Replicate()] * table.device_mesh.ndim)
    return out / sizes.clamp(min=1).to(out.dtype).unsqueeze(1), of, sizes, sizes.clone()


def _picked(named: Mapping[str, Any]) -> Any:
    """The rows looked up, weighted; zeros for the padding."""
    rows = aten.embedding(named["weight"], named["indices"])
    weights = named.get("per_sample_weights")
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    if named["padding_idx"] >= 0:
        rows = rows * (named["indices"] != named["padding_idx"]).to(rows.dtype).unsqueeze(1)
    return rows


def _by_width(table: DTensor) -> tuple[Placement, ...]:
    """The table's layout with all but one cut by width undone."""
    mesh, width = table.device_mesh, table.shape[1]
    kept: list[Placement] = [
        p if isinstance(p, Shard) and p.dim == 1 and k <= width else Replicate()
        for p, k in zip(table.placements, mesh.shape, strict=True)
    ]
    return tuple(kept) if sum(isinstance(p, Shard) for p in kept) <= 1 else (Replicate(),) * mesh.ndim


def _op_itself(named: Mapping[str, Any], by_width: tuple[Placement, ...]) -> tuple[DTensor, ...]:
    table = named["weight"]
    mesh = table.device_mesh
    local = {n: _whole(t) if isinstance(t, DTensor) else t for n, t in named.items() if n != "weight"}
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
    named = _named(aten._embedding_bag_backward.default, args, kwargs)
    return _replicated(aten._embedding_bag_backward.default, named) if _at_once(named) else _apart(named)


@special("aten._embedding_bag_dense_backward.default")
def _dense_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _named(aten._embedding_bag_dense_backward.default, args, kwargs)
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
    all_axes = list(range(grad.device_mesh.ndim))
    cut = rows_are_cut(grad.device_mesh, (int(named["num_weights"]), grad.shape[1]), all_axes)
    return grad._spec.is_replicated() and indices._spec.is_replicated() and not cut


def _apart(named: Mapping[str, Any]) -> Any:
    """Each index gets its bag's gradient, weighted; then the gradient of a plain lookup."""
    of = named["offset2bag"] if "offsets" not in named else _bags(named)[0]
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
    named = _named(aten._embedding_bag_per_sample_weights_backward.default, args, kwargs)
    if not named["indices"].numel():
        return _replicated(aten._embedding_bag_per_sample_weights_backward.default, named)
    return (aten.index_select(named["grad"], 0, _bags(named)[0]) * _picked(named)).sum(1)


def _replicated(op: torch._ops.OpOverload, named: Mapping[str, Any]) -> DTensor:
    """`op` on replicated inputs."""
    mesh = next(t.device_mesh for t in named.values() if isinstance(t, DTensor))
    got = op(**{n: _whole(t) if isinstance(t, DTensor) else t for n, t in named.items()})
    made: DTensor = replicated_on(mesh, got)
    return made
