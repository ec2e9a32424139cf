"""Simulated ranks: one process, many ranks, no hang."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.gloo_ranks import run_ranks
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor.simulate as simulate_module
from dtensor.comm.world import current_world
from dtensor.distribute import distribute_tensor
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.placement import Shard
from dtensor.simulate import CollectiveMismatch, RankError, fake_world, simulate
from dtensor.simulation.rank_threads import RankThreads
from dtensor.tensor import DTensor


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def total(x: torch.Tensor) -> float:
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_every_rank_and_its_result(size: int) -> None:
    assert simulate(size)(rank_and_size) == [(r, size) for r in range(size)]
    assert simulate(size)(lambda: total(torch.ones(1))) == [float(size)] * size


def test_arguments_are_passed_on() -> None:
    assert simulate(2)(lambda a, *, b: (a, b, dist.get_rank()), 1, b=2) == [(1, 2, 0), (1, 2, 1)]


def test_the_module_is_callable_like_the_function() -> None:
    assert simulate_module(2)(rank_and_size) == [(0, 2), (1, 2)]
    assert simulate.fake_world is fake_world


@pytest.mark.parametrize("size, error", [(0, ValueError), (257, ValueError), (2.0, TypeError), (True, TypeError)])
def test_bad_sizes(size: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="world_size"):
        simulate(size)  # type: ignore[arg-type]


def test_torch_distributed_is_as_before_afterwards() -> None:
    world, register = c10d._world, c10d._register_process_group
    simulate(2)(rank_and_size)
    with pytest.raises(RankError):
        simulate(2)(lambda: 1 / 0)
    assert c10d._world is world and c10d._register_process_group is register and not dist.is_initialized()
    assert not [t for t in threading.enumerate() if t.name.startswith("simulated")]


def test_one_at_a_time_in_a_fixed_order() -> None:
    def program(log: list[str]) -> None:
        log.append(f"{dist.get_rank()}a")
        dist.barrier()
        log.append(f"{dist.get_rank()}b")

    logs: list[list[str]] = [[], []]
    for log in logs:
        simulate(3)(program, log)
    assert logs[0] == logs[1] == ["0a", "1a", "2a", "2b", "0b", "1b"]


# collectives of torch.distributed


def collectives() -> None:
    rank, world = rank_and_size()
    others = range(world)
    x = torch.full((2,), float(rank))
    y = x.clone()
    dist.all_reduce(y)
    assert (y == sum(others)).all()
    for op, value in [
        (dist.ReduceOp.MAX, world - 1), (dist.ReduceOp.MIN, 0), (dist.ReduceOp.AVG, sum(others) / world),
        (dist.ReduceOp.PRODUCT, 0),
    ]:  # fmt: skip
        y = x.clone()
        dist.all_reduce(y, op)
        assert (y == value).all(), op
    y = torch.tensor([1 << rank])
    dist.all_reduce(y, dist.ReduceOp.BOR)
    assert y.item() == 2**world - 1
    outs = [torch.zeros(2) for _ in others]
    dist.all_gather(outs, x)
    assert [o[0].item() for o in outs] == list(others)
    flat = torch.zeros(2 * world)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(flat, x)  # torch 2.11 has the old names only
    assert flat[::2].tolist() == list(others)
    own = torch.zeros(2)
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(own, flat)
    assert (own == world * rank).all()
    dist.reduce_scatter(own, list(flat.chunk(world)), dist.ReduceOp.MAX)
    assert (own == rank).all()
    dist.scatter(own, [torch.full((2,), 10.0 + r) for r in others] if rank == 1 else None, src=1)
    assert (own == 10 + rank).all()
    got = [torch.zeros(2) for _ in others] if rank == 2 else None
    dist.gather(x, got, dst=2)
    assert got is None or [g[0].item() for g in got] == list(others)
    dist.broadcast(own, src=0)
    assert (own == 10).all()
    kept = x.clone()
    dist.reduce(kept, 1)
    assert (kept == (sum(others) if rank == 1 else rank)).all()
    sent = torch.arange(float(world)) + 10 * rank
    received = torch.zeros(world)
    dist.all_to_all_single(received, sent)
    assert received.tolist() == [10 * r + rank for r in others]
    parts = [torch.zeros(1) for _ in others]
    dist.all_to_all(parts, list(sent.chunk(world)))
    assert torch.equal(torch.cat(parts), received)
    uneven = torch.zeros(rank * world)
    dist.all_to_all_single(uneven, torch.full((sum(others),), float(rank)), [rank] * world, list(others))
    assert uneven.tolist() == [float(r) for r in others for _ in range(rank)]
    work = dist.all_reduce(y, async_op=True)
    assert work is not None and work.wait()
    dist.barrier()


def objects() -> None:
    rank, world = rank_and_size()
    everything: list[object] = [None] * world
    dist.all_gather_object(everything, {"rank": rank})
    assert everything == [{"rank": r} for r in range(world)]
    one: list[object] = [rank]
    dist.broadcast_object_list(one, src=2)
    assert one == [2]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, list(range(world)) if rank == 0 else None, src=0)
    assert mine == [rank]
    gathered: list[object] | None = [None] * world if rank == 3 else None
    dist.gather_object(rank, gathered, dst=3)
    assert gathered is None or gathered == list(range(world))


def messages() -> None:
    rank, world = rank_and_size()
    following, before = (rank + 1) % world, (rank - 1) % world
    x = torch.zeros(1)
    receive = dist.irecv(x, before)
    send = dist.isend(torch.tensor([float(rank)]), following)
    assert receive is not None and send is not None
    assert not receive.is_completed()
    receive.wait()
    send.wait()
    assert x.item() == before and receive.is_completed()
    x.zero_()
    operations = [
        dist.P2POp(dist.irecv, x, before), dist.P2POp(dist.isend, torch.tensor([float(rank)]), following)
    ]  # fmt: skip
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert x.item() == before
    if rank == 0:
        sources = {dist.recv(x) for _ in range(world - 1)}
        assert sources == set(range(1, world))
    else:
        dist.send(torch.ones(1), 0)
    if rank == 0:
        dist.send(torch.tensor([1.0]), 1, tag=7)
        dist.send(torch.tensor([2.0]), 1, tag=8)
    if rank == 1:
        dist.recv(x, 0, tag=8)
        assert x.item() == 2
        dist.recv(x, 0, tag=7)
        assert x.item() == 1


def groups() -> None:
    rank, world = rank_and_size()
    ends = dist.new_group([0, world - 1])
    same_ranks = dist.new_group([0, world - 1], use_local_synchronization=True)
    x = torch.ones(1)
    if rank in (0, world - 1):
        assert ends is not same_ranks
        dist.all_reduce(x, group=ends)
        dist.all_reduce(x, group=same_ranks)
        assert x.item() == 4
        assert dist.get_process_group_ranks(ends) == [0, world - 1]
        assert dist.get_rank(ends) == (0 if rank == 0 else 1) and dist.get_world_size(ends) == 2
        assert dist.get_global_rank(ends, 1) == world - 1 and dist.get_group_rank(ends, world - 1) == 1
        dist.destroy_process_group(ends)
    else:
        assert dist.get_rank(ends) == -1
    halves, _ = dist.new_subgroups(2)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=halves)
    assert x.item() == rank // 2 * 4 + 1
    assert dist.get_backend() == "simulated"
    assert dist.group.WORLD is not None and dist.group.WORLD.size() == world
    assert not repr(dist.group.WORLD).startswith("<")


def functionals() -> None:
    rank, world = rank_and_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    group = mesh.get_group("b")
    ranks = dist.get_process_group_ranks(group)
    x = torch.full((2,), float(rank))
    assert (functional.all_reduce(x, "sum", group) + 0).tolist() == [float(sum(ranks))] * 2
    gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
    scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)
    assert (gather(x, 0, group) + 0).tolist() == [float(r) for r in ranks for _ in range(2)]
    assert (scatter(torch.ones(4), "sum", 0, group) + 0).tolist() == [2.0, 2.0]
    assert (functional.all_to_all_single(x, [1, 1], [1, 1], group) + 0).tolist() == [float(r) for r in ranks]
    assert (functional.broadcast(x, 1, group) + 0).tolist() == [float(ranks[1])] * 2
    coalesced = functional.all_reduce_coalesced([x, 2 * x], "max", group)
    assert [(c + 0)[0].item() for c in coalesced] == [float(max(ranks)), 2.0 * max(ranks)]
    name = group.group_name
    raw = torch.ops._c10d_functional.all_reduce.default(x, "sum", name)
    assert torch.ops._c10d_functional.wait_tensor.default(raw)[0].item() == sum(ranks)


def destroyed() -> None:
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("program", [collectives, objects, messages, groups, functionals, destroyed])
def test_torch_distributed_inside(program: Callable[[], None]) -> None:
    simulate(4)(program)
    simulate(4)(program)


def test_users_collectives_do_not_break_autograd() -> None:
    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        z = y.detach().clone()
        dist.all_reduce(z)
        y.sum().backward()
        assert x.grad is not None and (x.grad == 2).all()

    simulate(2)(program)


def test_modes_do_not_see_the_work_of_others() -> None:
    """The last rank to arrive computes everybody's result; its dispatch modes must not tell it from the others."""

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    def program() -> list[str]:
        comm = init_device_mesh("cpu", (4,)).comm()
        x = torch.ones(3)
        with Names() as mode:
            y = comm.all_reduce(x * 2, "max")
            comm.all_gather(y, [(3,)] * 4)
        return mode.names

    assert simulate(4)(program) == [["aten::mul"]] * 4


class _Sum(torch.autograd.Function):
    """Sum over the mesh, forward and backward."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad), None


def test_backward_communicates() -> None:
    def program() -> torch.Tensor:
        comm = init_device_mesh("cpu", (4,)).comm()
        x = torch.full((2,), float(comm.rank), requires_grad=True)
        y = x
        for _ in range(3):
            y = _Sum.apply(y * x, comm)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    grads = simulate(4)(program)
    assert all(torch.isfinite(g).all() for g in grads) and grads[1].sum() != 0
    with torch.no_grad():
        assert simulate(2)(torch.is_grad_enabled) == [False, False]


# random numbers


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.randn())


def test_every_rank_has_its_own_streams() -> None:
    """Each rank draws what a process of its own would draw, however the ranks take turns."""

    def program(seed: int) -> list[tuple[float, float, float]]:
        rank = dist.get_rank()
        if seed:
            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
        out = []
        for _ in range(5):
            out.append(draw())
            dist.barrier()
            if rank == 1:
                out.append(draw())
        return out

    expected = []
    for rank in range(3):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        expected.append([draw() for _ in range(10 if rank == 1 else 5)])
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
    assert simulate(3)(program, 1) == expected
    start = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    unseeded = simulate(3)(program, 0)
    assert unseeded[0] == unseeded[2] == unseeded[1][:5]
    assert torch.equal(torch.get_rng_state(), start[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == start[1:]
    assert unseeded[0][0] == draw()


def test_numpys_second_gaussian_belongs_to_the_rank() -> None:
    """randn makes two numbers at a time and keeps one; drawing it moves no bits."""

    def program() -> list[float]:
        np.random.seed(dist.get_rank())
        out = []
        for _ in range(6):
            out.append(float(np.random.randn()))
            dist.barrier()
        return out

    got = simulate(3)(program)
    for rank in range(3):
        np.random.seed(rank)
        assert got[rank] == [float(np.random.randn()) for _ in range(6)]


# ranks that disagree


def other_shape() -> None:
    dist.all_reduce(torch.ones(3 if dist.get_rank() == 2 else 2))


def other_kind() -> None:
    mesh = init_device_mesh("cpu", (4,))
    if mesh.get_rank() == 3:
        mesh.comm().all_gather(torch.ones(2), [(2,)] * 4)
    else:
        mesh.comm().all_reduce(torch.ones(2))


def other_dtype() -> None:
    init_device_mesh("cpu", (4,)).comm().all_reduce(torch.ones(2).double() if dist.get_rank() else torch.ones(2))


def other_op() -> None:
    init_device_mesh("cpu", (4,)).comm().all_reduce(torch.ones(2), "max" if dist.get_rank() == 1 else "sum")


def other_root() -> None:
    init_device_mesh("cpu", (4,)).comm().broadcast(torch.ones(2), dist.get_rank() % 2)


def other_part() -> None:
    rank = dist.get_rank()
    init_device_mesh("cpu", (4,)).comm().all_to_all(
        [torch.ones(1)] * 4, [(2 if (rank, i) == (1, 2) else 1,) for i in range(4)]
    )


def other_scatter() -> None:
    rank = dist.get_rank()
    like = torch.ones(3 if rank == 2 else 1)
    init_device_mesh("cpu", (4,)).comm().scatter([torch.ones(1)] * 4 if rank == 0 else None, like, 0)


@pytest.mark.parametrize(
    "program, ranks, words",
    [
        (other_shape, "0|2", r"dist.all_reduce.*\(2,\).*dist.all_reduce.*\(3,\)"),
        (other_kind, "0|3", "all_reduce.*all_gather"),
        (other_dtype, "0|1", "float32.*float64"),
        (other_op, "0|1", "op=sum.*op=max"),
        (other_root, "0|1", "src=0.*src=1"),
        (other_part, "1|2", r"\(2,\) from rank 2, which sends \(1,\)"),
        (other_scatter, "2|0", r"\(3,\) from rank 0, which sends \(1,\)"),
    ],
)
def test_different_collectives(program: Callable[[], None], ranks: str, words: str) -> None:
    """An error at once that names two ranks, what they do and where; no hang."""
    with pytest.raises(CollectiveMismatch, match=words) as caught:
        simulate(4)(program)
    for rank in ranks.split("|"):
        assert re.search(rf"\brank {rank}\b", str(caught.value))
    if "which sends" not in str(caught.value):
        line = program.__code__.co_firstlineno
        places = [int(n) for n in re.findall(r"test_simulate\.py:(\d+)", str(caught.value))]
        assert len(places) == 2 and all(line < n < line + 8 for n in places)


def test_mismatch_reaches_every_rank() -> None:
    seen: list[int] = []

    def program() -> None:
        dist.barrier()
        try:
            other_kind()
        except CollectiveMismatch:
            seen.append(dist.get_rank())
            raise

    with pytest.raises(CollectiveMismatch):
        simulate(4)(program)
    assert sorted(seen) == [0, 1, 2, 3]


def crossed() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    order = ("a", "b") if dist.get_rank() in (0, 3) else ("b", "a")
    for axis in order:
        mesh.comm(axis).all_reduce(torch.ones(2))


def left_early() -> None:
    if dist.get_rank() != 3:
        dist.barrier()


def all_receive() -> None:
    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % 4)


@pytest.mark.parametrize(
    "program, words",
    [
        (crossed, r"no rank can go on: rank 0 is in all_reduce.*ranks \(0, 2\).*rank 1 is in.*ranks \(0, 1\)"),
        (left_early, "rank 0 is in dist.barrier.*rank 3 has returned"),
        (all_receive, r"rank 0 is in recv\(src=1.*rank 1 is in recv\(src=2"),
    ],
)
def test_a_wait_that_cannot_end(program: Callable[[], None], words: str) -> None:
    with pytest.raises(CollectiveMismatch, match=words):
        simulate(4)(program)


# ranks that fail


class _Odd(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)
        self.code = code


def fails(error: BaseException, log: list[int]) -> None:
    dist.barrier()
    if dist.get_rank() == 2:
        raise error
    try:
        dist.barrier()
    except Exception:  # must not catch what ends the rank
        log.append(-1)
    finally:
        log.append(dist.get_rank())


@pytest.mark.parametrize(
    "error", [ValueError("a bad value"), KeyError("k"), OSError(2, "gone", "file"), _Odd(code=5), AssertionError()]
)
def test_an_exception_names_its_rank(error: Exception) -> None:
    log: list[int] = []
    with pytest.raises(type(error)) as caught:
        simulate(4)(fails, error, log)
    assert isinstance(caught.value, RankError) and caught.value.rank == 2
    assert str(caught.value).startswith(f"rank 2: {type(error).__name__}")
    assert caught.value.__cause__ is error and caught.value.args == error.args
    assert sorted(log) == [0, 1, 3]
    if isinstance(error, _Odd):
        assert caught.value.code == 5  # type: ignore[attr-defined]


def test_exits_and_interrupts_stay_what_they_are() -> None:
    for error in (SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            simulate(4)(fails, error, [])
        assert caught.value is error


def test_a_class_that_cannot_be_derived_from() -> None:
    class Final(Exception):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    with pytest.raises(RankError, match="rank 2: Final: no") as caught:
        simulate(4)(fails, Final("no"), [])
    assert isinstance(caught.value.__cause__, Final)


def test_the_first_failure_counts() -> None:
    with pytest.raises(ZeroDivisionError, match="rank 0"):
        simulate(8)(lambda: 1 / 0)


def test_a_failure_in_backward() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if dist.get_rank() == 1:
                raise ValueError("in backward")
            dist.all_reduce(grad)
            return grad

    def program() -> None:
        Bad.apply(torch.ones(2, requires_grad=True)).sum().backward()

    with pytest.raises(ValueError, match="rank 1: ValueError: in backward"):
        simulate(3)(program)


# simulations in simulations, and beside real groups


def nested(depth: int) -> list[object]:
    rank, world = rank_and_size()
    inside: list[object] = [] if depth == 0 else simulate(2)(nested, depth - 1)
    with pytest.raises(ValueError, match="rank 1: ValueError: inner"):
        simulate(2)(fails_on_one)
    dist.barrier()
    assert rank_and_size() == (rank, world)
    return [(rank, world), inside]


def fails_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("inner")
    dist.barrier()


def test_nested() -> None:
    inner = [[(0, 2), []], [(1, 2), []]]
    assert simulate(3)(nested, 1) == [[(r, 3), inner] for r in range(3)]


def test_from_two_threads() -> None:
    results: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(simulate(n)(lambda: total(torch.ones(1))))) for n in (2, 3)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(results) == [[2.0] * 2, [3.0] * 3]
    assert not dist.is_initialized()


def gloo_beside_simulated(rank: int, world: int) -> None:
    """A real group is hidden inside and as before afterwards, also after an error and after destroy inside."""
    group = dist.group.WORLD
    mesh = init_device_mesh("cpu", (world,))
    assert simulate(3)(lambda: total(torch.ones(1))) == [3.0] * 3
    assert simulate(2)(lambda: init_device_mesh("cpu", (2,)).comm().all_reduce(torch.ones(1)).item()) == [2.0] * 2
    simulate(3)(destroyed)
    with pytest.raises(RankError):
        simulate(3)(fails_on_one)
    assert dist.group.WORLD is group and rank_and_size() == (rank, world)
    assert total(torch.ones(1)) == world
    assert mesh.comm().all_reduce(torch.ones(1)).item() == world
    assert (functional.all_reduce(torch.ones(1), "sum", group) + 0).item() == world
    assert mesh == init_device_mesh("cpu", (world,))


@pytest.mark.processes
def test_beside_a_real_group() -> None:
    run_ranks(2, [gloo_beside_simulated]).check()


# the fake world


def test_fake_world() -> None:
    with fake_world(100_000, rank=70_001) as world:
        assert current_world() is world
        start = time.perf_counter()
        mesh = init_device_mesh("cpu", (100, 1000), mesh_dim_names=("a", "b"))
        hash(mesh)
        spent = time.perf_counter() - start
        assert mesh.coord == (70, 1) and mesh.get_rank() == 70_001
        assert mesh.comm("a").all_reduce(torch.ones(3, dtype=torch.bfloat16)).shape == (3,)
        assert world.traffic == [("all_reduce", 100, 5, 10)]
        with pytest.raises(RuntimeError, match="no process groups"):
            mesh.get_group("a")
        with fake_world(2):
            assert init_device_mesh("cpu", (2,)) != init_device_mesh("cpu", (1, 2))
        assert current_world() is world
        assert init_device_mesh("cpu", (100, 1000), mesh_dim_names=("a", "b")) == mesh
    assert spent < 0.5, "50 ms on a quiet machine"
    with pytest.raises(ValueError, match=r"0\.\.3"), fake_world(4, rank=4):
        pass
    with fake_world(100_000), pytest.raises(RuntimeError, match="bigger than default world size"):
        init_device_mesh("cpu", (100_001,))


def test_worlds_make_different_meshes() -> None:
    meshes: list[DeviceMesh] = []

    def program() -> None:
        meshes.append(init_device_mesh("cpu", (2,)))

    simulate(2)(program)
    simulate(2)(program)
    with fake_world(2):
        program()
    assert len(set(meshes)) == 5
    assert len({id(m) for m in meshes}) == 5


def test_no_world() -> None:
    with pytest.raises(RuntimeError, match="no world"):
        current_world()


def test_cost_of_a_collective() -> None:
    """Some tens of microseconds a rank on a quiet machine; the bound leaves room for a busy one."""

    def program() -> float:
        comm, x = init_device_mesh("cpu", (4,)).comm(), torch.ones(8)
        start = time.perf_counter()
        for _ in range(300):
            comm.all_reduce(x)
        return (time.perf_counter() - start) / 300

    assert min(simulate(4)(program)[0] for _ in range(3)) < 2e-3


def test_rank_threads_alone() -> None:
    """The engine knows nothing of torch.distributed."""
    threads = RankThreads(3)
    sums = threads.run(lambda r: threads.meet(r, (0, 1, 2), r, ("add",), r, lambda xs: [sum(xs)] * 3))
    assert sums == [3, 3, 3] and threads.error is None


def test_a_mesh_of_another_rank_is_refused() -> None:
    """A cache shared by the ranks hands out rank 0's mesh: an error, not a hang or a wrong shard."""
    meshes: list[DeviceMesh] = []

    def run() -> None:
        if not meshes:
            meshes.append(init_device_mesh("cpu", (2,)))
        meshes[0].comm().all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError, match="made by rank 0 of a simulated run and is used by rank 1"):
        simulate(2)(run)

    def no_collective() -> None:
        if len(meshes) == 1:
            meshes.append(init_device_mesh("cpu", (2,)))
        DTensor.from_local(torch.ones(2), meshes[1])

    with pytest.raises(RuntimeError, match="used by rank 1"):
        simulate(2)(no_collective)


def test_meshes_of_ranks_that_are_not_there_are_refused() -> None:
    def run() -> None:
        for ranks in ([0, 7], [-1, 0]):
            with pytest.raises(RuntimeError, match="names rank"):
                DeviceMesh("cpu", ranks)
        for shape in ((0,), (-1,), (2, 0)):
            with pytest.raises(ValueError, match="at least one"):
                init_device_mesh("cpu", shape)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        mesh._flatten("ab")
        assert mesh.get_local_rank("ab") == mesh.get_rank()

    simulate(2)(run)


# ------------------------------------------------------------ one collective from different lines
def rows() -> DTensor:
    return distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)])


def shown(x: DTensor) -> float:
    return float(x.full_tensor())


def apart_by_return() -> None:
    x = rows()
    if dist.get_rank() == 0:
        x.sum().item()
    else:
        x.mean().item()


def apart_on_one_line() -> None:
    x = rows()
    x.sum().item() if dist.get_rank() == 2 else x.mean().item()


def apart_in_callers() -> None:
    x = rows()
    if dist.get_rank() == 1:
        shown(x.sum())
    else:
        shown(x.mean())


def apart_in_torch() -> None:
    if dist.get_rank() == 3:
        dist.all_reduce(torch.ones(2))
    else:
        dist.all_reduce(torch.zeros(2))


def apart_in_backward() -> None:
    w = rows().requires_grad_()
    if dist.get_rank() == 0:
        (w * 2).full_tensor().sum().backward()
    else:
        (w * 3).full_tensor().sum().backward()


@pytest.mark.parametrize(
    "program", [apart_by_return, apart_on_one_line, apart_in_callers, apart_in_torch, apart_in_backward]
)
def test_one_collective_from_different_lines(program: Callable[[], None]) -> None:
    """A warning with both places: the ranks may have met by chance."""
    with pytest.warns(UserWarning, match="from different lines of the program: rank") as caught:
        simulate(4)(program)
    places = re.findall(r"rank (\d) at \S*test_simulate\.py:(\d+), column (\d+)", str(caught[0].message))
    assert len(places) == 2 and len({(line, column) for _, line, column in places}) == 2
    first = program.__code__.co_firstlineno
    assert all(first < int(line) < first + 7 for _, line, _ in places)


def same_lines_for_all() -> None:
    x, rank = rows(), dist.get_rank()
    for _ in range(2):
        shown(x.sum())
    [shown(y) for y in (x.sum(), x.mean())]
    if rank:
        dist.barrier()
        dist.broadcast(torch.ones(1), 0)
    else:
        dist.barrier()
        dist.broadcast(torch.zeros(1), 0)
    try:
        if rank == 2:
            raise ValueError
    except ValueError:
        pass
    finally:
        shown(x.sum())
    w = rows().requires_grad_()
    with contextlib.suppress(ValueError):
        (w * w).sum().backward()


def test_no_warning_where_lines_agree() -> None:
    simulate(4)(same_lines_for_all)
