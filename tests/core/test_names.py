"""A program may call its own files `loss`, `parallel` and `propagation_rules`: ours are under `dtensor`."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

USE = """
import torch, torch.nn.functional as F
import dtensor
from dtensor import Replicate, init_device_mesh, distribute_tensor
from dtensor.loss import loss_parallel
from dtensor.parallel import ColwiseParallel, parallelize_module, suggest_plan

def rank():
    mesh = init_device_mesh("cpu", (2,))
    net = parallelize_module(torch.nn.Linear(4, 6), mesh, ColwiseParallel(use_local_output=False))
    with loss_parallel():
        out = F.cross_entropy(net(torch.ones(3, 4)), distribute_tensor(torch.arange(3), mesh, [Replicate()]))
    net(torch.ones(3, 4)).sort().values.sum().full_tensor()
    return type(out).__name__

assert dtensor.simulate(2)(rank) == ["DTensor"] * 2
"""

BESIDE = (
    """
import loss, parallel, propagation_rules
"""
    + USE
    + """
import sys
from dtensor.port import port
assert port("from torch.distributed.tensor.parallel import loss_parallel").text.startswith("from dtensor.parallel")
assert loss.mine == parallel.mine == propagation_rules.mine == 1 and sys.modules["loss"] is loss

def step(x):
    return x * loss.mine

def changed():
    x = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
    lowered = dtensor.lower(step, x)
    first, loss.mine = lowered(x).sum().item(), 2
    return first, lowered(x).sum().item()

assert dtensor.simulate(1)(changed) == [(2.0, 4.0)]
"""
)

SHORT = """
import parallel, loss, propagation_rules.proof.parts
from parallel.planning.suggest import suggest_plan
from loss.rows import Classes
import dtensor.parallel, dtensor.loss.rows
from dtensor import propagation_rules as rules
from dtensor.propagation_rules.proof import parts
assert parallel is dtensor.parallel and loss is dtensor.loss and propagation_rules is rules
assert suggest_plan is dtensor.parallel.suggest_plan and Classes is dtensor.loss.rows.Classes
assert propagation_rules.proof.parts is parts
import shardwright, shardwright.debug, shardwright.parallel
from shardwright import DTensor, distribute_tensor, lower
assert shardwright is dtensor and shardwright.parallel is parallel and DTensor is dtensor.DTensor
import pickle, runpy, sys
other = ("parallel", "loss", "propagation", "shardwright")
assert not [n for n, m in sys.modules.items() if n.startswith(other) and m and m.__name__ == n]
style = pickle.loads(pickle.dumps(dtensor.parallel.ColwiseParallel()))
assert type(style) is parallel.ColwiseParallel
sys.argv = ["", "list", "aten.mm"]
runpy.run_module("propagation_rules", run_name="__main__")
"""  # fmt: skip


def python(*args: str, cwd: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, env=env, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_beside_files_of_these_names(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    for file in ("loss.py", "parallel/__init__.py", "propagation_rules.py"):
        (tmp_path / file).write_text("mine = 1\n")
    (tmp_path / "prog.py").write_text(BESIDE)
    python("-m", "dtensor.swap", "prog.py", cwd=tmp_path)
    assert "aten.mm" in python("-m", "dtensor.propagation_rules", "list", "aten.mm", cwd=tmp_path)


def test_as_a_file_of_such_a_name(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(USE + "import loss\nassert loss is dtensor.loss\n")
    python("loss.py", cwd=tmp_path)


def test_short_names_are_the_same_objects(tmp_path: Path) -> None:
    (tmp_path / "shardwright").symlink_to(ROOT / "dtensor" / "shardwright")  # as it is installed
    assert "aten.mm" in python("-c", SHORT, cwd=tmp_path)


def test_every_package_is_installed() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for folder in ("dtensor", "loss", "parallel", "propagation_rules")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(given["packages"]) - {"shardwright"} == there - {"dtensor.shardwright"}
    assert (ROOT / given["package-dir"]["shardwright"] / "__init__.py").exists()
