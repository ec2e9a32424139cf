"""Tensors on meta and of a trace send what tensors with values send: CommDebugMode counts the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor
from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    init_device_mesh,
)  # fmt: skip
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from dtensor.simulate import fake_world
from dtensor.spec import Spec, contiguous_stride

R, P = Replicate(), Partial()
Counted = tuple[dict[str, int], list[tuple[str, int]]]
Program = Callable[[str, DeviceMesh], object]


def counted(program: Program, device: str, mesh: DeviceMesh) -> Counted:
    """Bytes by kind, and every collective in order."""
    with CommDebugMode() as mode:
        program(device, mesh)
    return mode.get_comm_bytes(), [
        (e.collective.kind, e.collective.nbytes) for e in mode.events if e.collective is not None
    ]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyz"[: len(shape)]))


@contextmanager
def fake_group(size: int) -> Iterator[None]:
    """torch's own process group that carries nothing, of whose ranks this is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ways(program: Program, shape: tuple[int, ...]) -> dict[str, Counted]:
    """`program` counted on every kind of world, with every kind of tensor that the world takes."""
    size, found = torch.Size(shape).numel(), {}
    with fake_world(size):
        found["fake world, cpu"] = counted(program, "cpu", mesh_of(shape))
        found["fake world, meta"] = counted(program, "meta", mesh_of(shape))
        with FakeTensorMode():
            found["fake world, trace"] = counted(program, "cpu", mesh_of(shape))
    with fake_group(size):
        found["group, cpu"] = counted(program, "cpu", mesh_of(shape))
        found["group, meta"] = counted(program, "meta", mesh_of(shape))
        with FakeTensorMode():
            found["group, trace"] = counted(program, "cpu", mesh_of(shape))
    run = dtensor.simulate(size)
    for device in ("cpu", "meta"):
        found[f"simulated, {device}"] = run(lambda d=device: counted(program, d, mesh_of(shape)))[0]
    return found


def alike(program: Program, shape: tuple[int, ...]) -> None:
    """Fails unless something is sent, and meta tensors and tensors of a trace send what tensors with values send."""
    found = ways(program, shape)
    for world in ("fake world", "group", "simulated"):
        want = found[f"{world}, cpu"]
        assert want[0], "nothing was sent"
        for kind in ("meta", "trace"):
            got = found.get(f"{world}, {kind}", want)
            assert got == want, f"{world}: {kind} {got}, with values {want}"


def local_of(shape: tuple[int, ...], mesh: DeviceMesh, layout: tuple[Placement, ...], device: str) -> DTensor:
    spec = Spec.make(mesh, layout, shape, contiguous_stride(shape), torch.float32)
    return DTensor.from_local(
        torch.ones(spec.local_shape, device=device), mesh, layout, shape=shape, stride=spec.stride, run_check=False
    )


LAYOUTS = [Shard(0), Shard(1), R, P]


@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (2, 1)])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_redistributions(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    pairs = [
        (a, b) for a, b in product(product(LAYOUTS, repeat=len(mesh)), repeat=2) if a != b and P not in b
    ][:: 1 if len(mesh) == 1 else 5]  # fmt: skip
    if len(mesh) == 2:
        pairs += [((Shard(0), Shard(0)), (R, R)), ((Shard(0), StridedShard(0, split_factor=2)), (Shard(1), R))]

    def program(device: str, m: DeviceMesh) -> None:
        for src, dst in pairs:
            for _ in range(3):  # the general way, then what is bound
                local_of(shape, m, src, device).redistribute(placements=dst)

    alike(program, mesh)


def train(device: str, mesh: DeviceMesh) -> None:
    with torch.device(device):
        net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)
        )
        x = torch.ones(4, 6, 8)
    plan = {"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(net, mesh, plan | {"3": SequenceParallel()})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        out = net(x[:, :2])
        (out if isinstance(out, DTensor) else DTensor.from_local(out, mesh, [Shard(1)])).sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def mixed(device: str, mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 10, device=device), mesh, [Shard(0)])
    (x @ x.T).softmax(0).cumsum(1).sum()
    x[2:7].flip(0).sort(dim=0)
    targets = distribute_tensor(torch.zeros(8, dtype=torch.long, device=device), mesh, [R])
    torch.nn.functional.cross_entropy(x, targets).full_tensor()
    x.full_tensor()


@pytest.mark.parametrize("program", [train, mixed])
def test_programs(program: Program) -> None:
    alike(program, (4,))


def draws(device: str, mesh: DeviceMesh) -> None:
    for layout in ([R, R], [R, Shard(0)], [Shard(1), R], [P, Shard(0)]):
        x = local_of((4, 6), mesh, tuple(layout), device)
        torch.rand_like(x)
        torch.nn.functional.dropout(x, 0.5)
        torch.bernoulli(x * 0)


def test_draws() -> None:
    """In a trace over a process group the ranks share a number, and send less."""
    found = ways(draws, (2, 2))
    for world, kind in (("fake world", "meta"), ("fake world", "trace"), ("group", "meta"), ("simulated", "meta")):
        assert found[f"{world}, {kind}"] == found[f"{world}, cpu"], (world, kind)
        assert found[f"{world}, cpu"][1]


def test_a_difference_is_told() -> None:
    with pytest.raises(AssertionError, match="meta"):
        alike(lambda device, m: local_of((8, 8), m, (Shard(0),), device).redistribute(
            placements=[R if device == "cpu" else Shard(1)]), (4,))  # fmt: skip
