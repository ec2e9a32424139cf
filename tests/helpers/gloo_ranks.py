"""Run functions on real gloo processes, many of them on one set of processes.

    from helpers.gloo_ranks import run_ranks

    def case_sum(rank, world):                     # at module level: the processes import it by name
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == world

    @pytest.mark.processes
    def test_on_gloo():
        run_ranks(4, [case_sum, case_other]).check()

`run_ranks(world, functions)` starts `world` processes with an initialised gloo default group, runs each function on
all of them in turn, as `function(rank, world)`, with one thread and the same seed, and gives an `Outcome`:

    outcome.failures         {function name: ["rank 2: <traceback>", ...]} of those that failed
    outcome.results          {function name: [what each rank returned]}; it must be picklable
    outcome.check()          AssertionError with all tracebacks where there is a failure
    outcome.check(case_sum)  the same for one function only

A function passes when it returns on every rank. Where one fails or hangs on some rank, the processes are ended and a
fresh set runs the functions that are left, so that one failure does not spoil the others. `timeout` is in seconds for
one function; a hang is reported with the stack of the rank that hangs.

The processes are forked from one server that has imported torch and the engine and has done nothing else: they start in
some ten milliseconds, and none inherits a group, a cache or a thread of the test's own process.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing as mp
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, Any

import torch
import torch.distributed as dist

from dtensor.placement import Placement

Case = Callable[[int, int], Any]
GRACE = 3.0  # seconds that the other ranks get to report after one has failed


@dataclass
class Outcome:
    """What became of the functions of one `run_ranks`."""

    failures: dict[str, list[str]] = field(default_factory=dict)
    results: dict[str, list[Any]] = field(default_factory=dict)

    def check(self, case: Case | None = None) -> None:
        """Raise AssertionError with the tracebacks of `case`, or of all functions, where there are any."""
        failed = self.failures if case is None else {n: f for n, f in self.failures.items() if n == case.__name__}
        if failed:
            raise AssertionError("\n".join(f"{name} failed on {text}" for name, fs in failed.items() for text in fs))


def run_ranks(world: int, functions: Sequence[Case], timeout: float = 60.0) -> Outcome:
    """Run each of `functions` on `world` gloo processes; see the module's description."""
    names = [f.__name__ for f in functions]
    if len(set(names)) != len(names):
        raise ValueError(f"functions need different names, got {names}")
    outcome = Outcome()
    left = list(functions)
    while left:
        with _Processes(world) as processes:
            while left:
                case = left.pop(0)
                failures, results = processes.run(case, timeout)
                if failures:
                    outcome.failures[case.__name__] = failures
                    break
                outcome.results[case.__name__] = results
    return outcome


class _Processes:
    """One set of gloo processes, each at the other end of a pipe."""

    def __init__(self, world: int) -> None:
        context = _server()
        port = _free_port()
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.stacks: list[IO[str]] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            self.stacks.append(tempfile.NamedTemporaryFile("r", suffix=f".rank{rank}"))
            process = context.Process(
                target=_serve, args=(theirs, rank, world, port, self.stacks[-1].name), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        deadline = time.monotonic() + 1.0
        for process, stack in zip(self.processes, self.stacks):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            stack.close()

    def run(self, case: Case, timeout: float) -> tuple[list[str], list[Any]]:
        """(failures, results) of one function. After a failure the processes are of no more use."""
        failures: list[str] = []
        results: list[Any] = [None] * len(self.pipes)
        waiting = dict(enumerate(self.pipes))
        for pipe in self.pipes:
            pipe.send((case, timeout))
        deadline = time.monotonic() + timeout + GRACE
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                try:
                    error, results[rank] = waiting.pop(rank).recv()
                except EOFError:
                    error = f"the process ended with exit code {self.processes[rank].exitcode}"
                if error is not None:
                    failures.append(f"rank {rank}: {error}")
                    deadline = min(deadline, time.monotonic() + GRACE)
        if not failures:
            failures = [f"rank {rank}: no answer in {timeout} s\n{self.stacks[rank].read()}" for rank in waiting]
        return failures, results


@functools.cache
def _server() -> mp.context.ForkServerContext:
    """Where processes are forked from; what it imports is found by its PYTHONPATH, not by what pytest puts first."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["helpers.imported_once"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _case_of(error: BaseException) -> str:
    """Which case of its loops a test's function was at: the layouts, sizes and names that it holds, frame by frame."""
    lines = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = os.path.basename(frame.f_code.co_filename)
        if file.startswith("test_"):
            held = ", ".join(f"{name}={value!r}" for name, value in frame.f_locals.items() if _is_plain(value))
            lines.append(f"at {file}:{line} with {held}"[:1000])
    return "\n".join(lines)


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) < 9 and all(map(_is_plain, value))
    return isinstance(value, (str, int, float, torch.dtype, Placement))


def _serve(pipe: Connection, rank: int, world: int, port: int, stack: str) -> None:
    """One rank: run what comes through the pipe until None comes."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    with open(stack, "w") as file:
        while (work := pipe.recv()) is not None:
            case, timeout = work
            torch.manual_seed(0)
            faulthandler.dump_traceback_later(timeout, file=file)
            error, result = None, None
            try:
                result = case(rank, world)
            except BaseException as raised:
                error = traceback.format_exc() + _case_of(raised)
            faulthandler.cancel_dump_traceback_later()
            try:
                pipe.send((error, result))
            except Exception as unpicklable:
                pipe.send((f"the result cannot be sent back: {unpicklable}", None))
    dist.destroy_process_group()
    sys.stdout.flush()
