"""Random programs on DTensors give what they give on plain tensors: a sample of `make fuzz`; and it can fail."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dtensor.dispatch import views
from fuzz.draw import Program, Step, draw, families
from fuzz.judge import judge
from fuzz.processes import Tally, on_gloo, simulated_apart
from fuzz.shrink import shrink

MESHES = ((2,), (4,), (2, 2), (2, 3), (2, 2, 2))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_programs(mesh: tuple[int, ...]) -> None:
    tally, first = Tally(), 100 * len(mesh) + 10 * mesh[-1]
    for judged, small in simulated_apart(mesh, range(first, first + 4), seconds=30.0):
        tally.add(judged)
        assert judged.found.kind == "right", f"seed {judged.program.seed}: {judged.found.text}\n{small}"
    assert tally.steps > 30 and tally.refused.total() <= 0.02 * tally.steps, tally


@pytest.mark.processes
def test_programs_on_processes() -> None:
    for judged, lines in on_gloo((2,), range(4)):
        assert judged.found.kind == "right", f"{judged.found.text}\n{lines}"


# ------------------------------------------------------------ programs
def test_a_seed_is_a_program() -> None:
    """The same one each time, of lines from everywhere in the table."""
    assert draw(5, (2, 2)) == draw(5, (2, 2)) != draw(6, (2, 2))
    drawn = [s for seed in range(20) for s in draw(seed, (2, 3)).steps]
    assert {s.family for s in drawn} == {"leaf", *(f.name for f in families())}
    words = {w for s in drawn for w in s.layout}
    assert {"R", "S0", "S1", "P(sum)", "P(max)", "P(min)", "P(avg)", "P(product)", "P(norm2)", "S0/3"} <= words


# ------------------------------------------------------------ it can fail
def _leaf(name: str, *layout: str) -> Step:
    return Step(f"{name} = leaf('normal', (5, 4), 'f64', 3, LAYOUT, False)", "leaf", layout)


def _program(mesh: tuple[int, ...], *steps: Step | str) -> Program:
    return Program(0, mesh, tuple(s if isinstance(s, Step) else Step(s, "call") for s in steps), each=False)


WRITE = _program(
    (2, 2), _leaf("t0", "S0/2", "R"), _leaf("t1", "P(sum)", "S1"), "t2 = t1.sin()", "t3 = t0[1:4]",
    "t4 = t3 * 2 + t2[:3]", "t5 = t0.flatten()", "t3.mul_(2)", "v6 = t2.mean().item()", "t7 = t4 + t5[:4]",
    "t8 = t7 @ t2.mT",
)  # fmt: skip


def _lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes through views that moved do not reach what they are views of."""
    monkeypatch.setattr(views, "carried_back", lambda spec, new: spec.base)


def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views that moved keep what they had when they were taken."""
    monkeypatch.setattr("dtensor.dispatch.late.retake", lambda spec: spec.local)


@pytest.mark.parametrize("breaks", [_lost, _stale])
def test_an_engine_that_loses_writes_is_found_and_shrunk(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judge(WRITE).found.kind == "right"
    breaks(monkeypatch)
    judged = judge(WRITE)
    assert judged.found.kind == "wrong"
    small, found = shrink(judged.program, judged.found)
    assert found.kind == "wrong" and found.key == judged.found.key
    assert len(small.steps) <= 4 and len(small.mesh) == 1 and any("mul_" in line for line in small.lines)
    assert sum(w != "R" for s in small.steps for w in s.layout) <= 1
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(small.script(), "<printed>", "exec"), {"__name__": "printed"})
    assert "rank 0:" in printed.getvalue()


@pytest.mark.parametrize(
    "breaks, says",
    [
        (lambda x: -x, "elements"),
        (lambda x: x.clone().clamp_(min=0).float(), "float32"),
        (lambda x: x.clone().clamp_(min=0)[:4], "(4, 4)"),
        (lambda x: x.clone().clamp_(min=0).requires_grad_(), "requires_grad"),
        (lambda x: 1 / 0, "ZeroDivisionError"),
        (lambda x: x.clone().clamp_(min=0) if x.device_mesh.get_rank() else 1 / 0, "has returned"),
        (lambda x: x.clamp_(min=0), "t0"),
    ],
)
def test_whatever_is_other_than_plain_is_wrong(breaks: Callable[[Any], Any], says: str, monkeypatch: Any) -> None:
    program, real = _program((2,), _leaf("t0", "S0"), "t1 = t0.relu()"), torch.Tensor.relu
    assert judge(program).found.kind == "right"
    monkeypatch.setattr(torch.Tensor, "relu", lambda x: breaks(x) if hasattr(x, "_spec") else real(x))
    found = judge(program).found
    assert found.kind == "wrong" and says in found.text


def test_refusals_are_counted_and_the_program_goes_on() -> None:
    judged = judge(_program((2,), _leaf("t0", "S0"), "t1 = t0[torch.tensor([0, 1])]", "t2 = t1 + 1", "t3 = t0 + 1"))
    assert judged.found.kind == "right" and [line for line, _ in judged.refused] == ["t1 = t0[torch.tensor([0, 1])]"]
    assert [s.text for s in judged.program.steps[1:]] == ["t3 = t0 + 1"]
    tally = Tally()
    tally.add(judged)
    assert (tally.steps, tally.refused.total(), tally.wrong) == (2, 1, 0) and "MixedTensorError" in str(tally)


def test_a_refusal_that_has_changed_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(x: Any) -> Any:
        if hasattr(x, "_spec"):
            x.neg_()
            raise ValueError("too late\n  fix: none")
        return x.clone().clamp_(min=0)

    monkeypatch.setattr(torch.Tensor, "relu", late)
    found = judge(_program((2,), _leaf("t0", "S0"), "t1 = t0.relu()")).found
    assert found.kind == "wrong" and "has changed" in found.text


def test_what_ends_the_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.processes.judge", lambda program: os._exit(1) if program.seed == 1 else judge(program))
    kinds = [judged.found.text for judged, _ in simulated_apart((2,), range(3), 1.0)]
    assert kinds == ["", "it ends the process", ""]


def test_a_printed_program_runs_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(_program((2,), _leaf("t0", "S0"), "t1 = t0.flatten()", "t1.mul_(2)").script())
    root = str(Path(__file__).resolve().parents[2])
    env = {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "t1: torch.float64" in done.stdout and "rank" not in done.stdout, done.stderr
