"""What the demo shows: a progress line while it runs, tables when it is done."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from train_tp import Job, Record


class Progress:
    """A line on stderr: a bar on a terminal, elsewhere one line a quarter."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.began = time.perf_counter()
        self.terminal = sys.stderr.isatty()

    def show(self, step: int, loss: float) -> None:
        """Say that `step` is done."""
        done = step == self.steps
        seconds = time.perf_counter() - self.began
        text = f"step {step}/{self.steps}  loss {loss:.3f}  {seconds:.0f} s"
        if self.terminal:
            room = max(10, min(40, shutil.get_terminal_size().columns - len(text) - len(self.name) - 8))
            filled = room * step // self.steps
            bar = "█" * filled + "░" * (room - filled)
            sys.stderr.write(f"\r{self.name:22} {bar} {text}" + ("\n" if done else ""))
        elif done or step % max(1, self.steps // 4) == 0:
            sys.stderr.write(f"{self.name:22} {text}\n")
        sys.stderr.flush()


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as they need to be; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(r, widths))) for r in rows]
    title = "  ".join(f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(head, widths)))
    return "\n".join([title, "-" * len(title), *lines])


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def largest_difference(records: list[Record], single: Record) -> float:
    """Between the losses of any of `records` and `single`'s; NaN when there is one among them."""
    losses = torch.tensor([record.losses for record in records], dtype=torch.float64)
    return float((losses - torch.tensor(single.losses, dtype=torch.float64)).abs().max())


def print_report(job: Job, sharded: list[Record], single: Record, other: list[Record] | None, tolerance: float) -> bool:
    """Print everything; whether the losses of `sharded` on all ranks, and of `other`, agree with `single`'s."""
    runs = {f"{job.ranks} ranks": sharded, **({"torch's DTensor": other} if other else {}), "one process": [single]}
    differences = {name: largest_difference(records, single) for name, records in runs.items()}

    print(f"\nLoss, mesh dp={job.mesh[0]} x tp={job.mesh[1]}, {job.dtype}")
    shown = sorted({0, *range(job.steps // 10 - 1, job.steps, max(1, job.steps // 10)), job.steps - 1} - {-1})
    print(
        table(
            ["step", *runs, "difference"],
            [
                [
                    str(i + 1),
                    *(f"{records[0].losses[i]:.6f}" for records in runs.values()),
                    f"{abs(sharded[0].losses[i] - single.losses[i]):.1e}",
                ]
                for i in shown
            ],
        )
    )
    for name, largest in list(differences.items())[:-1]:
        verdict = "rounding" if largest <= tolerance else "NOT rounding"
        print(f"largest difference over all steps and ranks, {name}: {largest:.1e} ({verdict}; limit {tolerance:.0e})")

    print("\nOne training step: what a rank receives, by collective")
    kinds = sorted({kind for records in runs.values() for kind in records[0].traffic})
    rows = []
    for kind in kinds:
        cells = (records[0].traffic.get(kind, (0, 0)) for records in runs.values())
        rows.append([kind, *(f"{calls} x  {size(received)}" if calls else "-" for calls, received in cells)])
    print(table(["collective", *runs], rows))

    print("\nA rank (the fullest) beside one process")
    tokens = job.batch * job.model.positions
    print(
        table(
            ["", *runs],
            [
                ["parameters", *(size(max(r.parameter_bytes for r in records)) for records in runs.values())],
                ["peak of live tensors", *(size(max(r.peak_bytes for r in records)) for records in runs.values())],
                ["tokens per second", *(f"{records[0].tokens_per_second(tokens):,.0f}" for records in runs.values())],
            ],
        )
    )
    if job.sample:
        print(f"\nSample of the {job.ranks} ranks' model:\n{sharded[0].sample}")
    return all(largest <= tolerance for largest in differences.values())
