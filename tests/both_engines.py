"""Run the cases of a program under torch's engine and under `dtensor.swap`, in the same processes, and compare.

    CASES = cases("fsdp", world=4)                  the functions `case_*` of tests/programs/fsdp.py
    outcome = run_ranks(4, CASES)

A case is a function of the number of processes that gives a list of tensors, or None to be passed by. The program is
read once under each engine, each time into a namespace of its own, as what it imports is bound when it is read.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtensor.swap

PROGRAMS = Path(__file__).resolve().parent / "programs"
_read: dict[tuple[str, bool], dict[str, Any]] = {}


class BothEngines:
    """One case. With `alone`, a reason why torch's engine cannot run it, it runs on this one only."""

    def __init__(self, program: str, name: str, alone: str = "", tolerance: float = 0.0) -> None:
        self.program, self.__name__, self.alone, self.tolerance = program, name, alone, tolerance

    def __call__(self, rank: int, world: int) -> None:
        want = None if self.alone else self.run(world, ours=False)
        got = self.run(world, ours=True)
        if not self.alone:
            torch.testing.assert_close(got, want, rtol=self.tolerance, atol=self.tolerance)

    def run(self, world: int, ours: bool) -> Any:
        """The case on one engine."""
        torch.manual_seed(0)
        if not ours:
            return namespace(self.program, ours)[self.__name__](world)
        with dtensor.swap.swapped():
            return namespace(self.program, ours)[self.__name__](world)


def namespace(program: str, ours: bool) -> dict[str, Any]:
    """The program's globals, read under the engine that is in force."""
    if (program, ours) not in _read:
        if str(PROGRAMS) not in sys.path:
            sys.path.insert(0, str(PROGRAMS))
        path = PROGRAMS / f"{program}.py"
        made: dict[str, Any] = {"__name__": f"program_{program}", "__file__": str(path)}
        exec(compile(path.read_text(), path, "exec"), made)
        assert ("dtensor" in made["DTensor"].__module__.split(".")[0]) is ours, made["DTensor"]
        _read[program, ours] = made
    return _read[program, ours]


def names(program: str) -> list[str]:
    """The cases of a program, in its order."""
    tree = ast.parse((PROGRAMS / f"{program}.py").read_text())
    return [f.name for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith("case_")]
