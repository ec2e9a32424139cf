"""Process groups of CUDA meshes: bound, connected, split off where that is safe; devices; what a failed group says."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gloo_ranks import run_ranks
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, init_device_mesh
from dtensor.debug import watch_collectives
from dtensor.errors import CollectiveError
from dtensor.mesh import arguments, process_groups


class Options:
    """In the place of `ProcessGroupNCCL.Options`."""

    split_from: object = None
    split_color = -2


class Made:
    """How groups were made on one rank: ranks, color, device, description; by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, world: int, bound: bool) -> None:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        self.groups: dict[str, tuple[tuple[int, ...], int | None, object, str]] = {}
        helper = c10d._new_process_group_helper

        def spy(size: int, at: int, ranks: list[int], backend: Any, store: Any, name: str, **given: Any) -> Any:
            options, default = given.pop("backend_options"), c10d._get_default_group()
            assert default.bound_device_id is None, "torch would split the group by a hash of its ranks"
            assert ranks[at] == rank and size == len(ranks)
            color = None if options is None else options.split_color
            assert options is None or options.split_from == "parent"
            self.groups[name] = (tuple(ranks), color, given["device_id"], given["group_desc"])
            return helper(size, at, ranks, backend, store, name, **given)

        monkeypatch.setattr(c10d, "_new_process_group_helper", spy)
        monkeypatch.setattr(c10d, "ProcessGroupNCCL", type("NCCL", (), {"Options": Options}), raising=False)
        monkeypatch.setattr(c10d, "_get_split_source", lambda group: "parent")
        monkeypatch.setattr(process_groups, "_is_nccl", lambda backend: True)
        device = torch.device("cuda", rank)
        if bound:
            c10d._get_default_group().bound_device_id = device
        else:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "current_device", lambda: rank)
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def take(self) -> list[tuple[str, tuple[int, ...], int | None, object, str]]:
        found = [(name, *rest) for name, rest in self.groups.items()]
        self.groups.clear()
        return found


def played(world: int, bound: bool, body: Any) -> list[Any]:
    out = []
    for rank in range(world):
        with pytest.MonkeyPatch.context() as m:
            made = Made(m, rank, world, bound)
            try:
                out.append(body(made, rank))
            finally:
                dist.destroy_process_group()
    return out


@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)], ids=str)
def test_axes_of_a_whole_world_are_split_off(shape: tuple[int, ...]) -> None:
    """All ranks split for the axes in one order; a row has one color, other rows others; each is bound to its GPU."""

    def body(made: Made, rank: int) -> Any:
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=tuple("xyz"[: len(shape)]))
        first = made.take()
        assert all(device == torch.device("cuda", rank) for *_, device, _ in first)
        groups = mesh.get_all_groups()
        assert all(g.bound_device_id == torch.device("cuda", rank) for g in groups)
        init_device_mesh("cuda", shape)
        assert not made.take(), "the same rows again: nothing is made"
        flat = mesh.comm((0, 1))
        late = made.take()
        assert flat.ranks == tuple(sorted(flat.ranks)) and (len(late) == 1 or len(shape) == 2)
        assert all(color is None and device == torch.device("cuda", rank) for _, _, color, device, _ in late)
        return first, [ranks for _, ranks, *_ in late]

    ranks = played(8, True, body)
    for at in range(len(shape)):
        step = [r[0][at] for r in ranks]
        rows = {row for _, row, *_ in step}
        assert sorted(x for row in rows for x in row) == list(range(8)), "the rows share out the world"
        colors = {(row, color) for _, row, color, *_ in step}
        assert len(colors) == len(rows) == len({c for _, c in colors}), "one color a row"
        assert all(c is not None and c > 0 for _, c in colors)
        assert all("xyz"[at] in desc for *_, desc in step)
    assert all(ranks[r][1] == ranks[first][1] for r in range(8) for first in [g[0] for g in ranks[r][1][:1]])


def test_what_is_not_split() -> None:
    """A default group that is not bound, a part of the world, ranks in another order than a family that was made."""

    def unbound(made: Made, rank: int) -> None:
        mesh = init_device_mesh("cuda", (2, 2))
        got = made.take()
        assert [color for _, _, color, *_ in got] == [None, None]
        assert all(device == torch.device("cuda", rank) for *_, device, _ in got)
        assert mesh.get_group(0).bound_device_id == torch.device("cuda", rank)
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert all(device is None for *_, device, _ in made.take())

    played(4, False, unbound)

    def part(made: Made, rank: int) -> list[Any]:
        if rank < 4:
            DeviceMesh("cuda", [[0, 1], [2, 3]])
        only = made.take()
        assert all(color is None for _, _, color, *_ in only)
        DeviceMesh("cuda", [[0, 1, 2, 3], [4, 5, 6, 7]])
        whole = made.take()
        DeviceMesh("cuda", [[0, 1, 2, 3], [4, 5, 7, 6]])  # rows of ranks 0 to 3 are known, those of the others are not
        other = made.take()
        return [[color for _, _, color, *_ in some] for some in (whole, other)]

    for whole, other in played(8, True, part):
        assert len(whole) == 2 and all(color is not None for color in whole)
        assert len(other) == 2 and all(color is not None for color in other), "all ranks split again, or none"


# ------------------------------------------------------------ devices
def test_one_process_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    own = arguments.own_device
    count = {"n": 8}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count["n"])
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert own("cuda") == 3
    count["n"] = 4
    with pytest.raises(
        RuntimeError, match=r"8 processes .* torch sees 4 cuda devices \(CUDA_VISIBLE_DEVICES is not set"
    ):
        own("cuda")
    count["n"] = 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert own("cuda") == 0, "each process is shown one device of its own"
    count["n"] = 0
    with pytest.raises(RuntimeError, match="torch sees 0"):
        own("cuda")


def test_the_device_that_the_group_is_bound_to_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtensor.comm.world import current_world

    chosen: list[int] = []
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    monkeypatch.setattr(dist, "get_backend", lambda *a: "nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    c10d._get_default_group().bound_device_id = torch.device("cuda", 2)
    arguments.choose_device("cuda", current_world())
    arguments.choose_device("cpu", current_world())
    assert chosen == [2]


def test_the_world_is_bound_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda **given: made.append(given))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    arguments.start_world("cuda")
    arguments.start_world("cpu")
    assert made == [1, {"device_id": torch.device("cuda", 1)}, {}]


@pytest.fixture(autouse=True)
def device_threads() -> Iterator[None]:
    yield
    torch.autograd.set_multithreading_enabled(True)


def test_backward_runs_on_the_thread_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meshes of an accelerator that is there keep backward off torch's device threads; those of CPUs do not care."""

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())

    def threads_of_their_own(device: str) -> bool:
        init_device_mesh(device, (1,))
        return torch._C._is_multithreading_enabled()

    assert threads_of_their_own("cuda") and threads_of_their_own("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert threads_of_their_own("cpu") and not threads_of_their_own("cuda")


# ------------------------------------------------------------ a rank that is missing
def short(world: int) -> DeviceMesh:
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=1))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def told(call: Any) -> str:
    with pytest.raises(CollectiveError) as caught:
        call()
    return str(caught.value)


def missing(rank: int, world: int) -> str:
    """Rank 1 does not come: the other says which collective, for what, from which line, and what came before."""
    meshes = [short(world) for _ in range(4)]  # a gloo group is of no use after a timeout
    x = [DTensor.from_local(torch.ones(4, 6), mesh, [Partial()]) for mesh in meshes]
    x[0].redistribute(meshes[0], [Replicate()])
    if rank == 1:
        dist.barrier()
        return ""
    text = told(lambda: x[0].redistribute(meshes[0], [Shard(0)]))
    for part in (
        "reduce_scatter over axis 'tp' of the mesh (tp=2), ranks (0, 1), of which this is rank 0",
        "got: float32[12] on cpu; gloo group", "Timed out",
        "for: redistribute f32[4,6]{P:tp} -> f32[4@tp,6]", "1. reduce_scatter over tp: [P(sum)] -> [S(0)]",
        "test_cuda_groups.py:", "in <lambda>: text = told(lambda: x[0].redistribute(meshes[0], [Shard(0)]))",
        "before it, on this rank: all_reduce over axis 'tp'", "look at the other ranks",
    ):  # fmt: skip
        assert part in text, (part, text)
    for mesh, local, layout in ((meshes[1], x[1], Replicate()), (meshes[2], x[2], Shard(1))):
        late = local.redistribute(mesh, [layout], async_op=True).to_local()
        text = told(lambda late=late: late + 1)
        assert "for: redistribute f32[4,6]{P:tp} ->" in text and "late + 1" in text, text
    reports: list[str] = []
    with watch_collectives(0.4, reports.append):
        text = told(lambda: meshes[3].comm().broadcast(torch.ones(3, dtype=torch.int64)))
    assert len(reports) == 1 and "rank 0: no collective has ended for 0.4 s" in reports[0], reports
    assert "broadcast over axis 'tp' of the mesh (tp=2), ranks (0, 1) of int64[3], from" in reports[0], reports
    assert "broadcast over axis 'tp'" in text and "int64[3]" in text and "for:" not in text, text
    dist.barrier()
    return text


def test_the_watch_looks_at_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: what an event on its stream has passed is done; what it has not is named, the oldest first."""
    from dtensor.debug.watch import _Watch

    reached: list[bool] = []

    class Event:
        def record(self, stream: str) -> None:
            assert stream == "default of 0"
            self.at = len(reached)
            reached.append(False)

        def query(self) -> bool:
            return reached[self.at]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default of {device}")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    told: list[str] = []
    watch = _Watch(0.2, told.append)
    watch._look()
    assert not reached, "nothing was issued"
    for name in "abc":
        watch.issued(name)
    watch._look()
    watch.issued("d")
    reached[0] = True
    watch._look()
    assert watch.passed == 3 and len(reached) == 2
    watch.thread.start()
    watch.thread.join(5)
    assert told == ["no collective has ended for 0.2 s; the first that may not have:\n  d"]
    with pytest.raises(ValueError, match="positive"), watch_collectives(0):
        pass


@pytest.mark.processes
def test_a_missing_rank_is_named() -> None:
    run_ranks(2, [missing]).check()
