"""What does a sequence length never seen before cost? Milliseconds a step of a transformer block, and an op."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import block_steps as block
import side_by_side as bench
import torch


def lengths(name: str, ranks: int) -> tuple[Callable[[int], float], int]:
    """A function that times one step at a given length, and how many ops on DTensors a step has."""
    step, args = block.dtensor_parts(name, block.Sizes(ranks=ranks))
    cls = type(args[0])
    mesh, whole = args[0].device_mesh, list(args[0].placements)

    def batch(length: int) -> list[Any]:
        return [cls.from_local(t, mesh, whole) for t in block.inputs(block.Sizes(ranks=ranks, length=length))]

    def run(length: int) -> float:
        given = batch(length)
        began = time.perf_counter()
        step(*given)
        return time.perf_counter() - began

    run(8)
    run(8)
    return run, count_ops(lambda: step(*batch(8)))


def count_ops(step: Callable[[], object]) -> int:
    """Ops that reach the engine in one step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(t.__name__ == "DTensor" for t in types):
                Count.seen += 1
                return NotImplemented
            return func(*args, **(kwargs or {}))

    with Count():
        step()
    return Count.seen


def main() -> None:
    """Steps at new lengths, the engines in turns, and the same lengths again."""
    ranks = 8
    bench.start_fake_world(ranks)
    runs = {name: lengths(name, ranks) for name in bench.ENGINES}
    rows = []
    new: dict[str, list[float]] = {name: [] for name in runs}
    again: dict[str, list[float]] = {name: [] for name in runs}
    for found, repeat in ((new, False), (again, True)):
        for i in range(12):
            for name, (run, _) in runs.items():
                found[name].append(run(20 + 3 * i))
        del repeat
    for title, found in (("a new length every step", new), ("lengths seen before", again)):
        spreads = {n: bench.scaled(bench.Spread.of(t), 1e3) for n, t in found.items()}
        rows.append([title, *spreads.values(), f"{spreads['ours'].median / spreads['torch'].median:.2f}"])
    print("A step of a transformer block on 8 ranks (fake), ms, median (quartiles)\n")
    print(bench.markdown(["", *runs, "ours / torch"], rows))
    print("\nMore for a new length, by op on DTensors:", end=" ")
    parts = []
    for name, (_, ops) in runs.items():
        extra = bench.Spread.of(new[name]).median - bench.Spread.of(again[name]).median
        parts.append(f"{name} {extra / ops * 1e3:.3f} ms ({ops} ops)")
    print(", ".join(parts) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
