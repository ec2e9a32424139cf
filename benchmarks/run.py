"""Run every benchmark and write benchmarks/RESULTS.md: machine, versions, date, and a section a question.

What each script prints is also kept as JSON and drawn, in benchmarks/results.
"""

from __future__ import annotations

import ast
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOUND = HERE / "results"
SCRIPTS = (
    "dispatch_cached", "profile_dispatch", "dispatch_miss", "sequences", "cache_memory", "block", "redistribute",
    "redistribute_plan", "redistribute_memory", "redistribute_gloo",
    "loss_parallel", "import_time",
)  # fmt: skip


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def surroundings() -> dict[str, str]:
    """Date, machine, load and versions."""
    try:
        own = version("shardwright")
    except PackageNotFoundError:
        own = "as it is in the checkout"
    versions = f"Python {platform.python_version()}, torch {version('torch')}, numpy {version('numpy')}, "
    return {
        "date": str(datetime.date.today()),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
        "versions": versions + f"shardwright {own}",
    }


def where_we_lose(name: str, tables: list[dict[str, Any]]) -> list[str]:
    """A line for every row in which ours takes longer than torch's."""
    lines = []
    for table in tables:
        if "ours / torch" in table["columns"]:
            at = table["columns"].index("ours / torch")
            lines += [
                f"- {name}, {table['title'].split(',')[0]}: {row[0]}, {row[at]:.2f} times torch's"
                for row in table["rows"]
                if isinstance(row[at], float) and row[at] > 1.03
            ]
    return lines


def tables_of(text: str) -> list[dict[str, Any]]:
    """The Markdown tables in a script's output: the line before each, its columns, and rows with numbers as numbers."""
    found: list[dict[str, Any]] = []
    before = ""
    lines = iter(text.splitlines())
    for line in lines:
        if not line.startswith("|"):
            before = line or before
            continue
        columns = _cells(line)
        next(lines)
        rows = []
        for row in lines:
            if not row.startswith("|"):
                break
            name, *cells = _cells(row)
            rows.append([name, *map(_value, cells)])
        found.append({"title": before, "columns": columns, "rows": rows})
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _value(cell: str) -> Any:
    """A cell as a number, as {median, low, high}, as a list of those, or as text."""
    spreads = [
        {"median": float(m), "low": float(a), "high": float(b)}
        for m, a, b in re.findall(r"([\d.]+) \(([\d.]+)-([\d.]+)\)", cell)
    ]
    if spreads:
        return spreads[0] if len(spreads) == 1 else spreads
    try:
        return float(cell)
    except ValueError:
        return cell


def plot(name: str, question: str, tables: list[dict[str, Any]], folder: Path = FOUND) -> bool:
    """Draw the spreads as bars, medians with quartiles; False without matplotlib, or where there is nothing to draw."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    from matplotlib import pyplot

    shown = []
    for table in tables:
        series: dict[str, list[tuple[str, dict[str, float]]]] = {}
        for row in table["rows"]:
            for column, value in zip(table["columns"][1:], row[1:], strict=False):
                values = value if isinstance(value, list) else [value]
                for i, v in enumerate(values):
                    if isinstance(v, dict):
                        label = column if len(values) == 1 else f"{column} {('ours', 'torch')[i] if i < 2 else i}"
                        series.setdefault(label, []).append((row[0], v))
        if series:
            shown.append((table["title"], series))
    if not shown:
        return False
    heights = [0.16 * sum(map(len, series.values())) + 1.2 for _, series in shown]
    figure, axes = pyplot.subplots(
        len(shown), figsize=(8, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for ax, (title, series) in zip(axes[:, 0], shown, strict=True):
        names = list(dict.fromkeys(n for points in series.values() for n, _ in points))
        for i, (label, points) in enumerate(series.items()):
            at = [names.index(n) + (i - len(series) / 2 + 0.5) * 0.8 / len(series) for n, _ in points]
            middle = [v["median"] for _, v in points]
            ends = [[v["median"] - v["low"] for _, v in points], [v["high"] - v["median"] for _, v in points]]
            ax.barh(at, middle, 0.75 / len(series), xerr=ends, label=label, error_kw={"linewidth": 0.8})
        ax.set_yticks(range(len(names)), names, fontsize=7)
        ax.invert_yaxis()
        ax.set_xscale("log")
        ax.set_title(title, fontsize=8)
        ax.legend(fontsize=7)
    figure.suptitle(question, fontsize=9)
    figure.tight_layout()
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    return True


def main() -> None:
    """Run them all, or the ones named on the command line (which leaves RESULTS.md alone)."""
    chosen = sys.argv[1:] or SCRIPTS
    now = surroundings()
    behind: list[str] = []
    sections = [
        "# Benchmarks\n\nWritten by `make bench`. Lower is better; above a ratio of 1 torch's engine is faster.\n",
        f"- date: {now['date']}\n- machine: {now['machine']}, load average {now['load']}\n- {now['versions']}\n"
        "- every table is also in `results/`, as JSON and as a plot\n",
    ]
    for name in chosen:
        script = HERE / f"{name}.py"
        question = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()[0]
        print(f"{name}: {question}", flush=True)
        began = time.perf_counter()
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        print(f"{done.stdout}({time.perf_counter() - began:.0f} s)\n", flush=True)
        tables = tables_of(done.stdout)
        FOUND.mkdir(exist_ok=True)
        result = {"question": question, **surroundings(), "tables": tables}
        (FOUND / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        drawn = plot(name, question, tables)
        picture = f"\n![{name}](results/{name}.svg)\n" if drawn else ""
        sections.append(f"## {name}\n\n{question}\n\n{done.stdout}{picture}")
        behind += where_we_lose(name, tables)
    lost = "\n".join(behind) or "- nowhere"
    sections.insert(2, f"## Where we lose\n\nOps that take longer than torch's, by more than 3 %:\n\n{lost}\n")
    if not sys.argv[1:]:
        (HERE / "RESULTS.md").write_text("\n".join(sections))


if __name__ == "__main__":
    main()
