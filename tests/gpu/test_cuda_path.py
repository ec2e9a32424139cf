"""What the CUDA path issues, recorded without a GPU: which collectives, on which groups, in which order, how.

Every rank of a world is played in turn, on torch's fake process groups, which carry nothing, with CPU tensors that are
taken for tensors on a device with streams. What is issued is compared with what the plan says, and between the ranks.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.comm_cases import every, exercise_movement, exercise_reductions
from helpers.gloo_ranks import run_ranks
from helpers.launches import Call, Recorder, on_rank, played
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor import Partial, Placement, Replicate, Shard, init_device_mesh
from dtensor.comm import issue as comm_sent
from dtensor.comm.wire import eager, waited
from dtensor.redistribute.executor import asynchronous
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.redistribute.plan import plan_reshard
from dtensor.spec import Spec, contiguous_stride

R = Replicate()


def layouts(axes: int) -> list[tuple[Placement, ...]]:
    one: list[Placement] = [R, Shard(0), Shard(1), Partial(), Partial("max")]
    return [
        c for c in itertools.product(one, repeat=axes) if len({p.reduce_op for p in c if isinstance(p, Partial)}) <= 1
    ]


def moves(axes: int, most: int, pending: bool = False) -> list[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    found = [
        (a, b) for a in layouts(axes) for b in layouts(axes)
        if a != b and (pending or not any(isinstance(p, Partial) for p in b))
    ]  # fmt: skip
    random.Random(axes).shuffle(found)
    return found[:most]


def intended(plan: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The collectives of a plan as this rank should issue them: kind, and the ranks along the step's axes."""
    out = []
    for step in plan.steps:
        if not step.is_collective:
            continue
        comm = plan.src.mesh.comm(step.axes if len(step.axes) > 1 else step.axes[0])
        kind = "all_to_all" if step.kind in ("all_to_all_reduce", "spread_reduce") else step.kind
        out.append((kind, tuple(sorted(comm.ranks))))
    return out


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["now", "async"])
def test_every_move_issues_what_its_plan_says(shape: tuple[int, ...], late: bool) -> None:
    """Kind, group and order on all ranks; the ranks of a group agree; synchronous ones join the current stream."""
    cases = moves(len(shape), 24)

    def body(mesh: Any) -> list[tuple[list[Call], list[tuple[str, tuple[int, ...]]], list[bool]]]:
        out = []
        for i, (a, b) in enumerate(cases):
            full = [(16, 24), (7, 10)][i % 2]
            src = Spec.make(mesh, a, full, (full[1], 1), torch.bfloat16)
            dst = src.with_placements(b)
            with Recorder() as seen:
                got = redistribute_local(torch.zeros(src.local_shape, dtype=src.dtype), src, dst, async_op=late)
                got = got + 0
            assert tuple(got.shape) == tuple(dst.local_shape)
            plan = plan_reshard(src, dst)
            nows = [not (late and step is plan.steps[-1]) for step in plan.steps if step.is_collective]
            out.append((seen.calls, intended(plan), nows))
        return out

    ranks = played(shape, body)
    kinds = set()
    for i, (a, b) in enumerate(cases):
        for calls, plan, nows in (r[i] for r in ranks):
            told = [kind for kind, _ in plan]
            if [c.kind for c in calls] != told:  # parts of different sizes, and maxima of 16 bits, travel in other ways
                assert len(calls) == len(told), (a, b, calls, plan)
            assert [c.ranks for c in calls] == [tuple(g) for _, g in plan], (a, b)
            kinds |= {c.kind for c in calls}
            assert [c.now for c in calls] == nows, (a, b, calls)
        agree([r[i][0] for r in ranks])
    assert {"all_reduce", "all_gather", "all_to_all", "reduce_scatter"} <= kinds


def agree(calls: list[list[Call]]) -> None:
    """The ranks of each group issue the same collectives in the same order, and what one sends the other expects."""
    groups = {c.ranks for some in calls for c in some}
    for ranks in groups:
        each = [[c for c in calls[r] if c.ranks == ranks] for r in ranks]
        for step in zip(*each, strict=True):
            assert len({(c.kind, c.dtype, c.now) for c in step}) == 1, step
            if step[0].kind != "all_to_all":
                assert len({c.sent for c in step}) == 1, step
                continue
            for i, j in itertools.product(range(len(ranks)), repeat=2):
                assert step[i].splits[1][j] == step[j].splits[0][i], (ranks, step)


PAYLOADS = {
    torch.bfloat16: (torch.bfloat16, torch.bfloat16), torch.float16: (torch.float16, torch.float16),
    torch.float8_e4m3fn: (torch.uint8, torch.float32), torch.float8_e5m2: (torch.uint8, torch.float32),
    torch.bool: (torch.uint8, torch.uint8), torch.complex64: (torch.int64, torch.float32),
    torch.complex128: (torch.float64, torch.float64), torch.int16: (torch.float16, torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
def test_what_travels_is_what_nccl_carries(dtype: torch.dtype) -> None:
    """8-bit floats, booleans and complex numbers move as bytes, and are reduced as numbers that NCCL reduces."""
    moved, reduced = PAYLOADS[dtype]

    def body(mesh: Any) -> list[Call]:
        comm = mesh.comm()
        x = torch.zeros(3, 2).to(dtype)
        with Recorder() as seen:
            comm.all_gather(x, [(3, 2)] * 4)
            comm.all_to_all([x] * 4, [(3, 2)] * 4)
            comm.all_to_all([torch.zeros(i % 2 * 99).to(dtype) for i in range(4)], [(comm.rank % 2 * 99,)] * 4)
            comm.broadcast(x, 1)
            comm.all_reduce(x, "sum")
            comm.reduce_scatter([x] * 4, "sum")
        return seen.calls

    ranks = played((4,), body)
    agree(ranks)
    for calls in ranks:
        assert [c.dtype for c in calls] == [moved] * 4 + [reduced] * 2, calls
        assert all(c.now for c in calls)


@pytest.mark.parametrize(("name", "value"), [("TORCH_NCCL_BLOCKING_WAIT", "1"), ("NCCL_BLOCKING_WAIT", "1"), ("", "")])
def test_blocking_wait_waits_for_every_collective(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Where torch is told to raise errors of NCCL where the host waits, the host waits: nothing is left in a queue."""
    for known in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        monkeypatch.delenv(known, raising=False)
    if name:
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("another_comm_sent", comm_sent.__file__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    on_a_device = SimpleNamespace(device=torch.device("cuda"), is_meta=False)
    assert fresh.in_queue(on_a_device) is (not name) and not fresh.in_queue(torch.empty(2))
    waited, wait = [], fresh._wait
    monkeypatch.setattr(fresh, "_wait", lambda x: waited.append(x) or wait(x))
    with on_rank(0, 2), Recorder() as seen:
        fresh.in_queue = lambda x: not fresh.BLOCKING
        place = init_device_mesh("cpu", (2,)).comm()
        fresh.all_reduce(place, torch.ones(2), torch.ones(2), "sum", False).wait()
    assert len(waited) == bool(name) and [c.now for c in seen.calls] == [not name], seen.calls


# ------------------------------------------------------------ with numbers, on gloo
def queued(rank: int, world: int) -> None:
    """The in-place collectives of the accelerator's path, on real processes."""
    before, comm_sent.in_queue = comm_sent.in_queue, eager
    try:
        every(exercise_reductions, [torch.bool, torch.float8_e4m3fn], few=True)
        every(exercise_movement, [torch.complex64], few=True)
        c = init_device_mesh("cpu", (world,)).comm()
        x = torch.ones(2)
        with Recorder() as seen:
            c.all_reduce(x)
            c.all_reduce(x, async_op=True).wait()
        assert [call.now for call in seen.calls] == [True, False], seen.calls
        assert torch.equal(x, torch.ones(2))
    finally:
        comm_sent.in_queue = before


@pytest.mark.processes
def test_queued_collectives_follow_the_specification() -> None:
    run_ranks(4, [queued], 120).check()


# ------------------------------------------------------------ streams
class Streams:
    """A device module that writes down what is asked of its streams."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"
        streams = self

        class Stream:
            def __init__(self, device: object = None, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                streams.log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: object) -> None:
                streams.log.append(f"{self.name} waits for the event")

        class Event:
            def record(self, stream: Stream) -> None:
                streams.log.append(f"event on {stream.name}")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device: object = None) -> Any:
        return self.Stream(name=self.now)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


def with_streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """CPU tensors count as those of a device, whose streams write down what is asked of them."""
    streams = Streams()
    monkeypatch.setattr(asynchronous, "in_queue", eager)
    monkeypatch.setattr(asynchronous, "streams", lambda device: streams)
    monkeypatch.setattr(asynchronous, "_sides", {})
    mark = lambda self, stream: streams.log.append(f"memory used on {stream.name}")  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", mark)
    return streams


class Reads(TorchDispatchMode):
    """What the ops under it read: on which stream, op, memory."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree_leaves(args):
            if isinstance(t, torch.Tensor):
                self.seen.append((self.streams.now, str(func), t.untyped_storage().data_ptr()))
        return func(*args, **(kwargs or {}))


LAYOUTS = [(p, q) for p in (R, Shard(0), Shard(1), Partial()) for q in (R, Shard(0), Shard(1), Partial())]


@pytest.mark.parametrize("shape", [(16, 16), (7, 5)])
def test_an_asynchronous_source_may_be_written_to_at_once(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    """Nothing that is still to run reads its memory, whatever the layouts."""
    streams, beside = with_streams(monkeypatch), 0
    monkeypatch.setattr(comm_sent, "in_queue", eager)
    stride = contiguous_stride(shape)
    with on_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        for layout in LAYOUTS:
            src = Spec.make(mesh, layout, shape, stride, torch.float32)
            for target in LAYOUTS:
                if layout == target or any(q == Partial() and p != q for p, q in zip(layout, target)):
                    continue
                x = torch.zeros(src.local_shape)
                with Reads(streams) as reads:
                    got = redistribute_local(x, src, src.with_placements(target), async_op=True)
                    at = len(reads.seen)
                    done = waited(got)
                own = x.untyped_storage().data_ptr()
                if done.untyped_storage().data_ptr() != own:  # else nothing moves
                    late = reads.seen[at:] + [read for read in reads.seen if read[0] == "side"]
                    assert not [read for read in late if read[2] == own], (layout, target)
                beside += "side waits for main" in streams.log
                streams.log.clear()
    assert beside >= (8 if shape == (16, 16) else 0)


P = Partial()
TWICE = {
    "gathered": ((Shard(1), P, P), (R, P, P), (R, Shard(0), R)),
    "reduced": ((P, P, P), (R, P, P), (R, Shard(0), R)),
    "scattered": ((P, P, P), (Shard(0), P, P), (Shard(0), R, Shard(1))),
    "exchanged": ((Shard(0), P, P), (Shard(1), P, P), (Shard(1), Shard(0), R)),
    "beside": ((P, P, P), (Shard(0), R, P), (R, Shard(1), R)),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_source_on_its_way_is_waited_for_by_the_current_stream(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As it counts as there from then on: the side stream's wait alone would leave the next use without one."""
    streams = with_streams(monkeypatch)
    monkeypatch.setattr(comm_sent, "in_queue", eager)
    wait = comm_sent._wait

    def waits(x: torch.Tensor) -> torch.Tensor:
        streams.log.append(f"{streams.now} waits for a collective")
        return wait(x)

    monkeypatch.setattr(comm_sent, "_wait", waits)
    first, then, last = TWICE[name]
    with on_rank(0, 8):
        src = Spec.make(init_device_mesh("cpu", (2, 2, 2)), first, (16, 16), (16, 1), torch.float32)
        middle = src.with_placements(then)
        on_its_way = redistribute_local(torch.zeros(src.local_shape), src, middle, async_op=True)
        assert type(on_its_way).__name__ == "AsyncCollectiveTensor"
        streams.log.clear()
        again = redistribute_local(on_its_way, middle, src.with_placements(last), async_op=True)
        on_its_way + 1
        log = list(streams.log)
        waited(again)
    assert any(line in ("main waits for a collective", "main waits for the event") for line in log), log
    assert not any(line.startswith("side waits for a") for line in log), log


def test_several_collectives_run_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan runs on the side stream, after what was queued; the result waits where it is used; memory is marked."""

    def body(mesh: Any) -> tuple[list[str], list[Call]]:
        streams = with_streams(monkeypatch)
        src = Spec.make(mesh, (Partial(), Partial()), (16, 16), (16, 1), torch.float32)
        dst = src.with_placements((Shard(0), R))
        with Recorder() as seen:
            got = redistribute_local(torch.zeros(16, 16), src, dst, async_op=True)
            assert streams.log == ["side waits for main", "memory used on side", "event on side"]
            assert type(got).__name__ == "AsyncCollectiveTensor" and streams.now == "main"
            streams.now = "third"
            assert (got + 1).shape == (8, 16)
        redistribute_local(torch.zeros(16, 16), src, src.with_placements((R, Partial())), async_op=True)
        return streams.log, seen.calls

    for log, calls in played((2, 2), body):
        assert log[3:] == ["third waits for the event", "memory used on third"], log  # one collective: no side stream
        assert len(calls) == 2 and all(c.now for c in calls)
