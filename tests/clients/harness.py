"""Programs of other people, unmodified, on torch's engine, on this one and on one process: started, compared, kept.

A file `programs/NAME.py` is such a program (see `programs/record.py`). A test file names it, what it needs, its cases:

    client = Client("transformers_tp", needs=("transformers",), ranks=(2, 4), cases=("llama", "qwen3"))
    pytestmark = client.mark()

    @pytest.mark.parametrize("ranks, case", client.pairs())
    def test_case(ranks, case):
        client.check(ranks, case)

What is compared: every value that a case gives back, element by element, in the program's own dtype. The difference of
two values is the largest difference of two elements over the largest magnitude of the second (at least 1e-3), and may
be `client.tolerance`. This engine must agree with one process. Where torch's engine does not agree with one process
either, though it runs, the case must be listed in `deviates` with the reason, and this engine must agree with torch's.
A case that torch's engine cannot run is held to one process alone, and must be listed in `torch_fails` with a part of
the error.

One start of processes serves all cases of a program: one process, then each number of ranks on both engines. The one
process's values are also held to those in `recorded/NAME.json` (scalars, and norms of tensors), which
`make clients RECORD=1` writes, with the differences that were found. Nothing is started while tests are collected, or
where the program is not installed: its tests are skipped with the reason.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
APART = Path(sys.prefix) / "apart"
ENGINES = {"torch": "torch.distributed.tensor", "ours": "dtensor"}

rows: list[tuple[str, ...]] = []
"""The table that `make clients` prints: program, case, ranks, torch's engine, this one."""


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two elements over the largest magnitude in `b`, at least 1e-3; inf for other shapes,
    dtypes, or places of infinite and not-a-number elements."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    a, b = a[finite], b[finite]
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item()


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of two results, and the name of the value that has it."""
    if a.keys() != b.keys():
        return float("inf"), f"names {sorted(a.keys() ^ b.keys())} in one of them only"
    return max(((difference(a[name], b[name]), name) for name in a), default=(0.0, ""))


def summary(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """What is recorded of a result: scalars, and one norm of all tensors whose names have a first word in common."""
    kept: dict[str, float] = {name: x.item() for name, x in values.items() if x.dim() == 0}
    squares: dict[str, float] = {}
    for name, x in values.items():
        if x.dim() > 0:
            word = name.partition(" ")[0]
            squares[word] = squares.get(word, 0.0) + x.double().square().sum().item()
    return kept | {f"norm of {word}": square**0.5 for word, square in squares.items()}


@dataclass(frozen=True)
class Client:
    """A program, and how it is held to account.

    Attributes:
        name: its file in `programs/`, without `.py`.
        needs: distributions that must be installed.
        apart: the name of a folder of packages that only this program sees (`apart/NAME.txt` lists them), if any.
        cases: the cases to run.
        ranks: the numbers of ranks to start it on.
        tolerance: the difference that is allowed, see this module's text.
        deviates: case, or `case@ranks`: why torch's engine and this one, alike, give other values than one process.
        torch_fails: case, or `case@ranks`: a part of the error that torch's engine ends with.
        timeout: seconds that one start may take.
    """

    name: str
    needs: tuple[str, ...]
    cases: tuple[str, ...]
    ranks: tuple[int, ...] = (2,)
    tolerance: float = 1e-5
    deviates: dict[str, str] = field(default_factory=dict)
    torch_fails: dict[str, str] = field(default_factory=dict)
    timeout: float = 600
    apart: str = ""

    def mark(self) -> list[pytest.MarkDecorator]:
        """For `pytestmark`: processes are started; skipped, with the reason, where something is not installed."""
        missing = [name for name in self.needs if not version(name, self.apart)]
        return [
            pytest.mark.processes,
            pytest.mark.slow,
            pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (make clients installs it)"),
        ]

    def pairs(self) -> list[tuple[int, str]]:
        """Every number of ranks with every case."""
        return [(ranks, case) for ranks in self.ranks for case in self.cases]

    def check(self, ranks: int, case: str) -> None:
        """Fail unless this engine gives what the module's text asks for on `ranks` ranks."""
        one = self._result("one", 1, case)
        assert isinstance(one, dict), f"on one process:\n{one}"
        self._held_to_recorded(case, one)
        torchs, ours = self._result("torch", ranks, case), self._result("ours", ranks, case)
        said, problem = self._judged(ranks, case, one, torchs, ours)
        rows.append((self.name, case, str(ranks), *said))
        if os.environ.get("RECORD"):
            self._record("measured", f"{case}@{ranks}", dict(zip(ENGINES, said)))
        assert not problem, problem

    def _judged(self, ranks: int, case: str, one: Any, torchs: Any, ours: Any) -> tuple[tuple[str, str], str]:
        """The two cells of the table, and what is wrong, if anything."""
        keys = (case, f"{case}@{ranks}")
        fails = next((self.torch_fails[key] for key in keys if key in self.torch_fails), None)
        deviates = next((self.deviates[key] for key in keys if key in self.deviates), None)
        if isinstance(torchs, str):
            cell = "fails: " + _last_line(torchs)
            problem = "" if fails is not None and fails in torchs else f"torch's engine, not expected:\n{torchs}"
        else:
            far, where = differences(torchs, one)
            cell = f"{far:.0e}"
            problem = "" if fails is None else "torch's engine runs this case now: take it out of torch_fails"
        if isinstance(ours, str):
            return (cell, "FAILS: " + _last_line(ours)), f"this engine:\n{ours}"
        off, name = differences(ours, one)
        if off <= self.tolerance:
            return (cell, f"{off:.0e}"), problem
        if isinstance(torchs, str):
            return (cell, f"WRONG {off:.0e}"), f"{name} differs by {off} from one process"
        apart, at = differences(ours, torchs)
        if far > self.tolerance and apart <= self.tolerance:
            said = (f"{far:.0e} ({where})", f"as torch's, {apart:.0e}")
            unlisted = f"both engines differ from one process at {name}, by {off}: no reason listed"
            return said, problem if deviates else unlisted
        return (cell, f"WRONG {off:.0e}"), f"{name} differs by {off} from one process; by {apart} from torch's at {at}"

    def _result(self, engine: str, ranks: int, case: str) -> Any:
        results = run(self, engine, ranks)
        return results["cases"].get(case, results["output"])

    def _held_to_recorded(self, case: str, one: dict[str, torch.Tensor]) -> None:
        """Fail where the one process's numbers are not those recorded; record them when RECORD is set."""
        file = HERE / "recorded" / f"{self.name}.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        now = summary(one)
        if os.environ.get("RECORD"):
            self._record("cases", case, now)
            return
        assert case in kept.get("cases", {}), f"no numbers recorded for {case}: make clients RECORD=1"
        expected = kept["cases"][case]
        assert now.keys() == expected.keys()
        for key, value in expected.items():
            assert now[key] == pytest.approx(value, rel=1e-4, abs=1e-6), f"{key} on one process is not as recorded"

    def _record(self, part: str, key: str, value: dict[str, Any]) -> None:
        """Put one entry into the file of this client, with the versions that gave it."""
        file = HERE / "recorded" / f"{self.name}.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        kept["versions"] = {name: version(name, self.apart) for name in ("torch", *self.needs)}
        kept[part] = dict(sorted({**kept.get(part, {}), key: value}.items()))
        file.write_text(json.dumps(kept, indent=1) + "\n")


def version(name: str, apart: str = "") -> str:
    """The version of a distribution, "" where it is not installed; imports nothing. `apart`: see `Client`."""
    if apart:
        for found in importlib.metadata.distributions(name=name, path=[str(APART / apart)]):
            return found.version
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _run(name: str, cases: tuple[str, ...], engine: str, ranks: int, timeout: float, apart: str) -> dict[str, Any]:
    script = str(HERE / "programs" / f"{name}.py")
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "results.pt")
        command = [sys.executable]
        if engine != "one":
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if engine == "ours":
            command += ["-m", "dtensor.swap"]
        seen = f"{ROOT}{os.pathsep}{APART / apart}" if apart else str(ROOT)
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": seen, "HF_HUB_OFFLINE": "1", "CLIENT_SCRATCH": folder}
        started = subprocess.Popen(
            [*command, script, file, *cases], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
            cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = started.communicate(timeout=timeout)
            output = f"exit {started.returncode}, no result for this case\n{said[-6000:]}"
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            said, _ = started.communicate()
            output = f"not done after {timeout} s\n{said[-6000:]}"
        except BaseException:
            os.killpg(started.pid, signal.SIGKILL)
            raise
        found = torch.load(file, weights_only=True) if Path(file).exists() else {"engine": None, "cases": {}}
    if found["engine"] is not None and engine != "one":
        of_ours = not found["engine"].startswith("torch.")
        assert of_ours == (engine == "ours"), f"asked for {engine}, ran on {found['engine']}"
    return {**found, "output": output}


def run(client: Client, engine: str, ranks: int) -> dict[str, Any]:
    """What a program's cases gave on "one" process, or on `ranks` ranks of "torch" or "ours"; started once for all.

    Returns `{"engine": module of the DTensor class, "cases": {case: values or error}, "output": for a case without}`.
    """
    return _run(client.name, client.cases, engine, ranks, client.timeout, client.apart)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "no output")[:100]
