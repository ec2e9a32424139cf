"""The choice of strategies: the cheapest by the cost model, checked against enumeration; ties and in-place targets."""

import itertools

import pytest
import torch

import dtensor
from dtensor import Partial, Placement, Replicate, Shard, init_device_mesh
from dtensor.placement import StridedShard
from dtensor.redistribute.cost_model import CostModel, current_cost_model, use_cost_model
from dtensor.rules.choice import all_decisions, decide
from dtensor.rules.patterns import parse_pattern
from dtensor.rules.pricing import FEW, NEAR, moving, price
from dtensor.rules.rule import Rule, State, linear, refine
from dtensor.simulate import fake_world
from dtensor.spec import Spec, TensorMeta, contiguous_stride, may_be_empty

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def mm_rule(m: int, k: int, n: int) -> Rule:
    return Rule((((0,), (1,)), ((1,), (2,))), (((0,), (2,)),), (m, k, n), linear=(linear(0), linear(1)))


def spec(mesh, shape, *placed: Placement) -> Spec:
    return Spec.make(mesh, placed, shape, contiguous_stride(shape), torch.float32)


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(torch.Size(shape), contiguous_stride(shape), torch.float32)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 3)])
def test_the_decision_is_the_cheapest_of_all(mesh_shape: tuple[int, ...]) -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", mesh_shape)
        some = list(itertools.product((R, S0, S1, P), repeat=len(mesh_shape)))
        for sizes in ((64, 32, 16), (7, 5, 3), (1, 8, 64)):
            m, k, n = sizes
            for a, b in itertools.product(some, some[:: 1 if len(mesh_shape) == 1 else 3]):
                ins = [spec(mesh, (m, k), *a), spec(mesh, (k, n), *b)]
                rule = mm_rule(*sizes)
                got = decide("mm", rule, ins, [meta(m, n)], mesh)
                assert got is not None
                every = list(all_decisions("mm", rule, ins, [meta(m, n)], mesh))
                least = every[0].cost
                assert [d.cost for d in every] == sorted(d.cost for d in every)
                if len(mesh_shape) == 1 or least == 0:
                    assert got.cost == least
                    continue
                near = [d for d in every[:FEW] if d.cost <= NEAR * least]
                if any(len(moving(s, d)) > 1 for c in near for s, d in zip(ins, c.inputs, strict=True)):
                    model = current_cost_model()
                    assert price(model, got, ins) <= min(price(model, d, ins) for d in near) + 1e-12


def test_the_smaller_operand_is_gathered_on_several_axes() -> None:
    """By the sum of single-axis moves the weight would need two collectives, the input one."""
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4))
        for m, k, n in ((64, 16, 16), (4096, 64, 64), (8192, 1024, 1024)):
            ins = [spec(mesh, (m, k), S0, R), spec(mesh, (k, n), S1, S1)]
            got = decide("mm", mm_rule(m, k, n), ins, [meta(m, n)], mesh)
            assert got is not None
            assert got.inputs[0] is ins[0] and got.inputs[1].placements == (R, S1)
            assert got.outputs[0] is not None and got.outputs[0].placements == (S0, S1)


@pytest.mark.parametrize(
    ("a", "b", "out", "moved"),
    [
        ((S0,), (R,), S0, 0),
        ((R,), (S1,), S1, 0),
        ((S1,), (S0,), P, 0),
        ((P,), (R,), P, 0),
        ((R,), (R,), R, 0),
        ((S1,), (R,), P, 1),
    ],
)
def test_what_costs_nothing_is_chosen(a, b, out, moved) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        ins = [spec(mesh, (8, 16), *a), spec(mesh, (16, 4), *b)]
        got = decide("mm", mm_rule(8, 16, 4), ins, [meta(8, 4)], mesh)
        assert got is not None and got.cost == 0
        assert got.outputs[0] is not None and got.outputs[0].placements == (out,)
        assert sum(x is not y for x, y in zip(ins, got.inputs, strict=True)) == moved
        assert "mm" in str(got) and "->" in str(got)


def test_the_smaller_one_is_gathered() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        for m, n in ((1024, 8), (8, 1024)):
            ins = [spec(mesh, (m, 16), S0), spec(mesh, (16, n), S1)]
            got = decide("mm", mm_rule(m, 16, n), ins, [meta(m, n)], mesh)
            assert got is not None and got.outputs[0] is not None
            assert got.outputs[0].placements == ((S0,) if m > n else (S1,))


def test_the_cost_model_decides() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4))
        ins = [spec(mesh, (512, 512), S0, R), spec(mesh, (512, 512), S0, R)]
        free = CostModel(latency=0.0, hop=0.0)
        with use_cost_model(free):
            cheap = decide("mm", mm_rule(512, 512, 512), ins, [meta(512, 512)], mesh)
        slow = CostModel(axis_bandwidth={0: 1e6})
        with use_cost_model(slow):
            dear = decide("mm", mm_rule(512, 512, 512), ins, [meta(512, 512)], mesh)
        assert cheap is not None and dear is not None and dear.cost >= cheap.cost > 0


def test_a_written_tensor_keeps_its_layout_or_nothing_is_legal() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        rule = Rule((((0,),), ((0,),)), (((0,),),), (8,))
        ins = [spec(mesh, (8,), S0), spec(mesh, (8,), R)]
        kept = decide("f_", rule, ins, [meta(8)], mesh, {0: 0})
        assert kept is not None and kept.inputs[0] is ins[0] and kept.outputs[0] is ins[0]
        assert decide("f_", rule, [spec(mesh, (8,), P), ins[1]], [meta(8)], mesh, {0: 0}) is None


def test_composites_need_even_cuts_and_give_split_factors() -> None:
    rule = Rule((((0, 1),),), (((0,), (1,)),), (4, 6))
    start = State.start(rule)
    assert start.placement(((0, 1),), 0) is S0
    assert start.placement(((0, 1),), 1) is StridedShard(0, split_factor=4)
    cut = start.sharded(rule, 0, 2)
    assert cut is not None and cut.placement(((0, 1),), 1) is StridedShard(0, split_factor=2)
    assert start.sharded(rule, 0, 3) is None and start.sharded(rule, 1, 4) is None


def test_the_local_sizes_are_known_of_every_rank() -> None:
    """Also where a rank other than the last has the smallest part: 7 over 2 and 3 is 2, 2, 0 and 1, 1, 1."""
    empty = dict.fromkeys((True, False), 0)
    for shape in ((2, 3), (3, 2), (2, 2, 2), (4, 3)):
        with fake_world(12):
            mesh = init_device_mesh("cpu", shape)
            for n, split in itertools.product(range(1, 20), (0, 2, 3)):
                whole, held = Rule((((0,),),), (((0,),),), (n,), nonempty=frozenset({0})), [S0] * len(shape)
                state: State | None = State.start(rule := Rule((((0,),),), (((0,),),), (n,)))
                strict: State | None = State.start(whole)
                for axis, k in enumerate(shape):
                    cut = split if axis == 0 else 0
                    state = state and state.sharded(rule, 0, k, cut)
                    strict = strict and strict.sharded(whole, 0, k, cut)
                    held[axis] = StridedShard(0, split_factor=cut) if cut else S0
                there = spec(mesh, (n,), *held)
                sizes = {there.local_shape_of(c)[0] for c in itertools.product(*map(range, shape))}
                assert state is not None and set(state.sizes[0]) == sizes
                assert may_be_empty([there]) == (0 in sizes) == (strict is None)
                empty[0 in sizes] += 1
    assert min(empty.values()) > 20


def test_refinement_follows_split_factors() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2))
        rule = Rule((((0,), (1,)),), (((0,), (1,)),), (16, 3))
        given = spec(mesh, (16, 3), S0, StridedShard(0, split_factor=4))
        refined = refine(rule, [given])
        assert refined.inputs == (((0, 2), (1,)),) and refined.sizes == (8, 3, 2)
        got = decide("f", rule, [given], [meta(16, 3)], mesh)
        assert got is not None and got.cost == 0 and got.outputs[0] is given
        uneven = spec(mesh, (7, 3), StridedShard(0, split_factor=2), R)
        got = decide("f", Rule((((0,), (1,)),), (((0,), (1,)),), (7, 3)), [uneven], [meta(7, 3)], mesh)
        assert got is not None and got.cost == 0 and got.outputs[0] is uneven


@pytest.mark.parametrize(
    ("text", "shapes", "outs", "sizes"),
    [
        ("m k, k n -> m n", [(2, 3), (3, 4)], [(2, 4)], (2, 3, 4)),
        ("..., ... -> ...", [(5, 1, 3), (4, 3)], [(5, 4, 3)], (3, 4, 5)),
        ("b [n], [n] -> b [n], b 1", [(2, 3), (3,)], [(2, 3), (2, 1)], (2, 3)),
    ],
)
def test_patterns(text, shapes, outs, sizes) -> None:
    _, _, got, _, _ = parse_pattern(text, shapes, outs)
    assert sorted(got) == sorted(sizes)


def test_bad_patterns_say_what_is_wrong() -> None:
    for text, part in (("a -> a", "fewer dims"), ("a b c -> a b", "more dims"), ("a a -> a a", "is 2 in one tensor")):
        with pytest.raises(ValueError, match=part):
            parse_pattern(text, [(2, 3)], [(2, 3)])
    with pytest.raises(ValueError, match="has 2 inputs"):
        parse_pattern("a, b -> a", [(2,)], [(2,)])


def test_all_ranks_decide_alike() -> None:
    def run() -> str:
        mesh = init_device_mesh("cpu", (2, 2))
        ins = [spec(mesh, (7, 5), S0, P), spec(mesh, (5, 3), S1, S1)]
        return str(decide("mm", mm_rule(7, 5, 3), ins, [meta(7, 3)], mesh))

    assert len(set(dtensor.simulate(4)(run))) == 1


def test_another_inputs_split_factor_does_not_bind_a_written_tensor() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = dtensor.zeros(12, 4, device_mesh=mesh, placements=[S0, S0])
        y = dtensor.distribute_tensor(torch.ones(3, 4, 4), mesh, [R, S1]).flatten(0, 1)
        assert y.placements == (R, StridedShard(0, split_factor=3))
        x.copy_(y)
        x.add_(y)
        assert x.placements == (S0, S0) and torch.equal(x.full_tensor(), torch.full((12, 4), 2.0))
        assert torch.equal((x + y).full_tensor(), torch.full((12, 4), 3.0))

    dtensor.simulate(4)(run)
