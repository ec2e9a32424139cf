"""What the redistribution tests share: the table of meshes, shapes and layouts, and the specification.

The specification is written with `torch.chunk` alone and knows nothing of intervals, plans or collectives.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import torch

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.redistribute.plan import ReshardPlan
from dtensor.spec import Spec, contiguous_stride

Layout = tuple[Placement, ...]
R, P = Replicate(), Partial()

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (4,), (2, 2), (2, 3), (1, 3), (2, 2, 2))
SHAPES: tuple[tuple[int, ...], ...] = ((8, 12), (5, 7), (1, 3), (0, 4), (9, 2, 3), (7,))


def placements_for(ndim: int) -> list[Placement]:
    """Every kind of placement for a tensor of `ndim` dims."""
    shards: list[Placement] = [Shard(d) for d in sorted({0, min(1, ndim - 1), ndim - 1})]
    return [R, P, *shards, StridedShard(0, split_factor=2), StridedShard(ndim - 1, split_factor=3)]


def pairs(mesh: Sequence[int], ndim: int, most: int, seed: int = 0) -> list[tuple[Layout, Layout]]:
    """All pairs of layouts, or `most` of them drawn at random."""
    layouts = list(itertools.product(placements_for(ndim), repeat=len(mesh)))
    if len(layouts) ** 2 <= most:
        return list(itertools.product(layouts, layouts))
    rng = random.Random(seed)
    return [(rng.choice(layouts), rng.choice(layouts)) for _ in range(most)]


def numbers(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Global tensor whose elements are all different (as far as the dtype allows)."""
    flat = torch.arange(1, 1 + math.prod(shape))
    if dtype == torch.bool:
        return (flat % 3 == 0).reshape(tuple(shape))
    return (flat % 113).to(dtype).reshape(tuple(shape))


def _chunk(x: torch.Tensor, k: int, r: int, dim: int) -> torch.Tensor:
    parts = x.chunk(k, dim)
    return parts[r] if r < len(parts) else x.narrow(dim, 0, 0)


def shard_of(full: torch.Tensor, layout: Layout, mesh: Sequence[int], coord: Sequence[int]) -> torch.Tensor:
    """The shard of `full` at `coord`; what Partial axes add is not in it."""
    for p, k, r in zip(layout, mesh, coord, strict=True):
        if isinstance(p, Shard):
            full = _chunk(full, k, r, p.dim)
        elif isinstance(p, StridedShard):
            full = torch.cat([_chunk(c, k, r, p.dim) for c in full.chunk(p.split_factor, p.dim)], p.dim)
    return full


def local_of(full: torch.Tensor, layout: Layout, mesh: Sequence[int], coord: Sequence[int]) -> torch.Tensor:
    """What the rank at `coord` holds of `full` in `layout`: its shard, or an uneven part of a pending reduction."""
    x = shard_of(full, layout, mesh, coord).clone()
    pending = [a for a, p in enumerate(layout) if isinstance(p, Partial)]
    if not pending:
        return x
    k, at = math.prod(mesh[a] for a in pending), 0
    for a in pending:
        at = at * mesh[a] + coord[a]
    op = layout[pending[0]].reduce_op  # type: ignore[attr-defined]
    return part_of(x, op, k, at)


def part_of(x: torch.Tensor, op: str, k: int, at: int) -> torch.Tensor:
    """Position `at`'s part of `x` as a reduction over `k` positions; no two positions alike where that can be."""
    if op in ("sum", "avg"):
        extra = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape) % 5 + 1
        part = extra * (at + 1) if at < k - 1 else -extra * (k * (k - 1) // 2)
        whole = x if at == 0 else torch.zeros_like(x)
        return (whole + part.to(x.dtype)) * (k if op == "avg" else 1)
    who = torch.arange(x.numel()).reshape(x.shape) % k == at
    if op in ("max", "bor"):
        return torch.where(who, x, x * 0 if op == "bor" else x - at - 1)
    if op in ("min", "band"):
        return torch.where(who, x, x.new_full((), -1) if op == "band" else x + at + 1)
    if op == "product":
        return torch.where(who, x, torch.ones_like(x))
    return torch.where(who, x, torch.zeros_like(x))  # bxor and the norms


def spec_of(mesh: DeviceMesh, layout: Layout, full: torch.Tensor) -> Spec:
    """The spec of `full` in `layout`."""
    return Spec.make(mesh, layout, tuple(full.shape), contiguous_stride(full.shape), full.dtype)


def as_many(seen: Sequence[int], plan: ReshardPlan) -> bool:
    """True for as many collectives as planned; a spread reduction leaves out an all-to-all that would carry nothing."""
    planned = len(plan.collectives)
    return len(seen) == planned or ("spread_reduce" in plan.collectives and len(seen) < planned)
