"""The planner against the shortest paths of the graph of layouts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.layout_graph import draw, layout_graph, shortest

from dtensor.mesh.device_mesh import init_device_mesh
from dtensor.placement import Partial, Replicate, Shard
from dtensor.redistribute.cost_model import CostModel, use_cost_model
from dtensor.redistribute.plan import plan_reshard
from dtensor.simulate import fake_world
from dtensor.spec import Spec, contiguous_stride

KINDS = [Replicate(), Partial(), Shard(0), Shard(1)]
EVEN, UNEVEN = (16, 16, 16), (13, 9, 11)
MODELS = {
    "bytes first": CostModel(),
    "seconds": CostModel(slack=math.inf),
    "no launches": CostModel(latency=0.0, hop=0.0, pairwise=0.0, slack=math.inf),
    "slow outer axis": CostModel(axis_bandwidth={0: 1e9}, slack=math.inf),
    "as gloo": CostModel(
        latency=1e-3,
        hop=1e-3,
        bandwidth=1e9,
        pairwise=0.0,
        slack=math.inf,
        kinds={"all_to_all": (0.4, 1.0), "all_reduce": (0.8, 0.8), "reduce_scatter": (1.6, 1.8)},
    ),
}


def spec_on(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> Spec:
    mesh = init_device_mesh("cpu", mesh_shape)
    return Spec.make(mesh, (Replicate(),) * len(mesh_shape), shape, contiguous_stride(shape), torch.float32)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)], ids=str)
def test_no_path_is_shorter(mesh_shape: tuple[int, ...], shape: tuple[int, ...], name: str) -> None:
    """Exact by bytes where shards are even; within 1 % by seconds, and within 25 % where shards are uneven.

    A KiB is not worth a collective. Where launches cost nothing, a spread reduction and then a gather can be 4 % faster
    than what is looked for.

    Where an all-to-all is far cheaper than a reduction, two of them, axis by axis, can be a third faster than one.

    By seconds a plan does not shard what it will gather; with uneven shards the estimates of single steps (of the
    largest shard each) do not add up alike on all paths.
    """
    model = MODELS[name]
    with fake_world(math.prod(mesh_shape)), use_cost_model(model):
        spec = spec_on(mesh_shape, shape)
        graph = layout_graph(spec, KINDS)
        for src in graph:
            for dst in graph:
                if src == dst or any(q is Partial() and p is not q for p, q in zip(src, dst)):
                    continue
                plan = plan_reshard(spec.with_placements(src), spec.with_placements(dst))
                best = shortest(graph, src, dst, "seconds" if model.by_seconds else "nbytes")
                if model.by_seconds:
                    least = sum(graph.edges[s.src, s.dst]["seconds"] for s in best)
                    most = 1.25 if shape == UNEVEN else 1.04 if name == "no launches" else 1.01
                    most = 1.35 if name == "as gloo" else most
                    assert plan.cost <= least * most, f"{plan}\n{best}"
                    continue
                most = sum(s.nbytes for s in best if s.is_collective) * (1.05 if shape == EVEN else 1.2) + 1024
                assert sum(s.nbytes for s in plan.steps if s.is_collective) <= most, f"{plan}\n{best}"
                if shape == EVEN:
                    assert len(plan.collectives) <= sum(s.launches for s in best), f"{plan}\n{best}"


def test_the_reference_is_the_plan_that_a_reader_would_make() -> None:
    with fake_world(8):
        graph = layout_graph(spec_on((2, 4), EVEN), KINDS, CostModel())
        pending, cut = (Partial(), Partial()), (Shard(0), Replicate())
        assert [s.kind for s in shortest(graph, pending, cut, "nbytes")] == [
            "reduce_scatter", "all_reduce"
        ]  # fmt: skip
        assert [s.kind for s in shortest(graph, (Shard(0), Shard(1)), (Shard(1), Shard(0)), "nbytes")] == ["all_to_all"]


def test_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with fake_world(8):
        graph = layout_graph(spec_on((2, 4), EVEN), KINDS)
        file = tmp_path / "layouts.png"
        draw(graph, str(file), (Shard(0), Partial()), (Replicate(), Shard(0)), "nbytes")
        assert file.stat().st_size > 5000
