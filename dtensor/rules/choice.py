"""From a rule and the layouts at hand to a decision: which strategy on which mesh axis.

The search goes over the axes from left to right. Its states are prefixes: the choices of the first axes, with
the factors' local sizes that they leave and the cost of bringing every input, on those axes, into the layout
they ask for. It takes the cheapest prefix off a queue, extends it by every legal choice of the next axis and
stops at the first complete one; costs never shrink, so that one is the cheapest. Ties: fewer inputs that
change, then deeper prefixes, then the order in which `Rule.choices` lists them. Everything it reads is the
same on all ranks. On a mesh of several axes the runners-up are priced again with the best one
(`dtensor.rules.pricing`).

    mm  a: f32[64@x,64]  b: f32[64@x,64]     on one axis of 4
    m   b is gathered                        64*64*3/4 elements received
    k   a moves to S(1)                      64*64/4*3/4           <- the cheapest
    R   both gathered                        twice the first
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Replicate
from dtensor.redistribute.cost_model import CostModel, current_cost_model
from dtensor.rules.decision import Decision
from dtensor.rules.pricing import FEW, NEAR, axis_cost, cheapest_of, reordered
from dtensor.rules.rule import Choice, Rule, State, Want, carried_splits, refine
from dtensor.spec import Spec, TensorMeta

__all__ = ["Keep", "all_decisions", "decide"]


@dataclass(slots=True)
class _Prefix:
    choices: tuple[Choice, ...]
    ins: tuple[tuple[Placement, ...], ...]
    outs: tuple[tuple[Placement, ...], ...]
    state: State


_AVG = Partial("avg")

Keep = Mapping[int, int]
"""Input that is written -> output that is the same tensor (-1: none); both must keep the input's layout."""


def decide(
    op: str,
    rule: Rule,
    inputs: Sequence[Spec],
    outputs: Sequence[TensorMeta | None],
    mesh: DeviceMesh,
    keep: Keep | None = None,
) -> Decision | None:
    """The cheapest strategy for these layouts; None when none is legal (only possible with `keep`)."""
    keep = keep or {}
    refined = refine(rule, inputs)
    best = _best(op, refined, inputs, outputs, mesh, keep)
    if refined is rule or (best is not None and best.cost == 0):
        return best
    # The split factor of one input may not suit the layout of another: perhaps that one should move instead.
    for other in {id(r): r for r in (refine(rule, inputs, only=keep), rule) if r is not refined}.values():
        found = _best(op, other, inputs, outputs, mesh, keep)
        if found is not None and (best is None or found.cost < best.cost):
            best = found
    return best


def _best(
    op: str, rule: Rule, inputs: Sequence[Spec], outputs: Sequence[TensorMeta | None], mesh: DeviceMesh, keep: Keep
) -> Decision | None:
    """The cheapest strategy of one form of the rule; on several axes, of the first few by their plans."""
    limit = [math.inf]
    found = _search(op, rule, inputs, outputs, mesh, keep, limit)
    best = next(found, None)
    if best is None or best.cost == 0 or sum(k > 1 for k in mesh.shape) < 2:
        return best
    limit[0] = NEAR * best.cost
    return cheapest_of([best, *itertools.islice(found, FEW - 1)], inputs)


def all_decisions(
    op: str, rule: Rule, inputs: Sequence[Spec], outputs: Sequence[TensorMeta | None], mesh: DeviceMesh,
    keep: Keep | None = None, pending: Iterable[str] | None = None,
) -> Iterator[Decision]:  # fmt: skip
    """Every legal strategy, cheapest first: what the law tests run.

    `pending` replaces the reductions that are tried for linear groups (default: those of the inputs).
    """
    return _search(op, refine(rule, inputs), inputs, outputs, mesh, keep or {}, None, pending)


def _search(
    op: str, rule: Rule, inputs: Sequence[Spec], outputs: Sequence[TensorMeta | None], mesh: DeviceMesh,
    keep: Keep, limit: list[float] | None, pending: Iterable[str] | None = None,
) -> Iterator[Decision]:  # fmt: skip
    """The strategies, cheapest first; with a `limit` (which may be lowered on the way) those that cost no more, and
    where one moves nothing only that one.
    """
    if pending is None:
        pending = {p.reduce_op for s in inputs for p in s.placements if isinstance(p, Partial)}
    choices = [c for c in rule.choices(pending, carried_splits(rule, inputs)) if not _truncates(c, inputs)]
    start = _Prefix((), ((),) * len(inputs), ((),) * len(outputs), State.start(rule))
    if limit is not None:
        unmoved = _unmoved(rule, start, choices, inputs, mesh, keep)
        if unmoved is not None:
            yield _finish(op, rule, unmoved, inputs, outputs, 0.0)
            return
    model = current_cost_model()
    order = itertools.count()
    queue: list[tuple[float, int, int, int, _Prefix]] = [(0.0, 0, 0, next(order), start)]
    sizes = [max(s.local_numel_bound, 1) * s.dtype.itemsize for s in inputs] if inputs else []
    while queue:
        cost, moved, depth, _, prefix = heapq.heappop(queue)
        if limit is not None and cost > limit[0]:
            return
        axis = -depth
        if axis == mesh.ndim:
            yield _finish(op, rule, prefix, inputs, outputs, cost)
            continue
        k = mesh.shape[axis]
        for choice in choices:
            grown = _extend(rule, prefix, choice, k, inputs)
            if grown is None or not _legal(grown, inputs, axis, keep):
                continue
            extra, moves = _step_cost(model, rule, inputs, sizes, grown, axis, mesh, choice)
            heapq.heappush(queue, (cost + extra, moved + moves, -(axis + 1), next(order), grown))


def _unmoved(
    rule: Rule, prefix: _Prefix, choices: Sequence[Choice], inputs: Sequence[Spec], mesh: DeviceMesh, keep: Keep
) -> _Prefix | None:
    """The strategy that moves no input and costs nothing, found without a queue; None where the search must look.

    It is what the search would find: per axis the first choice that asks every input for the layout it has.
    """
    for axis, k in enumerate(mesh.shape):
        for choice in choices:
            if choice.kernel is not None and choice.kernel.collectives:
                continue
            if rule.price_later is not None and rule.price_later(axis, choice) is not None:
                continue
            if not all(
                _want(prefix.state, dims, w, choice.split, s.placements[axis]) is s.placements[axis]
                for dims, w, s in zip(rule.inputs, choice.inputs, inputs, strict=True)
            ):
                continue
            grown = _extend(rule, prefix, choice, k, inputs)
            if grown is not None and _legal(grown, inputs, axis, keep):
                prefix = grown
                break
        else:
            return None
    return prefix


def _truncates(choice: Choice, inputs: Sequence[Spec]) -> bool:
    """True for a pending average of integers, which is rounded: only ops that move elements may pass it."""
    if choice.factor is not None or choice.moves_only:
        return False
    return any(w is _AVG and not _rounds(s.dtype) for w, s in zip(choice.inputs, inputs, strict=True))


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _extend(rule: Rule, prefix: _Prefix, choice: Choice, k: int, inputs: Sequence[Spec]) -> _Prefix | None:
    """The prefix with `choice` on the next axis, of size `k`; None where it is not legal."""
    if choice.kernel is not None:
        for c in prefix.choices:
            if c.kernel is not None and c.kernel is not choice.kernel:
                return None
    state = prefix.state
    if choice.factor is not None:
        cut = state.sharded(rule, choice.factor, k, choice.split)
        if cut is None:
            return None
        state = cut
    axis = len(prefix.choices)
    ins = tuple(
        (*done, _want(prefix.state, dims, w, choice.split, s.placements[axis]))
        for done, dims, w, s in zip(prefix.ins, rule.inputs, choice.inputs, inputs, strict=True)
    )
    outs = tuple(
        (*done, _want(prefix.state, dims, w, choice.split))
        for done, dims, w in zip(prefix.outs, rule.outputs, choice.outputs, strict=True)
    )
    if any(not _one_reduction(t) for t in (*ins, *outs)):
        return None
    return _Prefix((*prefix.choices, choice), ins, outs, state)


def _want(
    state: State, dims: tuple[tuple[int, ...], ...], want: Want, split: int, given: Placement | None = None
) -> Placement:
    """What `want` means after the axes chosen so far; `given` is what the tensor has on this axis."""
    if isinstance(want, int):
        return state.placement(dims, want, split)
    return want or given or Replicate()


def _one_reduction(placements: Sequence[Placement]) -> bool:
    kinds = {"sum" if p.reduce_op == "avg" else p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(kinds) <= 1


def _legal(prefix: _Prefix, inputs: Sequence[Spec], axis: int, keep: Keep) -> bool:
    return all(
        prefix.ins[i][axis] is inputs[i].placements[axis]
        and (o < 0 or prefix.outs[o][axis] is inputs[i].placements[axis])
        for i, o in keep.items()
    )


def _step_cost(
    model: CostModel, rule: Rule, inputs: Sequence[Spec], sizes: Sequence[int], prefix: _Prefix, axis: int,
    mesh: DeviceMesh, choice: Choice,
) -> tuple[float, int]:  # fmt: skip
    """Seconds to bring the inputs, on this axis, into the prefix's layout, and how many inputs change."""
    cost, moves, k = 0.0, 0, mesh.shape[axis]
    for spec, nbytes, want in zip(inputs, sizes, prefix.ins, strict=True):
        if spec.placements[axis] is not want[axis] or reordered(spec, want, axis):
            moves += 1
            if k > 1:
                cost += axis_cost(model, spec, want, axis, nbytes)
    width = inputs[0].dtype.itemsize if inputs else 4
    due = rule.price_later(axis, choice) if rule.price_later is not None and k > 1 else None
    if due is not None:
        cost += due[2] * getattr(model, due[0])(k, due[1] * width, (axis,))
    if choice.kernel is not None and k > 1 and choice.kernel.collectives:
        send: Callable[[int, float], float] = getattr(model, choice.kernel.moves)
        before = math.prod(
            n for n, c in zip(mesh.shape, prefix.choices[:-1], strict=False) if c.kernel is choice.kernel
        )
        nbytes = max(choice.kernel.elements, 1) * width  # one collective over all axes of the kernel
        cost += choice.kernel.collectives * max(send(k * before, nbytes) - send(before, nbytes), 0.0)
    return cost, moves


def _finish(
    op: str, rule: Rule, prefix: _Prefix, inputs: Sequence[Spec], outputs: Sequence[TensorMeta | None], cost: float
) -> Decision:
    mesh = inputs[0].mesh
    ins = tuple(s.with_placements(p) if p != s.placements else s for s, p in zip(inputs, prefix.ins, strict=True))
    outs = tuple(
        None if m is None else Spec.make(mesh, p, m.shape, m.stride, m.dtype)
        for m, p in zip(outputs, prefix.outs, strict=True)
    )
    on = [(a, c) for a, c in enumerate(prefix.choices) if c.kernel is not None]
    kernel = on[0][1].kernel if on else None
    return Decision(
        op, tuple(c.label for c in prefix.choices), ins, outs, rule, kernel,
        tuple(a for a, _ in on), tuple(c.factor or 0 for _, c in on), cost,
    )  # fmt: skip
