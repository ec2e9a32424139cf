"""check_plan says before a plan is applied what it will do: layouts, collectives and bytes as then measured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import rand
from helpers.parallel import on_ranks, seeded, sent
from helpers.plan_rows import ROWS, Row
from helpers.suggest_models import Llama
from torch import nn

from dtensor import DeviceMesh, DTensor, Replicate
from dtensor.debug import CommDebugMode
from dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    check_plan,
    parallelize_module,
    suggest_plan,
)
from dtensor.parallel.planning.rehearsal import Sent

R = Replicate()


def counts(collectives: tuple[Sent, ...]) -> str:
    kinds = [s.kind for s in collectives]
    return ", ".join(f"{k} {kinds.count(k)}" for k in sorted(set(kinds)))


def nbytes(collectives: tuple[Sent, ...]) -> dict[str, int]:
    out: dict[str, int] = {}
    for s in collectives:
        out[s.kind] = out.get(s.kind, 0) + s.nbytes
    return out


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_it_says_what_every_style_sends(row: Row) -> None:
    """The same counts and bytes as on ranks that run, without anything being sent or changed."""

    def f(mesh: DeviceMesh) -> None:
        net = row.make()
        x = torch.zeros(2, 8, dtype=torch.long) if isinstance(net, nn.Embedding) else torch.zeros(2, 8, 16)
        x = x if row.x is None else x.chunk(4, row.x)[mesh.get_local_rank()].contiguous()
        x = x.requires_grad_() if x.is_floating_point() else x
        alone = mesh.get_local_rank() in (0, 3)  # a rank that asks needs no other
        with CommDebugMode() as none:
            report = check_plan(net, row.plan, mesh, x) if alone else None
        assert none.get_total_counts() == 0 and not any(isinstance(p, DTensor) for p in net.parameters())
        parallelize_module(net, mesh, row.plan)
        with CommDebugMode() as forward:
            y = net(x)
        with CommDebugMode() as backward:
            (y.to_local() if isinstance(y, DTensor) else y).sum().backward()
        assert sent(forward) == row.forward
        if report is None:
            return
        assert report and (counts(report.forward), counts(report.backward)) == (row.forward, row.backward)
        assert nbytes(report.forward) == forward.get_comm_bytes()
        assert nbytes(report.backward) == backward.get_comm_bytes()
        grads = [p.grad for p in net.parameters() if isinstance(p.grad, DTensor)]
        assert bool(report.pending) == any(g.placements[0].is_partial() for g in grads)

    on_ranks(f)


EXPECTED = """\
"up": ColwiseParallel()
    input     float32[8, 16] -> f32[8,16]
    output    f32[8,32@tp] -> float32[8, 8]
    backward  all_reduce 1 (768 bytes)
"down": RowwiseParallel()
    input     float32[8, 8] -> f32[8,32@tp]
    output    f32[8,16]{P:tp} -> float32[8, 16]     all_reduce 1 (768 bytes)
matches nothing: 'dwn'
forward sends all_reduce 1 (768 bytes)
backward sends all_reduce 1 (768 bytes)"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


def test_the_report() -> None:
    def f(mesh: DeviceMesh) -> None:
        x = rand(8, 16).requires_grad_()
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel(), "dwn": RowwiseParallel()}
        assert str(check_plan(Net(), plan, mesh, x)) == EXPECTED

    on_ranks(f)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "layouts that do not meet": (
        {"up": ColwiseParallel(), "down": RowwiseParallel(input_layouts=R)},
        "fails: down: ValueError: RowwiseParallel of 'down' (Linear): the input has 16 features"),
    "whole for a piece": (
        {"down": RowwiseParallel()}, "fails: down: ValueError: RowwiseParallel of 'down' (Linear): a plain input"),
    "a module it does not know": ({"": ColwiseParallel()}, "fails: NotImplementedError: ColwiseParallel: knows Linear"),
    "twice": ({"up": ColwiseParallel(), "u*": ColwiseParallel()}, "fails: RuntimeError: parallelize_module: the plan"),
    "names": ({"no": ColwiseParallel(), "up.x": ColwiseParallel()}, "matches nothing: 'no'\nmatches nothing: 'up.x'"),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "text"), FAULTS.values(), ids=FAULTS)
def test_faults_are_told(plan: dict[str, Any], text: str) -> None:
    def f(mesh: DeviceMesh) -> None:
        report = check_plan(Net(), plan, mesh, rand(8, 16))
        assert not report and text in str(report)

    on_ranks(f, 2)


def test_modules_alike_are_told_once_and_others_that_send_are_named() -> None:
    def f(mesh: DeviceMesh) -> None:
        net = seeded(Llama)
        plan = suggest_plan(net, mesh)
        report = check_plan(net, plan, mesh, torch.zeros(2, 8, dtype=torch.long))
        rows = {row.name: row for row in report.rows}
        assert len(rows["model.layers.*.self_attn.o_proj"].modules) == 2 and set(rows) == set(plan)
        assert counts(report.forward) == "all_gather 1, all_reduce 5"
        odd = {"up": ColwiseParallel(use_local_output=False)}
        other = check_plan(Net(), odd, mesh, rand(8, 16))
        assert "fails: down: " in str(other)
        stack = nn.Sequential(nn.LayerNorm(16), nn.Softmax(0))
        report = check_plan(stack, {"0": SequenceParallel(sequence_dim=0)}, mesh, rand(4, 16))
        assert '"1", not in the plan' in str(report)

    on_ranks(f, 2)


def test_the_example_and_the_model_are_left_alone() -> None:
    def f(mesh: DeviceMesh) -> None:
        net, x = Net(), rand(8, 16).requires_grad_()
        before = copy.deepcopy(net.state_dict())
        check_plan(net, {"up": ColwiseParallel(), "down": RowwiseParallel()}, mesh, (x,))
        check_plan(net, {"up": ColwiseParallel(output_layouts=R)}, mesh, {"x": x})
        assert x.grad is None and all(p.grad is None for p in net.parameters())
        assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.values(), strict=True))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())

    on_ranks(f, 2)


class Between(nn.Module):
    """Columns, some code, a row."""

    def __init__(self, code: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.code, self.down = nn.Linear(16, 16), code, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.code(self.up(x)))  # type: ignore[no-any-return]


CODE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "heads": (lambda q: q.view(2, 3, 4, -1).softmax(-1).flatten(2), "would give [2, 3, 4, 2] where [2, 3, 2, 4]"),
    "heads, transposed": (
        lambda q: q.view(2, 3, 4, -1).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2), "view would"),
    "heads of each rank": (lambda q: q.view(2, 3, -1, 4).softmax(-1).flatten(2), ""),
    "by reshape": (lambda q: q.reshape(2, 3, 4, -1).softmax(-1).reshape(2, 3, -1), "view would give"),
    "by unflatten": (lambda q: q.unflatten(-1, (4, -1)).softmax(-1).flatten(2), "view would give"),
    "softmax over all": (lambda q: q.softmax(-1), "takes all pieces"),
    "a norm": (lambda q: q / q.norm(dim=-1, keepdim=True), "takes all pieces"),
    "pointwise": (lambda q: F.silu(q) * 2 + q, ""),
    "the width as a number": (lambda q: q * q.shape[-1], "would take other numbers"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "text"), CODE.values(), ids=CODE)
def test_code_that_means_something_else_on_pieces(code: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    """It is told where what ranks compute is wrong, and only there."""

    def f(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        net, x = Between(code), torch.randn(2, 3, 16)
        want, plan = net(x), {"up": ColwiseParallel(), "down": RowwiseParallel()}
        report = check_plan(net, plan, mesh, x)
        assert bool(report) == (not text) and text in report.error, report.error
        got = parallelize_module(copy.deepcopy(net), mesh, plan)(x)
        assert torch.allclose(got, want, atol=1e-5) == bool(report)
        fixed: dict[str, Any] = {**plan, "up": ColwiseParallel(use_local_output=False)}
        assert check_plan(net, fixed, mesh, x)
        torch.testing.assert_close(parallelize_module(net, mesh, fixed)(x), want)

    on_ranks(f, 2)
