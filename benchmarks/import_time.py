"""What does importing the engine add to `import torch`? Milliseconds, in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import side_by_side as bench

PROGRAM = """
import sys, time
import torch
before = set(sys.modules)
began = time.perf_counter()
import {module}
print(time.perf_counter() - began, len(set(sys.modules) - before))
"""


def measure(module: str) -> tuple[float, int]:
    """(seconds, modules loaded) of importing `module` after torch."""
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(module=module)]
    seconds, modules = subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), int(modules)


def main() -> None:
    """Print one table."""
    found: dict[str, list[tuple[float, int]]] = {module: [] for module in bench.ENGINES.values()}
    for _ in range(5):
        for module, runs in found.items():
            runs.append(measure(module))
    rows = []
    for module, runs in found.items():
        spread = bench.scaled(bench.Spread.of([seconds for seconds, _ in runs]), 1e3)
        rows.append([f"`import {module}`", spread, f"{min(s for s, _ in runs) * 1e3:.0f}", runs[0][1]])
    print("Import after `import torch`, ms, median (quartiles)\n")
    print(bench.markdown(["", "ms", "best", "modules loaded"], rows))


if __name__ == "__main__":
    main()
