"""Modules under styles against the same modules in one process: how both are made, and what is compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import dtensor
from dtensor import DeviceMesh, DTensor, Replicate, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)  # fmt: skip
from helpers.laws import rand

R = Replicate()
STYLES: list[ParallelStyle] = [
    ColwiseParallel(),
    RowwiseParallel(),
    SequenceParallel(),
    PrepareModuleInput(input_layouts=R, desired_input_layouts=R),
    PrepareModuleOutput(output_layouts=R, desired_output_layouts=R),
    PrepareModuleInputOutput(output_layouts=R, desired_output_layouts=R),
]


def on_ranks(f: Callable[[DeviceMesh], object], n: int = 4) -> list[object]:
    return dtensor.simulate(n)(lambda: f(init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))))


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(whole(a), whole(b), rtol=1e-4, atol=1e-5)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same module on every rank: they share one generator, so the numbers are put in by hand."""
    module = make()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(rand(*p.shape, seed=i) / 3)
    return module


def grads_match(ref: nn.Module, net: nn.Module) -> None:
    for (name, p), q in zip(ref.named_parameters(), net.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert isinstance(q.grad, DTensor)
            same(q.grad, p.grad)


def kinds(mode: CommDebugMode) -> dict[str, int]:
    return {str(k).split(".")[-1]: n for k, n in mode.get_comm_counts().items()}


def sent(mode: CommDebugMode) -> str:
    names = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
             "all_to_all_single": "all_to_all", "scatter_": "scatter"}  # fmt: skip
    counts = {str(k).rpartition(".")[2]: n for k, n in mode.get_comm_counts().items()}
    return ", ".join(f"{k} {n}" for k, n in sorted((names.get(k, k), n) for k, n in counts.items()))


