"""Reductions that are spread over the ranks: right in every case, level, and what arrives is what was divided."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import networkx
import pytest
import torch
from helpers.gloo_ranks import run_ranks
from helpers.reshard_cases import Layout, P, R, as_many, local_of, numbers, pairs, shard_of, spec_of

import dtensor
from dtensor.comm.observers import observers
from dtensor.intervals import region_size
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.placement import Partial, Placement, Shard, StridedShard
from dtensor.redistribute.cost_model import CostModel, use_cost_model
from dtensor.redistribute.executor.run import run_reshard
from dtensor.redistribute.plan import ReshardPlan, Step, plan_reshard
from dtensor.redistribute.planner.balanced_reduction import in_stages, spread
from dtensor.redistribute.planner.division import balanced, boxes_of
from dtensor.redistribute.planner.layout_space import Space
from dtensor.redistribute.planner.single_collective import moving_axes
from dtensor.simulate import fake_world

S0, S1 = Shard(0), Shard(1)


def spread_plan(mesh: DeviceMesh, full: torch.Tensor, src: Layout, dst: Layout) -> ReshardPlan | None:
    """The plan that is one spread reduction; None where there is none."""
    have, want = spec_of(mesh, src, full), spec_of(mesh, dst, full)
    pending = [a for a, (p, q) in enumerate(zip(src, dst)) if isinstance(p, Partial) and p is not q]
    pending = [a for a in pending if mesh.shape[a] > 1]
    if not pending or any(isinstance(q, Partial) and p is not q for p, q in zip(src, dst)) or 0 in full.shape:
        return None
    model = CostModel(wire={torch.bfloat16: torch.float32})
    wire = model.wire.get(full.dtype) if full.dtype.is_floating_point else None
    space = Space(mesh.shape, full.shape, full.itemsize, model, wire, in_stages(have))
    held, wanted = space.facts(src), space.facts(dst)
    over, _ = moving_axes(space, space.put(held, pending, R), wanted)
    axes = tuple(a for a in sorted({*over, *pending}))
    if math.prod(mesh.shape[a] for a in axes) == 1:
        return None
    found = spread(space, held, wanted, axes, pending)
    return None if found is None else ReshardPlan(have, want, found[1], found[0])


def faults(mesh: DeviceMesh, full: torch.Tensor, todo: Sequence[tuple[Layout, Layout]], exact: bool) -> Iterator[str]:
    tried = 0
    for src, dst in todo:
        plan = spread_plan(mesh, full, src, dst)
        if plan is None:
            continue
        tried += 1
        coord = mesh.coord or ()
        x = local_of(full, src, mesh.shape, coord).to(full.dtype)
        before = x.clone()
        seen: list[int] = []
        count = lambda kind, ranks, arrived, itemsize, seen=seen: seen.append(arrived)  # noqa: E731
        observers.append(count)
        y = run_reshard(plan, x)
        observers.remove(count)
        if not as_many(seen, plan) or sum(seen) != plan.received_elements:
            yield f"counted {seen} at {coord}, planned {plan.received_elements}: {plan}"
        late = run_reshard(plan, x.clone(), async_op=True) + 0
        if not torch.equal(x, before) or not y.is_contiguous() or not torch.equal(late, y):
            yield f"wrote to its input, or async differs: {plan}"
        for axis, p in enumerate(dst):
            if isinstance(p, Partial):
                y = mesh.comm(axis).all_reduce(y, p.reduce_op)
        want = shard_of(full, dst, mesh.shape, coord)
        right = y.dtype == want.dtype and y.shape == want.shape
        if not right or not (torch.equal(y, want) if exact else torch.allclose(y, want)):
            yield f"wrong values at {coord}: {plan}"
    if not tried:
        yield "nothing was tried"


def run(
    mesh_shape: tuple[int, ...], full: torch.Tensor, todo: Sequence[tuple[Layout, Layout]], exact: bool = True
) -> None:
    body = lambda: list(faults(init_device_mesh("cpu", mesh_shape), full, todo, exact))  # noqa: E731
    for found in dtensor.simulate(math.prod(mesh_shape))(body):
        assert not found, found[0]


@pytest.mark.parametrize("shape", [(5, 7), (1, 3), (9, 2, 3)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(3,), (4,), (2, 2), (2, 3), (2, 2, 2), (2, 1, 2, 2)], ids=str)
def test_every_pair_gives_the_shard(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    todo = [pair for pair in pairs(mesh_shape, len(shape), 400, seed=len(shape)) if P in pair[0]]
    run(mesh_shape, numbers(shape), todo[:30])


def pairs_of(p: Placement) -> list[tuple[Layout, Layout]]:
    layouts = list(itertools.product([p, R, S0, S1], repeat=2))
    return [(a, b) for a, b in itertools.product(layouts, layouts) if p in a and p not in b][::2]


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product", "band", "bxor"])
def test_reductions(op: str) -> None:
    whole = op in ("band", "bxor")
    full = numbers((5, 6), torch.int64 if whole else torch.float64)
    run((2, 3), full, pairs_of(Partial(op)), exact=op not in ("avg", "product"))
    if op == "avg":
        run((2, 3), numbers((5, 6), torch.int32), pairs_of(Partial(op)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.uint8], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    if dtype == torch.bool:
        run((2, 3), numbers((4, 6), dtype), pairs_of(Partial("bor")))
        return
    full = numbers((4, 6), dtype) % 4 if not dtype.is_complex else numbers((4, 6), dtype)
    run((2, 3), full, pairs_of(Partial()))


def test_what_cannot_be_reduced_in_stages_is_left_alone() -> None:
    def body() -> list[bool]:
        mesh = init_device_mesh("cpu", (2, 3))
        norm = spec_of(mesh, (Partial("norm2"), S0), numbers((4, 6)))
        narrow = spec_of(mesh, (P, S0), numbers((4, 6)).to(torch.float8_e4m3fn))
        short = spec_of(mesh, (Partial("avg"), S0), numbers((4, 6), torch.int32).to(torch.uint16))
        return [in_stages(norm), in_stages(narrow), in_stages(short)]

    assert dtensor.simulate(6)(body)[0] == [False, False, False]


@pytest.mark.parametrize(
    ("src", "dst", "each"),
    [
        ((P, S0), (S0, S0), 896),  # seven quarters of an eighth of 4096
        ((S0, P), (R, S0), 2048),
    ],
    ids=str,
)
def test_all_ranks_receive_alike(src: Layout, dst: Layout, each: int) -> None:
    """The default model takes it, though it launches more, and no rank receives more than the mean by counting."""
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4))
        plan = plan_reshard(*(spec_of(mesh, p, torch.empty(16, 16, 16)) for p in (src, dst)))
        assert {*plan.collectives} == {"spread_reduce"} and "in " in str(plan), str(plan)
        got = [plan.received_by(coord) for coord in itertools.product(range(2), range(4))]
        assert max(got) <= 1.02 * each and sum(got) <= 1.001 * 8 * each, got
        with use_cost_model(CostModel(slack=math.inf)):  # where a launch counts it is not worth it
            plan = plan_reshard(*(spec_of(mesh, p, torch.empty(16, 16, 16)) for p in (src, dst)))
            assert "spread_reduce" not in plan.collectives, str(plan)


def test_pieces_are_a_partition_of_what_is_wanted() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4))
        full = torch.empty(13, 9, 11)
        for src, dst in [((P, S0), (S0, S0)), ((S0, P), (R, S0)), ((S1, P), (S0, S1))]:
            plan = spread_plan(mesh, full, src, dst)
            assert plan is not None
            group = tuple(itertools.product(range(2), range(4)))
            boxes = boxes_of(plan.src, plan.steps[0], group)
            assert sum(region_size(p.region) for p in boxes) == full.numel()
            for p in boxes:
                assert p.reducer in (*p.holders, *p.wanting) and p.last in (-1, *p.holders)
                assert {*p.holders}.isdisjoint(p.wanting) or p.end in p.wanting, p


def highest(loads: Sequence[int], work: Sequence[tuple[int, int, tuple[int, ...]]]) -> float:
    """The least highest load, by maximum flows and bisection."""
    low, high = float(max(loads)), float(max(loads) + sum(n * each for n, each, _ in work))
    for _ in range(40):
        level, graph = (low + high) / 2, networkx.DiGraph()
        for c, (n, each, takers) in enumerate(work):
            graph.add_edge("from", ("class", c), capacity=float(n * each))
            graph.add_edges_from((("class", c), ("rank", t)) for t in takers)
        for t, load in enumerate(loads):
            graph.add_edge(("rank", t), "to", capacity=level - load)
        flow = networkx.maximum_flow_value(graph, "from", "to")
        low, high = (low, level) if flow >= sum(n * each for n, each, _ in work) - 1e-6 else (level, high)
    return high


def test_loads_are_levelled_as_far_as_can_be() -> None:
    draw = random.Random(0)
    for _ in range(25):
        ranks = draw.randint(2, 8)
        loads = [draw.randint(0, 50) for _ in range(ranks)]
        work = [
            (draw.randint(1, 60), draw.randint(0, 3), tuple(draw.sample(range(ranks), draw.randint(1, ranks))))
            for _ in range(draw.randint(1, 10))
        ]
        if not any(each for _, each, _ in work):
            continue
        shares = balanced(loads, work)
        got = [float(n) for n in loads]
        for (n, each, takers), share in zip(work, shares):
            assert sum(share) == pytest.approx(1.0) and min(share) >= 0
            for t, part in zip(takers, share):
                got[t] += n * each * part
        assert max(got) <= 1.005 * highest(loads, work) + 1e-3


def test_the_law_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are left out are seen."""
    from dtensor.redistribute.executor import balanced_reduction

    def seen() -> bool:
        body = lambda: list(  # noqa: E731
            faults(init_device_mesh("cpu", (2, 2)), numbers((8, 8)), [((P, S0), (S0, S0)), ((P, P), (R, S0))], True)
        )
        return any(dtensor.simulate(4)(body))

    assert not seen()
    first = lambda self, parts, k, complete: parts[0].clone()  # noqa: E731
    monkeypatch.setattr(balanced_reduction.BalancedReduction, "_reduced", first)
    assert seen()


def reduced_again_on_gloo(rank: int, world: int) -> None:
    """Reductions by receivers and balanced ones, drawn alike on all ranks: first and later uses.

    All give the same bits, in new memory; inputs stay as they are, with gaps in them or without.
    """
    draw, bad, tried = random.Random(7), [], 0
    meshes = [init_device_mesh("cpu", shape) for shape in ((8,), (2, 4), (2, 2, 2))]
    kinds = [
        ("sum", torch.float32), ("avg", torch.float64), ("sum", torch.bfloat16), ("max", torch.float32),
        ("bor", torch.bool), ("product", torch.float32), ("avg", torch.int32), ("bxor", torch.uint8),
        ("sum", torch.complex64), ("sum", torch.complex128), ("min", torch.int64),
    ]  # fmt: skip
    for _ in range(100):
        mesh, ndim, (op, dtype) = draw.choice(meshes), draw.choice((1, 2, 3)), draw.choice(kinds)
        full = numbers([draw.choice((1, 3, 4, 8, 9)) for _ in range(ndim)], dtype)
        full = full % 4 if dtype in (torch.bfloat16, torch.uint8) else full
        settled: list[Placement] = [R, *[Shard(d) for d in range(ndim)], StridedShard(0, split_factor=2)]
        pending = Partial(op)
        src = [draw.choice([pending, pending, *settled]) for _ in mesh.shape]
        src[draw.randrange(len(src))] = pending
        dst = tuple(draw.choice(settled) for _ in mesh.shape)
        plan, coord = spread_plan(mesh, full, tuple(src), dst), mesh.coord or ()
        if plan is None:
            continue
        step = Step("all_to_all_reduce", plan.steps[0].axes, plan.src.placements, plan.dst.placements)
        for how in (plan, ReshardPlan(plan.src, plan.dst, (step,), 0.0)):
            tried += 1
            given = [local_of(x, tuple(src), mesh.shape, coord).to(dtype) for x in (full, full.flip(0))]
            if draw.random() < 0.3 and rank % 2:
                given[1] = given[1].transpose(0, -1).contiguous().transpose(0, -1)
            before = [x.clone() for x in given]
            with torch.inference_mode() if tried % 3 == 0 else contextlib.nullcontext():
                got = [run_reshard(how, given[i]) for i in (0, 0, 1, 0)]
            got.append(run_reshard(how, given[1], async_op=True).clone())
            want = [shard_of(x, dst, mesh.shape, coord) for x in (full, full.flip(0))]
            for y, i in zip(got, (0, 0, 1, 0, 1)):
                exact = op not in ("avg", "product") or not dtype.is_floating_point
                near = torch.equal(y, want[i]) if exact else torch.allclose(y, want[i])
                same = torch.equal(y, got[0] if i == 0 else got[2])
                if not (near and same and y.dtype is dtype and y.is_contiguous() and torch.equal(given[i], before[i])):
                    bad.append(f"{how} of {dtype}: {near} {same}")
            held = [y.untyped_storage().data_ptr() for y in (*got, *given) if y.numel()]
            if len({*held}) < len(held):
                bad.append(f"{how}: memory is shared")
    assert not bad, bad[:3]
    assert tried > 120, tried


@pytest.mark.processes
def test_later_uses_on_gloo_processes() -> None:
    run_ranks(8, [reduced_again_on_gloo], timeout=200).check()
