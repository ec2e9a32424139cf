"""Checking many ops: one report an overload, several processes, a progress bar, a summary.

The calls are collected once; a process is forked for every overload, so that it has them already. One that dies or
does not come back is a finding like any other: it names the overload and the sweep goes on. What is tried with
arguments that nobody would give (the search for missing rows and for stale plans) comes last: some of torch's ops do
not check them and write where they should not, which says nothing about a rule.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

import torch

from .keys import stale_plans
from .missing import merged, missing_rows
from .recorded import RecordedCall
from .truth import MESHES, check_call

__all__ = ["OpReport", "Settings", "check_overload", "sweep", "written_summary"]


@dataclass(frozen=True)
class Settings:
    """Meshes, strategies a call and mesh, whether missing rows and keys of plans are looked at, seconds an overload."""

    meshes: tuple[tuple[int, ...], ...] = MESHES
    limit: int = 48
    missing: bool = True
    keys: bool = False
    seconds: float = 300.0


@dataclass
class OpReport:
    """What was found about one overload.

    `wrong` holds a line each; `missing` maps a row to the number of calls it would be right for and an example;
    `unpriced` names kernels that communicate and do not say so.
    """

    name: str
    calls: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    missing: dict[str, tuple[int, str]] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    unpriced: list[str] = field(default_factory=list)
    seconds: float = 0.0


def check_overload(name: str, calls: Sequence[RecordedCall], settings: Settings = Settings()) -> OpReport:  # noqa: B008
    """Truth of all strategies for these calls of one overload, and the rows that its rule misses."""
    *_, report = _stages(name, calls, settings)
    return report


def _stages(name: str, calls: Sequence[RecordedCall], settings: Settings) -> Iterator[OpReport]:
    """The report after the law of truth, then the whole one."""
    torch.set_num_threads(1)
    start = time.monotonic()
    report = OpReport(name, len(calls))
    skipped: Counter[str] = Counter()
    for call in calls:
        for mesh in settings.meshes:
            outcome = check_call(call, mesh, settings.limit)
            if outcome.skipped:
                skipped[outcome.skipped] += 1
                break
            report.right += outcome.right
            report.unpriced = sorted({*report.unpriced, *outcome.unpriced})
            report.wrong += [f"{call} on {mesh}: {w}" for w in outcome.wrong]
    report.skipped = dict(+skipped)
    yield report
    for call in calls:
        for i, t in enumerate(call.tensors[:2]):
            if t.is_floating_point() and t.numel():
                outcome = check_call(call.with_nan_in(i), settings.meshes[0], settings.limit, extremes_only=True)
                report.right += outcome.right
                report.wrong += [f"{call} with a NaN in {i}: {w}" for w in outcome.wrong]
    for call in calls:
        if settings.missing:
            for row in merged(missing_rows(call)):
                count, example = report.missing.get(row, (0, str(call)))
                report.missing[row] = count + 1, example
    for call in calls:
        if settings.keys:
            report.wrong += [f"stale plan: {w}" for w in stale_plans(call)]
    report.seconds = round(time.monotonic() - start, 3)
    yield report


# ------------------------------------------------------------ processes
def sweep(
    calls: Mapping[str, Sequence[RecordedCall]], settings: Settings = Settings(), jobs: int = 1,  # noqa: B008
    out: TextIO | None = None, log: str | Path | None = None,
) -> list[OpReport]:  # fmt: skip
    """A report of every overload in `calls`, by name; progress is told on `out` (default: standard error).

    Every report is written to the file `log` when it is there, a JSON object a line.
    """
    out = sys.stderr if out is None else out
    if log is not None:
        Path(log).write_text("")
    reports: list[OpReport] = []
    bar = _Progress(len(calls), out)
    for report in _run(lambda n: _stages(n, calls[n], settings), sorted(calls), max(jobs, 1), settings.seconds):
        reports.append(report)
        bar.show(report)
        if log is not None:
            with Path(log).open("a") as f:
                f.write(json.dumps(asdict(report)) + "\n")
    bar.end()
    return sorted(reports, key=lambda r: r.name)


@dataclass
class _Running:
    process: Any
    name: str
    start: float
    report: OpReport | None = None


def _run(
    stages: Callable[[str], Iterator[OpReport]], names: Sequence[str], jobs: int, seconds: float
) -> Iterator[OpReport]:
    """The last report of every name, from `jobs` processes; from this one where processes cannot be forked."""
    if "fork" not in multiprocessing.get_all_start_methods():
        yield from ([*stages(n)][-1] for n in names)
        return
    fork = multiprocessing.get_context("fork")
    left = list(reversed(names))
    busy: dict[Connection, _Running] = {}
    while left or busy:
        while left and len(busy) < jobs:
            name = left.pop()
            ours, theirs = multiprocessing.Pipe(duplex=False)
            process = fork.Process(target=_work, args=(stages, name, theirs), daemon=True)
            process.start()
            theirs.close()
            busy[ours] = _Running(process, name, time.monotonic())
        for pipe in wait(list(busy), timeout=1.0):
            assert isinstance(pipe, Connection)
            try:
                busy[pipe].report = pipe.recv()
            except EOFError:
                busy[pipe].process.join()
                yield _ended(busy.pop(pipe))
                pipe.close()
        for pipe, running in list(busy.items()):
            if time.monotonic() - running.start > seconds:
                running.process.kill()
                running.process.join()
                yield _ended(busy.pop(pipe), f"no answer within {seconds:.0f} seconds")
                pipe.close()


def _ended(running: _Running, why: str = "") -> OpReport:
    status = running.process.exitcode
    why = why or (f"the process ended with exit status {status}" if status else "")
    if running.report is None:
        return OpReport(running.name, wrong=[f"{running.name}: {why or 'no report'}"])
    if why:
        running.report.skipped[f"looking for missing rows or stale plans: {why}"] = 1
    return running.report


def _work(stages: Callable[[str], Iterator[OpReport]], name: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    try:
        for report in stages(name):
            pipe.send(report)
    except Exception as e:
        pipe.send(OpReport(name, wrong=[f"{name}: the check itself raises {type(e).__name__}: {e}"]))
    pipe.close()


# ------------------------------------------------------------ telling
class _Progress:
    """A bar on a terminal; elsewhere a line for every overload with something wrong, and one every 50."""

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
    unpriced = sorted({f"{k} ({r.name})" for r in reports for k in r.unpriced})
    if unpriced:
        lines.append(f"kernels that communicate and state no price: {', '.join(unpriced)}")
    why: Counter[str] = Counter()
    for r in reports:
        if r not in checked:
            why["not checked: " + (next(iter(r.skipped)) if r.skipped else "no strategy but replication")] += 1
        why.update(reason for reason in r.skipped if reason.startswith("looking"))
    lines += [f"    {n:4d} {reason}" for reason, n in why.most_common()]
    return "\n".join(lines)
