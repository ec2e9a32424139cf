"""The programs of tests/gpu without a GPU: their logic on gloo, their launcher, what it says where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor import Partial, Replicate, Shard, init_device_mesh
from dtensor.propagation_rules.proof import parts
from dtensor.simulate import fake_world
from dtensor.spec import Spec

LAUNCHER = Path(__file__).parent / "run.py"


def launched(*options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(
        [sys.executable, str(LAUNCHER), *options], capture_output=True, text=True, timeout=240, env=environment
    )


@pytest.mark.slow
@pytest.mark.processes
def test_programs_on_gloo() -> None:
    words = (
        "movement,one_rank,one_launch,groups,other_order,distribute,autocast,bytes,attention.math,grouped,draws,equal_seeds,losses,"
        "tensor_parallel,lowered"
    )
    done = launched("--device", "cpu", "--worlds", "2", "--quick", "--only", words)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("collectives.movement", "redistribution.other_order", "random_numbers.whole_draws", "lowered.step"):
        assert [line for line in done.stdout.splitlines() if line.startswith(name) and "passed" in line], done.stdout
    assert "world of 2, lowered.cuda_graph: CUDA graphs need a GPU" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_without_gpus() -> None:
    """What is skipped, and why, and that this is no failure."""
    done = launched("--worlds", "1,8")
    assert done.returncode == 0, done.stderr
    assert "world of 1: torch sees 0 GPUs here" in done.stdout and "world of 8: torch sees 0 GPUs" in done.stdout


def script(python: str, out: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"PYTHON": python, "OUT": str(out), "DEVICE": "cuda"}
    command = [str(LAUNCHER.with_name("one_gpu.sh"))]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_the_script_for_one_gpu_without_one(tmp_path: Path) -> None:
    """It says what it skips, and leaves no results; of a Python without torch it says that."""
    done = script(sys.executable, tmp_path / "results")
    assert done.returncode == 0, done.stderr
    for said in ("world of 1: torch sees 0 GPUs here", "skipped: a world of 1, torch sees 0 GPUs here"):
        assert said in done.stdout
    done = script(str(tmp_path / "no-python"), tmp_path / "results")
    assert done.returncode == 2 and "lacks torch, numpy or networkx" in done.stdout
    assert not (tmp_path / "results").exists()


ON_FAKE_TENSORS = (
    "collectives.one_launch", "collectives.gradients_in_one_launch", "redistribution.other_order",
    "redistribution.distribute", "attention.grouped", "random_numbers.whole_draws",
)  # fmt: skip


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA cannot copy fake CUDA tensors")
def test_cases_keep_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake CUDA tensors, whose ops refuse a mix of devices: inputs, results and what they are compared with."""
    monkeypatch.syspath_prepend(str(LAUNCHER.parent))
    import environment
    import worker

    def alike(got: torch.Tensor, want: torch.Tensor, *tolerances: object, **more: object) -> None:
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)

    monkeypatch.setattr(parts, "_noise", lambda t, g: torch.zeros_like(t))
    monkeypatch.setattr(environment.Environment, "same_everywhere", lambda self, *values: None)
    cases = {name: case for name, case in worker._found("") if name in ON_FAKE_TENSORS}
    assert len(cases) == len(ON_FAKE_TENSORS)
    for case in cases.values():
        monkeypatch.setattr(sys.modules[case.__module__], "close", alike)
        with fake_world(4, 3), FakeTensorMode():
            case(environment.Environment(torch.device("cuda", 0), 3, 4, quick=True))


def test_parts_are_on_the_device_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_noise", lambda t, g: torch.zeros_like(t))
    for placement in (Replicate(), Shard(1), Partial(), Partial("max")):
        with fake_world(4, 1), FakeTensorMode():
            spec = Spec.make(init_device_mesh("cuda", (4,)), (placement,), (3, 8), (8, 1), torch.float32)
            part = parts.part_of(torch.empty(3, 8, device="cuda"), spec)
            assert part.device.type == "cuda" and part.shape == spec.local_shape


BROKEN = '''
import time
import torch.distributed as dist
from environment import Skip

def case_first(env):
    """It passes."""
    raise Skip("of no use here")

def case_second(env):
    """It fails on one rank, while the other waits for it."""
    if env.rank == 1:
        raise ValueError("this rank is wrong")
    dist.barrier()

def case_third(env):
    """It is never run."""
'''


@pytest.mark.processes
def test_a_failure_ends_the_world(tmp_path: Path) -> None:
    """The failed rank's traceback comes first, the others are ended, the exit code says so."""
    (tmp_path / "cases_broken.py").write_text(BROKEN)
    done = launched("--device", "cpu", "--worlds", "2,2", "--modules", "broken", path=tmp_path)
    assert done.returncode == 1
    text = done.stdout
    assert text.index("-- rank 1 failed in broken.second") < text.index("ValueError: this rank is wrong")
    assert text.index("ValueError: this rank is wrong") < text.index("what the ranks and torchrun wrote")
    assert "broken.third" not in text and "FAILED: world of 2" in text and text.count("== world of 2") == 1
    assert "broken.first" in text and "skipped: of no use here" in text


def test_arguments_are_checked() -> None:
    done = launched("--worlds", "1,zero")
    assert done.returncode == 2 and "--worlds" in done.stderr
