"""The law tests can fail: wrong rules and wrong values turn them red. And the rules of every family hold."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.laws import Sample, check_layouts, check_strategies, differs, part_of, rand

import dtensor
from dtensor import Partial, Replicate, Shard, StridedShard, init_device_mesh
from dtensor.propagation_rules.build.labelled import labelled
from dtensor.propagation_rules.pointwise import pointwise
from dtensor.redistribute.cost_model import current_cost_model
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.choice import decide
from dtensor.rules.registry import Call, override, pattern
from dtensor.rules.rule import Kernel, Rule
from dtensor.spec import Spec, TensorMeta

MM = Sample("mm", torch.mm, (rand(5, 6), rand(6, 3)))
RELU = Sample("relu", torch.relu, (rand(5, 6),), grads=False)
ADD = Sample("add", lambda x: x + 1, (rand(5, 6),), grads=False)


def _wrong_reduce(call: Call) -> Rule:
    return pattern("m k, k n -> m n", reduce="avg")(call)


def _no_refusal_of_uneven(call: Call) -> Rule:
    """Says that the transposed dims are the same: wrong wherever a dim is sharded."""
    return pattern("a b -> a b")(call)


BROKEN: list[tuple[str, Sample, Callable[[Call], Rule]]] = [
    ("aten.mm", MM, _wrong_reduce),
    ("aten.mm", MM, pattern("m k, k n -> m n", linear="0+1")),
    ("aten.relu", RELU, pointwise("0")),
    ("aten.relu", RELU, pointwise("neg:0")),
    ("aten.neg", Sample("neg", torch.neg, (rand(5, 6),), grads=False), pointwise("max:0")),
    ("aten.t", Sample("t", torch.t, (rand(6, 6),), grads=False), _no_refusal_of_uneven),
    ("aten.add", ADD, pattern("a b -> a b", linear="0")),
]


@pytest.mark.parametrize(("name", "sample", "build"), BROKEN, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(BROKEN)])
def test_a_wrong_rule_is_caught(name: str, sample: Sample, build: Callable[[Call], Rule]) -> None:
    with override(name, build), pytest.raises(AssertionError):
        check_strategies(sample, (2,)).must_hold()
    with override(name, build), pytest.raises(AssertionError):
        check_layouts(sample, (2,)).must_hold()


@pytest.mark.parametrize("mesh", [(2,), (2, 3)])
def test_right_rules_pass(mesh: tuple[int, ...]) -> None:
    for sample in (MM, RELU, ADD):
        check_strategies(sample, mesh).must_hold()
        check_layouts(sample, mesh).must_hold()


def test_calls_that_were_held_are_left_out_and_wrong_ones_never_are() -> None:
    held: set[object] = set()
    first = check_strategies(MM, (2,), held=held)
    calls = len(held)
    again = check_strategies(MM, (2,), held=held)
    assert first.right > again.right >= calls > 0 and len(held) == calls
    other = Sample("mm", torch.mm, (rand(6, 6), rand(6, 3)))
    assert check_strategies(other, (2,), held=held).right > again.right and len(held) > calls
    with override("aten.mm", _wrong_reduce), pytest.raises(AssertionError):
        check_strategies(MM, (2,), held=held).must_hold()
    with override("aten.mm", _wrong_reduce), pytest.raises(AssertionError):
        check_strategies(MM, (2,), held=held).must_hold()


def test_differs_sees_value_shape_and_dtype() -> None:
    a = torch.tensor([1.0, 2.0])
    assert not differs(a, a.clone(), 1e-5, 1e-5)
    assert differs(a, a + 0.1, 1e-5, 1e-5)
    assert differs(a, a.reshape(1, 2), 1e-5, 1e-5)
    assert differs(a, a.double(), 1e-5, 1e-5)
    assert not differs(torch.tensor([float("nan")]), torch.tensor([float("nan")]), 1e-5, 1e-5)
    assert differs(torch.tensor([float("nan")]), torch.tensor([0.0]), 1e-5, 1e-5)


def test_parts_put_together_give_the_whole() -> None:
    """`part_of`, the specification that the laws use, is inverted by a redistribution."""

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        full = rand(5, 6)
        for placed in (
            (Shard(0), Shard(0)), (Partial(), Shard(1)), (Partial("avg"), Partial("sum")),
            (Partial("max"), Replicate()),
            (StridedShard(1, split_factor=3), Shard(0)), (Partial("product"), Partial("product")),
        ):  # fmt: skip
            spec = Spec.make(mesh, placed, full.shape, full.stride(), full.dtype)
            whole = spec.with_placements((Replicate(), Replicate()))
            assert not differs(redistribute_local(part_of(full, spec), spec, whole), full, 1e-4, 1e-4), placed

    dtensor.simulate(4)(run)


def test_a_label_may_have_other_sizes_where_only_kernels_cut_it() -> None:
    """`resized` dims may differ between tensors; no plain strategy shards them, and without it they are an error."""
    meta = TensorMeta(torch.Size([3, 2]), (2, 1), torch.float32)

    def program() -> None:
        spec = Spec.make(init_device_mesh("cpu", (4,)), (Shard(0),), (5, 2), (2, 1), torch.float32)
        call = Call(torch.ops.aten.slice.Tensor, {}, (spec,), ("self",), (meta,))
        rule = labelled(call, [["a", "b"]], [["a", "b"]], resized=("a",), filled=True)
        assert rule.whole == {0} and rule.nonempty == {1} and rule.sizes == (5, 2)
        assert [c.label for c in rule.choices(())] == ["factor 1", "R"]
        cut = replace(rule, kernels=(Kernel("k", frozenset({0}), ("shard",), lambda ctx: None),))
        choice = next(c for c in cut.choices(()) if c.kernel is not None)
        assert (choice.inputs, choice.outputs) == ((0,), (0,))
        with pytest.raises(ValueError, match="dims labelled 'a' have sizes 5 and 3"):
            labelled(call, [["a", "b"]], [["a", "b"]])
        with pytest.raises(ValueError, match="alone in their dims"):
            labelled(call, [[("a", "c"), "b"]], [["a", "b"]], sizes={"a": 5, "c": 1}, resized=("a",))

    dtensor.simulate(4)(program)


def test_a_kernel_is_charged_once_for_all_its_axes() -> None:
    """What it sends goes over its axes together: the second axis costs no second launch."""

    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        spec = Spec.make(mesh, (Shard(0), Shard(0)), (8000,), (1,), torch.float32)
        meta = TensorMeta(torch.Size([8000]), (1,), torch.float32)
        kernel = Kernel("k", frozenset({0}), ("shard",), lambda ctx: None, 100, 1, "all_to_all")
        rule = Rule((((0,),),), (((0,),),), (8000,), frozenset({0}), kernels=(kernel,))
        found = decide("k", rule, [spec], [meta], mesh)
        assert found is not None and found.kernel_axes == (0, 1)
        assert found.cost == pytest.approx(current_cost_model().all_to_all(4, 400))

    dtensor.simulate(4)(program)
