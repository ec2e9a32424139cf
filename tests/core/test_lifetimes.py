"""What a world made does not outlive it: simulated ranks, fake worlds, process groups that are destroyed in any way."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # its functions have the default group of who imports it first as a default
import torch.nn.functional as F
from helpers.gloo_ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor
from dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.comm.communicator import Communicator
from dtensor.comm.world import World
from dtensor.redistribute.plan import ReshardPlan
from dtensor.spec import Spec

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def movements() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.ones(7, 6), mesh, [S0, S1])
    for layout in ([R, R], [S1, S0], [S1, R]):
        for _ in range(3):  # what is bound comes with the second run
            x.redistribute(placements=layout)
            dtensor.DTensor.from_local(torch.ones(4, 4), mesh, [Partial(), S0]).redistribute(placements=layout)
    x.redistribute(placements=[R, S1], async_op=True).to_local()
    flat = mesh._flatten("c")
    distribute_tensor(torch.ones(9), flat, [S0]).redistribute(mesh["a"], [S0])


def training() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    w = torch.nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [S0, S1]))
    for _ in range(2):
        x = distribute_tensor(torch.ones(4, 8), mesh, [S0, R])
        targets = distribute_tensor(torch.zeros(4, dtype=torch.long), mesh, [S0, R])
        (F.cross_entropy(F.layer_norm(F.linear(x, w), (8,)), targets) + w.norm()).backward()
        torch.nn.utils.clip_grad_norm_([w], 1.0)
        torch.optim.AdamW([w], foreach=True).step()


def views_and_more() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.arange(42.0).view(7, 6), mesh, [S0, S1])
    x.view(42)[3:20].add_(1)
    x.sort(0), x.unique(), torch.quantile(x, 0.3), F.dropout(x), torch.linalg.svdvals(x)
    dtensor.rand(8, 8, device_mesh=mesh, placements=[S0, S1])
    with pytest.raises(IndexError):
        x.sum(5)


PROGRAMS = [movements, training, views_and_more]


def left(collect: int = 3) -> list[object]:
    """What there is of worlds. Objects that C++ holds go in a collection after the one that finds them."""
    for _ in range(collect):
        gc.collect()
    kinds = (World, Communicator, Spec, ReshardPlan, dtensor.DeviceMesh, dtensor.DTensor)
    return [o for o in gc.get_objects() if issubclass(type(o), kinds)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_nothing_outlives_a_simulation(program: Callable[[], None]) -> None:
    before = left(0)
    dtensor.simulate(4)(program)
    assert not [o for o in left() if not any(o is b for b in before)]


def test_nothing_outlives_a_fake_world() -> None:
    before = left(0)
    with dtensor.simulate.fake_world(4):
        movements()
    assert not [o for o in left() if not any(o is b for b in before)]


def test_a_simulation_inside_a_world_leaves_that_world_as_it_is() -> None:
    def outer() -> bool:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 4), mesh, [S0])
        first = x.redistribute(placements=[R])
        dtensor.simulate(2)(movements_of_two)
        return bool(torch.equal(x.redistribute(placements=[R]).to_local(), first.to_local()))

    def movements_of_two() -> None:
        distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [S0]).redistribute(placements=[R])

    assert dtensor.simulate(2)(outer) == [True, True]


def test_results_of_a_simulation_are_the_programs() -> None:
    def program() -> dtensor.DTensor:
        return distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [S0])

    results = dtensor.simulate(2)(program)
    assert [r.to_local().shape for r in results] == [(2, 4)] * 2


# ------------------------------------------------------------ process groups
def destroy_all(groups: list[dist.ProcessGroup]) -> None:
    dist.destroy_process_group()


def destroy_each(groups: list[dist.ProcessGroup]) -> None:
    default = dist.distributed_c10d._get_default_group()
    for group in [g for g in groups if g is not default]:
        dist.destroy_process_group(group)
    dist.destroy_process_group()


@pytest.mark.parametrize("destroy", [destroy_all, destroy_each])
@pytest.mark.parametrize("program", [movements, training], ids=lambda p: p.__name__)
def test_destroyed_groups_are_held_by_nobody(
    program: Callable[[], None], destroy: Callable[[list[dist.ProcessGroup]], None]
) -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x, comm = distribute_tensor(torch.ones(4, 4), mesh, [S0, R]), mesh.comm("a")
    program()
    gc.collect()
    groups = list(dist.distributed_c10d._world.pg_map)
    refs = [weakref.ref(g) for g in groups]
    assert len(refs) == 3  # the default group, which a flattened mesh has as well, and one an axis
    gc.disable()
    try:
        destroy(groups)
        del groups
        assert [r() for r in refs] == [None] * 3
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="has been destroyed; make a mesh after"):
        x.redistribute(placements=[R, R])
    with pytest.raises(RuntimeError, match="destroyed"):
        comm.all_reduce(torch.ones(2))
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    with pytest.raises(RuntimeError, match="has been destroyed; make a mesh after"):
        x.redistribute(placements=[R, R])
    with pytest.raises(RuntimeError, match="destroyed"):
        comm.all_reduce(torch.ones(2))
    program()


def test_a_group_that_was_given_is_not_made_again() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    group = dist.new_group([0, 1])
    mesh = dtensor.DeviceMesh.from_group(group, "cpu")
    x = distribute_tensor(torch.ones(4), mesh, [S0])
    x.redistribute(placements=[R])
    dist.destroy_process_group(group)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has been destroyed"):
            x.redistribute(placements=[R])


FULL = torch.arange(56.0).view(8, 7)
USES: dict[str, tuple[list[dtensor.Placement], Callable[[dtensor.DTensor], dtensor.DTensor], torch.Tensor]] = {
    "sum": ([S0, R], lambda x: x.sum(), FULL.sum()),
    "columns": ([S0, R], lambda x: x.redistribute(placements=[S1, R]), FULL),
    "both": ([S0, S1], lambda x: x + 1, FULL + 1),
    "product": ([R, S1], lambda x: x @ x.t(), FULL @ FULL.t()),
    "flattened": ([S0, S0], lambda x: x.redistribute(placements=[S1, S1]), FULL),
}


def case_meshes_made_again(rank: int, world: int) -> None:
    kept: list[object] = []
    for name, (placements, use, want) in USES.items():
        for keep in (True, False):
            for turn in range(3):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"a{name}", f"b{name}"))
                x = distribute_tensor(FULL, mesh, placements)
                for _ in range(2 + turn):
                    assert torch.allclose(use(x).full_tensor(), want), (name, keep, turn)
                if keep:
                    kept.append((mesh, x))
                refs = [weakref.ref(g) for g in mesh.get_all_groups()]
                for ref in refs:
                    dist.destroy_process_group(ref())
                assert [r() for r in refs] == [None, None], (name, keep, turn)
                del mesh, x
    for _, y in kept[:1]:  # type: ignore[misc]
        assert torch.allclose(y.sum().full_tensor(), FULL.sum())  # by groups that all its members make again


@pytest.mark.processes
def test_meshes_made_again() -> None:
    run_ranks(4, [case_meshes_made_again]).check()


ENDING = """
import atexit, glob, sys
def threads():
    names = [open(f).read() for f in glob.glob("/proc/self/task/*/comm")]
    print("threads", sum("pt_gloo" in n for n in names), flush=True)
atexit.register(threads)
import torch, torch.distributed as dist
from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo")
x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
assert x.sum().full_tensor() == 4
threads()
if dist.get_rank() == 0:
    sys.exit(7)
raise ValueError("mine")
"""


@pytest.mark.processes
def test_the_end_of_a_process_that_destroys_nothing(tmp_path: Path) -> None:
    """gloo's threads end before the interpreter does, where they could abort it; exit codes are the program's."""
    (tmp_path / "program.py").write_text(ENDING)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[2]), env.get("PYTHONPATH", "")])
    program = [sys.executable, str(tmp_path / "program.py")]
    started = [
        subprocess.Popen(program, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(2)
    ]
    ended = [p.communicate(timeout=120)[0].split() for p in started]
    assert [p.returncode for p in started] == [7, 1]
    for words in ended:
        assert words[0::2] == ["threads", "threads"] and words[1] != "0" and words[3] == "0", ended
