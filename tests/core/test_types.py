"""What `import dtensor` shows, and that type checkers follow the README's examples."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import dtensor

ROOT = Path(__file__).resolve().parents[2]

USE = """
import torch
import dtensor
from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.loss import linear_cross_entropy, loss_parallel
from dtensor.parallel import ColwiseParallel, check_plan, input_reshard, parallelize_module

def program(n: int) -> DTensor:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    y: torch.Tensor = (x @ dtensor.ones(4, 4, device_mesh=mesh, placements=[Replicate()])).full_tensor()
    z: DTensor = 2 * x.relu() + 1 - x.sum(0, keepdim=True)
    x += 1
    z *= -x
    same: torch.Tensor = (x == z).to_local()
    for part in x.t().contiguous().chunk(2):
        z = part.redistribute(placements=[Replicate()])
    if z.grad is not None:
        z.grad.full_tensor()
    return z[0]

results: list[DTensor] = dtensor.simulate(2)(program, n=3)
with dtensor.simulate.fake_world(8, rank=1) as world:
    sent = world.traffic
shown = dtensor.lower(program, 3).graph_module, dtensor.debug.CommDebugMode, dtensor.parallel.ColwiseParallel
number: str = dtensor.__version__
"""
WRONG = """
import dtensor
from dtensor.parallel import nothing_there
def f(n: int) -> str: return ""
other: list[int] = dtensor.simulate(2)(f, 3)
dtensor.simulate(2)(f, 3)[0].no_such_method()
dtensor.simulate("2")
"""


def test_types_of_examples(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    texts = {f"readme_{i}": text for i, text in enumerate(blocks)}
    texts |= {"use": USE, "wrong": WRONG}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    files = [str(tmp_path / f"{name}.py") for name in texts]
    done = subprocess.run([sys.executable, "-m", "mypy", *files], cwd=ROOT, capture_output=True, text=True)
    lines = [line.split("/")[-1] for line in done.stdout.splitlines() if ": error: " in line]
    found = [line for line in lines if "[no-untyped" not in line]  # examples need not annotate their own functions
    assert len(blocks) > 2 and {f.partition(": error")[0] for f in found} == {
        "wrong.py:3", "wrong.py:5", "wrong.py:6", "wrong.py:7"
    }, done.stdout + done.stderr  # fmt: skip


def test_public_names() -> None:
    names = dir(dtensor)
    assert {"lower", "LowerError", "debug", "experimental", "loss", "parallel", "__version__", "DTensor"} <= {*names}
    assert not [n for n in names if n.startswith("_") and n != "__version__"]
    assert not [n for n in names if (ROOT / "dtensor" / f"{n}.py").exists() and n not in dtensor.__all__]
    assert all(getattr(dtensor, n) is not None for n in names)


def test_version() -> None:
    try:
        installed = version("shardwright")
    except PackageNotFoundError:
        pytest.skip("not installed")
    assert dtensor.__version__ == installed


def test_packages_without_an_import_of_their_own() -> None:
    names = "debug.CommDebugMode", "experimental.local_map", "loss.loss_parallel", "parallel.ColwiseParallel"
    code = "import dtensor\n" + "\n".join(f"dtensor.{name}" for name in names)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
