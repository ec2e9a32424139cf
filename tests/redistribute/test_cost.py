"""The cost model: what it adds up, and that it can be replaced."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import dtensor
from dtensor.mesh.device_mesh import init_device_mesh
from dtensor.placement import Partial, Replicate, Shard
from dtensor.redistribute.cost_model import CostModel, current_cost_model, set_cost_model, use_cost_model
from dtensor.redistribute.plan import plan_reshard
from dtensor.rules.pricing import move_cost
from dtensor.simulate import fake_world
from dtensor.spec import Spec


def test_sums() -> None:
    model = CostModel(latency=1.0, hop=0.25, bandwidth=100.0, copy_bandwidth=1000.0)
    assert model.all_gather(4, 100) == 1.0 + 3 * 0.25 + 3.0
    assert model.reduce_scatter(4, 400) == 1.0 + 3 * 0.25 + 3.0
    assert model.all_reduce(4, 400) == 1.0 + 6 * 0.25 + 6.0
    assert model.all_to_all(4, 400) == 1.125 + 3 * 0.25 + 3.0
    assert model.broadcast(4, 100) == 1.0 + 3 * 0.25 + 1.0
    assert model.local_copy(500) == 0.5
    assert model.floor(2, 100) == 3.0


def test_kinds_of_a_backend() -> None:
    usual = CostModel(latency=1.0, hop=0.25, bandwidth=100.0, pairwise=0.0)
    model = CostModel(
        latency=1.0,
        hop=0.25,
        bandwidth=100.0,
        pairwise=0.0,
        kinds={"all_to_all": (0.5, 0.75), "all_reduce": (2.0, 3.0)},
    )
    assert model.all_to_all(4, 400) == 0.5 * 1.75 + 0.75 * 3.0
    assert model.all_reduce(4, 400) == 2 * 2.5 + 3 * 6.0
    assert model.all_gather(4, 100) == usual.all_gather(4, 100)
    assert model.floor(2, 100) == 2 * 0.5 + 0.75
    with pytest.raises(ValueError, match="kinds are of all_gather"):
        CostModel(kinds={"gather": (1.0, 1.0)})
    with pytest.raises(ValueError, match="must be positive"):
        CostModel(kinds={"all_gather": (0.0, 1.0)})


def test_a_group_of_one_is_free() -> None:
    model = CostModel()
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"):
        assert getattr(model, kind)(1, 8) == 0


def test_the_slowest_axis_counts() -> None:
    model = CostModel(latency=1.0, hop=0.0, bandwidth=100.0, axis_bandwidth={0: 10.0}, axis_latency={1: 5.0})
    assert model.all_gather(2, 100, (1,)) == 5.0 + 1.0
    assert model.all_gather(2, 100, (0,)) == 1.0 + 10.0
    assert model.all_gather(2, 100, (0, 1)) == 5.0 + 10.0
    assert model.all_gather(2, 100) == 1.0 + 1.0
    assert model.floor(1, 100) == 1.0 + 1.0


@pytest.mark.parametrize("bad", [{"bandwidth": 0.0}, {"latency": -1.0}, {"axis_bandwidth": {0: -1.0}}, {"slack": 0.9}])
def test_impossible_numbers_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        CostModel(**bad)  # type: ignore[arg-type]


def test_replacing() -> None:
    usual, other, inner = current_cost_model(), CostModel(latency=1.0), CostModel(latency=2.0)
    with use_cost_model(other):
        assert current_cost_model() is other
        with use_cost_model(inner):
            assert current_cost_model() is inner
        assert dtensor.simulate(2)(current_cost_model) == [other, other]
    assert current_cost_model() is usual
    assert set_cost_model(other) is usual
    try:
        assert current_cost_model() is other
    finally:
        set_cost_model(usual)


@pytest.mark.parametrize("slack", [1.05, math.inf])
def test_one_axis_costs_the_planner_of_ops_what_its_plan_costs(slack: float) -> None:
    """The cost by which ops choose strategies is that of the plan that then runs."""
    kinds = [Replicate(), Shard(0), Shard(1), Partial()]
    model = CostModel(slack=slack, pairwise=0.0)
    with fake_world(4), use_cost_model(model):
        mesh = init_device_mesh("cpu", (4,))
        for src, dst in itertools.permutations(kinds, 2):
            if isinstance(dst, Partial):
                continue
            spec = Spec.make(mesh, (src,), (64, 32), (32, 1), torch.float32)
            plan = plan_reshard(spec, spec.with_placements((dst,)))
            expected = move_cost(model, src, dst, spec.local_numel_bound * 4, 4)
            assert plan.cost == pytest.approx(expected, rel=1e-6), str(plan)
