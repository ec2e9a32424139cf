"""suggest_plan on models in the manner of Llama, Qwen, Mixtral and GPT: what it says, and the numbers that come out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.laws import ints, rand
from helpers.parallel import on_ranks, same, seeded
from helpers.suggest_models import (
    GPT,
    VOCABULARY,
    Attention,
    GateUp,
    Llama,
    NeoXAttention,
    TiledQueries,
    TwoOutputs,
    ViTAttention,
)
from torch import nn

import dtensor
from dtensor import DeviceMesh, DTensor, init_device_mesh, parallel, simulate
from dtensor.debug import CommDebugMode
from dtensor.parallel import check_plan, parallelize_module, suggest_plan, unparallelize_module
from dtensor.simulate import fake_world

ENDS = {"model.embed_tokens": "RowwiseParallel(input_layouts=Replicate())",
        "lm_head": "ColwiseParallel(output_layouts=Replicate())"}  # fmt: skip
COLUMN, ROW = "ColwiseParallel()", "RowwiseParallel()"
ATTENTION = {f"model.layers.*.self_attn.{n}_proj": ROW if n == "o" else COLUMN for n in "qkvo"}
NORM = {"model.layers.*.self_attn.q_norm": "SequenceParallel(sequence_dim=1, use_local_output=True)"}
MLP = {f"model.layers.*.mlp.{n}_proj": ROW if n == "down" else COLUMN for n in ("gate", "up", "down")}
EXPERTS = {f"model.layers.*.mlp.experts.*.w{i}": ROW if i == 2 else COLUMN for i in (1, 2, 3)}
GPT_MLP = {
    "h.*.mlp.c_fc": "ColwiseParallel(weight_dims=(1, 0))", "h.*.mlp.c_proj": "RowwiseParallel(weight_dims=(1, 0))",
}  # fmt: skip
GPT_ENDS = {"wte": ENDS["model.embed_tokens"], "lm_head": ENDS["lm_head"]}
GPT_ATTENTION = {
    "h.*.attn.c_attn": "PackedColwiseParallel((16, 16, 16), unit=4, use_local_output=False, weight_dims=(1, 0))",
    "h.*.attn.c_proj": "RowwiseParallel(weight_dims=(1, 0))",
}

CASES: dict[str, tuple[Callable[[], nn.Module], int, dict[str, str], str]] = {
    "llama": (Llama, 4, {**ATTENTION, **MLP, **ENDS}, ""),
    "llama, tied": (lambda: Llama(tied=True), 2, {**ATTENTION, **MLP, **ENDS}, ""),
    "llama, heads that do not divide": (Llama, 3, {**MLP, **ENDS}, "o_proj left alone: what is computed between them"),
    "qwen": (lambda: Llama(norm=True), 2, {**ATTENTION, **NORM, **MLP, **ENDS}, ""),
    "mixtral": (lambda: Llama(moe=True), 4, {**ATTENTION, **EXPERTS, **ENDS}, "layers.*.mlp.gate left alone"),
    "gpt": (GPT, 4, {**GPT_ATTENTION, **GPT_MLP, **GPT_ENDS}, ""),
    "gpt, heads that do not divide": (GPT, 3, {**GPT_MLP, **GPT_ENDS}, "in units of 4 does not go over 3 ranks"),
}


def read(text: str) -> dict[str, Any]:
    return eval(text, {n: getattr(dtensor, n) for n in ("Replicate", "Shard")} | vars(parallel))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("make", "ranks", "want", "note"), CASES.values(), ids=CASES)
def test_suggestions(make: Callable[[], nn.Module], ranks: int, want: dict[str, str], note: str) -> None:
    """What is suggested, that it prints as code, and that it trains like one process."""
    with fake_world(ranks):
        ref = seeded(make)
        plan = suggest_plan(ref, init_device_mesh("cpu", (ranks,)))
    assert {name: repr(style) for name, style in plan.items()} == want
    assert note in " ".join(plan.notes) and (note != "" or not plan.notes)
    assert {name: repr(style) for name, style in read(repr(plan)).items()} == want

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(make)
        net = parallelize_module(copy.deepcopy(ref), mesh, read(repr(plan)))
        tokens = ints(VOCABULARY, 2, 8)
        out = net(tokens)
        same(out, ref(tokens))
        out.square().mean().backward()
        ref(tokens).square().mean().backward()
        for (name, p), q in zip(unparallelize_module(net).named_parameters(), ref.named_parameters(), strict=True):
            assert name == q[0] and (p.grad is None) == (q[1].grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-3, atol=1e-6)

    on_ranks(f, ranks)


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(8, 16), nn.Linear(16, 8), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self.a(x)))  # type: ignore[no-any-return]


BETWEEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool | None]] = {
    "pointwise": (lambda h: h.relu() * 2, True),
    "its own width": (lambda h: h / math.sqrt(h.shape[-1]), False),
    "places": (lambda h: h * torch.arange(h.shape[-1]), None),
    "softmax": (lambda h: h.softmax(-1), None),
    "norm": (lambda h: nn.functional.layer_norm(h, (h.shape[-1],)), None),
    "mean": (lambda h: h - h.mean(-1, keepdim=True), None),
    "scan": (lambda h: h.cumsum(-1), None),
    "turned round": (lambda h: h.flip(-1), None),
    "width in the code": (lambda h: h.view(-1, 16).relu(), False),
    "its own width in a tensor": (lambda h: h / torch.tensor(float(h.shape[-1])), False),
    "another way for another width": (lambda h: h.relu() if h.shape[-1] == 16 else h.sigmoid(), False),
    "softmax of groups by number": (lambda h: h.unflatten(-1, (4, -1)).softmax(-1).flatten(-2), False),
    "norm of groups by number": (lambda h: nn.functional.normalize(h.view(4, 4, -1), dim=-1).flatten(-2), False),
    "scan of groups by number": (lambda h: h.view(-1, 4, h.shape[-1] // 4).cumsum(-1).flatten(-2), False),
    "groups by width": (lambda h: h.unflatten(-1, (-1, 4)).softmax(-1).flatten(-2), True),
    "a plain tensor of its width": (lambda h: h * torch.linspace(0.0, 1.0, h.shape[-1]), None),
}


@pytest.mark.parametrize(("between", "local"), BETWEEN.values(), ids=BETWEEN)
def test_what_stands_between(between: Callable[[torch.Tensor], torch.Tensor], local: bool | None) -> None:
    """Plain local tensors only where each rank then computes the same; DTensors where they can; else nothing."""

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: Between(between))
        plan = suggest_plan(ref, mesh, rand(4, 8))
        if local is None:
            assert not plan and "a, b left alone" in plan.notes[0]
            return
        assert plan["a"].use_local_output is local  # type: ignore[attr-defined]
        net = parallelize_module(copy.deepcopy(ref), mesh, plan)
        same(net(rand(4, 8)), ref(rand(4, 8)))

    on_ranks(f, 2)


BY_NUMBER, BY_WIDTH = (lambda h: h.view(*h.shape[:2], 4, -1)), (lambda h: h.view(*h.shape[:2], -1, 4))
HEADS: dict[str, tuple[Callable[[], nn.Module], bool | None]] = {
    "by number": (lambda: Attention(BY_NUMBER), False),
    "by number, unflatten": (lambda: Attention(lambda h: h.unflatten(-1, (4, -1))), False),
    "by number, products": (lambda: Attention(BY_NUMBER, sdpa=False), False),
    "by number, masked": (lambda: Attention(BY_NUMBER, masked=True), None),
    "by width": (lambda: Attention(BY_WIDTH), True),
    "by width, products": (lambda: Attention(BY_WIDTH, sdpa=False), True),
    "by width, masked": (lambda: Attention(BY_WIDTH, masked=True), True),
}


@pytest.mark.parametrize(("make", "local"), HEADS.values(), ids=HEADS)
def test_heads(make: Callable[[], nn.Module], local: bool | None) -> None:
    """`view(b, t, heads, -1)` of a rank's piece makes all heads, each too narrow: there DTensors, and it is told."""

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(make)
        plan = suggest_plan(ref, mesh, rand(2, 3, 16))
        told = "on plain local tensors view would give [2, 3, 4, 2] where [2, 3, 2, 4] is meant"
        assert (told in repr(plan)) is (local is not True)
        assert set(plan) == (set() if local is None else set("qkvo")) and repr(read(repr(plan))) == str(dict(plan))
        assert all(plan[name].use_local_output is local for name in "qkv" if plan)  # type: ignore[attr-defined]
        net = parallelize_module(copy.deepcopy(ref), mesh, plan)
        x, y = rand(2, 3, 16).requires_grad_(), rand(2, 3, 16).requires_grad_()
        same(net(x), ref(y))
        net(x).square().sum().backward()
        ref(y).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-5)

    on_ranks(f, 2)


def test_random_numbers_are_left_alone() -> None:
    class Noisy(Between):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = (x + torch.randn_like(x) > 0).nonzero()  # forward reads values, another number in each run
            return super().forward(x[found[:, 0]])  # type: ignore[no-any-return]

    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        net, x = Noisy(torch.relu), rand(4, 8)
        before = torch.get_rng_state()
        plan = suggest_plan(net, mesh, x)
        assert repr(plan["a"]) == "ColwiseParallel()" and torch.equal(torch.get_rng_state(), before)


PACKED: dict[type[nn.Module], str] = {
    ViTAttention: "PackedColwiseParallel((16, 16, 16), unit=4, use_local_output=False)",
    NeoXAttention: "ColwiseParallel()",
    GateUp: "PackedColwiseParallel((24, 24))",
    TiledQueries: "",
    TwoOutputs: "",
}


@pytest.mark.parametrize(("make", "want"), PACKED.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_packed_projections(make: type[nn.Module], want: str) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(make)
        plan = suggest_plan(ref, mesh, rand(2, 8, 16))
        assert [repr(style) for style in plan.values()] == ([want, "RowwiseParallel()"] if want else [])
        net = parallelize_module(copy.deepcopy(ref), mesh, plan)
        same(net(rand(2, 8, 16)), ref(rand(2, 8, 16)))

    on_ranks(f, 2)


class Stacked(nn.Module):
    """Experts in one tensor of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.router = nn.Parameter(torch.zeros(4, 8, 8)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("te,td,edf->tf", self.router(x).softmax(-1), x, self.gate_up)


def test_what_is_left_alone_is_told() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        plan = suggest_plan(nn.Sequential(Between(torch.relu), Stacked()), mesh, rand(4, 8))
    assert set(plan) == {"0.a", "0.b"}
    assert plan.notes == (
        "* left alone: nothing is known of how it uses gate_up",
        "*.router left alone: nothing to pair it with",
    )


def test_examples_and_axes() -> None:
    def f() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ref = seeded(lambda: Between(torch.relu))
        names = {"a": "ColwiseParallel()", "b": "RowwiseParallel()"}
        for plan in (
            suggest_plan(ref, mesh["tp"]),
            suggest_plan(ref, mesh, rand(4, 8), axis="tp", others=dtensor.Shard(0)),
            suggest_plan(ref, mesh["tp"], {"x": rand(4, 8)}),
        ):
            assert {name: repr(style) for name, style in plan.items()} == names
        with torch.device("meta"):
            assert set(suggest_plan(Between(torch.relu), mesh["tp"])) == {"a", "b"}
        with pytest.raises(ValueError, match=r"does not run on the example(.|\n)*a: RuntimeError"):
            suggest_plan(ref, mesh["tp"], rand(4, 9))
        net = parallelize_module(ref, mesh["tp"], {"a": parallel.ColwiseParallel()})
        with pytest.raises(ValueError, match="has been parallelized already"):
            suggest_plan(net, mesh["tp"])
        nothing = suggest_plan(nn.ReLU(), mesh["tp"], rand(2, 2))
        assert not nothing and repr(nothing) == "{\n}"

    simulate(4)(f)


def test_the_check_of_a_suggestion() -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: Llama(moe=True))
        tokens = ints(VOCABULARY, 2, 8)
        with CommDebugMode() as mode:
            plan = suggest_plan(ref, mesh)
            report = check_plan(ref, plan, mesh, tokens)
        assert mode.get_total_counts() == 0 and not any(isinstance(p, DTensor) for p in ref.parameters())
        assert report and not report.idle and "forward reads values" in str(report)

    on_ranks(f, 2)
