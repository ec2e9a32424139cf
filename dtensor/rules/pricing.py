"""Pricing strategies by the redistributions that they really need, where several axes change at once.

The search of `dtensor.rules.choice` adds up the costs of single-axis moves, which is exact as long as no input moves
on two axes. Where one does, the sum is a guess: one collective may do what it counts twice, or it may take two. So
the few strategies that the search finds first are compared by the plans that would be run:

    mm  x: f32[8192@dp,1024]  w: f32[1024@dp+tp,1024]     on (dp, tp), the weight transposed
    gather x over dp                        one all-gather
    gather w over dp, keep it sharded by tp     one all-to-all over both, as dp shards w first; two in the sum

A launch counts the same whatever is launched, so that of two strategies with one collective each the one that receives
less is taken, however small both are; with a model that decides by seconds alone the plans' own seconds are
compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.redistribute.cost_model import CostModel, current_cost_model
from dtensor.redistribute.plan import plan_reshard
from dtensor.rules.decision import Decision
from dtensor.spec import Spec

__all__ = ["FEW", "NEAR", "axis_cost", "cheapest_of", "move_cost", "moving", "price", "reordered"]

FEW = 4
"""Strategies that are compared by their plans, at most."""

NEAR = 1.5
"""A strategy that costs more than this times the cheapest, by the search, is not compared with it."""


def move_cost(
    model: CostModel, src: Placement, dst: Placement, nbytes: float, k: int, axes: Sequence[int] = ()
) -> float:
    """Seconds to turn `src` into `dst` on an axis of `k` for a local part of `nbytes`."""
    return 0.0 if isinstance(src, Replicate) else float(getattr(model, _kind(src, dst))(k, nbytes, axes))


def reordered(spec: Spec, want: Sequence[Placement], axis: int) -> bool:
    """True when an axis to the left shards the same dim differently, so that this axis' pieces move too."""
    p = want[axis]
    if not isinstance(p, (Shard, StridedShard)):
        return False
    splits = lambda q: q if isinstance(q, (Shard, StridedShard)) and q.dim == p.dim else None  # noqa: E731
    return any(splits(spec.placements[a]) is not splits(want[a]) for a in range(axis))


def axis_cost(model: CostModel, spec: Spec, want: Sequence[Placement], axis: int, nbytes: float) -> float:
    """What the search counts for bringing `spec` on `axis` into `want`, the layout of the axes up to this one.

    An input that moves on an axis to the left as well is taken to need no launch of its own on this one.
    """
    k = spec.mesh.shape[axis]
    cost = move_cost(model, spec.placements[axis], want[axis], nbytes, k, (axis,))
    if cost and any(_sends(spec, want, a) for a in range(axis)):
        return max(cost - model.launch((axis,)), 0.0)
    return cost


def _sends(spec: Spec, want: Sequence[Placement], a: int) -> bool:
    """True where bringing axis `a` into `want` communicates."""
    src = spec.placements[a]
    if spec.mesh.shape[a] == 1 or isinstance(src, Replicate):
        return False
    return src is not want[a] or reordered(spec, want, a)


def cheapest_of(decisions: Iterable[Decision], inputs: Sequence[Spec]) -> Decision | None:
    """The cheapest of some strategies of one call by their plans; the first where none moves on two axes at once."""
    found = list(decisions)
    if len(found) < 2 or not any(len(moving(s, d)) > 1 for c in found for s, d in zip(inputs, c.inputs)):
        return found[0] if found else None
    model = current_cost_model()
    return min(found, key=lambda c: price(model, c, inputs))


def moving(src: Spec, dst: Spec) -> list[int]:
    """Axes on which `src` communicates when it becomes `dst`."""
    return [] if src is dst else [a for a in range(len(src.placements)) if _sends(src, dst.placements, a)]


def price(model: CostModel, decision: Decision, inputs: Sequence[Spec]) -> float:
    """Seconds of a strategy: its moves by their plans, what the search added beside them, and what it leaves to do.

    That is the transfer of the results that are left pending: somebody will reduce them.
    """
    total = decision.cost + sum(_owed(model, s) for s in decision.outputs if s is not None)
    for src, dst in zip(inputs, decision.inputs):
        axes = moving(src, dst)
        nbytes = max(src.local_numel_bound, 1) * src.dtype.itemsize
        for a in axes:
            total -= axis_cost(model, src, dst.placements, a, nbytes)
        if len(axes) > 1:
            plan = plan_reshard(src, dst)
            sent = [s for s in plan.steps if s.is_collective]
            total += plan.cost if model.by_seconds else sum(
                s.launches * model.launch(s.axes) + model.transfer(s.nbytes, s.axes) for s in sent
            )
        elif axes:
            kind = _kind(src.placements[axes[0]], dst.placements[axes[0]])
            total += _one(model, kind, src.mesh.shape[axes[0]], nbytes, axes)
    kernel = decision.kernel
    if kernel is not None and kernel.collectives and not model.by_seconds:
        k = math.prod(decision.inputs[0].mesh.shape[a] for a in decision.kernel_axes)
        nbytes = max(kernel.elements, 1) * inputs[0].dtype.itemsize
        send = getattr(model, kernel.moves)
        total += kernel.collectives * (_one(model, kernel.moves, k, nbytes, ()) - send(k, nbytes))
    return total


def _owed(model: CostModel, out: Spec) -> float:
    """Seconds of transfer that reducing what is pending in `out` takes."""
    if not out.has_partial():
        return 0.0
    k = math.prod(k for k, p in zip(out.mesh.shape, out.placements) if isinstance(p, Partial))
    return model.transfer(out.local_numel_bound * out.dtype.itemsize * (k - 1) / k)


def _kind(src: Placement, dst: Placement) -> str:
    """The collective that brings `src`, which is not replicated, into `dst`."""
    cut = isinstance(dst, (Shard, StridedShard))
    if isinstance(src, Partial):
        return "reduce_scatter" if cut else "all_reduce"
    return "all_to_all" if cut else "all_gather"


def _one(model: CostModel, kind: str, k: int, nbytes: float, axes: Sequence[int]) -> float:
    """What `price` counts for one collective among `k`: a launch, and what is received."""
    if model.by_seconds or k == 1:
        return float(getattr(model, kind)(k, nbytes, axes))
    times = {"all_gather": k, "all_reduce": 2.0}.get(kind, 1.0)
    return model.launch(axes) + model.transfer(times * nbytes * (k - 1) / k, axes)
