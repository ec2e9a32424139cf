"""Redistributions drawn at random: every step leaves what it says, and no more is received than was planned.

A case is a mesh, a shape (also uneven, of one element a dim, empty, without dims), two layouts of all kinds of
placements and a cost model. On simulated ranks its plan is run as a whole and step by step.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from helpers.reshard_cases import Layout, R, as_many, local_of, numbers, shard_of, spec_of

import dtensor
from dtensor.comm.observers import observers
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.placement import Partial, Placement, Shard, StridedShard
from dtensor.redistribute.cost_model import CostModel, use_cost_model
from dtensor.redistribute.executor.run import run_reshard
from dtensor.redistribute.plan import ReshardPlan, plan_reshard

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (1, 3), (4, 2), (2, 2, 2), (2, 1, 2))
MODELS = (
    CostModel(),
    CostModel(slack=math.inf),
    CostModel(pairwise=4.0, slack=math.inf),
    CostModel(latency=0.0, hop=0.0, pairwise=0.0, slack=math.inf),
    CostModel(hop=4e-6, axis_bandwidth={0: 1e9, 1: 2e9, 2: 4e9}, slack=math.inf),
    CostModel(axis_latency={0: 2e-5}, axis_bandwidth={0: 1e7}, slack=math.inf),
    CostModel(hop=1e-3, kinds={"all_to_all": (0.3, 0.5), "all_reduce": (0.9, 1.0)}, slack=math.inf),
)
CASES = 400


class Case(NamedTuple):
    """What is drawn."""

    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    model: CostModel


def drawn(draw: random.Random, mesh: tuple[int, ...]) -> Case:
    ndim = draw.choice([0, 1, 2, 2, 3, 3])
    sizes = draw.choice([(8, 12, 16), (0, 1, 2, 3, 4, 5, 6, 7, 9, 12)])
    op = draw.choice(["sum", "sum", "sum", "avg", "max", "min"])

    def placement(pending: bool) -> Placement:
        kinds = ["R", "S", "S", "F"] if ndim else ["R"]
        kind = draw.choice([*kinds, "P"] if pending else kinds)
        if kind in "RP":
            return R if kind == "R" else Partial(op)
        dim = draw.randrange(ndim)
        return Shard(dim) if kind == "S" else StridedShard(dim, split_factor=draw.choice([2, 2, 3]))

    shape = tuple(draw.choice(sizes) for _ in range(ndim))
    src = tuple(placement(True) for _ in mesh)
    dst = tuple(placement(draw.random() < 0.3) for _ in mesh)
    return Case(mesh, shape, src, dst, draw.choice(MODELS))


def faults(mesh: DeviceMesh, case: Case) -> Iterator[str]:
    full, coord = numbers(case.shape), mesh.coord or ()
    with use_cost_model(case.model):
        plan = plan_reshard(spec_of(mesh, case.src, full), spec_of(mesh, case.dst, full))
    x = local_of(full, case.src, case.mesh, coord)
    before, seen = x.clone(), []
    count = lambda kind, ranks, arrived, itemsize: seen.append(arrived)  # noqa: E731
    observers.append(count)
    y = run_reshard(plan, x)
    observers.remove(count)
    if not as_many(seen, plan) or sum(seen) != plan.received_elements:
        yield f"counted {seen} at {coord}, planned {plan.received_elements}: {plan}"
    if not torch.equal(x, before):
        yield f"wrote to its input: {plan}"
    if not holds(mesh, full, y, case.dst):
        yield f"wrong values at {coord}: {plan}"
    cur, at = x, case.src
    for step in plan.steps:
        one = ReshardPlan(plan.src.with_placements(step.src), plan.src.with_placements(step.dst), (step,), 0.0)
        cur, linked = run_reshard(one, cur), step.src == at
        at = step.dst
        if not linked or not holds(mesh, full, cur, step.dst):
            yield f"{step} leaves something else at {coord}: {plan}"
            break
    if plan.steps and at != case.dst:
        yield f"ends elsewhere: {plan}"
    if not case.model.by_seconds and not any(isinstance(p, Partial) for p in (*case.src, *case.dst)):
        ids = torch.arange(full.numel()).reshape(full.shape)
        have, want = ({*shard_of(ids, p, case.mesh, coord).flatten().tolist()} for p in (case.src, case.dst))
        if len(plan.collectives) > 1 or plan.received_elements != len(want - have):
            yield f"receives {plan.received_elements} of {len(want - have)} at {coord}: {plan}"


def holds(mesh: DeviceMesh, full: torch.Tensor, local: torch.Tensor, layout: Layout) -> bool:
    """True where `local`, reduced over the axes that are pending, is this rank's shard of `full`."""
    for axis, p in enumerate(layout):
        if isinstance(p, Partial):
            local = mesh.comm(axis).all_reduce(local, p.reduce_op)
    want = shard_of(full, layout, mesh.shape, mesh.coord or ())
    return local.shape == want.shape and torch.allclose(local, want, rtol=1e-9)


def run(cases: list[Case]) -> list[str]:
    """The faults of cases on one mesh, on all ranks."""
    body = lambda: [f for case in cases for f in faults(init_device_mesh("cpu", case.mesh), case)]  # noqa: E731
    return list(itertools.chain(*dtensor.simulate(math.prod(cases[0].mesh))(body)))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_step_leaves_what_it_says(mesh: tuple[int, ...]) -> None:
    draw = random.Random(hash(mesh))
    found = run([drawn(draw, mesh) for _ in range(CASES // len(MESHES))])
    assert not found, found[0]


def test_the_law_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer elements than planned, and another order of them, are seen."""
    case = Case((2, 2), (8, 12), (Shard(0), Shard(1)), (Shard(1), R), CostModel())
    assert not run([case])
    right = run_reshard
    monkeypatch.setattr("test_reshard_random.run_reshard", lambda plan, x: right(plan, x).flip(0))
    assert any("wrong values" in f for f in run([case]))
    monkeypatch.setattr("test_reshard_random.run_reshard", lambda plan, x: torch.zeros(right(plan, x).shape[1:]))
    assert any("wrong values" in f for f in run([case]))
