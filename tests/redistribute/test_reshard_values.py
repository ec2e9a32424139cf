"""The law of redistribution: what each rank holds afterwards is its shard of the same global tensor.

Run on simulated ranks for pairs over all kinds of placements, on all meshes and shapes of the table; after
every step of a plan, not only after the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.reshard_cases import MESHES, SHAPES, Layout, R, local_of, numbers, pairs, shard_of, spec_of

import dtensor
from dtensor.comm.reduce_ops import reduce_tensors
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.redistribute import geometry
from dtensor.redistribute.cost_model import CostModel, use_cost_model
from dtensor.redistribute.executor import steps
from dtensor.redistribute.executor.run import redistribute_local, run_reshard
from dtensor.redistribute.plan import ReshardPlan, plan_reshard


def check(
    mesh: DeviceMesh, full: torch.Tensor, layout: Layout, local: torch.Tensor, what: str, exact: bool = True
) -> Iterator[str]:
    """Faults of `local` as this rank's part of `full` in `layout`. Pending reductions are carried out first."""
    spec = spec_of(mesh, layout, full)
    if tuple(local.shape) != tuple(spec.local_shape):
        yield f"{what}: shape {tuple(local.shape)} at {mesh.coord}, expected {tuple(spec.local_shape)}"
        return
    if local.dtype != full.dtype:
        yield f"{what}: {local.dtype}, expected {full.dtype}"
    for axis, p in enumerate(layout):
        if isinstance(p, Partial):
            local = mesh.comm(axis).all_reduce(local, p.reduce_op)
    want = shard_of(full, layout, mesh.shape, mesh.coord or ())
    if not (torch.equal(local, want) if exact else torch.allclose(local, want)):
        yield f"{what}: at {mesh.coord} got {local.tolist()}, expected {want.tolist()}"


def faults(mesh: DeviceMesh, full: torch.Tensor, src: Layout, dst: Layout, exact: bool = True) -> Iterator[str]:
    """What goes wrong between `src` and `dst`, after each step and for the way back."""
    a, b = spec_of(mesh, src, full), spec_of(mesh, dst, full)
    x = local_of(full, src, mesh.shape, mesh.coord or ())
    before = x.clone()
    plan = plan_reshard(a, b)
    y = run_reshard(plan, x)
    yield from check(mesh, full, dst, y, str(plan), exact)
    for n in range(1, len(plan.steps)):
        mid = plan.steps[n - 1].dst
        part = ReshardPlan(a, spec_of(mesh, mid, full), plan.steps[:n], 0.0)
        yield from check(mesh, full, mid, run_reshard(part, x), f"first {n} steps of {plan}", exact)
    if not torch.equal(x, before):
        yield f"{plan}: wrote to its input"
    if a is not b:
        yield from check(mesh, full, src, redistribute_local(y, b, a), f"way back of {plan}", exact)


def run(
    mesh_shape: Sequence[int], full: torch.Tensor, todo: Sequence[tuple[Layout, Layout]], exact: bool = True
) -> None:
    size = torch.Size(mesh_shape).numel()
    for found in dtensor.simulate(size)(program, mesh_shape, full, todo, exact):
        assert not found, "\n".join(found[:3])


def program(
    mesh_shape: Sequence[int], full: torch.Tensor, todo: Sequence[tuple[Layout, Layout]], exact: bool = True
) -> list[str]:
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    return [fault for src, dst in todo for fault in faults(mesh, full, src, dst, exact)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_every_pair_gives_the_shard(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    most = {1: 64, 2: 160, 3: 60}[len(mesh_shape)]
    run(mesh_shape, numbers(shape), pairs(mesh_shape, len(shape), most, seed=len(shape)))


def test_four_axes() -> None:
    run((2, 1, 2, 2), numbers((6, 5)), pairs((2, 1, 2, 2), 2, 40))


ORDERED = [(Shard(0), Shard(0)), (R, Shard(0)), (Shard(0), R), (Shard(1), Shard(0)), (Shard(0), Shard(1))]
STRIDED: list[tuple[Placement, ...]] = [(StridedShard(0, split_factor=s), Shard(0)) for s in (1, 2, 3, 5)]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 24])
def test_split_factors_to_and_from_anything(n: int) -> None:
    todo = [(a, b) for a in [*STRIDED, (R, R)] for b in [*ORDERED, *STRIDED]]
    run((2, 3), numbers((n, 2)), todo + [(b, a) for a, b in todo])


def test_many_intervals() -> None:
    """Split factors that leave more runs than are copied one by one, on one and on both dims."""
    layouts = [(StridedShard(0, split_factor=12),), (StridedShard(1, split_factor=11),), (Shard(0),), (R,)]
    run((2,), numbers((48, 44)), [(a, b) for a in layouts for b in layouts])
    both = [(StridedShard(0, split_factor=12), StridedShard(1, split_factor=11)), (Shard(1), Shard(0)), (R, R)]
    run((2, 2), numbers((48, 44)), [(a, b) for a in both for b in both])


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product", "norm2", "norm3.0"])
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_reductions_of_floats(mesh_shape: tuple[int, ...], op: str) -> None:
    p = Partial(op)
    kinds: list[Placement] = [p, R, Shard(0), Shard(1), StridedShard(1, split_factor=2)]
    todo = [(a, b) for a, b in pairs_over(kinds, len(mesh_shape)) if p in a or p in b]
    run(mesh_shape, numbers((5, 6)), todo[:: len(mesh_shape) ** 2], exact=False)


@pytest.mark.parametrize("op", ["band", "bor", "bxor", "sum", "max", "min", "product"])
def test_reductions_of_integers(op: str) -> None:
    p = Partial(op)
    todo = [(a, b) for a, b in pairs_over([p, R, Shard(0)], 2) if p in a or p in b]
    run((2, 2), numbers((5, 3), torch.int64), todo)


def pairs_over(kinds: Sequence[Placement], naxes: int) -> list[tuple[Layout, Layout]]:
    layouts: list[Layout] = [(k,) for k in kinds] if naxes == 1 else [(a, b) for a in kinds for b in kinds]
    return [(a, b) for a in layouts for b in layouts]


def test_sum_and_avg_may_meet() -> None:
    avg = Partial("avg")
    todo: list[tuple[Layout, Layout]] = [
        ((Partial(), R), (avg, R)),
        ((avg, R), (Partial(), R)),
        ((R, avg), (R, Partial())),
    ]

    def body() -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2))
        found = []
        for src, dst in [*todo, ((Partial(), avg), (R, R))]:
            full = numbers((4, 3))
            x = shard_of(full, src, mesh.shape, mesh.coord or ())
            mine = x * 2 if mesh.coord and mesh.coord[0] == 0 else -x
            if src == (Partial(), avg):
                want = redistribute_local(mine, spec_of(mesh, src, full), spec_of(mesh, dst, full))
                found += [] if torch.equal(want, full) else [f"{src} -> {dst}"]
                continue
            one, two = (spec_of(mesh, p, full) for p in (src, dst))
            whole = spec_of(mesh, (R, R), full)
            y = redistribute_local(redistribute_local(mine, one, two), two, whole)
            found += [] if torch.equal(y, redistribute_local(mine, one, whole)) else [f"{src} -> {dst}"]
            if "all_reduce" in plan_reshard(one, two).collectives:
                found.append(f"{src} -> {dst} communicates")
        return found

    for found in dtensor.simulate(4)(body):
        assert not found


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int32, torch.uint8, torch.bfloat16, torch.float16, torch.complex64, torch.float32]
)
def test_dtypes(dtype: torch.dtype) -> None:
    kinds: list[Placement] = [R, Shard(0), Shard(1), StridedShard(0, split_factor=2)]
    run((3,), numbers((7, 4), dtype), pairs_over(kinds, 1))
    if dtype not in (torch.bool, torch.uint8):
        run((3,), numbers((7, 4), dtype) % 8 if not dtype.is_complex else numbers((7, 4), dtype),
            [((Partial(),), (k,)) for k in kinds])  # fmt: skip
    run((3,), numbers((7, 4), dtype), [(a, (Partial(),)) for a in [(k,) for k in kinds]])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16, torch.complex64])
def test_dtypes_that_only_move(dtype: torch.dtype) -> None:
    """Bit by bit, as some have no comparison."""
    kinds: list[Placement] = [R, Shard(0), Shard(1), StridedShard(0, split_factor=2)]
    full = (torch.arange(28).reshape(7, 4) % 13).to(dtype)
    bits = {1: torch.uint8, 2: torch.int16, 8: torch.int64}[dtype.itemsize]

    def body() -> list[str]:
        mesh, bad = init_device_mesh("cpu", (3,)), []
        for src, dst in pairs_over(kinds, 1):
            x = shard_of(full.view(bits), src, mesh.shape, mesh.coord or ()).contiguous().view(dtype)
            y = redistribute_local(x, spec_of(mesh, src, full), spec_of(mesh, dst, full))
            want = shard_of(full.view(bits), dst, mesh.shape, mesh.coord or ())
            bad += [] if y.dtype == dtype and torch.equal(y.view(bits), want) else [f"{src} -> {dst}"]
        return bad

    for bad in dtensor.simulate(3)(body):
        assert not bad


WIRES = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("dtype", "wire"), WIRES, ids=str)
def test_sums_travel_in_the_dtype_of_the_wire(dtype: torch.dtype, wire: torch.dtype) -> None:
    """Parts whose sum, taken in a short dtype, loses what the long one keeps."""
    parts = [torch.tensor([256.0, 1.0]), *[torch.tensor([1.0, 1 / 512])] * 3]
    assert torch.stack(parts).to(torch.bfloat16).sum(0).tolist() != [256.0, 1.0]  # summed exactly, then rounded

    def body() -> list[str]:
        mesh, bad = init_device_mesh("cpu", (2, 2)), []
        x = parts[mesh.get_rank()].to(dtype).repeat(4, 1)
        full = torch.empty(4, 2, dtype=dtype)
        have = spec_of(mesh, (Partial(), Partial()), full)
        for dst in ((R, R), (Shard(0), R), (Shard(0), Shard(1)), (Shard(0), Shard(0)), (Partial(), R)):
            with use_cost_model(CostModel(wire={dtype: wire})):
                want = spec_of(mesh, dst, full)
                plan = plan_reshard(have, want)
                y = redistribute_local(x, have, want)
                late = redistribute_local(x, have, want, async_op=True) + 0
                y = redistribute_local(y, want, spec_of(mesh, (R, R), full))
            sums = reduce_tensors([p.to(wire) for p in parts], "sum")
            if "reduce_scatter" in plan.collectives and len(plan.collectives) > 1 or dst[0] == Partial():
                sums = y[0]  # added up in two steps: any of several roundings
            right = torch.equal(y, sums.to(dtype).expand(4, 2)) and y.dtype == dtype and late.dtype == dtype
            bad += [] if right and f"in {str(wire)[6:]}" in str(plan) else [f"{y.tolist()} {sums} {plan}"]
        return bad

    for bad in dtensor.simulate(4)(body):
        assert not bad, bad[0]


def test_wires_and_bytes() -> None:
    def body() -> list[int]:
        mesh, full = init_device_mesh("cpu", (4,)), torch.empty(16, 8, dtype=torch.bfloat16)
        found: list[int] = []
        wires: list[dict[torch.dtype, torch.dtype]] = [{}, {torch.bfloat16: torch.float32}]
        for wire in wires:
            with use_cost_model(CostModel(wire=wire)):
                found.append(plan_reshard(spec_of(mesh, (Partial(),), full), spec_of(mesh, (R,), full)).steps[0].nbytes)
                pending = spec_of(mesh, (Partial("max"),), full)
                found.append(plan_reshard(pending, spec_of(mesh, (R,), full)).steps[0].nbytes)
        return found

    assert dtensor.simulate(4)(body)[0] == [384, 384, 768, 384]
    with pytest.raises(ValueError, match="float to float"):
        CostModel(wire={torch.int8: torch.float32})


def test_bool_sum_is_or() -> None:
    def body() -> bool:
        mesh = init_device_mesh("cpu", (3,))
        full = torch.tensor([True, False, True, False])
        x = full & (torch.arange(4) % 3 == mesh.coord[0])  # type: ignore[index]
        y = redistribute_local(x, spec_of(mesh, (Partial(),), full), spec_of(mesh, (R,), full))
        return torch.equal(y, full)

    assert all(dtensor.simulate(3)(body))


def test_scalars() -> None:
    run((3,), torch.tensor(5.0), [((Partial(),), (R,)), ((R,), (Partial(),)), ((R,), (R,))])
    run((2, 2), torch.tensor(5.0), [((Partial(), Partial()), (R, R)), ((Partial(), R), (R, Partial()))])


def test_inputs_that_are_not_contiguous() -> None:
    def body() -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2))
        full = numbers((6, 4, 5))
        found: list[str] = []
        for src, dst in pairs((2, 2), 3, 80, seed=3):
            x = local_of(full, src, mesh.shape, mesh.coord or ())
            odd = (
                torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype).transpose(0, 1).contiguous().transpose(0, 1)
            )
            odd[..., ::2] = x
            y = redistribute_local(odd[..., ::2], spec_of(mesh, src, full), spec_of(mesh, dst, full))
            found += check(mesh, full, dst, y, f"{src} -> {dst}")
        return found

    for found in dtensor.simulate(4)(body):
        assert not found, found[0]


# ------------------------------------------------------------ the law can fail
def _one_fault(mesh_shape: Sequence[int], src: Layout, dst: Layout) -> bool:
    return any(dtensor.simulate(torch.Size(mesh_shape).numel())(program, mesh_shape, numbers((8, 8)), [(src, dst)]))


BROKEN: list[tuple[tuple[int, ...], Layout, Layout]] = [
    ((2,), (Shard(0),), (R,)),
    ((4,), (Shard(0),), (Shard(1),)),
    ((2,), (Partial(),), (Shard(0),)),
    ((2, 2), (Shard(0), Shard(0)), (Shard(1), Shard(1))),
]


@pytest.mark.parametrize(("mesh_shape", "src", "dst"), BROKEN, ids=str)
def test_wrong_positions_are_caught(
    mesh_shape: tuple[int, ...], src: Layout, dst: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _one_fault(mesh_shape, src, dst)
    right = steps.parts_along

    def reversed_parts(*args: Any) -> geometry.Parts:
        parts = right(*args)
        return geometry.Parts(parts.shape, parts.count, lambda: parts.regions[::-1])

    monkeypatch.setattr(steps, "parts_along", reversed_parts)
    assert _one_fault(mesh_shape, src, dst)


def test_a_missing_fill_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps._BIND, "zero_fill", steps._keep)
    assert _one_fault((2,), (Replicate(),), (Partial(),))


def test_check_sees_each_kind_of_fault() -> None:
    def body() -> list[int]:
        mesh = init_device_mesh("cpu", (1,))
        full = numbers((2, 2))
        wrong = [full + 1, full[:1], full.float()]
        return [len(list(check(mesh, full, (R,), x, ""))) for x in [full, *wrong]]

    assert dtensor.simulate(1)(body)[0] == [0, 1, 1, 1]
