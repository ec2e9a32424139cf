"""What the benchmarks share: two engines in one process, timed in turns, and the tables that come of it.

Both engines run as rank 0 of torch's fake process group, in which collectives return at once, with one
thread and tiny tensors: what is left is the work of the host.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace

import torch
import torch.distributed as dist

ENGINES = {"torch": "torch.distributed.tensor", "ours": "dtensor"}


def start_fake_world(size: int) -> None:
    """Be rank 0 of `size` ranks that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore")
    os.environ.update(RANK="0", WORLD_SIZE=str(size))
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    torch.set_num_threads(1)


def engine(name: str) -> SimpleNamespace:
    """The public names of one engine that the benchmarks use."""
    module = import_module(ENGINES[name])
    names = ("DTensor", "Shard", "Replicate", "Partial", "init_device_mesh")
    return SimpleNamespace(**{n: getattr(module, n) for n in names})


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some times; infinite when the op failed."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """The spread of `times`."""
        if len(times) < 2:
            return cls(*(list(times) * 3)[:3]) if times else FAILED
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        if math.isinf(self.median):
            return "fails"
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


FAILED = Spread(math.inf, math.inf, math.inf)


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int, loops: int, warmup: int = 20) -> dict[str, Spread]:
    """Seconds a call takes, by name: `rounds` turns of `loops` calls each, the order reversed every turn.

    Our kernels for products are out while it is torch's turn: tensors of any class go by them, and lose time there.
    """
    from dtensor.dispatch.products import see_whole

    times: dict[str, list[float]] = {name: [] for name in calls}
    working = {}
    for name, call in calls.items():
        try:
            for _ in range(warmup):
                call()
            working[name] = call
        except Exception:  # noqa: BLE001 - a benchmark shows what fails and goes on
            pass
    order = list(working.items())
    for _ in range(rounds):
        for name, call in order:
            see_whole(name != "torch")
            call()
            began = time.perf_counter()
            for _ in range(loops):
                call()
            times[name].append((time.perf_counter() - began) / loops)
        order.reverse()
    see_whole(True)
    return {name: Spread.of(found) for name, found in times.items()}


def scaled(spread: Spread, factor: float) -> Spread:
    """The same spread in another unit."""
    return Spread(spread.median * factor, spread.low * factor, spread.high * factor)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Geometric mean of the finite ones."""
    finite = [r for r in ratios if math.isfinite(r) and r > 0]
    return math.exp(sum(map(math.log, finite)) / len(finite)) if finite else math.nan


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def compare(title: str, tables: Mapping[str, Mapping[str, Callable[[], object]]]) -> None:
    """Time every call of `tables[engine][op]`, the engines in turns, and print a table of microseconds."""
    rows, ratios = [], []
    for op in tables["ours"]:
        found = in_turns({name: table[op] for name, table in tables.items()}, rounds=15, loops=100)
        both = all(math.isfinite(spread.median) for spread in found.values())
        ratios.append(found["ours"].median / found["torch"].median if both else math.nan)
        rows.append([op, *(scaled(s, 1e6) for s in found.values()), f"{ratios[-1]:.2f}" if both else ""])
    print(f"{title}, us a call, median (quartiles)\n")
    print(markdown(["op", *tables, "ours / torch"], rows))
    print(f"\nGeometric mean of ours / torch, where both work: {geometric_mean(ratios):.2f}\n")
