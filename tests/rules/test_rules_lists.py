"""List ops (`_foreach_*`) do to every element what the op they stand for does, whatever the elements' layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.laws import differs, make, rand

import dtensor
from dtensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LAYOUTS: list[tuple[Placement, Placement]] = [(R, R), (S0, R), (S0, S1), (S1, S1), (P, R), (Partial("avg"), S0)]
N = len(LAYOUTS)
INF = float("inf")

Lists = list[Any]
OPS: dict[str, Callable[[Lists, Lists, Lists], Any]] = {
    "add number": lambda a, b, c: torch._foreach_add(a, 1.5),
    "add": lambda a, b, c: torch._foreach_add(a, b, alpha=-2),
    "add numbers": lambda a, b, c: torch._foreach_add(a, [float(i) for i in range(N)]),
    "sub": lambda a, b, c: torch._foreach_sub(a, b),
    "mul number": lambda a, b, c: torch._foreach_mul(a, 1.5),
    "mul": lambda a, b, c: torch._foreach_mul(a, b),
    "mul tensor": lambda a, b, c: torch._foreach_mul(a, torch.tensor(2.0)),
    "div": lambda a, b, c: torch._foreach_div(a, b),
    "neg": lambda a, b, c: torch._foreach_neg(a),
    "abs": lambda a, b, c: torch._foreach_abs(a),
    "exp": lambda a, b, c: torch._foreach_exp(a),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(b),
    "pow": lambda a, b, c: torch._foreach_pow(b, 2),
    "maximum number": lambda a, b, c: torch._foreach_maximum(a, 0.1),
    "maximum": lambda a, b, c: torch._foreach_maximum(a, b),
    "clamp_min": lambda a, b, c: torch._foreach_clamp_min(a, b),
    "addcmul": lambda a, b, c: torch._foreach_addcmul(a, b, c, value=0.5),
    "addcdiv": lambda a, b, c: torch._foreach_addcdiv(a, c, b, value=0.5),
    "addcdiv numbers": lambda a, b, c: torch._foreach_addcdiv(a, c, b, [float(i) for i in range(N)]),
    "lerp": lambda a, b, c: torch._foreach_lerp(a, b, 0.3),
    "lerp tensors": lambda a, b, c: torch._foreach_lerp(a, b, c),
    "norm": lambda a, b, c: torch._foreach_norm(a, 2),
    "norm 1": lambda a, b, c: torch._foreach_norm(a, 1),
    "norm inf": lambda a, b, c: torch._foreach_norm(a, INF),
    "max": lambda a, b, c: torch._foreach_max(a),
    "zero_": lambda a, b, c: torch._foreach_zero_(a) or a,
    "mul_": lambda a, b, c: torch._foreach_mul_(a, 0.3) or a,
    "copy_": lambda a, b, c: torch._foreach_copy_(a, b) or a,
    "add_": lambda a, b, c: torch._foreach_add_(a, b, alpha=0.1) or a,
    "lerp_": lambda a, b, c: torch._foreach_lerp_(a, b, 0.1) or a,
    "addcmul_": lambda a, b, c: torch._foreach_addcmul_(a[:4], b[:4], c[:4], 0.3) or a,
}


def _full(seed: int) -> list[torch.Tensor]:
    return [rand(5, 3, seed=seed + i) for i in range(N)]


def _same_and_other_layouts(fn: Callable[[Lists, Lists, Lists], Any]) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    wrong = []
    for shift in (0, 1):

        def lists(full: list[torch.Tensor], by: int) -> list[DTensor]:
            return [make(t, mesh, LAYOUTS[(i + by) % N]) for i, t in enumerate(full)]

        a, b, c = _full(0), [t.abs() + 0.5 for t in _full(10)], _full(20)
        got = fn(lists(a, 0), lists(b, shift), lists(c, 2 * shift))
        want = fn(a, b, c)
        for g, w in zip(got, want, strict=True):
            bad = differs(g.full_tensor(), w, 1e-3, 1e-4)
            if bad:
                wrong.append(f"{g._spec}: {bad}")
    return wrong


@pytest.mark.parametrize("name", OPS)
def test_list_ops(name: str) -> None:
    assert not dtensor.simulate(4)(_same_and_other_layouts, OPS[name])[0]
