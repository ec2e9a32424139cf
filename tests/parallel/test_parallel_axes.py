"""Styles on one axis of a mesh of several: parameters, plain inputs, gradients over all axes, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.laws import rand
from helpers.modules import mlp
from helpers.parallel import STYLES, same, seeded
from torch import nn

from dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from dtensor.debug import CommDebugMode
from dtensor.parallel import (
    ColwiseParallel,
    PackedColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    unparallelize_module,
)

R = Replicate()
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def on_mesh(f: Callable[[DeviceMesh], object], shape: tuple[int, ...] = (2, 2), names: Any = ("dp", "tp")) -> None:
    n = 1
    for k in shape:
        n *= k
    simulate(n)(lambda: f(init_device_mesh("cpu", shape, mesh_dim_names=names)))


def check_gradients(net: nn.Module, ref: nn.Module) -> None:
    for p, q in zip(net.parameters(), ref.parameters(), strict=True):
        same(p.grad, q.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("shape", "names"), [
    ((2, 2), ("dp", "tp")), ((2, 2), ("tp", "dp")), ((2, 3), ("dp", "tp")), ((3, 2), ("tp", "dp"))
], ids=str)  # fmt: skip
@pytest.mark.parametrize("hidden", [12, 5])
def test_each_row_with_its_own_batch(shape: tuple[int, ...], names: tuple[str, ...], hidden: int) -> None:
    """others={"dp": Shard(0)}: gradients are those of the whole batch, without any wrapper for data parallelism."""

    def f(mesh: DeviceMesh) -> None:
        ref = mlp(6, hidden, 5)
        net = parallelize_module(copy.deepcopy(ref), mesh, PLAN, axis="tp", others={"dp": Shard(0)})
        assert net[0].weight.placements == tuple(Shard(0) if n == "tp" else R for n in names)  # type: ignore[index]
        x = rand(12, 6)
        rows = mesh.size(names.index("dp"))
        out = net(x.chunk(rows)[mesh.get_local_rank("dp")])
        same(out, ref(x).chunk(rows)[mesh.get_local_rank("dp")])
        out.square().sum().backward()
        ref(x).square().sum().backward()
        check_gradients(net, ref)
        for p, q in zip(unparallelize_module(net).parameters(), ref.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)

    on_mesh(f, shape, names)


def test_the_same_batch_everywhere_and_dtensors() -> None:
    def f(mesh: DeviceMesh) -> None:
        ref, x = mlp(6, 8, 5), rand(4, 6)
        ref(x).square().sum().backward()
        net = parallelize_module(copy.deepcopy(ref), mesh, PLAN, axis=-1, others=R)
        out = net(x)
        same(out, ref(x))
        net.zero_grad()
        out.square().sum().backward()
        check_gradients(net, ref)
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(use_local_output=False)}
        for layout in ([Shard(0), R], [R, Shard(1)], [R, R], [Shard(1), Shard(0)]):
            net = parallelize_module(copy.deepcopy(ref), mesh, plan, axis="tp")
            net.zero_grad()
            out = net(distribute_tensor(x, mesh, layout))
            same(out, ref(x))
            out.square().sum().backward()
            check_gradients(net, ref)

    on_mesh(f)


def test_three_axes_with_a_cut_sequence() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(Block)
        plan = {
            "norm": SequenceParallel(), "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }  # fmt: skip
        net = parallelize_module(copy.deepcopy(ref), mesh, plan, axis="tp", others={"dp": Shard(0), "cp": Shard(1)})
        x = rand(2, 8, 6)
        dp, cp, tp = (mesh.get_local_rank(n) for n in ("dp", "cp", "tp"))

        def piece(y: torch.Tensor) -> torch.Tensor:
            return y.chunk(2, 0)[dp].chunk(2, 1)[cp].chunk(2, 1)[tp]

        out = net(piece(x))
        same(out, piece(ref(x)))
        out.square().sum().backward()
        ref(x).square().sum().backward()
        check_gradients(net, ref)

    on_mesh(f, (2, 2, 2), ("dp", "cp", "tp"))


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4, 4)], ids=str)
def test_packed(sizes: tuple[int, ...]) -> None:
    def f(mesh: DeviceMesh) -> None:
        n = sum(sizes)
        ref = seeded(lambda: nn.Linear(6, n))
        style = PackedColwiseParallel(sizes, output_layouts=Shard(-1), use_local_output=False)
        net = parallelize_module(copy.deepcopy(ref), mesh, style, axis="tp", others=Shard(0))
        x = rand(4, 6)
        out = net(x.chunk(2)[mesh.get_local_rank("dp")])
        assert out.placements == (Shard(0), Shard(1))
        same(out, ref(x))
        out.square().sum().backward()
        ref(x).square().sum().backward()
        plain = unparallelize_module(net)
        check_gradients(plain, ref)

    on_mesh(f)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no axis": ({}, ValueError, "works over one mesh axis"),
    "unknown": ({"axis": "cp"}, ValueError, "no axis 'cp'"),
    "number": ({"axis": 2}, ValueError, "no axis 2"),
    "own": ({"axis": "tp", "others": {"tp": R}}, ValueError, "others names 'tp', the axis"),
    "other": ({"axis": "tp", "others": {"cp": R}}, ValueError, "no axis 'cp'"),
    "type": ({"axis": "tp", "others": [R]}, TypeError, "takes a placement, or one for each axis"),
}


@pytest.mark.parametrize(("kwargs", "error", "text"), BAD.values(), ids=BAD)
def test_bad_axes_change_nothing(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    def f(mesh: DeviceMesh) -> None:
        net = mlp(6, 8, 5)
        with pytest.raises(error, match=text):
            parallelize_module(net, mesh, PLAN, **kwargs)
        assert not any(isinstance(p, DTensor) for p in net.parameters())

    on_mesh(f)


def test_plain_inputs_of_unknown_layout_and_tensors_of_other_meshes_are_refused() -> None:
    def f(mesh: DeviceMesh) -> None:
        net = parallelize_module(mlp(6, 8, 5), mesh, PLAN, axis="tp")
        with pytest.raises(ValueError, match=r"how it lies over dp(.|\n)*others=Shard\(0\)"):
            net(rand(4, 6))
        with pytest.raises(ValueError, match="a DTensor of another mesh than the module's"):
            net(distribute_tensor(rand(4, 6), mesh["tp"], [R]))

    on_mesh(f)


@pytest.mark.parametrize("style", STYLES, ids=lambda s: type(s).__name__)
def test_every_style_takes_an_axis(style: Any) -> None:
    def f(mesh: DeviceMesh) -> None:
        made = nn.Identity() if type(style).__name__.startswith("Prep") else nn.Linear(8, 8)
        net = parallelize_module(made, mesh, style, axis="tp", others=Shard(0))
        shape = (4, 4, 4) if isinstance(style, RowwiseParallel) else (4, 4, 8)
        with CommDebugMode():
            net(rand(*shape))
        unparallelize_module(net)
        assert not net._forward_hooks and not net._forward_pre_hooks

    on_mesh(f)


def test_an_input_is_moved_over_the_own_axis_only() -> None:
    def f(mesh: DeviceMesh) -> None:
        style = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=R)
        net = parallelize_module(nn.Identity(), mesh, style, axis="tp", others=Shard(0))
        x = rand(4, 8)
        out = net(x.chunk(2)[mesh.get_local_rank("dp")].chunk(2, 1)[mesh.get_local_rank("tp")])
        assert out.placements == (Shard(0), R)
        same(out, x)

    on_mesh(f)
