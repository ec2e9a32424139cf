"""The laws for views, slices, joins, indexing and factories, and what these rules promise about communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.laws import HELD, Sample, check_layouts, check_strategies, in_turn, ints, make, named, rand
from helpers.samples.view import SAMPLES

import dtensor
from dtensor import Partial, Placement, Replicate, Shard, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.propagation_rules.build.labelled import every_dim, labelled
from dtensor.propagation_rules.rearrange import stack
from dtensor.propagation_rules.view import common_factors
from dtensor.rules.registry import override

R = Replicate()
pytestmark = pytest.mark.filterwarnings("ignore:.*is in beta:UserWarning")


@pytest.mark.parametrize(("sample", "mesh"), in_turn(SAMPLES), ids=named)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    """Every layout of the inputs gives the plain result, forward and backward."""
    check_layouts(sample, mesh, limit=16).must_hold()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(2,), (2, 3)], ids=str)
def test_strategies(sample: Sample, mesh: tuple[int, ...]) -> None:
    """Every derived strategy gives the plain result."""
    report = check_strategies(sample, mesh, limit=20, held=HELD)
    assert not report.wrong, "\n".join(report.wrong[:10])


# ------------------------------------------------------------ the common factors of two shapes
@pytest.mark.parametrize(
    ("a", "b", "first", "second", "sizes", "whole"),
    [
        ((6, 4), (24,), [(0,), (1,)], [(0, 1)], [6, 4], set()),
        ((12,), (3, 4), [(0, 1)], [(0,), (1,)], [3, 4], set()),
        ((8, 5), (2, 20), [(0, 1), (2,)], [(0,), (1, 2)], [2, 4, 5], set()),
        (
            (2, 3, 4, 7), (2, 4, 3, 7), [(0,), (2,), (3,), (1,)], [(0,), (4,), (5,), (1,)], [2, 7, 3, 4, 4, 3],
            {2, 3, 4, 5},
        ),
        ((1, 4), (4, 1), [(), (0,)], [(0,), ()], [4], set()),
        ((1, 4), (1, 2, 2), [(0,), (1, 2)], [(0,), (1,), (2,)], [1, 2, 2], set()),
        ((0, 6), (0, 2, 3), [(0,), (1,)], [(0,), (2,), (3,)], [0, 6, 2, 3], {1, 2, 3}),
        ((), (1,), [], [()], [], set()),
    ],
    ids=str,
)
def test_common_factors(
    a: tuple[int, ...], b: tuple[int, ...], first: list[Any], second: list[Any], sizes: list[int], whole: set[int]
) -> None:
    assert common_factors(a, b) == (first, second, sizes, whole)


def test_common_factors_rebuild_both_shapes() -> None:
    """The factors of each dim multiply to its size, and shared ones come in the same order on both sides."""
    shapes = [s for n in range(4) for s in itertools.product((1, 2, 3, 4, 6), repeat=n)]
    for a in shapes:
        for b in shapes:
            if math.prod(a) == math.prod(b):
                first, second, sizes, whole = common_factors(a, b)
                for shape, dims in ((a, first), (b, second)):
                    assert [math.prod(sizes[f] for f in d) for d in dims] == list(shape), (a, b)
                free = [[f for d in dims for f in d if f not in whole] for dims in (first, second)]
                assert free[0] == free[1], (a, b)


# ------------------------------------------------------------ what moves
def run(
    fn: Callable[..., Any], *given: tuple[torch.Tensor, Sequence[Placement]], mesh: tuple[int, ...] = (4,)
) -> tuple[Any, tuple[Placement, ...], int]:
    """Full result, its layout, and collectives sent, of rank 0."""

    def program() -> tuple[Any, tuple[Placement, ...], int]:
        m = init_device_mesh("cpu", mesh)
        inputs = [make(t, m, p) for t, p in given]
        with CommDebugMode() as mode:
            out = fn(*inputs)
        return out.full_tensor(), out.placements, mode.get_total_counts()

    first: tuple[Any, tuple[Placement, ...], int] = dtensor.simulate(math.prod(mesh))(program)[0]
    return first


@pytest.mark.parametrize(
    ("fn", "shape", "layout", "result"),
    [
        (lambda x: x.reshape(-1, 6), (8, 2, 6), Shard(0), Shard(0)),
        (lambda x: x.reshape(4, 2, 6), (8, 6), Shard(0), Shard(0)),
        (lambda x: x.reshape(3, 8, 2).flatten(0, 1).unflatten(0, (3, 8)), (3, 16), Shard(1), Shard(1)),
        (lambda x: x.permute(1, 0), (5, 6), Shard(0), Shard(1)),
        (lambda x: x.squeeze(), (5, 1, 6), Shard(2), Shard(1)),
        (lambda x: x[:, 1:3], (5, 6), Shard(0), Shard(0)),
        (lambda x: x[:5, 1], (5, 6), Shard(0), Shard(0)),
        (lambda x: x.expand(3, 5, 6), (5, 6), Shard(1), Shard(2)),
        (lambda x: x.split(2, 1)[0], (5, 6), Shard(0), Shard(0)),
        (lambda x: torch.cat([x, x], 1), (5, 6), Shard(0), Shard(0)),
        (lambda x: torch.cat([x, x], 1), (5, 6), Partial("max"), Partial("max")),
        (lambda x: x.tril(), (5, 6), Shard(0), Shard(0)),
        (lambda x: x.tril(), (5, 6), Shard(1), Shard(1)),
        (torch.zeros_like, (5, 6), Shard(1), Shard(1)),
        (torch.ones_like, (5, 6), Partial(), R),
        (lambda x: x.new_zeros(3, 3), (5, 6), Shard(0), R),
        (lambda x: torch.nn.functional.pad(x, (1, 1), value=2.0), (5, 6), Partial(), Partial()),
    ],
)
def test_free(fn: Callable[..., Any], shape: tuple[int, ...], layout: Placement, result: Placement) -> None:
    """These need no communication, and keep the layout as told."""
    x = rand(*shape)
    full, placements, count = run(fn, (x, [layout]))
    assert torch.allclose(full, fn(x))
    assert placements == (result,)
    assert count == 0


def test_writing_along_a_cut_dim_stays_local() -> None:
    """index_copy_, index_add_, index_put_ and scatter_ into a shard write what falls into it."""
    x, i, v = rand(6, 3), torch.tensor([4, 0, 5]), rand(3, 3, seed=1)
    for fn in (
        lambda x, i, v: x.index_copy_(0, i, v),
        lambda x, i, v: x.index_add_(0, i, v),
        lambda x, i, v: x.index_put_((i - 6,), v),
        lambda x, i, v: x.scatter_(0, i[:, None].expand(3, 3), v),
        lambda x, i, v: x.index_fill_(0, i, 2.5),
    ):
        full, placements, count = run(fn, (x, [Shard(0)]), (i, [R]), (v, [R]))
        assert torch.allclose(full, fn(x.clone(), i, v))
        assert placements == (Shard(0),)
        assert count == 0


def test_reading_few_entries_of_a_cut_dim_sends_those() -> None:
    """A few rows of a large sharded table: one sum of the rows instead of gathering the table."""
    table, i = rand(4096, 64), ints(4096, 3)
    full, placements, count = run(lambda t, i: t[i], (table, [Shard(0)]), (i, [R]))
    assert torch.equal(full, table[i])
    assert placements == (Partial(),)
    assert count == 0


def test_index_out_of_range_is_an_error_on_all_ranks() -> None:
    """An index that no rank holds is refused as in plain torch."""
    with pytest.raises(IndexError, match="index 6 is out of bounds for dim 0 of size 6"):
        run(
            lambda x, i, v: x.index_copy_(0, i, v),
            (rand(6, 3), [Shard(0)]), (torch.tensor([6]), [R]), (rand(1, 3), [R]),
        )  # fmt: skip


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_constants_in_pending_tensors(op: str) -> None:
    """A number written into a pending tensor is that number once the reduction is done."""
    x, i = rand(5, 4), torch.tensor([1, 3])
    for fn in (
        lambda x, i: x.index_fill_(0, i, 3.0),
        lambda x, i: x.scatter_(0, i[None, :].expand(2, 2), 3.0),
        lambda x, i: torch.nn.functional.pad(x, (1, 0), value=3.0),
    ):
        full, _, count = run(fn, (x, [Partial(op)]), (i, [R]))
        assert torch.allclose(full, fn(x.clone(), i), atol=1e-4)
        assert count == 0


# ------------------------------------------------------------ rules broken on purpose
@pytest.mark.parametrize(
    ("name", "wrong", "sample"),
    [
        ("aten.flip", lambda c: labelled(c, [every_dim(2)], [every_dim(2)]), "flip of [5, 4, 3]"),
        ("aten.permute", lambda c: labelled(c, [every_dim(3)], [every_dim(3)]), "permute of [5, 3, 4]"),
        ("aten.gather", lambda c: labelled(c, [["a", None], ["a", "i"]], [["a", "i"]]), "gather fewer rows"),
        ("aten.stack", lambda c: stack(c).__class__(*_first_last(stack(c))), "stack"),
    ],
)
def test_wrong_rules_are_caught(name: str, wrong: Any, sample: str) -> None:
    """The laws notice a dim that is not free, a permutation that is not one, a wrong correspondence."""
    chosen = next(s for s in SAMPLES if s.name == sample)
    with override(name, wrong), pytest.raises((AssertionError, ValueError, RuntimeError)):
        check_layouts(chosen, (2,), limit=12).must_hold()


def _first_last(rule: Any) -> tuple[Any, ...]:
    """The parts of a rule with the output's dims the wrong way round."""
    return rule.inputs, tuple(tuple(reversed(t)) for t in rule.outputs), rule.sizes
