"""unparallelize_module gives the plain module back: parameters, buffers, ties, hooks, keys; again and again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.laws import ints, rand
from helpers.modules import Stack, Tied, mlp
from helpers.parallel import on_ranks, same, seeded
from torch import nn

from dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_module
from dtensor.debug import CommDebugMode
from dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    input_reshard,
    parallelize_module,
    unparallelize_module,
)

R = Replicate()
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def hooks(net: nn.Module) -> int:
    kinds = [k for k in net.__dict__ if k.endswith("_hooks") or "_hooks_" in k]
    return sum(len(getattr(m, k) or ()) for m in net.modules() for k in kinds)


def is_plain_again(net: nn.Module, ref: nn.Module, n_hooks: int = 0) -> None:
    assert list(net.state_dict()) == list(ref.state_dict()) and hooks(net) == n_hooks
    assert not any(k.startswith("_parallel") or "distribute" in k for m in net.modules() for k in m.__dict__)
    for (a, p), (b, q) in zip(net.named_parameters(), ref.named_parameters(), strict=True):
        assert a == b and type(p) is type(q) and not isinstance(p, DTensor) and p.requires_grad == q.requires_grad
        torch.testing.assert_close(p, q, rtol=0, atol=0)
        assert p.stride() == q.stride()
    for (a, x), (b, y) in zip(net.named_buffers(), ref.named_buffers(), strict=True):
        assert a == b and not isinstance(x, DTensor)
        torch.testing.assert_close(x, y, rtol=0, atol=0)


class Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 5)
        self.register_buffer("kept", rand(3))
        self.register_buffer("temporary", rand(3), persistent=False)


class OwnStyle(ParallelStyle):
    """Shards the weight, changes an attribute, adds a hook of its own."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.times = 2  # type: ignore[assignment]
        module.register_forward_hook(lambda mod, args, out: out * mod.times)
        fn: Callable[..., object] = lambda mod, i, mesh: DTensor.from_local(i[0], mesh, [R])  # noqa: E731
        return distribute_module(module, device_mesh, input_fn=fn)

    def _undo(self, module: nn.Module) -> None:
        del module.times


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (lambda: mlp(6, 10, 5), PLAN),
    "colwise": (lambda: nn.Linear(6, 5), ColwiseParallel()),
    "rowwise": (lambda: nn.Linear(6, 5, bias=False), {"": RowwiseParallel()}),
    "embedding": (lambda: nn.Embedding(7, 3), RowwiseParallel(input_layouts=R)),
    "norm": (lambda: nn.LayerNorm(6), SequenceParallel()),
    "buffers": (Buffered, ColwiseParallel()),
    "own": (lambda: nn.Linear(6, 5), OwnStyle()),
    "prepared": (lambda: nn.Sequential(nn.Linear(6, 5)), {
        "": PrepareModuleInput(input_layouts=R, desired_input_layouts=R), "0": ColwiseParallel()}),
    "prepared both": (lambda: nn.Linear(6, 5), {
        "": PrepareModuleInputOutput(input_layouts=R, desired_input_layouts=R, output_layouts=R,
                                     desired_output_layouts=Shard(0))}),
    "output": (lambda: nn.Linear(6, 5), PrepareModuleOutput(output_layouts=R, desired_output_layouts=R)),
    "conv": (lambda: nn.Conv2d(4, 6, 3), ColwiseParallel()),
}  # fmt: skip


@pytest.mark.parametrize(("make", "plan"), CASES.values(), ids=CASES)
def test_plain_again(make: Callable[[], nn.Module], plan: Any) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(make)
        net = copy.deepcopy(ref)
        for _ in range(2):
            parallelize_module(net, mesh, plan)
            copied = copy.deepcopy(net)
            for done in (unparallelize_module(net), unparallelize_module(copied)):
                is_plain_again(done, ref)
                assert not hasattr(done, "times")
        x = ints(7, 4) if isinstance(ref, nn.Embedding) else rand(2, 4, 6, 6)
        torch.testing.assert_close(net(x), ref(x), rtol=0, atol=0)

    on_ranks(f)


def test_shared_frozen_and_trained() -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(Tied)
        plan = {"emb": RowwiseParallel(input_layouts=R), "head": ColwiseParallel(output_layouts=R)}
        net = parallelize_module(copy.deepcopy(ref), mesh, plan)
        t = ints(8, 5)
        for m in (net, ref):
            m(t).square().sum().backward()
        unparallelize_module(net)
        assert net.emb.weight is net.head.weight
        is_plain_again(net, ref)
        same(net.emb.weight.grad, ref.emb.weight.grad)  # type: ignore[arg-type]
        stack = seeded(Stack).requires_grad_(False)
        layers = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        undone = unparallelize_module(parallelize_module(copy.deepcopy(stack), mesh, layers))
        is_plain_again(undone, stack)

    on_ranks(f)


def test_hooks_of_others_stay_and_parts_can_be_undone() -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = mlp(6, 8, 5)
        net = copy.deepcopy(ref)
        seen: list[int] = []
        net[0].register_forward_hook(lambda mod, args, out: seen.append(1))
        parallelize_module(net, mesh, PLAN)
        net[2].register_forward_pre_hook(lambda mod, args: seen.append(2))
        unparallelize_module(net[0])
        assert not isinstance(net[0].weight, DTensor) and isinstance(net[2].weight, DTensor)
        parallelize_module(net[0], mesh, ColwiseParallel())
        same(net(rand(2, 6)), ref(rand(2, 6)))
        input_reshard(net, mesh, 0)
        unparallelize_module(net)
        assert hooks(net) == 2
        same(net(rand(2, 6)), ref(rand(2, 6)))
        assert seen == [1, 2, 1, 2]

    on_ranks(f)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)  # type: ignore[no-any-return]


class Wrapping(ParallelStyle):
    """Puts another module in the module's place."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return Doubled(ColwiseParallel(output_layouts=R)._apply(module, device_mesh))


def test_a_style_may_give_another_module() -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = mlp(6, 8, 5)
        net = parallelize_module(copy.deepcopy(ref), mesh, {"0": Wrapping(), "2": ColwiseParallel(output_layouts=R)})
        assert type(net[0]) is Doubled
        same(net(rand(2, 6)), ref[2](ref[1](2 * ref[0](rand(2, 6)))))  # type: ignore[index]
        assert type(parallelize_module(nn.Linear(6, 8), mesh, Wrapping())) is Doubled
        assert not any(isinstance(p, DTensor) for p in unparallelize_module(net).parameters())
        assert hooks(net) == 0

    on_ranks(f)


def test_meta_and_what_is_no_dtensor() -> None:
    def f(mesh: DeviceMesh) -> None:
        with torch.device("meta"):
            net = nn.Linear(6, 5)
        with CommDebugMode() as mode:
            parallelize_module(net, mesh, ColwiseParallel())
            unparallelize_module(net)
        assert net.weight.is_meta and net.weight.shape == (5, 6)
        assert mode.get_total_counts() > 0  # though nothing travels
        plain = nn.Linear(2, 2)
        weight = plain.weight
        assert unparallelize_module(plain) is plain and plain.weight is weight
        with pytest.raises(TypeError, match="expected a module"):
            unparallelize_module(3)  # type: ignore[arg-type]

    on_ranks(f)
