"""Plans: which collectives, how much is received, that all ranks decide alike, and how a plan reads."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.reshard_cases import Layout, P, R, numbers, pairs, shard_of, spec_of

import dtensor
from dtensor.errors import LayoutError, MeshError
from dtensor.mesh.device_mesh import init_device_mesh
from dtensor.placement import Partial, Replicate, Shard, StridedShard
from dtensor.redistribute.cost_model import CostModel, use_cost_model
from dtensor.redistribute.plan import ReshardPlan, plan_reshard
from dtensor.redistribute.planner.layout_space import Space
from dtensor.redistribute.planner.search import cheapest
from dtensor.simulate import fake_world
from dtensor.spec import Spec, contiguous_stride

S0, S1, S2 = Shard(0), Shard(1), Shard(2)
EVEN, UNEVEN = (16, 16, 16), (13, 9, 11)
SECONDS = CostModel(slack=math.inf)


def plan(mesh_shape: tuple[int, ...], src: Layout, dst: Layout, shape: tuple[int, ...] = EVEN) -> ReshardPlan:
    """A plan on a mesh that need not exist."""
    with fake_world(torch.Size(mesh_shape).numel()):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("x", "y", "z", "w")[: len(mesh_shape)])
        make = lambda layout: Spec.make(mesh, layout, shape, contiguous_stride(shape), torch.float32)  # noqa: E731
        return plan_reshard(make(src), make(dst))


ONE_AXIS = [
    (S0, R, "all_gather"), (S1, R, "all_gather"), (StridedShard(0, split_factor=2), R, "all_gather"),
    (P, R, "all_reduce"), (P, S0, "reduce_scatter"), (P, S1, "reduce_scatter"),
    (P, StridedShard(0, split_factor=2), "reduce_scatter"),
    (S0, S1, "all_to_all"), (S0, StridedShard(0, split_factor=2), "all_to_all"),
    (R, S0, ""), (R, StridedShard(1, split_factor=3), ""), (R, P, ""), (P, Partial("avg"), ""), (R, R, ""),
    (S0, P, ""), (StridedShard(0, split_factor=2), P, ""), (S1, Partial("max"), "all_gather"),
]  # fmt: skip


@pytest.mark.parametrize("shape", [EVEN, UNEVEN, (3, 2), (1, 5)], ids=str)
@pytest.mark.parametrize(("src", "dst", "kind"), ONE_AXIS, ids=str)
def test_one_axis_takes_one_collective_of_the_natural_kind(
    src: Partial, dst: Partial, kind: str, shape: tuple[int, ...]
) -> None:
    assert plan((4,), (src,), (dst,), shape).collectives == ((kind,) if kind else ())


@pytest.mark.parametrize(
    ("mesh_shape", "src", "dst", "collectives"),
    [
        ((2, 4), (S0, S1), (S1, S0), ("all_to_all",)),
        ((2, 4), (S0, S0), (S1, S1), ("all_to_all",)),
        ((2, 4), (S0, S0), (R, S0), ("all_to_all",)),
        ((2, 4), (S0, R), (R, S0), ("all_to_all",)),
        ((2, 4), (S0, R), (R, S1), ("all_gather",)),
        ((2, 4), (S0, S1), (R, R), ("all_gather",)),
        ((2, 4), (S0, S0), (S0, R), ("all_gather",)),
        ((2, 4), (S0, R), (S0, S0), ()),
        ((2, 4), (P, P), (R, R), ("all_reduce",)),
        ((2, 4), (P, P), (S0, S1), ("reduce_scatter",)),
        ((2, 4), (P, P), (S0, S0), ("reduce_scatter",)),
        ((2, 4), (P, R), (S0, S0), ("reduce_scatter",)),
        ((2, 4), (P, R), (R, S0), ("all_reduce",)),
        ((2, 4), (S0, P), (S0, R), ("all_reduce",)),
        ((2, 4), (S0, P), (R, P), ("all_gather",)),
        ((2, 4), (S0, S1), (P, S1), ()),
        ((2, 4), (S0, S1), (R, P), ("all_gather",)),
        ((2, 4), (R, S0), (P, P), ()),
        ((2, 4), (S0, S0), (S0, P), ()),
        ((2, 4), (S0, S0), (P, S0), ("all_to_all",)),
        ((2, 4), (S0, S1), (Partial("avg"), S1), ("all_gather",)),
        ((2, 4), (Partial("avg"), P), (R, R), ("all_reduce",)),
        ((2, 2, 2), (S0, S1, S2), (S2, S0, S1), ("all_to_all",)),
        ((2, 2, 2), (S0, S0, S0), (S1, S1, S1), ("all_to_all",)),
        ((2, 2, 2), (P, R, P), (R, S0, R), ("all_reduce",)),
    ],
    ids=str,
)
def test_several_axes(mesh_shape: tuple[int, ...], src: Layout, dst: Layout, collectives: tuple[str, ...]) -> None:
    made = plan(mesh_shape, src, dst)
    assert made.collectives == collectives, str(made)


@pytest.mark.parametrize("src", [(S0,), (R,), (P,)], ids=str)
def test_axes_of_size_one_never_communicate(src: Layout) -> None:
    for mid in (S1, R, P):
        for dst in (S0, S1, R):
            assert not plan((4, 1), (*src, mid), (*src, dst)).collectives


def test_tensors_without_elements_never_communicate() -> None:
    for src, dst in pairs((2, 2), 2, 60):
        assert not plan((2, 2), src, dst, (0, 4)).collectives


@pytest.mark.parametrize("shape", [EVEN, UNEVEN, (5, 7)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 3), (2, 2, 2)], ids=str)
def test_shard_and_replicate_pairs_receive_only_what_they_lack(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """By the specification: elements of the target shard that the rank does not hold, in at most one collective."""
    full = numbers(shape, torch.int64).view(-1).copy_(torch.arange(torch.Size(shape).numel())).view(shape)
    rng = random.Random(0)
    kinds = [R, S0, S1, StridedShard(0, split_factor=2), StridedShard(1, split_factor=3)]
    coords = list(torch.cartesian_prod(*[torch.arange(k) for k in mesh_shape]).view(-1, len(mesh_shape)).tolist())
    for _ in range(60):
        src, dst = (tuple(rng.choice(kinds) for _ in mesh_shape) for _ in "ab")
        made = plan(mesh_shape, src, dst, shape)
        assert len(made.collectives) <= 1, str(made)
        for coord in coords:
            have = set(shard_of(full, src, mesh_shape, coord).flatten().tolist())
            want = set(shard_of(full, dst, mesh_shape, coord).flatten().tolist())
            assert made.received_by(coord) == len(want - have), f"{coord} of {made}"


def test_plans_do_not_depend_on_the_rank() -> None:
    todo = pairs((2, 3), 2, 150, seed=1)

    def body() -> list[list[str]]:
        mesh = init_device_mesh("cpu", (2, 3))
        plans = [plan_reshard(*(spec_of(mesh, layout, numbers((5, 7))) for layout in pair)) for pair in todo]
        return [[str(step) for step in made.steps] for made in plans]

    first, *others = dtensor.simulate(6)(body)
    assert all(other == first for other in others)


def test_plans_are_cached_by_specs_and_cost_model() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        a, b = (spec_of(mesh, (p,), numbers((8, 8))) for p in (S0, R))
        assert plan_reshard(a, b) is plan_reshard(a, b)
        with use_cost_model(CostModel(latency=1.0)):
            other = plan_reshard(a, b)
        assert other is not plan_reshard(a, b) and other.cost > 1.0


def test_the_cost_model_chooses_between_bytes_and_launches() -> None:
    big, two = (1024, 1024, 64), (("reduce_scatter", "all_reduce"), ("reduce_scatter", "all_gather"))
    assert plan((2, 4), (P, P), (S0, R), EVEN).collectives in two
    with use_cost_model(SECONDS):
        assert plan((2, 4), (P, P), (S0, R), EVEN).collectives == ("all_reduce",)
        assert plan((2, 4), (P, P), (S0, R), big).collectives in two
    for hop, launches in ((0.0, 1), (1e-6, 2)):  # a ring of 255 hops, or two of 15
        with use_cost_model(CostModel(hop=hop, slack=math.inf)):
            assert len(plan((16, 16), (S0, S1), (S1, S0)).collectives) == launches
            assert len(plan((16, 16), (S0, S0), (R, R)).collectives) == launches


def test_costs_keep_the_triangle_inequality() -> None:
    """Even shards: no detour is cheaper than the plan, so the planner misses no two-step path.

    Where an all-to-all takes more to launch than a ring, a gather and a slice of a tiny tensor would be cheaper;
    the planner moves less instead.
    """
    kinds = [R, S0, S1]
    for mesh_shape in ((4,), (2, 4)):
        layouts = [(a,) for a in kinds] if len(mesh_shape) == 1 else [(a, b) for a in kinds for b in kinds]
        with use_cost_model(CostModel(pairwise=0.0, slack=math.inf)):
            cost = {(a, b): plan(mesh_shape, a, b).cost for a in layouts for b in layouts}
        for a in layouts:
            for b in layouts:
                for c in layouts:
                    assert cost[a, b] <= cost[a, c] + cost[c, b] + 1e-12, (a, c, b)


def test_searches_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the links differ, a bounded number of steps is looked at, so that a cold plan is fast."""
    looked: list[int] = []
    priced = Space._step

    def counted(space: Space, *args: Any) -> Any:
        looked[-1] += 1
        return priced(space, *args)

    monkeypatch.setattr(Space, "_step", counted)
    model = CostModel(hop=4e-6, axis_bandwidth={0: 1e9, 1: 4e9, 2: 2e9, 3: 8e9}, slack=math.inf)
    kinds, rng = [R, S0, S1, StridedShard(0, split_factor=2), P], random.Random(0)
    for sizes, most in (((8,), 6), ((2, 4), 24), ((2, 2, 2), 55), ((2, 2, 2, 2), 80)):
        for shape in (EVEN, UNEVEN, (1024, 512, 64)):
            for _ in range(40):
                src = tuple(rng.choice(kinds) for _ in sizes)
                dst = tuple(R if q is P and p is not P else q for p, q in zip(src, [rng.choice(kinds) for _ in sizes]))
                looked.append(0)
                cheapest(Space(sizes, shape, 4, model), src, dst)
                assert looked[-1] <= most, (looked[-1], src, dst)
    assert max(looked) > 40


def test_what_is_replicated_is_cut_before_the_rest_moves() -> None:
    """Also past what a later axis shards, by a split factor, and before a gather that starts before an exchange."""
    past = StridedShard(0, split_factor=2)
    with use_cost_model(SECONDS):
        made = plan((2, 2), (R, S0), (past, R))
    assert [s.kind for s in made.steps] == ["slice", "all_gather"] and made.steps[0].dst == (past, S0), str(made)
    made = plan((2, 2, 2), (R, P, S0), (past, R, S0))
    assert made.steps[0].kind == "slice" and made.steps[1].nbytes == 4096, str(made)
    with use_cost_model(CostModel(pairwise=4.0, slack=math.inf)):
        made = plan((4, 2), (S0, R), (past, S1))
    assert [s.kind for s in made.steps] == ["slice", "all_gather", "slice"] and made.steps[1].axes == (0,), str(made)


def test_models_that_replace_methods_are_asked() -> None:
    """The tables that plans share hold the numbers of plain models only."""

    class Same(CostModel):
        def all_gather(self, size: int, local_bytes: float, axes: Sequence[int] = ()) -> float:
            return CostModel.all_gather(self, size, local_bytes, axes)

    class Dear(CostModel):
        def reduce_scatter(self, size: int, local_bytes: float, axes: Sequence[int] = ()) -> float:
            return 1.0

    links: dict[str, Any] = {"hop": 4e-6, "axis_bandwidth": {0: 1e9, 1: 2e9}, "slack": math.inf}
    kinds = [R, S0, S1, P]
    layouts = [(a, b) for a in kinds for b in kinds]
    for src in layouts:
        for dst in layouts:
            costs = []
            for model in (CostModel(**links), Same(**links), Dear(**links)):
                with use_cost_model(model):
                    made = plan((2, 4), src, dst)
                costs.append(made.cost)
                assert not isinstance(model, Dear) or "reduce_scatter" not in made.collectives, str(made)
            # a search that is cut off later may find more
            assert costs[1] == pytest.approx(costs[0], rel=0.05) and costs[2] >= costs[0] * (1 - 0.05)


def test_text() -> None:
    assert str(plan((2, 4), (P, R), (S0, R))).splitlines() == [
        "f32[16,16,16]{P:x} -> f32[16@x,16,16]: 1 collectives, 7.3 us",
        "  1. reduce_scatter over x: [P(sum), R] -> [S(0), R], receives 8 KiB",
    ]
    assert str(plan((4,), (R,), (P,)).steps[0]) == "zero_fill over 0: [R] -> [P(sum)]"
    assert str(plan((4,), (P,), (Partial("avg"),)).steps[0]) == "scale over 0 by 4: [P(sum)] -> [P(avg)]"
    assert plan((4,), (R,), (S0,)).received_elements == 0


def test_what_cannot_be_planned() -> None:
    with fake_world(4):
        mesh, other = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        here = spec_of(mesh, (S0,), numbers((8, 8)))
        with pytest.raises(MeshError, match="one mesh"):
            plan_reshard(here, spec_of(other, (S0, R), numbers((8, 8))))
        with pytest.raises(LayoutError, match="global shape"):
            plan_reshard(here, spec_of(mesh, (R,), numbers((8, 9))))
        with pytest.raises(LayoutError, match="dtype"):
            plan_reshard(here, spec_of(mesh, (R,), numbers((8, 8), torch.int64)))
        mixed = spec_of(other, (P, Partial("max")), numbers((8, 8)))
        with pytest.raises(LayoutError, match="one kind of reduction"):
            plan_reshard(mixed, spec_of(other, (Replicate(), Replicate()), numbers((8, 8))))


def test_large_meshes_are_planned_without_looking_at_ranks() -> None:
    made = plan((100, 1000), (S0, S1), (S1, R), (100_000, 1000))
    assert made.collectives and made.cost > 0
