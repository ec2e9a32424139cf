"""Several collectives as one launch, without a GPU: what a launch holds, that nothing is read before its
end, and what goes alone.

The recording group stands for NCCL's: it takes down what it is asked between start and end, and only then carries it
out, as NCCL does. On torch's fake groups every rank of a world is played in turn; on gloo the numbers are compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gloo_ranks import run_ranks
from helpers.launches import Group, NothingRead, R, as_on_gpus, move, on_rank, played, recorded

from dtensor import DTensor, Partial, Placement, Shard, init_device_mesh, simulate
from dtensor.comm import issue as comm_sent
from dtensor.comm.coalescing import Together
from dtensor.errors import CollectiveError
from dtensor.propagation_rules.optimizers import pending_gradients
from dtensor.propagation_rules.optimizers.pending_gradients import settle
from dtensor.redistribute.executor import coalescing as together
from dtensor.spec import Spec

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


def test_parts_of_unlike_sizes_in_a_launch() -> None:
    """Gathers, exchanges and reductions of uneven and empty parts; which rank holds what does not change the calls."""
    shapes = [(5, 6), (2, 6), (0, 6)]
    kinds = [(Shard(0), R), (Shard(0), Shard(1)), (Partial(), R)]

    def body(mesh: Any) -> tuple[list[Any], list[Any]]:
        with as_on_gpus():
            log, groups = recorded(mesh)
            with NothingRead(groups):
                out = together.redistribute_together([move(mesh, a, b, shape) for shape in shapes for a, b in kinds])
            return log, [tuple(t.shape) for t in out]

    ranks = played((4,), body)
    for rank, (log, got) in enumerate(ranks):
        assert log == ranks[0][0] and log.count("start") == log.count("end") == log.count("wait") == 1, log
        assert log.count(("allreduce", True)) == 2 and len(log) == 9, log  # the shape without elements sends nothing
        columns = [2, 2, 2, 0][rank]
        assert got == [x for n, m in shapes for x in ((n, m), (n, columns), (n, m))]


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
    """Large tensors, reductions to different parts or after an exchange, CPU tensors: queued one by one, as ever."""

    def body(mesh: Any) -> list[list[Any]]:
        logs = []
        both = Spec.make(mesh, (Partial(), Shard(0)), (8, 8), (8, 1), torch.float32)
        jobs = [
            [move(mesh, Partial(), Shard(0), (7, 4))] * 2,
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


def gradients(mesh: Any, seed: int = 0) -> list[DTensor]:
    """Pending along one axis or the other, in two dtypes, sharded and whole, sums, averages and maxima."""
    wide, narrow = torch.float32, torch.bfloat16
    layouts = [
        ((Partial(), R), wide), ((Partial(), Shard(0)), wide), ((Partial(), R), narrow), ((R, Partial()), narrow),
        ((Partial("avg"), R), wide), ((R, Partial()), wide), ((Partial("max"), R), wide), ((Shard(0), R), wide),
    ]  # fmt: skip
    torch.manual_seed(seed)
    out = []
    for i, (layout, dtype) in enumerate(layouts):
        spec = Spec.make(mesh, layout[: mesh.ndim], (5 + i, 4), (4, 1), dtype)
        local = torch.randn(spec.local_shape).to(dtype)
        out.append(DTensor.from_local(local, mesh, spec.placements, run_check=False, shape=spec.shape, stride=(4, 1)))
    return out


def test_pending_gradients_launch_together() -> None:
    """Per axis one launch of all its buckets, whatever the dtype; nothing twice; what is not pending stays."""

    def body(mesh: Any) -> tuple[list[Any], list[Any]]:
        with as_on_gpus(), torch.no_grad():
            log, groups = recorded(mesh)
            grads = gradients(mesh)
            with NothingRead(groups):
                settle(grads)
                settle(grads)
        return log, [(g.placements, tuple(g.to_local().shape) == tuple(g._spec.local_shape)) for g in grads]

    for log, got in played((2, 2), body):
        late, now = ("allreduce", True), ("allreduce", False)
        assert log == [now, "start", *[late] * 3, "end", "wait", "start", *[late] * 2, "end", "wait"], log
        assert all(fits and not any(isinstance(p, Partial) for p in placements) for placements, fits in got)


def test_what_is_settled_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch holds, sent and received, is no more than a bucket; a larger gradient goes alone."""
    monkeypatch.setattr(pending_gradients, "BUCKET", 40)

    def body(mesh: Any) -> list[Any]:
        with as_on_gpus(), torch.no_grad():
            log, _ = recorded(mesh)
            settle(
                DTensor.from_local(torch.ones(n, dtype=dtype), mesh, [Partial()])
                for n in (10, 50, 10, 20)
                for dtype in (torch.float32, torch.float64)
            )
        return log

    for log in played((2,), body):
        assert log.count("start") == 1 and log.count(("allreduce", True)) == 2, log
        assert log.count(("allreduce", False)) == 4, log


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
    want, got = [gradients(mesh, 9 + rank) for _ in range(2)]
    sums = [g.full_tensor() for g in want]
    settle(want)
    with as_on_gpus(), torch.no_grad():
        log, groups = recorded(mesh)
        settle(got)
        mesh.comm(0).group = groups[0].group
    assert log.count("start") == 1, log
    for x, y, whole in zip(got, want, sums, strict=True):
        assert x.placements == y.placements and torch.equal(x.to_local(), y.to_local())
        torch.testing.assert_close(x.full_tensor(), whole)
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
