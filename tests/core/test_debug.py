"""CommDebugMode counts what runs, whatever runs it; visualize_sharding draws what ranks hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from helpers.gloo_ranks import run_ranks
from helpers.laws import rand
from torch import nn

import dtensor
from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.debug import CommDebugMode, visualize_sharding
from dtensor.debug.collectives import Collective
from dtensor.debug.visualize import sharding_grid
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

R, P, S = Replicate(), Partial(), Shard
c10d = torch.ops.c10d_functional


def on_ranks(f: Callable[[DeviceMesh], object], n: int = 4) -> list[object]:
    return dtensor.simulate(n)(lambda: f(init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


def net(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


# elements of f32[8,12] received by one of 4 ranks
MOVES: list[tuple[Placement, Placement, str, int]] = [
    (P, R, "all_reduce", 2 * 96 * 3 // 4),
    (P, S(0), "reduce_scatter", 96 * 3 // 4),
    (S(0), R, "all_gather", 96 * 3 // 4),
    (S(0), S(1), "all_to_all", 96 // 4 * 3 // 4),
]
KEYS = {
    "all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor",
    "all_to_all": "all_to_all_single",
}  # fmt: skip


def _move(mesh: DeviceMesh) -> None:
    for src, dst, kind, elements in MOVES:
        x = DTensor.from_local(rand(8, 12).chunk(4)[0] if src == S(0) else rand(8, 12), mesh, [src])
        with CommDebugMode() as mode:
            x.redistribute(placements=[dst])
        counts = mode.get_comm_counts()
        assert counts == {getattr(c10d, KEYS[kind]): 1}, (kind, counts)
        assert counts[c10d.broadcast] == 0 and mode.get_total_counts() == 1
        assert mode.get_comm_bytes() == {kind: 4 * elements}, (kind, mode.get_comm_bytes())


def test_kinds_and_bytes_on_simulated_ranks() -> None:
    on_ranks(_move)


def case_kinds_and_bytes(rank: int, world: int) -> None:
    _move(init_device_mesh("cpu", (world,)))


def case_users_own_collectives(rank: int, world: int) -> None:
    group = dist.group.WORLD
    with CommDebugMode() as mode:
        x = torch.ones(8)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([torch.empty(8) for _ in range(4)], x)
        fc.all_reduce(x, "sum", group) + 0  # noqa: B018
        torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 4, group.group_name)
    counts = mode.get_comm_counts()
    assert counts[c10d.all_reduce] == 2 and counts[torch.ops.c10d.allreduce_] == 1
    assert counts[torch.ops._c10d_functional.all_reduce] == 1
    assert counts[c10d.broadcast] == counts[c10d.reduce_scatter_tensor] == counts[c10d.all_gather_into_tensor] == 1
    assert mode.get_total_counts() == 5
    got = mode.get_comm_bytes()
    assert got == {"all_reduce": 2 * 48, "broadcast": 32 * (rank > 0), "all_gather": 96, "reduce_scatter": 24}, got


@pytest.mark.processes
def test_on_gloo() -> None:
    run_ranks(4, [case_kinds_and_bytes, case_users_own_collectives], timeout=180).check()


def test_entering_starts_from_zero_also_after_an_exception() -> None:
    def f(mesh: DeviceMesh) -> None:
        x, mode = DTensor.from_local(rand(8), mesh, [P]), CommDebugMode()
        with mode:
            x.full_tensor()
        with mode:
            assert mode.get_total_counts() == 0 and mode.get_parameter_info() == {}
        with pytest.raises(KeyError), mode:
            raise KeyError
        x.full_tensor()
        assert mode.get_total_counts() == 0
        with mode, CommDebugMode() as inner:
            x.full_tensor()
        assert mode.get_total_counts() == inner.get_total_counts() == 1

    on_ranks(f)


def test_forward_and_backward_by_module() -> None:
    def f(mesh: DeviceMesh) -> None:
        model = net(mesh)
        with CommDebugMode() as mode:
            model(rand(5, 6).requires_grad_()).sum().backward()
        seen = [(e.module, e.backward, e.collective.kind) for e in mode.events if e.collective]
        assert seen == [("Net.down", False, "all_reduce"), ("Net.up", True, "all_reduce")] or seen == [
            ("Net", False, "all_reduce"), ("Net.up", True, "all_reduce")
        ], seen  # fmt: skip
        assert set(mode.get_parameter_info()) == {"Net.up", "Net.down"}
        assert set(mode.get_parameter_info()["Net.up"]) == {"weight", "bias"}
        assert mode.get_sharding_info() == {
            "Net.up.weight": (S(0),), "Net.up.bias": (S(0),), "Net.down.weight": (S(1),), "Net.down.bias": (R,)
        }  # fmt: skip

    on_ranks(f)


def test_tables_grow_with_the_noise_level(tmp_path: Path) -> None:
    def f(mesh: DeviceMesh) -> None:
        model, rank = net(mesh), mesh.get_local_rank()
        with CommDebugMode() as mode:
            model(rand(5, 6)).sum().backward()
        tables = [mode.generate_comm_debug_tracing_table(noise_level=n) for n in range(4)]
        assert all(len(a.splitlines()) < len(b.splitlines()) for a, b in zip(tables, tables[1:], strict=False))
        for t in tables:
            assert "Net.down" in t and "all_reduce over 4 ranks" in t and "FORWARD" in t
            assert "parameter weight: f32[8@tp,6]" in t
        assert "aten" not in tables[0] and "aten.addmm" in tables[1]
        with pytest.raises(ValueError, match="noise_level"):
            mode.generate_comm_debug_tracing_table(4)
        mode.log_comm_debug_tracing_table_to_file(str(tmp_path / f"{rank}.txt"), 1)
        assert (tmp_path / f"{rank}.txt").read_text().strip() == tables[1].strip()
        mode.generate_json_dump(str(tmp_path / f"{rank}.json"), 0)
        (top,) = (n for n in json.loads((tmp_path / f"{rank}.json").read_text()) if n["fqn"] == "Net")
        assert [c["fqn"] for c in top["children"]] == ["Net.up", "Net.down"]
        assert top["children"][0]["parameters"]["weight"] == {"shape": [8, 6], "placements": ["Shard(dim=0)"]}

    on_ranks(f)


def test_the_parts_of_a_collective() -> None:
    assert Collective("all_reduce", 4, 12.0, 2).nbytes == 24


def test_grid_of_a_sharding() -> None:
    def f() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(rand(5, 4), mesh, [S(0), S(1)])
        columns, rows, cells = sharding_grid(x._spec)
        assert columns == ["Col 0-1", "Col 2-3"] and rows == ["Row 0-2", "Row 3-4"]
        assert cells == [["cpu: 0", "cpu: 1"], ["cpu: 2", "cpu: 3"]]
        y = distribute_tensor(rand(6), mesh, [R, S(0)])
        assert sharding_grid(y._spec)[2] == [["cpu: 0, 2", "cpu: 1, 3"]]
        z = distribute_tensor(rand(8), mesh, [S(0), S(0)])
        assert sharding_grid(z._spec)[2] == [[f"cpu: {r}" for r in range(4)]]

    dtensor.simulate(4)(f)


@pytest.mark.parametrize("use_rich", [False, True])
def test_visualize_sharding(use_rich: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def f(mesh: DeviceMesh) -> None:
        visualize_sharding(distribute_tensor(rand(8, 3), mesh, [S(0)]), header="My layout", use_rich=use_rich)
        visualize_sharding(distribute_tensor(torch.empty(0, 3), mesh, [S(0)]), header="nothing")
        with pytest.raises(RuntimeError, match="1 or 2 dims"):
            visualize_sharding(distribute_tensor(rand(2, 2, 2), mesh, [S(0)]))
        with pytest.raises(TypeError, match="expected a DTensor"):
            visualize_sharding(torch.ones(2))  # type: ignore[arg-type]

    on_ranks(f)
    text = capsys.readouterr().out
    assert text.count("My layout") == 1 and "nothing" not in text
    assert all(w in text for w in ("Row 0-1", "Row 6-7", "Col 0-2", "cpu: 3"))


def test_counts_by_module_and_direction() -> None:
    def run(mesh: DeviceMesh) -> None:
        net = parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with CommDebugMode() as mode:
            net(rand(3, 6).requires_grad_()).sum().backward()
        one = {c10d.all_reduce: 1}
        assert mode.comm_counts == mode.get_comm_counts() == {c10d.all_reduce: 2}
        by_module = mode.comm_module_counts
        assert by_module["Global"] == by_module["Net"] == {"forward": one, "backward": one}
        assert by_module["Global"]["forward"][c10d.all_gather_into_tensor] == 0
        with mode:
            pass
        assert mode.comm_module_counts == {"Global": {"forward": {}, "backward": {}}}

    on_ranks(run)
