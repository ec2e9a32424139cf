"""From one mesh to another: values, who receives how much, gradients, errors."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.gloo_ranks import run_ranks
from helpers.reshard_cases import Layout, P, R, local_of, numbers, shard_of, spec_of

import dtensor
from dtensor import DTensor, distribute_tensor
from dtensor.comm.observers import observers
from dtensor.errors import MeshError
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.placement import Partial, Placement, Shard, StridedShard
from dtensor.redistribute.cross_mesh import plan_between, redistribute_between
from dtensor.simulate import fake_world
from dtensor.spec import Spec, contiguous_stride

S0, S1 = Shard(0), Shard(1)
KINDS: list[Placement] = [R, S0, S1, StridedShard(0, split_factor=2)]
GRIDS: dict[str, tuple[Any, Any]] = {
    "another shape": ([0, 1, 2, 3, 4, 5], [[0, 1, 2], [3, 4, 5]]),
    "another order": ([[0, 1, 2], [3, 4, 5]], [[5, 3], [1, 0], [2, 4]]),
    "no rank in common": ([0, 2], [[1, 3], [4, 5]]),
    "some in common": ([[0, 1], [2, 3]], [2, 3, 4]),
    "to fewer": ([[0, 1], [2, 3]], [1]),
    "to more": ([3], [[0, 1, 2], [3, 4, 5]]),
}


def on_ranks(n: int, body: Callable[[], list[str]]) -> None:
    for found in dtensor.simulate(n)(body):
        assert not found, found[0]


def layouts(grid: Any, kinds: list[Placement]) -> list[Layout]:
    return list(itertools.product(kinds, repeat=torch.tensor(grid).ndim))


def part(mesh: DeviceMesh, full: torch.Tensor, layout: Layout) -> torch.Tensor:
    return full.new_empty(0) if mesh.coord is None else local_of(full, layout, mesh.shape, mesh.coord)


@pytest.mark.parametrize("shape", [(12, 6), (7, 5), (2, 3)], ids=str)
@pytest.mark.parametrize("name", GRIDS)
def test_every_pair_gives_the_shard(name: str, shape: tuple[int, ...]) -> None:
    one, two = GRIDS[name]
    rng = random.Random(0)
    todo = list(itertools.product(layouts(one, [*KINDS, P]), layouts(two, KINDS)))
    todo = rng.sample(todo, min(40, len(todo)))
    full = numbers(shape)

    def body() -> list[str]:
        a, b = DeviceMesh("cpu", one), DeviceMesh("cpu", two)
        bad = []
        for src, dst in todo:
            have, want = spec_of(a, src, full), spec_of(b, dst, full)
            seen: list[int] = []
            count = lambda kind, ranks, arrived, itemsize, seen=seen: seen.append(arrived)  # noqa: E731
            observers.append(count)
            x = part(a, full, src)
            kept = x.clone()
            y = redistribute_between(x, have, want)
            observers.remove(count)
            plan = plan_between(have, want)
            if b.coord is None:
                bad += [] if y.numel() == 0 else [f"{plan}: {tuple(y.shape)} outside"]
            elif not torch.equal(y, shard_of(full, dst, b.shape, b.coord)):
                bad.append(f"{plan}: wrong values")
            if P not in src:
                lacks = 0
                if b.coord is not None:
                    ids = torch.arange(full.numel()).reshape(shape)
                    held = set() if a.coord is None else set(shard_of(ids, src, a.shape, a.coord).flatten().tolist())
                    lacks = len(set(shard_of(ids, dst, b.shape, b.coord).flatten().tolist()) - held)
                bad += [] if sum(seen) == lacks and len(seen) <= 1 else [f"{plan}: {seen} for {lacks} lacking"]
            bad += [] if torch.equal(x, kept) else [f"{plan}: wrote to its input"]
        return bad

    on_ranks(6, body)


def test_the_same_ranks_need_not_communicate() -> None:
    def body() -> list[str]:
        line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        full, bad = numbers((8, 4)), []
        pairs: list[tuple[Layout, Layout]] = [((S0,), (S0, S0)), ((R,), (R, R)), ((R,), (S0, S1)), ((S1,), (S1, S1))]
        for src, dst in pairs:
            plan = plan_between(spec_of(line, src, full), spec_of(grid, dst, full))
            bad += [str(plan)] if plan.collectives else []
        return bad

    on_ranks(4, body)


def test_a_slice_and_its_mesh() -> None:
    """A slice stands for the mesh: to it and from it is a redistribution on one mesh."""

    def body() -> list[str]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        tp, dp = mesh["tp"], mesh["dp"]
        full, bad = numbers((7, 6)), []
        cases: list[tuple[DeviceMesh, Layout, DeviceMesh, Layout, int]] = [
            (tp, (S0,), mesh, (R, S0), 0), (tp, (S0,), mesh, (S1, S0), 0), (tp, (S0,), mesh, (R, R), 1),
            (mesh, (S0, S1), tp, (S1,), 1), (mesh, (R, S1), tp, (S1,), 0), (tp, (P,), mesh, (R, R), 1),
            (mesh, (P, S0), tp, (S0,), 1), (tp, (S0,), dp, (S0,), 1), (dp, (R,), tp, (S1,), 0),
            (tp, (P,), dp, (S0,), 2),
        ]  # fmt: skip
        for a, src, b, dst, most in cases:
            have, want = spec_of(a, src, full), spec_of(b, dst, full)
            y = redistribute_between(part(a, full, src), have, want)
            plan = plan_between(have, want)
            bad += [] if torch.equal(y, shard_of(full, dst, b.shape, b.coord or ())) else [f"wrong: {plan}"]
            bad += [] if len(plan.collectives) <= most else [str(plan)]
        return bad

    on_ranks(6, body)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.complex64])
def test_dtypes_and_numbers(dtype: torch.dtype) -> None:
    def body() -> list[str]:
        a, b = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 1, 3])
        bad = []
        for full, src, dst in ((numbers((5, 3), dtype), S0, S1), (numbers((), dtype), R, R)):
            x = part(a, full, (src,)) if a.coord else full.new_zeros([0] if full.ndim else [])
            y = redistribute_between(x, spec_of(a, (src,), full), spec_of(b, (dst,), full))
            if b.coord is not None and not torch.equal(y, shard_of(full, (dst,), b.shape, b.coord)):
                bad.append(f"{dtype} {full.ndim}: {y}")
        return bad

    on_ranks(4, body)


def test_public_call_and_its_gradient() -> None:
    def body() -> list[str]:
        a, b = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [[1, 2], [3, 0]])
        full = torch.arange(24.0).reshape(6, 4)
        x = distribute_tensor(full, a, [S0]).requires_grad_()
        y = x.redistribute(b, [S1, R])
        z = (y * y).redistribute(a, [R])
        bad = [] if y.placements == (S1, R) and y.device_mesh == b and y.shape == full.shape else [repr(y)]
        z.sum().redistribute(placements=[R]).backward()
        grad = x.grad
        assert isinstance(grad, DTensor)
        if a.coord is not None:
            bad += [] if torch.equal(z.to_local(), full * full) else ["values"]
            bad += [] if torch.equal(grad.to_local(), shard_of(2 * full, (S0,), a.shape, a.coord)) else ["gradient"]
        late = x.detach().redistribute(b, [R, S0], async_op=True)
        if b.coord is not None:
            bad += [] if torch.equal(late.to_local() + 0, shard_of(full, (R, S0), b.shape, b.coord)) else ["late"]
        return bad

    on_ranks(4, body)


@pytest.mark.parametrize("name", GRIDS)
def test_gradients_come_back_over_meshes(name: str) -> None:
    """Uneven shards and a pending source; meshes that share no rank; every rank of neither mesh takes no part."""
    one, two = GRIDS[name]

    def body() -> list[str]:
        a, b = DeviceMesh("cpu", one), DeviceMesh("cpu", two)
        full, weight = numbers((7, 5)), numbers((7, 5)) % 4 - 1.5
        whole, bad = [R] * a.ndim, []
        for src, dst in itertools.product((S0, S1, R), (S0, S1, R)):
            x = distribute_tensor(full, a, [src, *whole[1:]]).requires_grad_()
            y = x.redistribute(b, [dst] * b.ndim) * distribute_tensor(weight, b, [dst] * b.ndim)
            total = x.sum(0).redistribute(b, [S0, *[R] * (b.ndim - 1)])
            back = y.redistribute(a, [S1, *whole[1:]]).sum() + (total * total).sum().redistribute(a, whole)
            back.redistribute(placements=whole).backward()
            grad = x.grad
            assert isinstance(grad, DTensor)
            if a.coord is not None and not torch.allclose(grad.full_tensor(), weight + 2 * full.sum(0)):
                bad.append(f"{src} {dst}")
            bad += [] if grad.placements == x.placements else [repr(grad.placements)]
        return bad

    on_ranks(6, body)


def test_pending_tensors_without_elements() -> None:
    def body() -> list[bool]:
        a, b = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [3])
        found = []
        for shape in ((0, 3), (3, 0), (0,)):
            x = DTensor.from_local(torch.zeros(shape), a, [Partial("min")])
            y = x.redistribute(b, [R])
            found.append(b.coord is None or y.to_local().shape == shape)
        return found

    assert all(all(found) for found in dtensor.simulate(4)(body))


def test_errors() -> None:
    with fake_world(4):
        a, b = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        full = numbers((4, 4))
        with pytest.raises(dtensor.errors.LayoutError, match="pending reduction"):
            plan_between(spec_of(a, (S0,), full), spec_of(b, (Partial(), R), full))
        with pytest.raises(dtensor.errors.LayoutError, match="global shape"):
            plan_between(spec_of(a, (S0,), full), spec_of(b, (R, R), numbers((4, 5))))
        meta = Spec.make(DeviceMesh("meta", [0, 1]), (R,), (4, 4), contiguous_stride((4, 4)), full.dtype)
        with pytest.raises(MeshError, match="one kind of device"):
            plan_between(spec_of(a, (S0,), full), meta)
        x = DTensor.from_local(torch.ones(1, 4), a, [S0])
        with pytest.raises(RuntimeError, match="pending reduction"):
            x.redistribute(b, [Partial(), R])
        with pytest.raises(ValueError, match="placements"):
            x.redistribute(b, [R])
        with pytest.raises(RuntimeError, match="placements are needed"):
            x.redistribute(b)


def test_text() -> None:
    with fake_world(6):
        a, b = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3, 4])
        text = str(plan_between(spec_of(a, (P,), numbers((6, 4))), spec_of(b, (S0,), numbers((6, 4)))))
        assert (
            "1. reduce_scatter over 0" in text and "2. all_to_all over the ranks of both meshes, receives 64 B" in text
        )


def on_gloo(rank: int, world: int) -> None:
    a, b = DeviceMesh("cpu", [[0, 3], [2, 1]]), DeviceMesh("cpu", [3, 2])
    full = numbers((5, 7))
    for src, dst in itertools.product([(S0, S1), (P, S0), (R, R)], [(S0,), (R,), (S1,)]):
        y = redistribute_between(part(a, full, src), spec_of(a, src, full), spec_of(b, dst, full))
        assert b.coord is None or torch.equal(y, shard_of(full, dst, b.shape, b.coord)), (src, dst)
        back = redistribute_between(y, spec_of(b, dst, full), spec_of(a, (S1, S0), full))
        assert torch.equal(back, shard_of(full, (S1, S0), a.shape, a.coord or ())), (src, dst)


@pytest.mark.processes
def test_on_gloo_processes() -> None:
    run_ranks(4, [on_gloo], timeout=180).check()


def test_numbers_of_collectives_are_bounded() -> None:
    with fake_world(8):
        a, b = init_device_mesh("cpu", (8,)), init_device_mesh("cpu", (2, 2, 2))
        full = numbers((16, 16))
        for src, dst in itertools.product(layouts([0], [*KINDS, P]), itertools.product(KINDS, repeat=3)):
            plan = plan_between(spec_of(a, src, full), spec_of(b, dst, full))
            assert len(plan.collectives) <= (2 if P in src else 1) and math.isfinite(plan.first.cost)
