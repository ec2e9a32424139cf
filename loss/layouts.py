"""Targets and weights of a loss: on the mesh of its input, in the layout it wants them in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor.errors import short
from dtensor.mesh import DeviceMesh
from dtensor.placement import Placement, Replicate, Shard, StridedShard
from dtensor.propagation_rules.build import accumulation_dtype
from dtensor.tensor import DTensor

from .cross_entropy import totals_of

__all__ = ["check_index_dtype", "check_options", "check_weight", "shards", "distributed", "known_totals", "moved"]


def check_options(call: str, reduction: str, label_smoothing: float) -> None:
    """ValueError or RuntimeError for a reduction or a smoothing that is none, as torch raises them."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{call}: {short(reduction)} is not a valid value for reduction; use 'none', 'mean' or 'sum'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise RuntimeError(f"{call}: label_smoothing must be between 0.0 and 1.0, got {label_smoothing}")


def check_index_dtype(call: str, target: torch.Tensor) -> None:
    """RuntimeError where the dtype of `target` is not that of class indices."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise RuntimeError(f"{call}: a target of class indices must be of an integer type, got {target.dtype}")


def shards(p: Placement, dim: int) -> bool:
    """True where `p` shards dim `dim`."""
    return isinstance(p, (Shard, StridedShard)) and p.dim == dim


def distributed(call: str, x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """`x`, a target or weight, as a DTensor on `mesh`, indices as int64; a plain tensor counts as replicated."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    elif x.device_mesh != mesh:
        raise ValueError(
            f"{call}: target, weights and input must be on one mesh\n  got: {x.device_mesh!r} and {mesh!r}"
        )
    if not x.is_floating_point() and x.dtype != torch.int64:
        x = x.long()
    return x


def moved(x: DTensor, goal: Sequence[Placement]) -> DTensor:
    """`x` in the layout `goal`."""
    return x if x.placements == tuple(goal) else x.redistribute(placements=list(goal))


def check_weight(call: str, weight: object, count: int) -> torch.Tensor:
    """`weight`; TypeError or RuntimeError where it is not one number for each of `count` classes."""
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{call}: weight must be a tensor, a DTensor or None, got {short(weight)}")
    if tuple(weight.shape) != (count,):
        raise RuntimeError(
            f"{call}: weight must have one value for each of the {count} classes, got shape {tuple(weight.shape)}"
        )
    return weight


def known_totals(
    given: DTensor, goal: Sequence[Placement], weight: DTensor | None, count: int, dtype: torch.dtype, ignore_index: int
) -> torch.Tensor | None:
    """`totals_of` the targets `given`, where every rank has them all and the loss will use a part; else None.

    They are then known without summing over ranks, and a target that names no class is an error on all of them.
    """
    if given.placements == tuple(goal) or not all(isinstance(p, Replicate) for p in given.placements):
        return None
    return totals_of(given, weight, count, accumulation_dtype(dtype), ignore_index)
