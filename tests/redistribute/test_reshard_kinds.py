"""Redistributions of every dtype with every reduction: the group's own calls and functional collectives, bit for bit.

The specification is `dtensor.comm.reduce_ops.reduce_tensors` over all ranks' tensors, and the shards of that.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.gloo_ranks import run_ranks
from helpers.reshard_cases import Layout, shard_of, spec_of

from dtensor.comm import issue
from dtensor.comm.encodings import reduction
from dtensor.comm.reduce_ops import reduce_tensors
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.redistribute.cost_model import CostModel, use_cost_model
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.redistribute.plan import plan_reshard

R = Replicate()
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [
    *FLOATS, torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip
OPS = ["sum", "avg", "min", "max", "product", "band", "bor", "bxor", "norm0", "norm2"]
SPECIAL = [float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.5, -1.5]


def reduces(op: str, dtype: torch.dtype) -> bool:
    """True where `dtype` has the reduction, here and in torch."""
    if dtype == torch.uint64 and op not in ("product", "band", "bor", "bxor"):
        return False  # torch has no sum of them
    if op.startswith("norm"):
        return dtype in FLOATS
    if op in ("band", "bor", "bxor"):
        return not dtype.is_floating_point and not dtype.is_complex
    return not (dtype.is_complex and op in ("min", "max"))


def values(shape: Sequence[int], dtype: torch.dtype, op: str, seed: int, special: bool) -> torch.Tensor:
    """Small numbers, exact in every dtype; with `special`, NaN of either sign, infinities and zeros of either sign."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 4, tuple(shape), generator=g).double()
    if dtype.is_complex:
        return torch.complex(x, torch.randint(0, 4, tuple(shape), generator=g).double()).to(dtype)
    if dtype.is_signed and not op.startswith("norm"):
        x = x - 2
    if special and dtype in FLOATS:
        some = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), tuple(shape), generator=g)].double()
        x = torch.where(torch.rand(tuple(shape), generator=g) < 0.3, some, x)
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Every bit, but one NaN is as good as another."""
    if x.dtype.is_floating_point and x.itemsize > 1:
        x = torch.where(x.isnan(), torch.full((), float("nan"), dtype=x.dtype), x)
    return (torch.view_as_real(x) if x.dtype.is_complex else x).flatten().clone().view(torch.uint8)


def alike(x: torch.Tensor, y: torch.Tensor, near: bool = False) -> bool:
    """Equal as numbers, NaN to NaN; `near`: but for the last bits."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.dtype.is_complex:
        x, y = x.double(), y.double()
    return torch.allclose(x, y, rtol=1e-2 if near else 0.0, atol=0.0, equal_nan=True)


Case = tuple[Layout, Layout, tuple[int, ...], torch.dtype, str]


def cases(mesh: Sequence[int], seed: int, count: int, sizes: Sequence[int]) -> Iterator[Case]:
    """Layouts, shape, dtype and reduction, drawn alike on all ranks; every dtype with every reduction comes first."""
    draw = random.Random(seed)
    both = [(d, op) for d, op in itertools.product(DTYPES, OPS) if reduces(op, d)]
    draw.shuffle(both)
    for i in range(count):
        dtype, op = both[i % len(both)]
        ndim = draw.choice((1, 2, 2, 3))
        shape = tuple(draw.choice(sizes) for _ in range(ndim))
        shards: list[Placement] = [Shard(draw.randrange(ndim)) for _ in range(3)]
        settled = [R, *shards, StridedShard(draw.randrange(ndim), split_factor=2)]
        src = [draw.choice(settled) for _ in mesh]
        if draw.random() < 0.85:
            src[draw.randrange(len(mesh))] = Partial(op)
        if draw.random() < 0.2:
            src = [Partial(op) for _ in mesh]
        yield tuple(src), tuple(draw.choice(settled) for _ in mesh), shape, dtype, op


def given(mesh: DeviceMesh, case: Case, seed: int, special: bool) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """This rank's part of the source, its part of what is right, and whether any order of reducing gives that."""
    src, dst, shape, dtype, op = case
    coord = mesh.coord or ()
    pending = [a for a, p in enumerate(src) if isinstance(p, Partial)]
    k, at = 1, 0
    for a in pending:
        k, at = k * mesh.shape[a], at * mesh.shape[a] + coord[a]
    wholes = [values(shape, dtype, op, 100 * seed + i, special) for i in range(k)]
    settled = tuple(R if isinstance(p, Partial) else p for p in src)
    total = reduce_tensors(wholes, op) if pending else wholes[0]
    in_stages = len(pending) > 1 and (op == "norm2" or (op == "avg" and not dtype.is_floating_point))
    mine = shard_of(wholes[at], settled, mesh.shape, coord).clone()
    return mine, shard_of(total, dst, mesh.shape, coord), not in_stages and not (pending and dtype.itemsize == 1)


def faults(mesh: DeviceMesh, case: Case, number: int) -> list[str]:
    """First use, uses of what is bound, in between and at last a rank or two that go the general way; and async."""
    src, dst, shape, dtype, op = case
    like = torch.empty(shape, dtype=dtype)
    spec, target = spec_of(mesh, src, like), spec_of(mesh, dst, like)
    special, rank, bad = number % 3 == 0 and op != "product", mesh.get_rank(), []
    x, want, exact = given(mesh, case, number, special)
    other, want_other, _ = given(mesh, case, number + 1000, False)
    gapped = x.transpose(0, -1).contiguous().transpose(0, -1)
    shifted = torch.cat([x.flatten(), x.flatten()])[x.numel() :].view(x.shape)
    here = any(s.kind in ("all_to_all_reduce", "spread_reduce") for s in plan_reshard(spec, target).steps)
    equal = alike if here else lambda y, z: torch.equal(bits(y), bits(z))  # torch.maximum may give either zero
    general = redistribute_local(x, spec, target)
    kept = [general]
    uses = (
        ("bound", x, want), ("bound other", other, want_other), ("again", x, want), ("shifted", shifted, want),
        ("one general", gapped if rank == number % 4 else x, want), ("others", gapped if rank % 2 else shifted, want),
    )  # fmt: skip
    for name, given_x, right in uses:
        before = bits(given_x)
        y = redistribute_local(given_x, spec, target)
        same = right is not want or equal(y, general) or op == "norm2"
        fine = (not exact or alike(y, right, op == "norm2")) and same and y.dtype is dtype
        alone = y is given_x or (y.is_contiguous() and all(apart(y, z) for z in (given_x, *kept)))
        if not fine or not alone or not torch.equal(bits(given_x), before):
            bad.append(
                f"{name} {number}: {src} -> {dst} of {shape} {dtype} {op}: {fine} {alone}\n{y}\n{general}\n{right}"
            )
        kept.append(y)
    late = redistribute_local(x.clone(), spec, target, async_op=True)
    if not equal(late.clone(), general) and op != "norm2":
        bad.append(f"async {number}: {case}")
    if not exact or alike(general, want, op == "norm2"):
        return bad
    return [*bad, f"general {number}: {case}\n{general}\n{want}"]


def apart(x: torch.Tensor, y: torch.Tensor) -> bool:
    return not x.numel() or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()


def drawn(seed: int, counts: Sequence[int], sizes: Sequence[int]) -> None:
    for shape, count in zip(((4,), (2, 2)), counts):
        mesh, bad = init_device_mesh("cpu", shape), []
        for i, case in enumerate(cases(shape, seed, count, sizes)):
            bad += faults(mesh, case, i)
        assert not bad, "\n".join(bad[:3])


def small_on_gloo(rank: int, world: int) -> None:
    """Even, uneven and empty shards."""
    drawn(1, (60, 24), (1, 2, 3, 4, 5, 7, 8, 0))


def larger_on_gloo(rank: int, world: int) -> None:
    """Parts that are copied box by box, and gathered straight into the result, smaller ones by way of spare tensors."""
    drawn(2, (8, 6), (8, 64, 67, 130))
    line, square, bad = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2)), []
    for dtype in (torch.float32, torch.complex128, torch.bool):
        bad += faults(square, ((Shard(0), Shard(1)), (R, R), (67, 131), dtype, "sum"), 1)
        bad += faults(line, ((Shard(1),), (R,), (67, 131), dtype, "sum"), 1)
        bad += faults(
            line, ((Shard(2),), (Shard(0),), (67, 67, 1), dtype, "sum"), 1
        )  # one rank has all: it gets nothing
    assert not bad, bad[:3]


def counted_on_gloo(rank: int, world: int) -> None:
    """Every dtype with every reduction, parts even, padded and listed: the group's own calls, none functional."""
    mesh, calls, bad = init_device_mesh("cpu", (4,)), [], []
    original = issue._functional
    shapes = itertools.cycle(((8, 8), (5, 7), (9, 67), (9, 2)))

    def counting(*args: Any) -> Any:
        calls.append(args[1])
        return original(*args)

    issue._functional = counting
    try:
        for dtype in DTYPES:
            moves: list[tuple[Placement, Placement, str]] = [
                (Shard(0), R, ""),
                (Shard(1), Shard(0), ""),
                (Shard(1), R, ""),
            ]
            for op in [op for op in OPS if reduces(op, dtype)]:
                moves += [(Partial(op), dst, op) for dst in (R, Shard(0), Shard(1))]
            for src, dst, op in moves:
                shape = next(shapes)
                x, want, exact = given(mesh, ((src,), (dst,), shape, dtype, op), 0, False)
                like, before = torch.empty(shape, dtype=dtype), bits(x)
                seen, got = [], []
                for _ in range(3):
                    del calls[:]
                    got.append(redistribute_local(x, spec_of(mesh, (src,), like), spec_of(mesh, (dst,), like)))
                    seen.append(len(calls))
                same = op == "norm2" or torch.equal(bits(got[0]), bits(got[2]))
                right = not exact or alike(got[2], want, op == "norm2")
                if seen != [0, 0, 0] or not (same and right and torch.equal(bits(x), before)):
                    bad.append(f"{src} -> {dst} of {shape} {dtype}: {seen} {same} {right}")
    finally:
        issue._functional = original
    assert not bad, bad[:5]


def wire_on_gloo(rank: int, world: int) -> None:
    """Sums that travel in another dtype."""
    mesh, bad = init_device_mesh("cpu", (4,)), []
    for dtype, wire in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.complex64, torch.complex128),
    ):
        with use_cost_model(CostModel(wire={dtype: wire})):
            for shape, dst, op in (((5, 7), R, "sum"), ((5, 7), Shard(0), "avg"), ((8, 8), Shard(1), "sum")):
                bad += faults(mesh, ((Partial(op),), (dst,), shape, dtype, op), 1)
    assert not bad, "\n".join(bad[:3])


@pytest.mark.processes
def test_on_gloo_processes() -> None:
    run_ranks(4, [small_on_gloo, larger_on_gloo, counted_on_gloo, wire_on_gloo], timeout=120).check()


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_travel_as_integers_of_their_order(dtype: torch.dtype, op: str) -> None:
    """Every special value against every other, and every bfloat16 there is: NaN of either sign is beyond infinity."""
    how = reduction(op, dtype, 4, True)
    assert how.encode is not None and how.decode is not None and how.wire == op
    some = torch.tensor([*SPECIAL, 3e-45, -3e-45, 1e38, -1e38]).to(dtype)
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).to(dtype)
    for a, b in ((some.repeat_interleave(len(some)), some.repeat(len(some))), (patterns, patterns.flip(0))):
        kept = a.clone()
        codes = how.encode(a), how.encode(b)
        best = torch.maximum(*codes) if op == "max" else torch.minimum(*codes)
        assert not best.dtype.is_floating_point and torch.equal(bits(a), bits(kept))
        got, want = how.decode(best.clone()), torch.maximum(a, b) if op == "max" else torch.minimum(a, b)
        assert alike(got, want)
        zeros = (a == 0) & (b == 0)  # of which the sign is that of the order: -0.0 below 0.0
        first = a.signbit() & b.signbit() if op == "max" else a.signbit() | b.signbit()
        assert torch.equal(got[zeros].signbit(), first[zeros])
        assert torch.equal(bits(how.decode(how.encode(a).clone())), bits(a))


def test_what_is_compared_can_fail() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert torch.equal(bits(nan), bits(-nan.clone().copysign(nan))) is False and not alike(nan, torch.ones(2))
    assert torch.equal(bits(torch.tensor([0.0])), bits(torch.tensor([-0.0]))) is False
    assert alike(nan, nan.clone()) and not alike(nan, nan.double())
