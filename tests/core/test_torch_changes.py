"""What changes of torch for the whole process: nothing by the import, what is listed by the first mesh, all undone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dtensor import torch_changes

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, types, torch, torch.nn, torch.optim, torch.masked, torch._lowrank, torch.nn.utils.rnn, torch.utils.dlpack
import torch.distributed.distributed_c10d, torch._meta_registrations, torch.nn.utils.clip_grad
import torch.optim.adam, torch.optim.sgd

def state():
    found = {}
    for name, module in list(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            for key, value in list(vars(module).items()) if isinstance(module, types.ModuleType) else ():
                found[f"{name}.{key}"] = id(value)
                if isinstance(value, type) and value.__module__.startswith("torch"):
                    found.update({f"{name}.{key}.{k}": id(v) for k, v in list(vars(value).items()) if callable(v)})
    return found

def changed(before):
    now = state()
    apart = ("__warningregistry__", "__doc__", "_safe_globals_set")  # the last is a list that is added to
    return sorted(k for k in before if now.get(k) != before[k] and not k.endswith(apart))

before = state()
import dtensor
by_import = changed(before)
def program():
    mesh = dtensor.init_device_mesh("cpu", (2,))
    p = torch.nn.Parameter(dtensor.distribute_tensor(torch.ones(4, 4), mesh, [dtensor.Shard(0)]))
    (p * 2).sum().backward()
    torch.optim.Adam([p], foreach=True).step()
dtensor.simulate(2)(program)
by_use = changed(before)
from dtensor import torch_changes
torch_changes.undo()
print(repr((by_import, by_use, changed(before))))
"""


def test_the_import_changes_nothing_and_undo_leaves_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    by_import, by_use, left = eval(done.stdout.splitlines()[-1])
    assert not by_import
    listed = {
        "torch.utils.dlpack.to_dlpack", "torch._meta_registrations.device_hint", "torch.nn.modules.rnn.LSTM.forward",
        "torch.optim.adam._multi_tensor_adam", "torch.nn.utils.clip_grad._get_total_norm",
    }  # fmt: skip
    assert listed <= set(by_use)
    assert not listed & set(left)  # torch itself loads more when it is used, which stays


def test_every_change_says_what_why_and_by_whom() -> None:
    for change in torch_changes.CHANGES:
        assert change.what and change.why and change.when in ("mesh", "rules")
    assert len({change.by for change in torch_changes.CHANGES}) == len(torch_changes.CHANGES)


def test_nothing_else_is_put_into_torchs_modules() -> None:
    """Assignments to attributes of torch's modules, but for the swap and a trace, as the list says."""
    places = "torch|dist|c10d|F|clip_grad|optim"
    assigned = re.compile(rf"^\s*({places})(\.\w+)+ = |^\s*setattr\(({places})\b", re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT)}: {line[0].strip()}"
        for package in ("dtensor", "parallel", "loss", "propagation_rules")
        for path in sorted((ROOT / package).rglob("*.py"))
        if not {"swap", "lowering"} & set(path.parts)
        for line in assigned.finditer(path.read_text())
    ]
    assert not found
