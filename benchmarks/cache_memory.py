"""What do caches hold after 10,000 shapes? MiB of the process, and seconds, for `a + b` and `mm` at ever new shapes."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import side_by_side as bench
import torch

SHAPES = {"torch": 1000, "ours": 10000}
"""Shapes tried; torch's, which take milliseconds each, are scaled up."""


def resident() -> float:
    """MiB in memory now."""
    gc.collect()
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(name: str) -> None:
    """Try shapes with one engine, alone in a process."""
    bench.start_fake_world(8)
    e = bench.engine(name)
    mesh = e.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    layout = [e.Shard(0), e.Replicate()]
    weight = e.DTensor.from_local(torch.randn(4, 2), mesh, [e.Replicate(), e.Shard(1)])

    def use(rows: int) -> None:
        a = e.DTensor.from_local(torch.empty(rows, 4), mesh, layout)
        torch.mm(a + a, weight)

    for rows in range(1, 60):
        use(rows)
    before, began = resident(), time.perf_counter()
    for rows in range(60, 60 + SHAPES[name]):
        use(rows)
    print("RESULT " + json.dumps([resident() - before, time.perf_counter() - began]))


def main() -> None:
    """Each engine in a process of its own."""
    rows = []
    for name, count in SHAPES.items():
        done = subprocess.run([sys.executable, str(Path(__file__)), name], capture_output=True, text=True, check=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        mib, seconds = json.loads(line.removeprefix("RESULT "))
        rows.append([name, count, f"{mib:.1f}", f"{mib * 10000 / count:.1f}", f"{seconds / count * 1e3:.2f}"])
    print("Two ops a shape, 2 mesh axes\n")
    print(bench.markdown(["engine", "shapes", "MiB", "MiB for 10,000", "ms a shape"], rows))
    print("\nOurs keeps at most 65,536 plans and drops them all beyond.\n")


if __name__ == "__main__":
    child(sys.argv[1]) if len(sys.argv) > 1 else main()
