"""Histograms: counts of shards add up, once all ranks agree on the bins.

histc       without bounds they are the least and the largest number, found by two small reductions
bincount    as many bins as the largest number asks for

bincount of 1 3 | 0 1 on 2 ranks      4 bins on both      0 1 0 1 | 1 1 0 0, a pending sum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.dispatch.hit import special
from dtensor.dispatch.materialized import settled_spec
from dtensor.errors import MixedTensorError
from dtensor.placement import Partial, Placement, Replicate
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Kernel, Rule
from dtensor.spec import Spec
from dtensor.tensor import DTensor

__all__ = ["bincount", "histc"]


def histc(call: Call) -> Rule:
    """With bounds the counts add up as they are."""
    x, out = call.inputs[0], call.outputs[0]
    assert out is not None
    dims: Dims = tuple((d,) for d in range(x.ndim))
    rule = Rule((dims,), (((x.ndim,),),), (*x.shape, out.shape[0]), frozenset({x.ndim}))
    if float(call["min"]) != float(call["max"]) or not dims:
        return rule
    every = frozenset(range(x.ndim))
    kernel = Kernel("histc", every, ("sum",), _run_histc, 2, 1)
    return replace(rule, whole=rule.whole | every, kernels=(kernel,))


def _run_histc(ctx: KernelContext) -> torch.Tensor:
    x = ctx.inputs[0]
    ends = torch.stack((x.amax(), -x.amin())) if x.numel() else x.new_full((2,), -torch.inf)
    high, low = ctx.all_reduce(ends, "max").tolist()
    low = -low
    if low == high:
        low, high = low - 1, high + 1
    return torch.histc(x, int(str(ctx.arguments["bins"])), low, high)


@special("aten.bincount.default")
def bincount(args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor:
    """The shape depends on the data, so this is no rule. Weights are laid out like what is counted."""
    named = {"weights": None, "minlength": 0} | dict(zip(("self", "weights", "minlength"), args, strict=False)) | kwargs
    x, weights = named["self"], named["weights"]
    if not isinstance(x, DTensor) or not (weights is None or isinstance(weights, DTensor)):
        raise MixedTensorError("bincount: got mixed torch.Tensor and DTensor; input and weights must be DTensors")
    if x.ndim != 1:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is not None and weights.shape != x.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    layout = tuple(Replicate() if isinstance(p, Partial) else p for p in x.placements)
    local = _laid_out(x, layout)
    own = None if weights is None else _laid_out(weights, layout)
    counts = torch.bincount(local, own, _bins(x, local, layout, named))
    if own is not None and x.numel() and not local.numel():  # of nothing it gives integers
        counts = counts.to(torch.float32 if own.dtype == torch.float32 else torch.float64)
    placements = tuple(p if isinstance(p, Replicate) else Partial() for p in layout)
    spec = Spec.make(x.device_mesh, placements, counts.shape, counts.stride(), counts.dtype)
    return DTensor(counts, spec, requires_grad=False)


def _bins(x: DTensor, local: torch.Tensor, layout: Sequence[Placement], named: Mapping[str, Any]) -> int:
    """How many bins all ranks need; RuntimeError where a number anywhere is negative."""
    mesh, least = x.device_mesh, int(named["minlength"])
    if x.is_floating_point() or x.dtype == torch.bool or least < 0:
        return least  # refused by the op itself
    ends = torch.tensor([-1, 0], device=local.device)
    if local.numel():
        ends = torch.stack((local.amax().long(), -local.amin().long()))
    for axis, p in enumerate(layout):
        if mesh.shape[axis] > 1 and not isinstance(p, Replicate) and mesh.coord is not None:
            ends = mesh.comm(axis).all_reduce(ends, "max")
    largest, below = ends.tolist()
    if below > 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    return max(least, largest + 1)


def _laid_out(x: DTensor, layout: Sequence[Placement]) -> torch.Tensor:
    spec = settled_spec(x, "bincount")
    return redistribute_local(x._local_tensor, spec, spec.with_placements(tuple(layout)))


register("aten.histc", histc)
