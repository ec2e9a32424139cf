"""Checking many ops: one report an overload, several processes, a progress bar, a summary.

The calls are collected once; worker processes are forked, so that they have them already. A worker that dies or
does not come back is a finding like any other: it names the overload and the sweep goes on.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

import torch

from propagation_rules.proof.missing import merged, missing_rows
from propagation_rules.proof.recorded import RecordedCall, with_nan
from propagation_rules.proof.truth import MESHES, check_call

__all__ = ["OpReport", "Settings", "check_overload", "sweep", "write_json", "written_summary"]


@dataclass(frozen=True)
class Settings:
    """What a sweep does: meshes, strategies a call and mesh, whether missing rows are looked for, seconds an op."""

    meshes: tuple[tuple[int, ...], ...] = MESHES
    limit: int = 48
    missing: bool = True
    seconds: float = 300.0


@dataclass
class OpReport:
    """What was found about one overload.

    `wrong` holds a line each; `missing` maps a row to the number of calls it would be right for and an example.
    """

    name: str
    calls: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    missing: dict[str, tuple[int, str]] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def check_overload(name: str, calls: Sequence[RecordedCall], settings: Settings = Settings()) -> OpReport:  # noqa: B008
    """Truth of all strategies for these calls of one overload, and the rows that its rule misses."""
    torch.set_num_threads(1)
    start = time.monotonic()
    report = OpReport(name, len(calls))
    skipped: Counter[str] = Counter()
    for call in calls:
        spoilt = call.with_tensors([with_nan(t) for t in call.tensors])
        trials = [(call, m, "") for m in settings.meshes] + [(spoilt, m, " with a NaN") for m in settings.meshes[:1]]
        for given, mesh, note in trials:
            outcome = check_call(given, mesh, settings.limit)
            if outcome.skipped:
                skipped[outcome.skipped] += not note
                break
            report.right += outcome.right
            report.wrong += [f"{call}{note} on {mesh}: {w}" for w in outcome.wrong]
        if settings.missing:
            for row in merged(missing_rows(call)):
                count, example = report.missing.get(row, (0, str(call)))
                report.missing[row] = count + 1, example
    report.skipped = dict(skipped)
    report.seconds = round(time.monotonic() - start, 3)
    return report


# ------------------------------------------------------------ processes
def sweep(
    calls: Mapping[str, Sequence[RecordedCall]], settings: Settings = Settings(), jobs: int = 1,  # noqa: B008
    out: TextIO | None = None,
) -> list[OpReport]:  # fmt: skip
    """A report of every overload in `calls`, by name; progress is told on `out` (default: standard error)."""
    out = sys.stderr if out is None else out
    names = sorted(calls, key=lambda n: -len(calls[n]))
    reports: list[OpReport] = []
    bar = _Progress(len(names), out)
    for report in _run(lambda n: check_overload(n, calls[n], settings), names, jobs, settings.seconds):
        reports.append(report)
        bar.show(report)
    bar.end()
    return sorted(reports, key=lambda r: r.name)


def _run(f: Callable[[str], OpReport], names: Sequence[str], jobs: int, seconds: float) -> Iterator[OpReport]:
    if jobs <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(f, names)
        return
    left = list(reversed(names))
    busy: dict[Connection, tuple[Any, str, float]] = {}
    while left or busy:
        while left and len(busy) < jobs:
            name = left.pop()
            ours, theirs = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(target=_work, args=(f, name, theirs), daemon=True)
            process.start()
            theirs.close()
            busy[ours] = process, name, time.monotonic()
        ready = wait(list(busy), timeout=1.0)
        for pipe in [c for c in busy if c in ready]:
            process, name, _ = busy.pop(pipe)
            try:
                report: OpReport = pipe.recv()
            except EOFError:
                process.join()
                report = OpReport(name, wrong=[f"{name}: the process ended with exit status {process.exitcode}"])
            pipe.close()
            process.join()
            yield report
        for pipe, (process, name, start) in list(busy.items()):
            if time.monotonic() - start > seconds:
                busy.pop(pipe)
                process.kill()
                process.join()
                pipe.close()
                yield OpReport(name, wrong=[f"{name}: no answer within {seconds:.0f} seconds"])


def _work(f: Callable[[str], OpReport], name: str, pipe: Connection) -> None:
    import warnings

    warnings.simplefilter("ignore")
    try:
        report = f(name)
    except Exception as e:
        report = OpReport(name, wrong=[f"{name}: the check itself raises {type(e).__name__}: {e}"])
    pipe.send(report)
    pipe.close()


# ------------------------------------------------------------ telling
class _Progress:
    """A bar on a terminal; elsewhere a line for every overload with a finding, and one every 50."""

    def __init__(self, total: int, out: TextIO) -> None:
        self.total, self.out, self.done, self.wrong, self.missing = total, out, 0, 0, 0
        self.start, self.live = time.monotonic(), out.isatty()

    def show(self, report: OpReport) -> None:
        self.done += 1
        self.wrong += bool(report.wrong)
        self.missing += bool(report.missing)
        state = f"{self.done}/{self.total} overloads, {self.wrong} wrong, {self.missing} with rows missing"
        if self.live:
            width = 30 * self.done // max(self.total, 1)
            left = (time.monotonic() - self.start) / self.done * (self.total - self.done)
            line = f"[{'#' * width}{'.' * (30 - width)}] {state}, {left:.0f} s left  {report.name}"
            self.out.write(f"\r\x1b[K{line[:150]}")
        elif report.wrong or self.done % 50 == 0:
            self.out.write(f"{state}; {report.name}: {len(report.wrong)} wrong\n")
        self.out.flush()

    def end(self) -> None:
        if self.live:
            self.out.write("\r\x1b[K")


def written_summary(reports: Sequence[OpReport], most: int = 8) -> str:
    """Findings overload by overload, then the totals."""
    lines: list[str] = []
    for r in reports:
        if r.wrong:
            lines.append(f"WRONG    {r.name}: {len(r.wrong)} of {r.right + len(r.wrong)}")
            lines += [f"    {w}" for w in r.wrong[:most]]
        if r.missing:
            lines.append(f"missing  {r.name}")
            lines += [f"    {row:60s} {n} of {r.calls} calls, as {example}" for row, (n, example) in r.missing.items()]
    checked = [r for r in reports if r.right or r.wrong]
    lines.append(
        f"{len(checked)} of {len(reports)} overloads checked with {sum(r.calls for r in checked)} calls: "
        f"{sum(r.right for r in reports)} strategies right, {sum(len(r.wrong) for r in reports)} wrong "
        f"in {sum(bool(r.wrong) for r in reports)} overloads, "
        f"rows missing in {sum(bool(r.missing) for r in reports)}"
    )
    why: Counter[str] = Counter()
    for r in reports:
        if r not in checked:
            why[max(r.skipped, key=r.skipped.__getitem__) if r.skipped else "no strategy but replication"] += 1
    lines += [f"    {n:4d} not checked: {reason}" for reason, n in why.most_common()]
    return "\n".join(lines)


def write_json(reports: Sequence[OpReport], path: str | Path) -> None:
    """All reports as a JSON list."""
    Path(path).write_text(json.dumps([asdict(r) for r in reports], indent=1) + "\n")
