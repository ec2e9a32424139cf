"""Run every benchmark and write benchmarks/RESULTS.md: machine, versions, date, and a section a question."""

from __future__ import annotations

import ast
import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = ("dispatch_cached", "dispatch_miss", "redistribute", "loss_parallel", "import_time")


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    """Run them all, or the ones named on the command line (which leaves RESULTS.md alone)."""
    chosen = sys.argv[1:] or SCRIPTS
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    sections = [
        "# Benchmarks\n\nWritten by `make bench`. Lower is better; above a ratio of 1 torch's engine is faster.\n",
        f"- date: {datetime.date.today()}\n- machine: {processor()}, {os.cpu_count()} cores{load}\n"
        f"- Python {platform.python_version()}, torch {version('torch')}, numpy {version('numpy')}, "
        f"shardwright {version('shardwright')}\n",
    ]
    for name in chosen:
        script = HERE / f"{name}.py"
        question = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()[0]
        print(f"{name}: {question}", flush=True)
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        print(done.stdout, flush=True)
        sections.append(f"## {name}\n\n{question}\n\n{done.stdout}")
    if not sys.argv[1:]:
        (HERE / "RESULTS.md").write_text("\n".join(sections))


if __name__ == "__main__":
    main()
