"""Measured cost models: equal on all ranks, positive, saved and read back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.gloo_ranks import run_ranks

import dtensor
from dtensor.calibrate import load, main, measure, save
from dtensor.mesh.device_mesh import init_device_mesh
from dtensor.redistribute.cost_model import CostModel


def described(model: CostModel) -> str:
    return repr(model)


def test_all_ranks_measure_the_same() -> None:
    def body() -> str:
        return described(measure(init_device_mesh("cpu", (2, 3)), large=4096, repeats=3))

    first, *others = dtensor.simulate(6)(body)
    assert all(other == first for other in others) and "slack=inf" in first


def test_one_rank_has_no_links() -> None:
    model = dtensor.simulate(1)(lambda: measure(init_device_mesh("cpu", (1,)), large=4096, repeats=3))[0]
    assert model.by_seconds and not model.axis_bandwidth


def test_saved_models_are_read_back(tmp_path: Path) -> None:
    wired = CostModel(wire={torch.bfloat16: torch.float32})
    links = CostModel(
        axis_latency={1: 2e-6}, axis_bandwidth={0: 1e9}, kinds={"all_to_all": (0.5, 1.0)}, slack=math.inf
    )  # fmt: skip
    for model in (wired, links):
        save(model, tmp_path / "model.json")
        assert described(load(tmp_path / "model.json")) == described(model)
    (tmp_path / "model.json").write_text('{"bandwidth": 0}')
    with pytest.raises(ValueError, match="must be positive"):
        load(tmp_path / "model.json")


def on_gloo(rank: int, world: int) -> None:
    model = main(["--mesh", "2,2", "--elements", "65536"])
    assert 1e5 < model.bandwidth < 1e12 and 1e-7 < model.latency < 10
    assert set(model.kinds) == {"all_reduce", "all_to_all", "reduce_scatter"}
    with dtensor.redistribute.cost_model.use_cost_model(model):
        mesh = init_device_mesh("cpu", (2, 2))
        x = dtensor.ones(8, 8, device_mesh=mesh, placements=[dtensor.Shard(0), dtensor.Shard(1)])
        assert x.full_tensor().sum() == 64


@pytest.mark.processes
def test_on_gloo_processes() -> None:
    run_ranks(4, [on_gloo], timeout=180).check()
