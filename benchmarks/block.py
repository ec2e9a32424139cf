"""What does a training step of a transformer block cost the host? By hand, lowered, ours and torch's, three worlds.

A world is some ranks of torch's fake process group, where collectives return at once (what is left is the host's work),
or gloo processes, where they do not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import block_steps as block
import side_by_side as bench
import torch
import torch.distributed as dist

WORLDS = {"1 rank, fake": ("fake", 1), "8 ranks, fake": ("fake", 8), "4 ranks, gloo": ("gloo", 4)}
ROUNDS, LOOPS = 15, 8


def first_step(name: str, sizes: block.Sizes) -> float:
    """Seconds of the first step at sizes never seen before, with the making of parameters left out."""
    if name == "lowered":
        step, args = block.dtensor_parts("ours", sizes)
        began = time.perf_counter()
        import dtensor

        dtensor.lower(step, *args)(*args)
        return time.perf_counter() - began
    step = block.VARIANTS[name](sizes)
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def measure(ranks: int) -> dict[str, Any]:
    """Every variant's steady state and first steps, as seen by this rank."""
    sizes = block.Sizes(ranks=ranks)
    steps = {name: make(sizes) for name, make in block.VARIANTS.items()}
    losses = {
        name: float(loss.to_local() if hasattr(loss := step(), "to_local") else loss) for name, step in steps.items()
    }
    steady = bench.in_turns(steps, ROUNDS, LOOPS)
    firsts: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(4):
        for name in firsts:
            firsts[name].append(first_step(name, block.Sizes(ranks=ranks, length=9 + turn)))
    return {
        "losses": losses,
        "steady": {n: (s.median, s.low, s.high) for n, s in steady.items()},
        "first": {n: sorted(t)[len(t) // 2] for n, t in firsts.items()},
    }


def child(kind: str, ranks: int, rank: int, store: str) -> None:
    """One rank: measure; rank 0 prints what it found."""
    if kind == "fake":
        bench.start_fake_world(ranks)
    else:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
        dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks))
        torch.set_num_threads(1)
    found = measure(ranks)
    if rank == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()


def run(kind: str, ranks: int) -> dict[str, Any]:
    """Start a world and get what its rank 0 found."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        count = 1 if kind == "fake" else ranks
        command = [sys.executable, "-W", "ignore", str(Path(__file__)), kind, str(ranks)]
        started = [
            subprocess.Popen([*command, str(r), f"{folder}/store"], stdout=subprocess.PIPE, text=True)
            for r in range(count)
        ]
        outs = [p.communicate(timeout=280)[0] for p in started]
    line = next(line for line in outs[0].splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def main() -> None:
    """Run all worlds; print a table of steady states and one of first steps."""
    steady, firsts, notes = [], [], []
    for title, (kind, ranks) in WORLDS.items():
        found = run(kind, ranks)
        spreads = {n: bench.scaled(bench.Spread(*s), 1e3) for n, s in found["steady"].items()}
        median = {n: s.median for n, s in spreads.items()}
        steady.append([
            title, *spreads.values(), f"{median['ours'] / median['torch']:.2f}",
            f"{median['lowered'] / median['by hand']:.2f}",
        ])  # fmt: skip
        firsts.append([title, *(f"{t * 1e3:.1f}" for t in found["first"].values())])
        values = found["losses"].values()
        if max(values) - min(values) > 1e-4:
            notes.append(f"the variants disagree in {title}: {found['losses']}")
    names = list(block.VARIANTS)
    print("A step (forward, backward, AdamW) in the steady state, ms, median (quartiles)\n")
    print(bench.markdown(["world", *names, "ours / torch", "lowered / by hand"], steady))
    print("\nThe first step at new shapes, ms (lowered: the trace and the first run)\n")
    print(bench.markdown(["world", *names], firsts))
    print("\n" + "\n".join(notes or ["All variants give the same loss."]) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
