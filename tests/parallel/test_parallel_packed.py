"""Packed projections: every rank holds its features of each part; all numbers are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.laws import rand
from helpers.modules import PackedAttention
from helpers.parallel import grads_match, kinds, on_ranks, same, seeded, whole
from torch import nn

from dtensor import DeviceMesh, DTensor, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.parallel import (
    ColwiseParallel,
    PackedColwiseParallel,
    RowwiseParallel,
    parallelize_module,
    unparallelize_module,
)
from dtensor.placement import StridedShard


def plan(net: PackedAttention, local: bool) -> dict[str, Any]:
    sizes = [n * net.e for n in (net.heads, net.kv, net.kv)]
    return {"qkv": PackedColwiseParallel(sizes, unit=net.e, use_local_output=local), "o": RowwiseParallel()}


CASES = [(4, 4, 2, 2), (8, 4, 2, 4), (4, 2, 4, 2), (5, 5, 2, 3)]


@pytest.mark.parametrize(("heads", "kv", "e", "ranks"), CASES)
@pytest.mark.parametrize("local", [True, False])
def test_packed_attention(heads: int, kv: int, e: int, ranks: int, local: bool) -> None:
    bias = heads != 8

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: PackedAttention(heads, kv, e, bias))
        net = parallelize_module(copy.deepcopy(ref), mesh, plan(ref, local))  # type: ignore[arg-type]
        x, y = rand(2, 3, 8).requires_grad_(), rand(2, 3, 8).requires_grad_()
        with CommDebugMode() as forward:
            out = net(x)
        with CommDebugMode() as backward:
            out.square().sum().backward()
        same(out, ref(y))
        ref(y).square().sum().backward()
        same(x.grad, y.grad)  # type: ignore[arg-type]
        if local or heads == kv and heads % ranks == 0:
            assert kinds(forward) == kinds(backward) == {"all_reduce": 1}
        plain = unparallelize_module(copy.deepcopy(net))
        assert list(dict(plain.named_parameters())) == list(dict(ref.named_parameters()))
        for p, q in zip(plain.parameters(), ref.parameters(), strict=True):
            same(p, q)
            same(p.grad, q.grad)  # type: ignore[arg-type]
        same(plain(y), ref(y))

    on_ranks(f, ranks)


def test_outputs_as_dtensors_are_in_their_true_order() -> None:
    def f(mesh: DeviceMesh) -> None:
        for sizes in ((8, 8), (8, 4, 4)):
            ref = seeded(lambda: nn.Linear(6, 16))
            for out in (None, Replicate(), Shard(0), Shard(-1)):
                style = PackedColwiseParallel(sizes, output_layouts=out, use_local_output=False)
                net = parallelize_module(copy.deepcopy(ref), mesh, style)
                x = rand(4, 6)
                y = net(x)
                same(y, ref(x))
                y.square().sum().backward()
                ref.zero_grad()
                ref(x).square().sum().backward()
                grads_match(ref, unparallelize_and_redo(net))

    on_ranks(f, 4)


def unparallelize_and_redo(net: nn.Module) -> nn.Module:
    """`net` with whole gradients, as DTensors."""
    mesh = next(net.parameters()).device_mesh  # type: ignore[attr-defined]
    plain = unparallelize_module(net)
    for p in plain.parameters():
        p.grad = DTensor.from_local(p.grad, mesh, [Replicate()])  # type: ignore[arg-type]
    return plain


@pytest.mark.parametrize("sizes", [(4, 4, 4), (8, 2, 2)], ids=str)
def test_state_dicts_read_and_write_the_plain_keys(sizes: tuple[int, ...]) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: nn.Sequential(nn.Linear(6, 12)))
        net, other = (
            parallelize_module(copy.deepcopy(ref), mesh, {"0": PackedColwiseParallel(sizes)}) for _ in range(2)
        )
        state = net.state_dict()
        assert list(state) == list(ref.state_dict())
        for name, x in state.items():
            assert isinstance(x, DTensor)
            same(x, ref.state_dict()[name])
            same(getattr(net[0], name[2:]), x)  # type: ignore[index]
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        other.load_state_dict(state)
        same(other(rand(3, 6)), net(rand(3, 6)))
        with pytest.raises(RuntimeError, match='Missing key\\(s\\) in state_dict: "0.weight"'):
            other.load_state_dict({"0.bias": state["0.bias"]})

    on_ranks(f, 2)


def test_writes_into_the_whole_reach_the_parts() -> None:
    """As initialisation does, and averages of weights by way of state_dict."""

    def f(mesh: DeviceMesh) -> None:
        ref = nn.Linear(6, 12)
        net = parallelize_module(copy.deepcopy(ref), mesh, PackedColwiseParallel((8, 2, 2)))
        x = rand(3, 6)
        writes: list[Callable[[nn.Module], object]] = [
            lambda m: nn.init.constant_(m.weight, 0.25),  # type: ignore[arg-type]
            lambda m: m.weight.data.fill_(0.5),  # type: ignore[operator, union-attr]
            lambda m: [v.mul_(0.5) for v in m.state_dict().values()],
            lambda m: (torch.manual_seed(3), m.reset_parameters()),  # type: ignore[operator]
        ]
        for write in writes:
            write(ref)
            write(net)
            same(net.state_dict()["weight"], ref.weight)
            same(torch.cat([p.full_tensor() for n, p in net.named_parameters() if "bias" in n]), ref.bias)  # type: ignore[attr-defined]
            write(ref)
            write(net)
            out = net(x)
            same(out, torch.cat([y.chunk(2, -1)[mesh.get_local_rank()] for y in ref(x).split([8, 2, 2], -1)], -1))
        whole = net.state_dict()["weight"]
        with torch.no_grad():
            net.weight_0.zero_()  # type: ignore[operator]
            whole.zero_()
        with pytest.raises(RuntimeError, match="both the parts of `weight` and a joined copy"):
            net(x)

    on_ranks(f, 2)


def test_layouts_and_frozen_parts() -> None:
    def f(mesh: DeviceMesh) -> None:
        net = parallelize_module(nn.Linear(6, 12), mesh, PackedColwiseParallel((4, 4, 4)))
        assert net.weight.placements == net.bias.placements == (StridedShard(0, split_factor=3),)
        frozen = nn.Linear(6, 12)
        frozen.weight.requires_grad_(False)
        net = parallelize_module(frozen, mesh, PackedColwiseParallel((8, 2, 2)))
        wants = {n: p.requires_grad for n, p in net.named_parameters()}
        assert wants == {f"{n}_{i}": n == "bias" for n in ("weight", "bias") for i in range(3)}
        assert not unparallelize_module(net).weight.requires_grad and type(net) is nn.Linear

    on_ranks(f, 2)


class Conv1D(nn.Module):
    """y = x W + b, with W of [in, out]."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.out = out
        self.weight, self.bias = nn.Parameter(torch.empty(into, out)), nn.Parameter(torch.empty(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.out)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (8, 2, 2), None], ids=str)
def test_a_weight_that_lies_the_other_way(sizes: tuple[int, ...] | None) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: nn.Sequential(Conv1D(12, 6), Conv1D(5, 12)))
        first = (
            ColwiseParallel(weight_dims=(1, 0)) if sizes is None
            else PackedColwiseParallel(sizes, weight_dims=(1, 0), output_layouts=Shard(-1))
        )  # fmt: skip
        net = parallelize_module(
            copy.deepcopy(ref), mesh, {"0": first, "1": RowwiseParallel(weight_dims=(1, 0))}
        )
        x = rand(2, 3, 6)
        out = net(x)
        same(out, ref(x))
        out.square().sum().backward()
        ref(x).square().sum().backward()
        grads_match(ref, unparallelize_and_redo(net))

    on_ranks(f, 2)


BAD: dict[str, tuple[Any, Any, str]] = {
    "sum": (PackedColwiseParallel((4, 4)), nn.Linear(6, 12), "add up to the output features"),
    "uneven": (PackedColwiseParallel((6, 3, 3)), nn.Linear(6, 12), "a part of 3 features"),
    "heads": (PackedColwiseParallel((4, 4, 4), unit=4), nn.Linear(6, 12), "shards hold whole units"),
    "unit": (PackedColwiseParallel((4, 4, 4), unit=3), nn.Linear(6, 12), "in units of 3"),
    "embedding": (PackedColwiseParallel((6, 6)), nn.Embedding(3, 12), "multiplies by its weight"),
    "weight_dims": (ColwiseParallel(weight_dims=(1, 0)), nn.Conv1d(2, 2, 1), "of two dims"),
}


@pytest.mark.parametrize(("style", "module", "text"), BAD.values(), ids=BAD)
def test_errors_change_nothing(style: Any, module: Any, text: str) -> None:
    def f(mesh: DeviceMesh) -> None:
        net = copy.deepcopy(module)
        with pytest.raises(ValueError, match=text):
            parallelize_module(net, mesh, style)
        assert not any(isinstance(p, DTensor) for p in net.parameters())

    on_ranks(f, 2)


def test_bad_sizes_and_a_shared_parameter() -> None:
    for sizes in ((), (0, 4)):
        with pytest.raises(ValueError, match="must be positive"):
            PackedColwiseParallel(sizes)

    def f(mesh: DeviceMesh) -> None:
        net = nn.Sequential(nn.Linear(6, 12), nn.Linear(6, 12))
        net[1].weight = net[0].weight
        style = PackedColwiseParallel((8, 2, 2))
        with pytest.raises(ValueError, match="is shared with another module"):
            parallelize_module(net, mesh, {"0": style, "1": style})
        equal = PackedColwiseParallel((4, 4, 4))
        parallelize_module(net, mesh, {"0": equal, "1": equal})
        assert net[0].weight is net[1].weight

    on_ranks(f, 2)


def test_copies_are_modules_of_their_own() -> None:
    """Also after the whole weight was read, which the module remembers."""

    def f(mesh: DeviceMesh) -> None:
        layer: Any = parallelize_module(seeded(lambda: nn.Linear(4, 14)), mesh, PackedColwiseParallel((2, 6, 6)))
        before = layer.weight.detach().clone()
        with torch.no_grad():
            layer.weight.mul_(2)
        others: list[Any] = [copy.deepcopy(layer), torch.optim.swa_utils.AveragedModel(layer).module]
        for other in others:
            same(other.weight, whole(before) * 2)
            with torch.no_grad():
                other.weight.zero_()
            assert other(rand(3, 4)).shape == (3, 7)
        same(layer.weight, whole(before) * 2)

    on_ranks(f, 2)
