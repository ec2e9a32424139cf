"""Several collectives as one launch, without a GPU: what a launch holds, that nothing is read before its
end, and what goes alone.

The recording group stands for NCCL's: it takes down what it is asked between start and end, and only then carries it
out, as NCCL does. On torch's fake groups every rank of a world is played in turn; on gloo the numbers are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from test_cuda_path import R, on_rank, played
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor import (
    DTensor,
    Partial,
    Placement,
    Shard,
    comm_sent,
    dispatch_lists,
    dispatch_miss,
    init_device_mesh,
    simulate,
)
from dtensor import reshard_together as together
from dtensor.comm_c10d import C10dCommunicator
from dtensor.comm_together import Together
from dtensor.comm_wire import eager
from dtensor.errors import CollectiveError
from dtensor.spec import Spec


class Ended:
    """The work of a launch."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def wait(self) -> None:
        self.log.append("wait")


class Group:
    """A process group that launches what it is asked between start and end at the end; `log` says in which order."""

    def __init__(self, group: Any, log: list[Any], fails: str = "") -> None:
        self.group, self.log, self.fails = group, log, fails
        self.open: list[tuple[Callable[..., Any], tuple[Any, ...], list[Any]]] | None = None
        self.unread: set[int] = set()

    def _start_coalescing(self, device: torch.device) -> None:
        assert self.open is None
        self.open = []
        self.log.append("start")

    def _end_coalescing(self, device: torch.device) -> Any:
        assert self.open is not None
        calls, self.open = self.open, None
        self.log.append("end")
        if self.fails == "end":
            raise RuntimeError("NCCL error: a peer is gone")
        for call, args, alive in calls:
            assert all(ref() is not None for ref in alive), "memory was given back before the launch"
            work = call(*args)
            if work is not None:
                work.wait()
        self.unread.clear()
        return Ended(self.log)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.group, name)
        if name not in ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base"):
            return found

        def call(*args: Any) -> Any:
            self.log.append((name, args[-1].asyncOp))
            if self.open is None:
                return found(*args)
            if self.fails == name:
                raise RuntimeError("NCCL error: invalid usage")
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            own = {id(t): t.detach() for t in tensors}  # so that not this keeps the caller's alive
            again = tuple([own.get(id(t), t) for t in a] if isinstance(a, list) else own.get(id(a), a) for a in args)
            self.unread |= {t.untyped_storage()._cdata for t in tensors[:1]}
            self.open.append((found, again, [weakref.ref(t) for t in tensors]))
            return Ended(self.log)

        call.__name__ = name
        return call


class NothingRead(TorchDispatchMode):
    """Fails where an op takes what a launch has yet to fill."""

    def __init__(self, groups: list[Group]) -> None:
        super().__init__()
        self.groups = groups

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func._schema.name.startswith("c10d") and "empty" not in func._schema.name:
            flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
            for t in flat:
                if isinstance(t, torch.Tensor) and type(t) is not DTensor:
                    for g in self.groups:
                        if g.open is not None:
                            assert t.untyped_storage()._cdata not in g.unread, f"{func} reads what has not arrived"
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """CPU tensors are taken for those of a device with streams, every group for one that launches together."""
    before = comm_sent.in_queue, C10dCommunicator.has_launches, together.may_meet
    comm_sent.in_queue = eager
    C10dCommunicator.has_launches = lambda self, device: True
    meets = lambda specs: len(specs) > 1  # noqa: E731
    together.may_meet = dispatch_lists.may_meet = dispatch_miss.may_meet = meets
    try:
        yield
    finally:
        comm_sent.in_queue, C10dCommunicator.has_launches = before[:2]
        together.may_meet = dispatch_lists.may_meet = dispatch_miss.may_meet = before[2]


def recorded(mesh: Any, fails: str = "") -> tuple[list[Any], list[Group]]:
    """The log of the groups of the mesh's axes, and the groups, which stand in front of the real ones from now on."""
    log: list[Any] = []
    groups = []
    for axis in range(mesh.ndim):
        comm = mesh.comm(axis)
        comm.group = Group(comm.group, log, fails)
        groups.append(comm.group)
    return log, groups


def move(mesh: Any, src: Placement, dst: Placement, shape: tuple[int, ...] = (8, 8)) -> tuple[torch.Tensor, Spec, Spec]:
    """A move along the mesh's first axis."""
    rest = (R,) * (mesh.ndim - 1)
    stride = tuple(torch.empty(shape, device="meta").stride())
    spec = Spec.make(mesh, (src, *rest), shape, stride, torch.float32)
    return torch.randn(spec.local_shape), spec, spec.with_placements((dst, *rest))


FOUR = [(Partial(), R), (Shard(0), R), (Partial(), Shard(1)), (Shard(0), Shard(1))]
CALLS = ["allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base"]


def test_what_a_launch_holds() -> None:
    """Four kinds of collectives of one group: one start, one end, a wait after it, nothing read before."""

    def body(mesh: Any) -> tuple[list[Any], list[Any]]:
        with as_on_gpus():
            log, groups = recorded(mesh)
            with NothingRead(groups):
                out = together.redistribute_together([move(mesh, a, b) for a, b in FOUR])
            return log, [tuple(t.shape) for t in out]

    ranks = played((4,), body)
    for log, shapes in ranks:
        assert log == ["start", *((name, True) for name in CALLS), "end", "wait"]
        assert shapes == [(8, 8), (8, 8), (8, 2), (8, 2)]


def test_one_launch_a_group() -> None:
    """Groups one after the other, each waited for before the next starts; a group's single move goes alone."""

    def body(mesh: Any) -> list[Any]:
        a = Spec.make(mesh, (Partial(), R), (8, 8), (8, 1), torch.float32)
        b = Spec.make(mesh, (R, Partial()), (8, 8), (8, 1), torch.float32)
        jobs = [(torch.ones(8, 8), s, s.with_placements((R, R))) for s in (a, b, a, b)]
        with as_on_gpus():
            log, _ = recorded(mesh)
            together.redistribute_together(jobs)
            together.redistribute_together(jobs[:2])
        return log

    two = ["start", ("allreduce", True), ("allreduce", True), "end", "wait"]
    for log in played((2, 2), body):
        assert log[:10] == [*two, *two] and [name for name, _ in log[10:]] == ["allreduce", "allreduce"], log


def test_what_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors, parts of unlike sizes, reductions after an exchange, CPU tensors: queued one by one, as ever."""

    def body(mesh: Any) -> list[list[Any]]:
        logs = []
        both = Spec.make(mesh, (Partial(), Shard(0)), (8, 8), (8, 1), torch.float32)
        jobs = [
            [move(mesh, Shard(0), R, (7, 4))] * 2,
            [(torch.ones(4, 8), both, both.with_placements((R, R)))] * 2,
            [move(mesh, Partial(), R)] * 2,
            [move(mesh, Partial(), R)],
        ]
        log, _ = recorded(mesh)
        with as_on_gpus():
            for i, some in enumerate(jobs):
                monkeypatch.setattr(together, "SMALL", 63 if i == 2 else 1 << 20)
                together.redistribute_together(some)
                logs.append(list(log))
                log.clear()
        together.redistribute_together(jobs[2])
        logs.append(log)
        return logs

    for logs in played((2, 2), body):
        assert not [entry for log in logs for entry in log if entry in ("start", "end")]
        assert [len(log) for log in logs if log is not logs[1]] == [2, 2, 1, len(logs[4])], logs


def test_launches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "MOST", 3)
    with on_rank(0, 2), as_on_gpus():
        mesh = init_device_mesh("cpu", (2,))
        log, _ = recorded(mesh)
        together.redistribute_together([move(mesh, Partial(), R) for _ in range(7)])
    one = [("allreduce", True)]
    assert log[:12] == ["start", *one * 3, "end", "wait"] * 2 and len(log) == 13, log


def test_ops_launch_together() -> None:
    """An op of two inputs that move, and a list op; again from the cache; what moves alone is not started."""

    def body(mesh: Any) -> list[list[Any]]:
        logs = []
        with as_on_gpus(), torch.no_grad():
            log, groups = recorded(mesh)
            make = lambda p, *shape: DTensor.from_local(torch.ones(shape), mesh, (p,))  # noqa: E731
            pair = [make(Partial("max"), 4, 4), make(Partial("min"), 4, 4)]
            one, other = [make(Shard(0), 4, 16), pair[0]], [make(Shard(1), 16, 4), make(R, 4, 4)]
            for call in (lambda: torch.atan2(*pair), lambda: torch._foreach_mul(one, other)):
                for _ in range(2):
                    with NothingRead(groups):
                        call()
                    logs.append(list(log))
                    log.clear()
        return logs

    ranks = played((4,), body)
    for logs in ranks:
        for log in logs:
            assert log[0] == "start" and log[-2:] == ["end", "wait"] and len(log) == 5, logs
            assert all(late for _, late in log[1:3]), log
        assert logs == ranks[0] and logs[::2] == logs[1::2]


def test_the_cpu_and_simulated_ranks_have_no_launches() -> None:
    """There the plans are those of before, and a call without a launch gives what single moves give."""
    with on_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        assert not mesh.comm().has_launches(torch.device("cpu"))
        spec = move(mesh, Partial(), R)[1]
        assert not together.may_meet([spec, spec])

    def rank() -> bool:
        mesh = init_device_mesh("cpu", (2,))
        jobs = [move(mesh, a, b) for a, b in FOUR]
        got = together.redistribute_together(jobs)
        want = [together.redistribute_local(*job) for job in jobs]
        return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    assert all(simulate(2)(rank))


# ------------------------------------------------------------ errors
def test_reading_before_the_end_is_an_error() -> None:
    with on_rank(0, 2), as_on_gpus():
        comm = init_device_mesh("cpu", (2,)).comm()
        log: list[Any] = []
        comm.group = Group(comm.group, log)
        with pytest.raises(CollectiveError, match="before the launch"), Together(comm, torch.device("cpu")):
            comm.all_reduce(torch.ones(2))
        assert log == ["start", ("allreduce", False), "end", "wait"], "an open launch would swallow what follows"
        with pytest.raises(RuntimeError, match="under way already|is under way"), Together(comm, torch.device("cpu")):
            Together(comm, torch.device("cpu")).__enter__()
        assert comm_sent.gathering.now is None


@pytest.mark.parametrize("fails", ["end", "_allgather_base"])
def test_an_error_names_the_collectives(fails: str) -> None:
    """The launch and its collectives, or the one that was refused; the redistributions; and the launch is ended."""
    with on_rank(0, 2), as_on_gpus():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        log, _ = recorded(mesh, fails)
        with pytest.raises(CollectiveError) as caught:
            together.redistribute_together([move(mesh, a, b) for a, b in FOUR[:2]])
        text = str(caught.value)
        head = "one launch of all_reduce, all_gather over" if fails == "end" else "all_gather over"
        assert text.startswith(head) and "axis 'tp'" in text, text
        assert "NCCL error" in text and "redistribute f32[8@tp,8] -> f32[8,8]" in text, text
        assert log.count("end") == 1 and comm_sent.gathering.now is None


def test_only_plain_collectives_may_be_inside() -> None:
    """A reduce-scatter of a list, of which NCCL's group makes a launch of its own, and another group's collective."""
    with on_rank(0, 4), as_on_gpus():
        mesh = init_device_mesh("cpu", (2, 2))
        comm = mesh.comm(0)
        for call in (
            lambda: comm.reduce_scatter([torch.ones(2), torch.ones(900)], async_op=True),
            lambda: mesh.comm(1).all_reduce(torch.ones(2), async_op=True),
        ):
            with pytest.raises(CollectiveError, match="inside a launch of group"), Together(comm, torch.device("cpu")):
                call()


# ------------------------------------------------------------ with numbers, on gloo
def numbers(rank: int, world: int) -> None:
    """Moves of all kinds, launched together by a group that carries nothing before the end, against one by one."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(7 + rank)
    ends: list[Placement] = [R, Shard(0), Shard(1), Partial(), Partial("max")]
    for shape in ((8, 4), (5, 3), (0, 4)):
        pairs = [(a, b) for a in ends for b in ends[:3] if a != b]
        jobs = [move(mesh, a, b, shape) for a, b in pairs]
        want = [together.redistribute_local(*job) for job in jobs]
        with as_on_gpus():
            log, groups = recorded(mesh)
            with NothingRead(groups):
                got = together.redistribute_together(jobs)
            mesh.comm(0).group = groups[0].group
        assert log.count("start") == (1 if shape[0] else 0), (shape, log)
        for (a, b), x, y in zip(pairs, got, want, strict=True):
            assert torch.equal(x, y), (shape, a, b)
    with as_on_gpus(), torch.no_grad():
        log, _ = recorded(mesh)
        parts = [torch.randn(4, 4) for _ in range(2)]
        a, b = (DTensor.from_local(x, mesh, [Partial(op)]) for x, op in zip(parts, ("max", "min"), strict=True))
        got = torch.atan2(a, b).full_tensor()
    assert log.count("start") == 1, log
    high, low = parts[0].clone(), parts[1].clone()
    dist.all_reduce(high, dist.ReduceOp.MAX)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    assert torch.equal(got, torch.atan2(high, low))


@pytest.mark.processes
def test_numbers_on_gloo() -> None:
    run_ranks(2, [numbers], 120).check()
