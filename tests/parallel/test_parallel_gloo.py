"""Plans on real processes: the numbers of one process, through a plan that was suggested, and back."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.gloo_ranks import run_ranks
from helpers.laws import rand
from helpers.modules import PackedAttention, mlp
from helpers.parallel import same, seeded
from torch import nn

from dtensor import init_device_mesh
from dtensor.parallel import (
    PackedColwiseParallel,
    RowwiseParallel,
    check_plan,
    parallelize_module,
    suggest_plan,
    unparallelize_module,
)


def agree(net: nn.Module, ref: nn.Module, x: torch.Tensor) -> None:
    """Outputs and gradients, and the plain module afterwards."""
    out = net(x)
    same(out, ref(x))
    out.square().mean().backward()
    ref.zero_grad()
    ref(x).square().mean().backward()
    plain = unparallelize_module(net)
    for p, q in zip(plain.parameters(), ref.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-6)


def case_suggested(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    ref = mlp(6, 7, 5)
    plan = suggest_plan(ref, mesh, rand(2, 6))
    assert set(plan) == {"0", "2"} and check_plan(ref, plan, mesh, rand(2, 6))
    agree(parallelize_module(copy.deepcopy(ref), mesh, plan), ref, rand(2, 6))


def case_packed(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    ref = seeded(lambda: PackedAttention(8, 4, 2))
    plan = {"qkv": PackedColwiseParallel((16, 8, 8), unit=2), "o": RowwiseParallel()}
    agree(parallelize_module(copy.deepcopy(ref), mesh, plan), ref, rand(2, 3, 8))


@pytest.mark.processes
def test_on_gloo() -> None:
    run_ranks(2, [case_suggested, case_packed]).check()
