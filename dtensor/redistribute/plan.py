"""From layout to layout: which steps, in which order.

`plan_reshard(src, dst)` is a pure function of two specs of one tensor on one mesh and of the cost model. It
uses mesh shape, global shape, dtype and placements only, never a rank's coord, so all ranks get the same
steps; what each rank sends is the executor's business (`dtensor.redistribute.executor.run`).

States. A state is a layout, a tuple of placements. Its *splits* say, per dim, which axes shard it in which
order; they alone decide which ranks hold what (`dtensor.redistribute.planner.layout_space`).

Steps.
    slice            R -> S      each rank keeps a part of what it holds; the splits of `src` come first in `dst`
    all_gather       S -> R      over the axes whose splits are dropped, where they come last in each dim
    all_to_all       anything without reduction, with split sizes, over exactly the axes that must talk
    reduce_scatter   P -> S      each position reduces the part that it keeps
    all_reduce       P -> R
    all_to_all_reduce    P -> anything: the parts go where they are wanted and are reduced there
    spread_reduce    P -> anything: parts go to ranks that have room, are reduced there, and results move on
    scale            P(sum) -> P(avg) and back, without communication
    embed            S -> P(sum), without communication: each position's shard among zeros
    zero_fill, one_fill, keep    R -> P, without communication: the value stays at position 0, or everywhere

Moving. Between layouts whose Partial axes agree one collective is enough, and it moves nothing twice: along
the axes that must talk, the shards of `src` are disjoint, so that every element has one source, and a rank
receives just what it wants and lacks. On a mesh (2, 4) of axes x, y:

    [S(0), R]    -> [R, S(0)]       all-to-all over x: half of the ranks hold what they want
    [S(0), S(0)] -> [S(1), S(1)]    all-to-all over x and y
    [S(0), S(1)] -> [R, R]          all-gather over x and y
    [S(0), R]    -> [R, S(1)]       slice, then all-gather over x

What "must talk" means is read off the digits that each axis fixes of a dim's index, so that a split factor that
skips what another axis would have sharded first is seen to be the same split.

Reducing. A Partial axis is reduced before anything else moves, since data that is not reduced is never smaller;
it is sliced before that where this is local. An axis may be reduced to R, or scattered to its shard in `dst`, or,
where another axis stands in the way, to any even shard, from which the final move gathers. Axes of one kind are
reduced in one collective. Where that receives no more, every rank fetches the pending parts of what it wants and
reduces them itself, always in the same order.

    [P, P]    -> [R, R]       all-reduce over x and y
    [P, P]    -> [S(0), R]    reduce-scatter over x, then all-reduce over y of the half
    [P, R]    -> [R, S(0)]    slice, then all-reduce over x of the quarter
    [P, S(0)] -> [R, S(0)]    all-reduce over x
    [P, S(0)] -> [S(0), S(0)] all-to-all over x and y; each reduces two parts

Choice. With a finite `slack` of the cost model: of the ways above those that receive at most `slack` times the fewest
bytes, of those the ones with the fewest collectives, of those the one of fewest seconds. They are few, and none
is searched for. With `slack=inf` the seconds alone decide; then several smaller collectives can be cheaper, where links
differ in speed or a launch costs less than the hops of a large group. The best of the ways above, and of going axis by
axis from the fast links to the slow ones and back, is then improved by a best-first search over the orders, if what
must be received leaves room for that. An axis only ever has its placement of `src`, of `dst`, R, or one even shard; the
search looks at a number of steps that is fixed by the number of axes, so it ends soon, everywhere with the same plan.
The graph of all layouts (`tests/helpers/layout_graph.py`, networkx) is the reference that both are tested against.

Towards Partial. The engine itself asks for it (a user may not): the last step. A shard becomes a summand where it is;
otherwise the tensor is brought to R on those axes and then split.

Invariants, tested: after every step each rank holds exactly the shard of the step's `dst`; the pending
reductions of the positions give the tensor's value; plans are equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from dtensor.comm.world import kept
from dtensor.errors import LayoutError, MeshError, expect, explain_error
from dtensor.intervals import common, region_size
from dtensor.placement import Partial, Replicate
from dtensor.redistribute.cost_model import CostModel, current_cost_model
from dtensor.redistribute.geometry import Coord, held_along, holdings, shared_along
from dtensor.redistribute.planner.balanced_reduction import in_stages
from dtensor.redistribute.planner.division import arrivals
from dtensor.redistribute.planner.layout_space import Space, is_sharded
from dtensor.redistribute.planner.search import cheapest
from dtensor.redistribute.step import Layout, Step
from dtensor.spec import Spec

__all__ = ["ReshardPlan", "Step", "check_one_tensor", "plan_reshard", "received"]

_REPLICATE, _SUM = Replicate(), Partial()
_FILL = {"product": "one_fill", "avg": "keep", "min": "keep", "max": "keep", "band": "keep", "bor": "keep"}


@dataclass(frozen=True, slots=True, eq=False)
class ReshardPlan:
    """How to bring a tensor from the layout of `src` to that of `dst`; equal on all ranks of the mesh.

    Attributes:
        src, dst: specs of one tensor on one mesh.
        steps: what to do, in order; () where nothing is to be done.
        cost: seconds, by the cost model that chose the steps.
    """

    src: Spec
    dst: Spec
    steps: tuple[Step, ...]
    cost: float
    bound: list[Callable[[torch.Tensor, bool], torch.Tensor]] = field(default_factory=list, repr=False)
    """The executor's: the plan bound to this rank's coord, filled at the first run."""

    @property
    def collectives(self) -> tuple[str, ...]:
        """Kinds of the collectives, in order; a step that takes several is there several times."""
        return tuple(s.kind for s in self.steps for _ in range(s.launches))

    @property
    def received_elements(self) -> int:
        """Elements that this rank receives; 0 for a rank outside the mesh."""
        return 0 if self.src.mesh.coord is None else self.received_by(self.src.mesh.coord)

    def received_by(self, coord: Sequence[int]) -> int:
        """Elements that the rank at `coord` receives, by set arithmetic."""
        return sum(received(self.src, step, tuple(coord)) for step in self.steps)

    def __str__(self) -> str:
        names = [self.src.mesh.axis_name(a) for a in range(len(self.src.placements))]
        lines = [f"{self.src} -> {self.dst}: {len(self.collectives)} collectives, {self.cost * 1e6:.1f} us"]
        lines += [f"  {i}. {step.describe(names)}" for i, step in enumerate(self.steps, 1)]
        return "\n".join(lines)


def received(spec: Spec, step: Step, coord: Coord) -> int:
    """Elements that the rank at `coord` receives in `step`.

    Reductions count as on a ring of k ranks: (k-1)/k of what is scattered, 2(k-1)/k of what is reduced to a replica.
    """
    if not step.is_collective:
        return 0
    if step.kind == "spread_reduce":
        return arrivals(spec, step, coord)
    k = math.prod(spec.mesh.shape[a] for a in step.axes)
    want = holdings(spec, step.dst, coord)
    if step.kind == "all_reduce":
        return 2 * region_size(want) * (k - 1) // k
    if step.kind == "reduce_scatter":
        return sum(map(region_size, held_along(spec, step.dst, step.axes, coord))) * (k - 1) // k
    arrive = shared_along(spec, step.dst, step.src, step.axes, coord)
    mine = common(holdings(spec, step.src, coord), want)[1]
    return sum(map(region_size, arrive)) - region_size(mine)


def plan_reshard(src: Spec, dst: Spec) -> ReshardPlan:
    """The cheapest steps from `src` to `dst`, specs of one tensor on one mesh, by the cost model in force.

    Cached, up to a bound. Raises MeshError where the meshes differ, LayoutError where the tensors do or where
    a layout is pending in several kinds of reduction (they cannot be reordered).
    """
    for name, spec in (("src", src), ("dst", dst)):
        if not isinstance(spec, Spec):
            expect("plan_reshard", name, spec, Spec, "a Spec", "plan_reshard(x._spec, y._spec)")
    return _plan(src, dst, current_cost_model())


@kept
@lru_cache(maxsize=8192)
def _plan(src: Spec, dst: Spec, model: CostModel) -> ReshardPlan:
    _check(src, dst)
    sizes = src.mesh.shape
    sums = any(isinstance(p, Partial) and p.reduce_op in ("sum", "avg") for p in src.placements)
    wire = model.wire.get(src.dtype) if sums else None
    wire = None if wire is src.dtype else wire
    space = Space(sizes, src.shape, src.dtype.itemsize, model, wire, in_stages(src))
    if src.placements == dst.placements:
        return ReshardPlan(src, dst, (), 0.0)
    if 0 in src.shape:
        return ReshardPlan(src, dst, (Step("empty", (), src.placements, dst.placements),), 0.0)
    steps: list[Step] = []
    start = tuple(q if k == 1 else p for p, q, k in zip(src.placements, dst.placements, sizes))
    if start != src.placements:
        steps.append(Step("keep", _changed(src.placements, start), src.placements, start))
    if not any(isinstance(p, Partial) for p in (*start, *dst.placements)):
        cost, middle = cheapest(space, start, dst.placements)
        return ReshardPlan(src, dst, (*steps, *middle), cost)
    scaled, factor = _scale(space, start, dst)
    if scaled != start:
        steps.append(Step("scale", _changed(start, scaled), start, scaled, factor=factor))
    goal = tuple(
        _REPLICATE if isinstance(q, Partial) and p is not q and k > 1 else q
        for p, q, k in zip(scaled, dst.placements, sizes)
    )
    kept = _kept(space, scaled, goal, dst.placements)
    cost, middle = cheapest(space, scaled, kept)
    steps += middle
    if kept != goal:
        axes = _changed(kept, goal)
        goal = tuple(dst.placements[a] if a in axes else p for a, p in enumerate(goal))
        more, embed = space.step("embed", axes, space.facts(kept), space.facts(goal))
        cost, steps = cost + more, [*steps, *embed]
    steps += _split(goal, dst.placements)
    return ReshardPlan(src, dst, tuple(steps), cost)


def _changed(src: Layout, dst: Layout) -> tuple[int, ...]:
    return tuple(a for a, p in enumerate(src) if p is not dst[a])


def check_one_tensor(src: Spec, dst: Spec, fix: str) -> None:
    """LayoutError, with `fix`, where two specs differ in the global shape or dtype."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise LayoutError(
            explain_error(
                f"redistribute {src} -> {dst}",
                f"{tuple(src.shape)} of {src.dtype} and {tuple(dst.shape)} of {dst.dtype}",
                "a redistribution keeps the global shape and dtype",
                fix,
            )
        )


def _check(src: Spec, dst: Spec) -> None:
    if src.mesh != dst.mesh:
        raise MeshError(
            explain_error(
                f"redistribute {src} -> {dst}",
                f"{src.mesh!r} and {dst.mesh!r}",
                "both layouts must be on one mesh",
                "distribute_tensor(x.full_tensor(), mesh, placements)",
            )
        )
    check_one_tensor(src, dst, "spec.with_placements(placements)")
    for spec in (src, dst):
        kinds = {"sum" if p.reduce_op == "avg" else p.reduce_op for p in spec.placements if isinstance(p, Partial)}
        if len(kinds) > 1:
            raise LayoutError(
                explain_error(
                    f"redistribute {src} -> {dst}",
                    f"{list(spec.placements)}",
                    "a layout may be pending in one kind of reduction only (sum and avg are one kind)",
                    "reduce one kind before the other is made",
                )
            )


def _scale(space: Space, layout: Layout, dst: Spec) -> tuple[Layout, float]:
    """`layout` with sum and avg exchanged where `dst` asks for it, or avg as sum where both are to be reduced.

    Floating point and complex only.

    Returns the layout and the factor: k for each axis that goes from sum to avg, 1/k for each back.
    """
    out, factor, dtype = list(layout), 1.0, dst.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return layout, factor
    reduced = [p for p, q in zip(layout, dst.placements) if isinstance(p, Partial) and not isinstance(q, Partial)]
    for a, (p, q) in enumerate(zip(layout, dst.placements)):
        if not isinstance(p, Partial) or p is q:
            continue
        if not isinstance(q, Partial):
            if p.reduce_op == "avg" and reduced.count(p) < len(reduced) and space.sizes[a] > 1:
                out[a], factor = _SUM, factor / space.sizes[a]
            continue
        if p.reduce_op == "sum" and q.reduce_op == "avg":
            out[a], factor = q, factor * space.sizes[a]
        elif p.reduce_op == "avg" and q.reduce_op == "sum":
            out[a], factor = q, factor / space.sizes[a]
    return tuple(out), factor


def _kept(space: Space, src: Layout, goal: Layout, dst: Layout) -> Layout:
    """`goal` with the shards of `src` on axes that become a pending sum: a shard among zeros is a summand.

    Only where every rank's shard then lies inside what it holds in the end.
    """
    axes = [a for a, q in enumerate(dst) if is_sharded(src[a]) and q is _SUM and space.sizes[a] > 1]
    kept = tuple([src[a] if a in axes else p for a, p in enumerate(goal)])
    return kept if axes and space.extends(space.facts(goal), space.facts(kept)) else goal


def _split(layout: Layout, dst: Layout) -> list[Step]:
    """The steps that turn replicated axes of `layout` into the Partial ones of `dst`, one a kind."""
    by_kind: dict[str, list[int]] = {}
    for a, q in enumerate(dst):
        if layout[a] is not q and isinstance(q, Partial):
            by_kind.setdefault(_FILL.get(q.reduce_op, "zero_fill"), []).append(a)
    steps, cur = [], layout
    for kind, axes in by_kind.items():
        nxt = tuple(dst[a] if a in axes else p for a, p in enumerate(cur))
        steps.append(Step(kind, tuple(axes), cur, nxt))
        cur = nxt
    return steps
