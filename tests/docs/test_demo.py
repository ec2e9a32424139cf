"""The demo: what it computes, what it measures, what it refuses, and that it can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import report
import train_tp
from meter import Meter

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--steps", "3", "--batch", "4", "--sample", "3")


def demo(*arguments: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Run the script as people do; its output and the figures it wrote."""
    figures = folder / "figures.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_tp.py"), *QUICK, *arguments, "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())


def check(figures: dict[str, Any], ranks: int) -> None:
    """What must hold of every run, whatever the mesh."""
    (single,) = figures["single"]
    assert figures["agree"] and len(figures["sharded"]) == ranks
    assert not single["traffic"]
    for rank in figures["sharded"]:
        assert rank["losses"] == pytest.approx(single["losses"], abs=1e-5)
        assert rank["sample"] == figures["sharded"][0]["sample"]
        assert rank["peak_bytes"] < single["peak_bytes"]


@pytest.mark.processes
def test_processes(tmp_path: Path) -> None:
    output, figures = demo("--mesh", "2,2", folder=tmp_path)
    check(figures, ranks=4)
    assert "largest difference" in output and "tokens per second" in output and "all_gather" in output
    tp = 2
    for rank in figures["sharded"]:  # the norms' scales, 9 x 128 numbers, are whole on every rank
        norms = 9 * 128 * 4
        assert rank["parameter_bytes"] - norms == (figures["single"][0]["parameter_bytes"] - norms) / tp


@pytest.mark.processes
def test_simulated_ranks_compute_the_same(tmp_path: Path) -> None:
    check(demo("--simulated", "--mesh", "2,2", folder=tmp_path)[1], ranks=4)


def test_float64_leaves_no_difference_to_rounding() -> None:
    job = train_tp.Job(text=train_tp.read_text(None), mesh=(1, 2), steps=3, batch=4, sample=0, dtype="float64")
    single = train_tp.train(job)
    for rank in train_tp.simulated(job):
        assert rank.losses == pytest.approx(single.losses, abs=1e-12)


def test_fused_loss_computes_the_same() -> None:
    jobs = [
        train_tp.Job(text=train_tp.read_text(None), mesh=(1, 2), steps=2, batch=2, sample=0, fused_loss=fused)
        for fused in (True, False)
    ]
    fused, apart = (train_tp.simulated(job) for job in jobs)
    for rank, other in zip(fused, apart, strict=True):
        assert rank.losses == pytest.approx(other.losses, abs=1e-6)
        assert {kind: calls for kind, (calls, _) in rank.traffic.items()} == {
            kind: calls for kind, (calls, _) in other.traffic.items()
        }
    assert train_tp.parse(["--fused-loss"])[1].fused_loss


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh 2,4 --ranks 4", "--mesh 2,4 has 8 ranks, but there are 4"),
        ("--mesh 4", "two numbers are needed"),
        ("--mesh a,b", "two numbers are needed"),
        ("--ranks 3", "3 tensor-parallel ranks cannot share 8 heads evenly; possible are 1, 2, 4"),
        ("--mesh 1,8", "8 tensor-parallel ranks cannot share 4 key and value heads"),
        ("--mesh 2,2 --batch 3", "--batch 3 cannot be dealt evenly to 2 data-parallel ranks"),
        ("--steps 0", "take positive numbers"),
        ("--text /no/such/file", "--text /no/such/file: No such file"),
        ("--text /dev/null", "0 bytes, more than 128 are needed"),
        ("--device cuda", "torchrun --nproc-per-node 4"),
    ],
)
def test_refusals(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        train_tp.parse(arguments.split())
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_report_tells_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    job = train_tp.Job(text=b"", steps=2, sample=0)
    single = train_tp.Record(losses=[3.0, 2.0], step_seconds=[0.1, 0.1])
    wrong = train_tp.Record(losses=[3.0, 2.01], step_seconds=[0.1, 0.1])
    assert report.print_report(job, [single, single], single, None, 1e-3)
    assert not report.print_report(job, [single, wrong], single, None, 1e-3)  # any rank counts
    assert not report.print_report(job, [single], single, [wrong], 1e-3)
    nan = train_tp.Record(losses=[3.0, float("nan")], step_seconds=[0.1, 0.1])
    assert not report.print_report(job, [nan], single, None, 1e-3)
    assert "NOT rounding" in capsys.readouterr().out


def test_meter_counts_live_tensors() -> None:
    held = torch.zeros(256)  # 1 kB
    with Meter([held, held.view(16, 16)]) as meter:
        assert meter.live == 1024  # one storage, two tensors
        x = torch.ones(512)
        y = x + 1
        del x
        z = y.view(2, 256)
        assert meter.live == 1024 + 2048
        del y, z
        assert meter.live == 1024
    assert meter.peak == 1024 + 2 * 2048


def test_runs_are_the_same_for_one_seed() -> None:
    text = train_tp.read_text(None)
    job = train_tp.Job(text=text, steps=2, batch=2, sample=3)
    first, second = train_tp.train(job), train_tp.train(job)
    assert first.losses == second.losses and first.sample == second.sample
    other = train_tp.train(train_tp.Job(text=text, steps=2, batch=2, sample=3, seed=1))
    assert other.losses != first.losses
