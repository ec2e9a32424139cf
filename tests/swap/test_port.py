"""`python -m dtensor.port`: a program's imports rewritten, and what is left named."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtensor.port import main, port

CASES = {
    "names": (
        "from torch.distributed.tensor import DTensor, Shard as S  # noqa\n",
        "from dtensor import DTensor, Shard as S  # noqa\n",
    ),
    "old names": (
        "from torch.distributed._tensor.placement_types import Replicate\n",
        "from dtensor import Replicate\n",
    ),
    "loss": (
        "from torch.distributed.tensor.parallel import loss_parallel, parallelize_module\n",
        "from dtensor.parallel import loss_parallel, parallelize_module\n",
    ),
    "two homes": (
        "from torch.distributed import DeviceMesh, ReduceOp\n",
        "from dtensor import DeviceMesh\nfrom torch.distributed import ReduceOp\n",
    ),
    "private": (
        "from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta\n",
        "from dtensor import Spec as DTensorSpec\nfrom dtensor.spec import TensorMeta\n",
    ),
    "long": (
        "if 1:\n    from torch.distributed.tensor.parallel import (\n"
        "        ColwiseParallel, RowwiseParallel,  # both\n"
        "        SequenceParallel, parallelize_module,\n    )\n",
        "if 1:\n    from dtensor.parallel import (\n"
        "        ColwiseParallel,\n        RowwiseParallel,\n        SequenceParallel,\n"
        "        parallelize_module,\n    )  # both\n",
    ),
    "module": (
        "import torch.distributed.tensor.parallel as tp\nstyle = tp.ColwiseParallel()\n",
        "import dtensor.parallel as tp\nstyle = tp.ColwiseParallel()\n",
    ),
    "module from": (
        "from torch.distributed.tensor import parallel as tp, debug\ntp.loss_parallel, debug.CommDebugMode()\n",
        "import dtensor.parallel as tp\nimport dtensor.debug as debug\ntp.loss_parallel, debug.CommDebugMode()\n",
    ),
    "dotted": (
        "import torch\nimport torch.distributed as dist\nm = dist.init_device_mesh('é', (2,)), dist.get_rank()\n"
        "p = torch.distributed.tensor.Shard(0).dim\n",
        "import torch\nimport dtensor\nimport torch.distributed as dist\n"
        "m = dtensor.init_device_mesh('é', (2,)), dist.get_rank()\np = dtensor.Shard(0).dim\n",
    ),
    "module not bound": (
        "import torch.distributed.tensor, os\nos.x = torch.distributed.tensor.DTensor\n",
        "import torch\nimport dtensor\nimport os\nos.x = dtensor.DTensor\n",
    ),
    "one line": (
        "x = 1; from torch.distributed.device_mesh import DeviceMesh; y = 2\n",
        "x = 1; from dtensor import DeviceMesh; y = 2\n",
    ),
    "other": ("import torch.distributed as dist\n# torch.distributed.tensor\ns = 'torch.distributed.tensor'\n", None),
}


@pytest.mark.parametrize(("old", "new"), CASES.values(), ids=CASES)
def test_port(old: str, new: str | None) -> None:
    got = port(old)
    assert got.text == (old if new is None else new) and not got.left
    compile(got.text, "ported", "exec")
    assert port(got.text).text == got.text


@pytest.mark.parametrize(
    ("source", "line", "what"),
    [
        ("from torch.distributed.tensor.experimental import context_parallel, local_map\n", 1, "context_parallel"),
        ("\nimport torch\ntorch.distributed.tensor._ops.utils.x\n", 3, "torch.distributed.tensor._ops.utils.x"),
        ("import torch.distributed.tensor._ops as ops\nops.x\n", 1, "torch.distributed.tensor._ops"),
        ("from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy\n", 1, "fully_shard (knows"),
        ("from torch.distributed._composable.fsdp import fully_shard as fs\n", 1, "use dtensor.swap"),
        ("from torch.distributed._composable.replicate import replicate\n", 1, "replicate (knows"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP\n", 1, "DistributedDataParallel (knows"),
        ("import torch\nfrom torch import nn\nnn.parallel.DistributedDataParallel(1)\n", 3, "use dtensor.swap"),
        ("import torch.distributed.fsdp as fsdp\nfsdp.FullyShardedDataParallel(1)\n", 2, "use dtensor.swap"),
        ("import torch\ntorch.distributed.fsdp.fully_shard(1)\n", 2, "use dtensor.swap"),
        ("from torch.distributed import fsdp\nfsdp.fully_shard(1)\n", 2, "use dtensor.swap"),
        ("from torch.distributed.fsdp import *\n", 1, "use dtensor.swap"),
        ("import torch.distributed as dist\ndef f(dtensor):\n    dist.init_device_mesh('cpu', (1,))\n", 3, "another"),
    ],
)
def test_what_is_left_is_named(source: str, line: int, what: str) -> None:
    assert any(at == line and what in text for at, text in port(source).left)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, odd = (tmp_path / name for name in ("good.py", "bad.py", "odd.py"))
    good.write_text("from torch.distributed.tensor import DTensor\n")
    bad.write_text("from torch.distributed.tensor.experimental import context_parallel\n")
    odd.write_text("print 'no Python'\n")
    assert main([str(good)]) == 0 and "torch" in good.read_text()
    assert "+from dtensor import DTensor" in capsys.readouterr().out
    assert main(["--apply", str(good), str(bad)]) == 1
    assert good.read_text() == "from dtensor import DTensor\n" and "torch" in bad.read_text()
    assert f"{bad}:1: no counterpart" in capsys.readouterr().err
    assert main([str(odd)]) == 2
    assert main([str(good)]) == 0 and not capsys.readouterr().out


def test_ported_program_is_like_the_tests_of_this_engine() -> None:
    """The programs that run unmodified under `dtensor.swap` port, but for what runs there only."""
    for path in (Path(__file__).parents[1] / "programs").glob("*.py"):
        ported = port(path.read_text())
        assert all("use dtensor.swap" in text for _, text in ported.left)
        assert "torch.distributed.tensor" not in ported.text.split('"""')[2]
