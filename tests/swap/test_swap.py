"""`dtensor.swap`: torch's names give this engine, torch's programs run on it, and all of it can be undone.

Everything runs in processes of its own: the swap is a matter of a whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"


def python(*arguments: str, timeout: float = 180) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


INSTALLED = r"""
import dataclasses, pickle, sys
import dtensor.swap

before = {name: sys.modules.get(name) for name in ("torch.distributed.tensor", "torch.distributed.device_mesh")}
assert not dtensor.swap.status().installed
dtensor.swap.install()
dtensor.swap.install()

import torch, torch.distributed as dist
import torch.distributed.tensor as dt, torch.distributed.tensor.parallel as tp
import torch.distributed.checkpoint.default_planner as planner, torch.distributed._state_dict_utils as state_dicts
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp
import torch.distributed._functional_collectives
from torch.distributed._tensor import DTensor as Old
from torch.distributed._tensor.placement_types import Shard as OldShard
from torch.distributed.tensor._api import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._random import manual_seed
from torch.distributed.tensor._redistribute import redistribute_local_tensor, use_min_cost_redistribution_plan
from torch.distributed.tensor._utils import ExplicitRedistributionContext, compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel, local_map
from torch.distributed.tensor.experimental._attention import context_parallel as same
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard
import dtensor, dtensor.parallel as parallel, dtensor.debug, dtensor.experimental

assert Old is DTensor is dt.DTensor is dtensor.DTensor is planner.DTensor is state_dicts.DTensor is fsdp.DTensor
assert OldShard is dt.Shard is dtensor.Shard and _StridedShard is dtensor.StridedShard is fsdp._StridedShard
assert dist.DeviceMesh is dist.device_mesh.DeviceMesh is dt.DeviceMesh is dtensor.DeviceMesh is fsdp.DeviceMesh
assert dist.init_device_mesh is dt.init_device_mesh is dtensor.init_device_mesh
assert tp is torch.distributed.tensor.parallel and tp.ColwiseParallel is parallel.ColwiseParallel
assert issubclass(tp.ColwiseParallel, ParallelStyle) and CommDebugMode is dtensor.debug.CommDebugMode
assert local_map is dtensor.experimental.local_map and context_parallel is same

# torch's engine is whole underneath, and is what torch's C++ holds
own = before["torch.distributed.tensor"] or sys.modules["torch.distributed.tensor"]._real
assert own._api.DTensor is not DTensor and own._dispatch.DTensorSpec is not DTensorSpec

class Probe(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.zeros(2)

torch.neg(torch.Tensor._make_wrapper_subclass(Probe, (2,)))

# on one process
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
assert torch.distributed._functional_collectives.all_reduce(torch.ones(2), "sum", mesh).tolist() == [1.0, 1.0]
x = dt.distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [dt.Shard(0)])
assert type(x) is DTensor
assert torch.equal(DTensor(x.to_local(), x._spec, requires_grad=False).full_tensor(), x.to_local())
spec = DTensorSpec(mesh, (dt.Shard(0),), tensor_meta=TensorMeta(torch.Size([2, 3]), (3, 1), torch.float32))
assert spec is x._spec and isinstance(spec, DTensorSpec) and spec.num_shards_map == [1, 1] and spec.num_shards == 1
import pprint
assert pprint.pformat(spec) == repr(spec) and dataclasses.is_dataclass(spec)
half = dataclasses.replace(spec, tensor_meta=TensorMeta(spec.shape, spec.stride, torch.bfloat16))
assert half.dtype is torch.bfloat16 and half.placements == spec.placements
with use_min_cost_redistribution_plan():
    assert torch.equal(redistribute_local_tensor(x.to_local(), spec, spec.replicated()), x.to_local())
manual_seed(3, mesh)
assert compute_local_shape_and_global_offset((4, 2), mesh, [dt.Shard(0)]) == ((4, 2), (0, 0))
two_runs = (8, 2), dtensor.DeviceMesh("cpu", [0, 1], _rank=0, _init_backend=False), [_StridedShard(0, split_factor=2)]
assert compute_local_shape_and_global_offset(*two_runs) == ((4, 2), (0, 0))
with mesh:
    assert torch.distributed.device_mesh._mesh_resources.get_current_mesh() is mesh

# functions that are torch's own refuse what is ours, and say which
def refused(call, *words):
    try:
        call()
    except (dtensor.swap.SwapError, TypeError) as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"not refused: {words}")

refused(lambda: context_parallel(mesh, buffers=[], buffer_seq_dims=[]).__enter__(), "context_parallel", "DeviceMesh")
refused(lambda: ExplicitRedistributionContext(), "ExplicitRedistributionContext", "CommDebugMode")
refused(lambda: DTensorSpec(mesh, (dt.Shard(0),)), "tensor_meta")
net = tp.parallelize_module(torch.nn.Linear(2, 2), mesh, tp.ColwiseParallel())
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tp.parallelize_module(torch.nn.Sequential(torch.nn.Linear(2, 2)), mesh, {"head": tp.ColwiseParallel()})
assert ["'head', which is not there: skipped" in str(w.message) for w in caught] == [True], caught

# rules for torch's engine are passed over, with a warning
from torch.distributed.tensor._ops.utils import register_op_strategy
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert register_op_strategy(torch.ops.aten._foreach_sign_.default)(len) is len
assert ["register_sharding" in str(w.message) for w in caught] == [True], caught

# a whole tensor of this mesh with the shape that it has on another one, as layers of sharding hand it on
eight = TensorMeta(torch.Size([8, 3]), (3, 1), torch.float32)
specs = [DTensorSpec(mesh, (p,), tensor_meta=eight) for p in (dt.Replicate(), dt.Shard(0))]
part = redistribute_local_tensor(torch.ones(4, 3), *specs)
assert part.shape == (4, 3)
from torch.distributed.tensor.parallel.ddp import _get_submodule_n_params
refused(lambda: _get_submodule_n_params(net, "weight"), "_get_submodule_n_params", "DTensor")

# compiled: torch's compiler takes our class for what it is, a tensor subclass
@torch.compile(backend="aot_eager", fullgraph=True)
def f(x):
    y = x.redistribute(placements=[dt.Replicate()]) if isinstance(x, dt.DTensor) else x * 100
    return (y + 1).to_local()

assert torch.equal(f(x), x.to_local() + 1)

status = dtensor.swap.status()
assert status.installed and "torch.distributed.tensor._api.DTensor" in status.swapped
assert "torch.distributed.tensor._utils.ExplicitRedistributionContext" in status.refused
assert "torch.distributed.tensor._dispatch.OpDispatcher" in status.torchs and "refused" in str(status)

dist.destroy_process_group()
dtensor.swap.uninstall()
dtensor.swap.uninstall()
assert dist.DeviceMesh is not dtensor.DeviceMesh and fsdp.DTensor is own._api.DTensor is planner.DTensor
assert sys.modules["torch.distributed.tensor"] is torch.distributed.tensor is own is sys.modules[own.__name__]
assert dt.Shard is own.Shard, "a facade that is still held"
assert not dataclasses.is_dataclass(dtensor.Spec) and not dtensor.swap.status().installed
del own  # torch's module, held by the program
with dtensor.swap.swapped():
    assert dist.DeviceMesh is dtensor.DeviceMesh
    with dtensor.swap.swapped():
        pass
    assert dist.DeviceMesh is dtensor.DeviceMesh
assert dist.DeviceMesh is not dtensor.DeviceMesh

# too early
import types
sys.modules["early"] = early = types.ModuleType("early")
exec("from torch.distributed.tensor import Shard; import torch.distributed.device_mesh as meshes", vars(early))
try:
    dtensor.swap.install()
except dtensor.swap.SwapError as error:
    assert "early.Shard" in str(error) and "early.meshes" in str(error), error
else:
    raise AssertionError("not noticed")
assert dist.DeviceMesh is not dtensor.DeviceMesh
print("all right")
"""


def test_names_refusals_undo_and_early_imports() -> None:
    assert "all right" in python("-c", INSTALLED)


LATER = r"""
import sys
import torch, torch.distributed.tensor
before = set(sys.modules)
import dtensor.swap
from dtensor.swap import later, names, rebind
from dtensor.swap.facade import Facade
dtensor.swap.install()
new = {name for name in sys.modules if name.split(".")[0] not in ("dtensor", "numpy")} - before
assert not new, f"install loads {sorted(new)}"
assert "dtensor.propagation_rules" not in sys.modules and "dtensor.parallel" not in sys.modules

def patched():
    found = []
    for module, functions in names.PATCHES.items():
        for path in functions if module in sys.modules else ():
            value = sys.modules[module]
            for part in path.split("."):
                value = getattr(value, part)
            found.append(value.__globals__["__name__"] == later.__name__)
    return found

def wrong(on):
    for name, module in list(sys.modules.items()):
        root = names.is_under(name, names.ROOTS)
        if root and isinstance(module, Facade) != on:
            yield f"{name} is {'the real one' if on else 'a facade'}"
        real = module._real if isinstance(module, Facade) else module
        parent, _, child = name.rpartition(".")
        if root and parent == real.__name__.rpartition(".")[0]:
            above = sys.modules[parent]
            held = vars(above._real if root and isinstance(above, Facade) else above)[child]
            if held is not (module if parent == "torch.distributed" else real):
                yield f"{parent} holds {held} as {child}"
        if not names.is_under(name, ("torch",)) or not hasattr(real, "__dict__"):
            continue
        for key, value in list(vars(real).items()):
            ours = isinstance(value, type) and str(value.__module__).startswith("dtensor.")
            if isinstance(value, Facade) and (root or not on) or ours and not on or ours and root:
                yield f"{name}.{key} is ours"
            if on and rebind._replaced(name) and dtensor.swap._mapping.of(value) is not None:
                yield f"{name}.{key} is torch's"

# what is loaded from now on is swapped: modules of the engine, of torch's that use it, under old names, in circles
import torch.distributed.tensor.debug._comm_mode as comm_mode
import torch.distributed._tensor.experimental as old
import torch.distributed.checkpoint._async_process_executor, torch.distributed.fsdp._init_utils as older_fsdp
import torch.distributed.tensor.parallel.ddp as ddp
assert comm_mode.CommDebugMode is dtensor.debug.CommDebugMode and old.local_map is dtensor.experimental.local_map
assert older_fsdp.DTensorExtensions.__module__ == "dtensor.swap.older_fsdp"
assert ddp._localize_dtensor.__module__ == "dtensor.swap.data_parallel"
assert type(old) is type(ddp) is Facade and torch.distributed.tensor.experimental is old
assert all(patched()) and not list(wrong(True)), (patched(), *wrong(True))

for _ in range(2):
    dtensor.swap.uninstall()
    assert not any(patched()) and not list(wrong(False)), (patched(), *wrong(False))
    import torch.distributed.tensor.experimental._attention, torch.distributed.checkpoint.state_dict
    dtensor.swap.install()
    assert all(patched()) and not list(wrong(True)), (patched(), *wrong(True))
assert not set(names.PATCHES) - set(sys.modules)
print("all right")
"""


def test_install_loads_only_the_core_and_what_is_loaded_later_is_swapped_then() -> None:
    assert "all right" in python("-c", LATER)


@pytest.mark.processes
def test_a_program_of_torchs_unmodified() -> None:
    """Spawned processes are swapped too: what the program prints comes from one."""
    printed = python("-m", "dtensor.swap", str(PROGRAMS / "tensor_parallel.py"))
    assert "engine dtensor." in printed and "done" in printed


def test_command_line(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(
        "import sys\nfrom torch.distributed.tensor import DTensor\nprint(DTensor.__module__, sys.argv[1:])\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dtensor.swap", "-m", "package", "--flag"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "dtensor.tensor ['--flag']"
