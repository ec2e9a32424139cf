"""Programs in processes of their own: one that may hang or die, and gloo processes, a rank each."""

from __future__ import annotations

import math
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from helpers.gloo_ranks import run_ranks

from fuzz.draw import Program, draw
from fuzz.judge import History, Judged, Verdict, form, judge, on_rank
from fuzz.shrink import shrink

HANG = 120.0  # seconds for one program


@dataclass
class Tally:
    """Figures of a run."""

    programs: int = 0
    steps: int = 0
    wrong: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, judged: Judged) -> None:
        self.programs += 1
        self.wrong += judged.found.kind == "wrong"
        self.steps += sum(s.family != "leaf" for s in judged.program.steps) + len(judged.refused)
        for line, text in judged.refused:
            self.refused[form(text)] += 1
            self.examples.setdefault(form(text), f"seed {judged.program.seed}: {line}\n        {text}")

    def __str__(self) -> str:
        lines = [f"{n:5d}  {k}\n       {self.examples[k][:600]}" for k, n in self.refused.most_common()]
        refused = self.refused.total()
        end = f"{self.programs} programs, {self.steps} steps, {self.wrong} wrong, {refused} steps refused"
        return "\n".join([*lines, f"{end} ({refused / max(self.steps, 1):.2%})"])


def _lost(seed: int, mesh: tuple[int, ...], what: str) -> Judged:
    return Judged(Program(seed, mesh, (), True), Verdict("wrong", -1, what, what))


# ------------------------------------------------------------ one process
def _work(mesh: tuple[int, ...], seeds: range, seconds: float, to: Connection) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        try:
            judged = judge(draw(seed, mesh))
            small = ""
            if judged.found.kind == "wrong":
                program, found = shrink(judged.program, judged.found, seconds=seconds)
                small = "    " + "\n    ".join([*program.lines, f"on {program.mesh}: {found.text[:700]}"])
            to.send((judged, small))
        except BaseException:
            to.send((_lost(seed, mesh, f"the fuzzer itself failed: {traceback.format_exc()}"), ""))


def simulated_apart(mesh: tuple[int, ...], seeds: range, seconds: float) -> Iterator[tuple[Judged, str]]:
    """Programs on simulated ranks in a process, made anew where one hangs or ends it, and what shrinking leaves."""
    context = multiprocessing.get_context("fork")
    while seeds:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(mesh, seeds, seconds, theirs), daemon=True)
        worker.start()
        theirs.close()
        try:
            while seeds and ours.poll(HANG + seconds):
                found = ours.recv()
                seeds = seeds[1:]
                yield found
            if seeds:
                yield _lost(seeds[0], mesh, "it hangs"), ""
        except EOFError:
            yield _lost(seeds[0], mesh, "it ends the process"), ""
        worker.kill()
        worker.join()
        seeds = seeds[1:]


# ------------------------------------------------------------ gloo
@dataclass
class _OnRanks:
    """A program on each rank of gloo processes."""

    seed: int
    mesh: tuple[int, ...]

    @property
    def __name__(self) -> str:
        return str(self.seed)

    def __call__(self, rank: int, world: int) -> Judged | None:
        def every(program: Program, history: History) -> list[Verdict]:
            found: list[Any] = [None] * world
            dist.all_gather_object(found, on_rank(program, history))
            return found

        judged = judge(draw(self.seed, self.mesh), every)
        return judged if rank == 0 else None


def on_gloo(mesh: tuple[int, ...], seeds: range) -> Iterator[tuple[Judged, str]]:
    """Programs on real processes, fifty on one set of them."""
    for start in range(0, len(seeds), 50):
        some = seeds[start : start + 50]
        outcome = run_ranks(math.prod(mesh), [_OnRanks(seed, mesh) for seed in some], timeout=HANG)
        for seed in some:
            if str(seed) in outcome.failures:
                yield _lost(seed, mesh, "\n".join(outcome.failures[str(seed)])), ""
            else:
                judged = outcome.results[str(seed)][0]
                yield judged, "    " + "\n    ".join(judged.program.lines)
