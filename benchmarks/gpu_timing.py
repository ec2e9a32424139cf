"""What the GPU benchmarks measure with: host time, time until the device is done, kernels, memory. On CPU too.

All ranks measure together, the variants in turns; a time is that of the slowest rank.

    host       until the call returns: the work of Python and of the launches
    step       until the device has done what was launched
    kernels    how many kernels and copies one call launches (on CPU: ops that no other op is inside)
    busy       how long they run, summed; more than `step` where they run side by side
    memory     the most that is allocated at one time beside what was there before
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import side_by_side as bench
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))
from meter import Meter  # noqa: E402

Call = Callable[[], object]
OTHERS = ("torch", "plain", "by hand", "hand")
MARKS = ("nccl:", "ProfilerStep", "gloo:")  # notes on the device's time line that are no kernels


@dataclass(frozen=True)
class Rank:
    """One rank of a run: where it computes, and how much it measures."""

    device: torch.device
    rank: int
    world: int
    tiny: bool
    """Sizes and counts for a trial of the benchmark itself."""

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """What large tensors are made of: bfloat16 on a GPU."""
        return torch.bfloat16 if self.cuda else torch.float32

    def settle(self) -> None:
        """Wait until the device has done all that was launched."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Found:
    """What a call takes: seconds, kernels, bytes. `busy` is NaN where the device keeps no record."""

    host: bench.Spread
    step: bench.Spread
    kernels: int
    busy: float
    memory: int

    @property
    def works(self) -> bool:
        """False where the call raised an error."""
        return math.isfinite(self.step.median)


FAILED = Found(bench.FAILED, bench.FAILED, 0, math.nan, 0)


def measure(calls: Mapping[str, Call], at: Rank, rounds: int = 12, loops: int = 4, warmup: int = 4) -> dict[str, Found]:
    """What each call takes: `rounds` turns of `loops` calls, the order reversed every turn; few of them if tiny.

    A call that raises an error, which it then must do on all ranks, is FAILED; the error is told on rank 0. Our kernels
    for products are out in turns of others, who would lose time there.
    """
    from dtensor.dispatch.products import see_whole

    rounds, loops, warmup = (2, 1, 1) if at.tiny else (rounds, loops, warmup)
    working = {}
    for name, call in calls.items():
        try:
            for _ in range(warmup):
                call()
            at.settle()
            working[name] = call
        except Exception as error:  # noqa: BLE001 - a benchmark shows what fails and goes on
            if at.rank == 0:
                print(f"{name} fails: {type(error).__name__}: {str(error).splitlines()[0][:300]}", file=sys.stderr)
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in working}
    order = list(working.items())
    for _ in range(rounds):
        for name, call in order:
            see_whole(name not in OTHERS)
            call()
            at.settle()
            dist.barrier()
            at.settle()
            began = time.perf_counter()
            for _ in range(loops):
                call()
            issued = time.perf_counter()
            at.settle()
            taken[name][0].append((issued - began) / loops)
            taken[name][1].append((time.perf_counter() - began) / loops)
        order.reverse()
    see_whole(True)
    found = dict.fromkeys(calls, FAILED)
    for name, (host, step) in taken.items():
        memory, (count, busy) = peak(working[name], at), kernels(working[name], at)
        found[name] = Found(slowest(host, at), slowest(step, at), count, busy, memory)
    return found


def slowest(times: list[float], at: Rank) -> bench.Spread:
    """The spread of times, each taken from the rank on which it was longest."""
    most = torch.tensor(times, dtype=torch.float64, device=at.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return bench.Spread.of(most.tolist())


def peak(call: Call, at: Rank) -> int:
    """The most bytes that `call` has allocated at one time, beside what was there before; the largest of all ranks."""
    call()
    if at.cuda:
        at.settle()
        before = torch.cuda.memory_allocated(at.device)
        torch.cuda.reset_peak_memory_stats(at.device)
        call()
        at.settle()
        most = torch.cuda.max_memory_allocated(at.device) - before
    else:
        with Meter() as meter:
            call()
        most = meter.peak
    seen = torch.tensor([most], dtype=torch.int64, device=at.device)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return int(seen)


def kernels(call: Call, at: Rank) -> tuple[int, float]:
    """How many kernels `call` launches on this rank, and the seconds they run, NaN where that is not known."""
    wanted = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if at.cuda else [])]
    with profile(activities=wanted) as seen:
        call()
        at.settle()
    events = list(seen.events() or ())
    if at.cuda:
        ran = [e for e in events if e.device_type.name == "CUDA" and not e.name.startswith(MARKS)]
        return len(ran), sum(e.time_range.elapsed_us() for e in ran) / 1e6 if ran else math.nan
    inner = [
        e
        for e in events
        if e.name.startswith("aten::") and not any(c.name.startswith("aten::") for c in e.cpu_children)
    ]
    return len(inner), math.nan


def milliseconds(spread: bench.Spread) -> bench.Spread:
    """The same spread in milliseconds."""
    return bench.scaled(spread, 1e3)


def number(value: float, form: str = ".2f") -> str:
    """A number for a table, or nothing where it is unknown."""
    return format(value, form) if math.isfinite(value) else "-"


def ratio(a: float, b: float) -> str:
    """a / b for a table; nothing where one is unknown."""
    return number(a / b) if b and math.isfinite(a) and math.isfinite(b) else "-"
