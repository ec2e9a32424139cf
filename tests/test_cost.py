"""The cost model: what it adds up, and that it can be replaced."""

from __future__ import annotations

import pytest

import dtensor
from dtensor.cost import CostModel, current_cost_model, set_cost_model, use_cost_model


def test_sums() -> None:
    model = CostModel(latency=1.0, hop=0.25, bandwidth=100.0, copy_bandwidth=1000.0)
    assert model.all_gather(4, 100) == 1.0 + 3 * 0.25 + 3.0
    assert model.reduce_scatter(4, 400) == 1.0 + 3 * 0.25 + 3.0
    assert model.all_reduce(4, 400) == 1.0 + 6 * 0.25 + 6.0
    assert model.all_to_all(4, 400) == 1.125 + 3 * 0.25 + 3.0
    assert model.broadcast(4, 100) == 1.0 + 3 * 0.25 + 1.0
    assert model.local_copy(500) == 0.5
    assert model.floor(2, 100) == 3.0


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
