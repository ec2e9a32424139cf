"""Public functions and constructors with arguments of wrong kinds: an error of ours, with a fix; nothing is changed."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtensor
from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.debug import visualize_sharding
from dtensor.errors import LIMIT
from dtensor.experimental import local_map
from dtensor.loss import linear_cross_entropy
from dtensor.parallel import (
    ColwiseParallel,
    PackedColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    check_plan,
    input_reshard,
    parallelize_module,
    suggest_plan,
    unparallelize_module,
)
from dtensor.redistribute.cost_model import CostModel, set_cost_model, use_cost_model
from dtensor.redistribute.plan import plan_reshard

ROOT = Path(__file__).resolve().parents[2]
BAD: dict[str, Any] = {
    "None": None, "str": "no", "out": 7, "negative": -1, "float": 1.5, "nan": math.nan, "empty": [], "dict": {},
    "nones": [None], "strs": ["no"], "floats": [1.5], "nans": (math.nan,), "negatives": [-1], "ragged": [[0], [1, 2]],
    "tensor": torch.ones(2), "dims": (Shard(7),), "class": type, "True": True, "huge": 10**30,
    "long": ["no" * 5000],
}  # fmt: skip

Arguments = dict[str | int, tuple[Any, str]]


def calls(mesh: DeviceMesh) -> dict[str, tuple[Callable[..., Any], Arguments]]:
    """Name: the call, and for each of its arguments a good value and which of BAD are good as well."""
    net, S = torch.nn.Linear(4, 4), [Shard(0)]
    x = distribute_tensor(torch.ones(4, 4), mesh, S)
    two = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    factory = {
        0: (4, "out"), "device_mesh": (mesh, ""), "placements": (S, "None"), "dtype": (torch.float32, "None"),
    }  # fmt: skip
    prepare = {"input_layouts": (S, "None nones dims"), "desired_input_layouts": (S, "nones dims")}
    outputs = {"output_layouts": (S, "nones dims"), "desired_output_layouts": (S, "nones dims")}
    style = {"input_layouts": (Replicate(), "None"), "output_layouts": (Replicate(), "None")}
    axis = "negative"
    return {
        "init_device_mesh": (init_device_mesh, {
            0: ("cpu", ""), 1: ((1,), "empty"), "mesh_dim_names": (("t",), "None str strs long empty"),
            "backend_override": ({}, "None dict"),
        }),
        "DeviceMesh": (DeviceMesh, {
            0: ("cpu", ""), 1: ([0], "True"), "mesh_dim_names": (("t",), "None str strs long empty"),
        }),
        "from_group": (DeviceMesh.from_group, {0: (dist.group.WORLD, ""), 1: ("cpu", "")}),
        "mesh[]": (two.__getitem__, {0: ("a", "")}),
        "size": (two.size, {0: (0, f"None {axis}")}),
        "get_local_rank": (two.get_local_rank, {0: (0, axis)}),
        "get_group": (two.get_group, {0: (0, axis)}),
        "comm": (two.comm, {0: (0, f"{axis} negatives empty")}),
        "flatten": (two.flatten, {0: ("ab", "None str")}),
        "unflatten": (two._unflatten, {0: ("a", axis), 1: ((1, 1), ""), 2: (("c", "d"), "")}),
        "concatenate": (DeviceMesh._concatenate, {0: ([two["a"]], "")}),
        "from_torch": (DeviceMesh.from_torch, {0: (None, "")}),
        "Shard": (Shard, {0: (0, "out negative huge")}),
        "StridedShard": (StridedShard, {0: (0, "out negative huge"), "split_factor": (2, "None out huge True")}),
        "Partial": (Partial, {0: ("sum", "None")}),
        "Spec": (Spec, {0: (mesh, ""), 1: (tuple(S), "None"), 2: (x._spec.tensor_meta, "")}),
        "Spec.make": (Spec.make, {
            0: (mesh, ""), 1: (tuple(S), ""), 2: ((4, 4), ""), 3: ((4, 1), ""), 4: (x.dtype, ""),
        }),
        "with_placements": (x._spec.with_placements, {0: ((Replicate(),), "")}),
        "plan_reshard": (plan_reshard, {0: (x._spec, ""), 1: (x._spec, "")}),
        "set_cost_model": (set_cost_model, {0: (CostModel(), "")}),
        "use_cost_model": (lambda m: contextlib.ExitStack().enter_context(use_cost_model(m)), {0: (CostModel(), "")}),
        "DTensor": (DTensor, {0: (torch.ones(4, 4), "tensor"), 1: (x._spec, "")}),
        "from_local": (DTensor.from_local, {
            0: (torch.ones(4, 4), ""), 1: (mesh, ""), 2: (S, "None"), "shape": ((4, 4), ""), "stride": ((4, 1), ""),
        }),
        "to_local": (x.to_local, {"grad_placements": (S, "None")}),
        "full_tensor": (x.full_tensor, {"grad_placements": (S, "None")}),
        "redistribute": (x.redistribute, {
            0: (None, "None"), 1: (S, ""), "forward_dtype": (None, "None"), "backward_dtype": (None, "None"),
        }),
        "distribute_tensor": (distribute_tensor, {
            0: (torch.ones(4, 4), "tensor"), 1: (mesh, ""), 2: (S, "None"), "src_data_rank": (0, "None"),
        }),
        "distribute_module": (distribute_module, {
            0: (net, ""), 1: (mesh, ""), "partition_fn": (None, "None class"), "input_fn": (None, "None class"),
            "output_fn": (None, "None class"),
        }),
        **{n: (getattr(dtensor, n), factory) for n in ("empty", "zeros", "ones", "rand")},
        "full": (dtensor.full, {
            0: ((4,), "out True empty"), 1: (1.0, "out negative float nan True huge"), "device_mesh": (mesh, ""),
            "placements": (S, "None"), "dtype": (torch.float32, "None"),
        }),
        "simulate": (dtensor.simulate, {0: (1, "out")}),
        "simulate()": (dtensor.simulate(1), {0: (lambda: 1, "class")}),
        "fake_world": (
            lambda *a, **k: contextlib.ExitStack().enter_context(dtensor.simulate.fake_world(*a, **k)),
            {0: (4, "out huge"), "rank": (0, "")},
        ),
        "lower": (dtensor.lower, {0: (lambda t: t, "class")}),
        "local_map": (local_map, {
            0: (lambda t: t, "None class"), "out_placements": (S, "None empty nones dims"),
            "in_placements": ((S,), "None empty nones dims"), "device_mesh": (mesh, "None"),
        }),
        "parallelize_module": (parallelize_module, {
            0: (net, ""), 1: (mesh, ""), 2: (ColwiseParallel(), "None dict"), "src_data_rank": (0, "None"),
        }),
        "unparallelize_module": (unparallelize_module, {0: (net, "")}),
        "check_plan": (check_plan, {0: (net, ""), 1: ({}, "dict"), 2: (mesh, ""), 3: (torch.ones(4, 4), "*")}),
        "suggest_plan": (suggest_plan, {0: (net, ""), 1: (mesh, "")}),
        "input_reshard": (input_reshard, {
            0: (torch.nn.Linear(4, 4), ""), 1: (mesh, ""), "input_reshard_dim": (0, "None out negative huge"),
        }),
        "ColwiseParallel": (ColwiseParallel, style),
        "RowwiseParallel": (RowwiseParallel, style),
        "PackedColwiseParallel": (PackedColwiseParallel, {**style, 0: ((2, 2), ""), "unit": (1, "out huge")}),
        "SequenceParallel": (SequenceParallel, {"sequence_dim": (1, "out negative huge")}),
        "PrepareModuleInput": (PrepareModuleInput, {
            **prepare, "input_kwarg_layouts": ({"a": Shard(0)}, "None"),
            "desired_input_kwarg_layouts": ({"a": Shard(0)}, ""),
        }),
        "PrepareModuleOutput": (PrepareModuleOutput, outputs),
        "PrepareModuleInputOutput": (PrepareModuleInputOutput, {**prepare, **outputs}),
        "linear_cross_entropy": (linear_cross_entropy, {
            0: (x, ""), 1: (x, ""), 2: (distribute_tensor(torch.zeros(4).long(), mesh, S), ""),
        }),
        "visualize_sharding": (visualize_sharding, {0: (x, "")}),
    }  # fmt: skip


def faults(name: str, call: Callable[..., Any], arguments: Arguments) -> list[str]:
    found = []
    for place, (_, good) in arguments.items():
        for kind, value in BAD.items():
            if kind in good.split() or good == "*":
                continue
            given = {p: value if p == place else v for p, (v, _) in arguments.items()}
            positional = [v for p, v in given.items() if isinstance(p, int)]
            what = f"{name}({place}={kind})"
            try:
                call(*positional, **{str(p): v for p, v in given.items() if not isinstance(p, int)})
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                ours = Path(last.filename).is_relative_to(ROOT) and (last.line or "").startswith("raise")
                text = str(error)
                if not ours or "fix" not in text and ";" not in text or len(text) > LIMIT + 100:
                    found.append(f"{what}: {type(error).__name__}: {text[:200]} (line {last.line}, {len(text)})")
            else:
                found.append(f"{what}: nothing is wrong with it")
    return found


def test_wrong_kinds_of_arguments() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("t",))
        table = calls(mesh)
        found = [text for name, (call, arguments) in table.items() for text in faults(name, call, arguments)]
        assert len(table) > 45 and not found, "\n".join(found)

    dtensor.simulate(1)(run)


def test_what_is_refused_is_unchanged() -> None:
    def run() -> None:
        mesh, net = init_device_mesh("cpu", (2,)), torch.nn.Linear(4, 4)
        before = dict(net.named_parameters())
        for bad in (lambda: distribute_module(net, mesh, "no"), lambda: parallelize_module(net, mesh, "no")):
            try:
                bad()
            except TypeError:
                pass
            else:
                raise AssertionError
        assert all(p is before[n] for n, p in net.named_parameters()) and not net._forward_hooks

    dtensor.simulate(2)(run)


def test_shifts_of_bool_are_those_of_torch() -> None:
    b, i = torch.tensor([True, False, True]), torch.tensor([1, 2, 3], dtype=torch.int32)
    cases = (lambda b, i: b << 1, lambda b, i: b >> 1, lambda b, i: b << i, lambda b, i: i << b, lambda b, i: i >> 1)

    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placed in (Shard(0), Replicate()):
            x, y = (distribute_tensor(t, mesh, [placed]) for t in (b, i))
            for f in cases:
                torch.testing.assert_close(f(x, y).full_tensor(), f(b, i))

    dtensor.simulate(2)(run)
