"""Run the cases of a program under torch's engine and under `dtensor.swap`, in the same processes, and compare.

    run_ranks(4, [BothEngines("fsdp", "case_alone_uneven")])        that function of tests/programs/fsdp.py
    run_ranks(4, [Exchange("checkpoints", "app", (TO_OURS, TO_TORCHS))])

A case is a function of the number of processes that gives a list of tensors, or None to be passed by. The program is
read once under each engine, each time into a namespace of its own, as what it imports is bound when it is read.
"""

from __future__ import annotations

import ast
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtensor.swap

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
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
        with engine(ours):
            return namespace(self.program, ours)[self.__name__](world)


def engine(ours: bool) -> AbstractContextManager[None]:
    """In force inside: this engine or torch's."""
    return dtensor.swap.swapped() if ours else nullcontext()


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


class Exchange:
    """`write_NAME` of a program on one engine, `read_NAME` on the other, through one folder, both ways."""

    def __init__(self, program: str, name: str, ways: tuple[tuple[bool, bool], ...]) -> None:
        self.program, self.name, self.ways = program, name, ways
        self.__name__ = f"exchange_{name}"

    def __call__(self, rank: int, world: int) -> None:
        found = []
        for writer, reader in self.ways:
            with engine(writer):
                folder = namespace(self.program, writer)["folder_for_all"]()
                namespace(self.program, writer)[f"write_{self.name}"](world, folder)
            dist.barrier()
            with engine(reader):
                found.append(namespace(self.program, reader)[f"read_{self.name}"](world, folder))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
        for got in found[1:]:
            torch.testing.assert_close(got, found[0], rtol=1e-9, atol=1e-9)


TO_OURS, TO_TORCHS, OURS = (False, True), (True, False), (True, True)
