"""Modules of all kinds under the styles: convolutions, dtypes, meta tensors, frozen and distributed parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.laws import ints, rand
from helpers.modules import mlp
from helpers.parallel import grads_match, kinds, on_ranks, same, seeded
from torch import nn

from dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module

R = Replicate()
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def pair(make: Callable[[int, int], nn.Module]) -> nn.Module:
    return seeded(lambda: nn.Sequential(make(4, 12), nn.ReLU(), make(12, 6)))


CONVOLUTIONS: dict[str, tuple[Callable[[int, int], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda i, o: nn.Conv1d(i, o, 3, padding=1), (2, 4, 7)),
    "1d unbatched": (lambda i, o: nn.Conv1d(i, o, 3), (4, 9)),
    "2d": (lambda i, o: nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), (2, 4, 8, 7)),
    "3d": (lambda i, o: nn.Conv3d(i, o, 2), (1, 4, 4, 5, 4)),
    "1d transposed": (lambda i, o: nn.ConvTranspose1d(i, o, 3, stride=2), (2, 4, 5)),
    "2d transposed": (lambda i, o: nn.ConvTranspose2d(i, o, 2, bias=False), (2, 4, 5, 4)),
    "3d transposed": (lambda i, o: nn.ConvTranspose3d(i, o, 2), (1, 4, 3, 3, 3)),
}


@pytest.mark.parametrize(("make", "shape"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("ranks", [3])
def test_convolutions_by_output_then_input_channels(
    make: Callable[[int, int], nn.Module], shape: tuple[int, ...], ranks: int
) -> None:
    """Handed over as plain tensors, with one all-reduce each way, as for Linear."""

    def f(mesh: DeviceMesh) -> None:
        ref = pair(make).double()
        net = parallelize_module(copy.deepcopy(ref), mesh, PLAN)
        x, y = (rand(*shape).double().requires_grad_() for _ in range(2))
        with CommDebugMode() as forward:
            out = net(x)
        with CommDebugMode() as backward:
            out.square().sum().backward()
        same(out, ref(y))
        ref(y).square().sum().backward()
        same(x.grad, y.grad)  # type: ignore[arg-type]
        grads_match(ref, net)
        assert kinds(forward) == kinds(backward) == {"all_reduce": 1}

    on_ranks(f, ranks)


GROUPED: dict[str, tuple[nn.Module, ParallelStyle, tuple[int, ...], int]] = {
    "depthwise": (nn.Conv1d(8, 8, 3, groups=8), ColwiseParallel(), (2, 8, 9), 0),
    "two a rank": (nn.Conv2d(8, 16, 3, groups=4), ColwiseParallel(), (2, 8, 5, 5), 0),
    "transposed": (nn.ConvTranspose1d(8, 4, 3, groups=4), ColwiseParallel(), (2, 8, 5), 0),
    "fewer than ranks": (nn.Conv1d(8, 8, 3, groups=2), ColwiseParallel(), (2, 8, 5), 1),
    "by input": (nn.Conv1d(8, 8, 3, groups=2), RowwiseParallel(), (2, 8, 5), 1),
    "transposed, by input": (nn.ConvTranspose1d(8, 8, 3, groups=2), RowwiseParallel(), (2, 8, 5), 1),
}


@pytest.mark.parametrize(("module", "style", "shape", "may_send"), GROUPED.values(), ids=GROUPED)
@pytest.mark.parametrize("local", [True, False])
def test_groups(module: nn.Module, style: ParallelStyle, shape: tuple[int, ...], may_send: int, local: bool) -> None:
    """Whole groups go together: nothing is sent where every rank has some, and the numbers are right where not."""

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: copy.deepcopy(module))
        mine = copy.copy(style)
        mine.use_local_output = False  # type: ignore[attr-defined]
        if local:
            mine.input_layouts = (Shard(1),)  # type: ignore[attr-defined]
        net = parallelize_module(copy.deepcopy(ref), mesh, mine)
        x = rand(*shape)
        piece = x.chunk(4, 1)[mesh.get_local_rank()] if local else distribute_tensor(x, mesh, [R])
        with CommDebugMode() as mode:
            out = net(piece)
        same(out, ref(x))
        out.square().sum().backward()
        ref(x).square().sum().backward()
        grads_match(ref, net)
        assert may_send or mode.get_total_counts() == 0

    on_ranks(f)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = mlp(6, 8, 5).to(dtype)
        net = parallelize_module(copy.deepcopy(ref), mesh, PLAN)
        norm = parallelize_module(nn.LayerNorm(6, dtype=dtype), mesh, SequenceParallel(sequence_dim=0))
        x = rand(4, 6).to(dtype)
        out = net(x)
        assert out.dtype == dtype
        tight = dtype == torch.float64
        torch.testing.assert_close(out, ref(x), rtol=1e-12 if tight else 0.03, atol=1e-12 if tight else 0.03)
        out.sum().backward()
        ref(x).sum().backward()
        for p, q in zip(net.parameters(), ref.parameters(), strict=True):
            assert p.grad.dtype == dtype  # type: ignore[union-attr]
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0.05, atol=0.05)  # type: ignore[union-attr]
        y = norm(distribute_tensor(x, mesh, [R]))
        assert y.dtype == dtype and y.placements == (Shard(0),)

    on_ranks(f)


def test_meta_then_to_empty() -> None:
    """Nothing is sent or allocated on meta; afterwards every rank has its part, to be filled in."""

    def f(mesh: DeviceMesh) -> None:
        ref = mlp(6, 10, 5)
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))
        with CommDebugMode() as mode:
            parallelize_module(net, mesh, PLAN)
        assert mode.get_total_counts() > 0  # as counted; nothing travels
        assert all(p.to_local().is_meta for p in net.parameters())  # type: ignore[attr-defined]
        net.to_empty(device="cpu")
        for p, q in zip(net.parameters(), ref.parameters(), strict=True):
            assert isinstance(p, DTensor) and isinstance(p, nn.Parameter) and not p.to_local().is_meta
            with torch.no_grad():
                p.copy_(distribute_tensor(q.detach(), mesh, p.placements))
        assert [p.placements[0] for p in net.parameters()] == [Shard(0), Shard(0), Shard(1), R]  # type: ignore[attr-defined]
        same(net(rand(3, 6)), ref(rand(3, 6)))

    on_ranks(f)


@pytest.mark.parametrize("frozen", ["0.weight", "2", ""])
def test_frozen(frozen: str) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = mlp(6, 10, 5)
        for name, p in ref.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
        net = parallelize_module(copy.deepcopy(ref), mesh, PLAN)
        x, y = rand(3, 6).requires_grad_(), rand(3, 6).requires_grad_()
        net(x).square().sum().backward()
        ref(y).square().sum().backward()
        same(x.grad, y.grad)  # type: ignore[arg-type]
        assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in ref.parameters()]
        grads_match(ref, net)

    on_ranks(f)


def test_parameters_that_are_distributed_already() -> None:
    """On the same mesh they are brought to their layout; on another they are refused before anything changes."""

    def f() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ref = mlp(6, 8, 5)
        net = copy.deepcopy(ref)
        for layer, name, placement in ((net[0], "weight", Shard(0)), (net[2], "weight", R), (net[2], "bias", Shard(0))):  # type: ignore[index]
            value = distribute_tensor(getattr(layer, name).detach(), mesh["tp"], [placement])
            layer.register_parameter(name, nn.Parameter(value))
        parallelize_module(net, mesh["tp"], PLAN)
        assert [p.placements[0] for p in net.parameters()] == [Shard(0), Shard(0), Shard(1), R]  # type: ignore[attr-defined]
        same(net(rand(3, 6)), ref(rand(3, 6)))
        other = copy.deepcopy(ref)
        other[2].weight = nn.Parameter(distribute_tensor(ref[2].weight.detach(), mesh["dp"], [R]))  # type: ignore[index]
        with pytest.raises(ValueError, match="is a DTensor of another mesh already"):
            parallelize_module(other, mesh["tp"], PLAN)
        assert not isinstance(other[0].weight, DTensor)  # type: ignore[index]

    simulate(4)(f)


class Llama2Norm(nn.Module):
    """Root-mean-square norm written out."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


NORMS: list[Callable[[], nn.Module]] = [
    lambda: nn.LayerNorm(6), lambda: nn.LayerNorm(6, bias=False), lambda: nn.LayerNorm(6, elementwise_affine=False),
    lambda: nn.RMSNorm(6), lambda: Llama2Norm(6), lambda: nn.Dropout(0.0),
]  # fmt: skip


@pytest.mark.parametrize("make", NORMS, ids=lambda m: type(m()).__name__)
@pytest.mark.parametrize(("dim", "local"), [(0, True), (1, False), (-2, True)])
def test_norms_of_a_cut_sequence(make: Callable[[], nn.Module], dim: int, local: bool) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(make)
        style = SequenceParallel(sequence_dim=dim, use_local_output=local)
        net = parallelize_module(copy.deepcopy(ref), mesh, style)
        x, y = rand(4, 8, 6), rand(4, 8, 6)
        piece = x.chunk(4, dim)[mesh.get_local_rank()].clone().requires_grad_()
        out = net(piece)
        assert isinstance(out, DTensor) != local
        same(out if local else out.to_local(), ref(y).chunk(4, dim)[mesh.get_local_rank()])
        (out if local else out.to_local()).square().sum().backward()
        y.requires_grad_()
        ref(y).square().sum().backward()
        same(piece.grad, y.grad.chunk(4, dim)[mesh.get_local_rank()])  # type: ignore[arg-type,union-attr]
        assert all(p.placements == (R,) and p.grad.placements == (Partial(),) for p in net.parameters())  # type: ignore[attr-defined,union-attr]
        grads_match(ref, net)

    on_ranks(f)


def test_lookups_of_cut_indices() -> None:
    """Indices that are sharded come out in the layout that is asked for, by column and by row."""

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: nn.Embedding(9, 6))
        i = ints(9, 4, 8)
        for style in (ColwiseParallel, RowwiseParallel):
            for out in (R, Shard(1), Shard(-1)):
                made = style(input_layouts=Shard(1), output_layouts=out, use_local_output=False)
                net = parallelize_module(copy.deepcopy(ref), mesh, made)
                same(net(i.chunk(4, 1)[mesh.get_local_rank()]), ref(i))

    on_ranks(f)
