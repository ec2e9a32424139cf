"""Exchanges along a sharded dim: the laws, just what is lacking is sent, and what rules promise about traffic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import HELD, Sample, check_layouts, check_strategies, make, rand
from helpers.samples.exchange import NO_STRATEGIES, SAMPLES

import dtensor
from dtensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh
from dtensor.comm.observers import observers
from dtensor.dispatch.materialized import MovedSpec
from dtensor.propagation_rules.build import exchange_plan
from dtensor.propagation_rules.build.exchange import Run, axes_of, backwards, busiest, exchange, places
from dtensor.propagation_rules.build.exchange_plan import plan
from dtensor.propagation_rules.sorting import sort
from dtensor.rules.registry import Call, override
from dtensor.rules.rule import Rule
from dtensor.simulate import fake_world
from dtensor.spec import Spec

R = Replicate()
S0, S1 = Shard(0), Shard(1)
pytestmark = pytest.mark.filterwarnings("ignore:.*is in beta:UserWarning")


# ------------------------------------------------------------ the laws
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_layouts(sample, mesh, limit=9).must_hold()


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.name not in NO_STRATEGIES], ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    report = check_strategies(sample, (2, 3), limit=20, held=HELD)
    assert not report.wrong, "\n".join(report.wrong[:10])


DTYPES = (torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """Elements of every kind move; nothing passes through a number of another kind."""

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        parts = [x[1:4], x[3], x.flip(0), x.roll(2, 0), F.pad(x, (0, 0, 1, 2)), *x.split([2, 5]), x.repeat(3, 1)]
        parts += [torch.cat([x, x[:2]]), x.unfold(0, 3, 2), x.diagonal(), x.diag_embed(), x.rot90()]
        if dtype.is_floating_point or dtype.is_complex:
            parts.append(F.pad(x[None], (1, 1, 2, 3), mode="reflect"))
        return parts

    check_layouts(Sample(f"{dtype}", fn, (rand(7, 3, dtype=dtype),), grads=False, pending=()), (2, 2)).must_hold()


# ------------------------------------------------------------ the primitive
def random_runs(rng: random.Random, sizes: Sequence[int], outs: Sequence[int], adds: bool) -> list[Run]:
    """Runs that stay inside the sources and targets; without `adds` no place is written twice."""
    runs: list[Run] = []
    free = [set(range(n)) for n in outs]
    for _ in range(rng.randint(1, 6)):
        s, t = rng.randrange(len(sizes)), rng.randrange(len(outs))
        step, stride, n = rng.randint(-3, 3), rng.choice((1, 1, 2, -1, 0) if adds else (1, 1, 2, 3)), rng.randint(1, 7)
        lows = [a for a in range(sizes[s]) if 0 <= a + step * (n - 1) < sizes[s]]
        fits = [b for b in range(outs[t]) if 0 <= b + stride * (n - 1) < outs[t]]
        if not adds:
            fits = [b for b in fits if all(b + stride * i in free[t] for i in range(n))]
        if lows and fits:
            run = Run(rng.choice(fits), rng.choice(lows), n, step, stride, s, t)
            free[t] -= {run.out + stride * i for i in range(n)}
            runs.append(run)
    return runs


def moved(
    runs: Sequence[Run], full: Sequence[torch.Tensor], outs: Sequence[int], adds: bool, fill: float
) -> list[torch.Tensor]:
    """What runs mean, element by element."""
    made = [torch.full((n, full[0].shape[1]), 0.0 if adds else fill, dtype=full[0].dtype) for n in outs]
    for r in runs:
        for i in range(r.length):
            row = full[r.source][r.start + r.step * i]
            place = r.out + r.stride * i
            made[r.target][place] = made[r.target][place] + row if adds else row
    return made


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    "mesh", [((4,), (S0,)), ((2, 2), (S0, S0)), ((3,), (StridedShard(0, split_factor=2),))], ids=str
)
def test_exchange_means_its_runs(mesh: tuple[tuple[int, ...], tuple[Placement, ...]], adds: bool) -> None:
    """Random runs over several sources and targets: the values, and exactly the elements that a rank lacks."""
    shape, placed = mesh

    def program() -> list[tuple[int, int, bool]]:
        device_mesh, rng = init_device_mesh("cpu", shape), random.Random(7)
        seen: list[tuple[int, int, bool]] = []
        for case in range(20):
            sizes = [rng.choice((0, 1, 3, 8, 13)) or 2 for _ in range(rng.randint(1, 3))]
            outs = [rng.choice((1, 2, 6, 12)) for _ in range(rng.randint(1, 2))]
            runs = random_runs(rng, sizes, outs, adds)
            full = [rand(n, 2, seed=case + i) for i, n in enumerate(sizes)]
            spec = [Spec.make(device_mesh, placed, t.shape, t.stride(), t.dtype) for t in full]
            want = moved(runs, full, outs, adds, 2.5)
            target = [Spec.make(device_mesh, placed, t.shape, t.stride(), t.dtype) for t in want]
            got_elements = 0

            def note(kind: str, ranks: tuple[int, ...], received: int, width: int) -> None:
                nonlocal got_elements
                got_elements += received

            observers.append(note)
            local = [make(t, device_mesh, placed)._local_tensor for t in full]
            made = exchange(
                device_mesh, axes_of(spec[0], 0), 0, local, runs, [places(s, 0) for s in spec],
                [places(s, 0) for s in target], fill=0 if adds else 2.5, adds=adds,
            )  # fmt: skip
            observers.remove(note)
            for part, whole in zip(made, want, strict=True):
                expected = make(whole, device_mesh, placed)._local_tensor
                torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)
            lacking = {
                (r.source, r.start + r.step * i) for r in runs for i in range(r.length)
                if _holds(target[r.target], r.out + r.stride * i) and not _holds(spec[r.source], r.start + r.step * i)
            }  # fmt: skip
            seen.append((got_elements, 2 * len(lacking), len({abs(r.step) or 1 for r in runs}) <= 1))
        return seen

    for rank in dtensor.simulate(math.prod(shape))(program):
        assert all(got >= lack for got, lack, _ in rank)
        assert all(got == lack for got, lack, one_step in rank if one_step)
        assert sum(lack for _, lack, _ in rank)


def _holds(spec: Spec, i: int) -> bool:
    assert spec.mesh.coord is not None
    return any(a <= i < a + n for a, n in spec.intervals_of(spec.mesh.coord)[0])


def test_backwards_is_the_transpose() -> None:
    """The runs of the gradient: each element adds to where it came from."""
    rng = random.Random(3)
    for _ in range(50):
        runs = random_runs(rng, [9], [12], adds=True)
        x, g = rand(9, 2), rand(12, 2, seed=1)
        forth = moved(runs, [x], [12], True, 0.0)[0]
        back = moved(backwards(runs), [g], [9], True, 0.0)[0]
        assert torch.allclose((forth * g).sum(), (x * back).sum(), atol=1e-4)


def test_all_ranks_know_when_nobody_lacks_anything() -> None:
    """Silence is decided alike by all positions; a single lacking element makes all of them call."""
    held = (((0, 3),), ((3, 3),), ((6, 2),), ())
    for runs, silent in (((Run(0, 0, 8),), True), ((Run(0, 0, 8), Run(7, 0, 1)), False), ((Run(0, 3, 1),), False)):
        assert {plan(runs, (held,), (held,), at, False).silent for at in range(4)} == {silent}
        assert (busiest(runs, (held,), (held,)) == 0) == silent


def test_an_estimate_of_many_positions_is_quick() -> None:
    n = 4000
    held = tuple(((8 * p, 8),) for p in range(n))
    assert busiest((Run(1, 0, 8 * n - 1), Run(0, 8 * n - 1, 1)), (held,), (held,)) == 1


# ------------------------------------------------------------ traffic
def traffic(
    fn: Callable[..., Any], *given: tuple[torch.Tensor, Sequence[Placement]], mesh: tuple[int, ...] = (4,)
) -> tuple[tuple[Placement, ...], list[str], list[int]]:
    """Layout of the (first) result, kinds of collectives of rank 0, elements that each rank receives."""

    def program() -> tuple[tuple[Placement, ...], list[str], int]:
        m = init_device_mesh("cpu", mesh)
        inputs = [make(t, m, p) for t, p in given]
        kinds: list[str] = []
        total = 0

        def note(kind: str, ranks: tuple[int, ...], received: int, width: int) -> None:
            nonlocal total
            kinds.append(kind)
            total += received

        observers.append(note)
        out = fn(*inputs)
        observers.remove(note)
        many = list(out) if isinstance(out, (list, tuple)) else [out]
        want = fn(*(t for t, _ in given))
        for got, ref in zip(many, want if isinstance(want, (list, tuple)) else [want], strict=True):
            torch.testing.assert_close(got.full_tensor(), ref, rtol=1e-4, atol=1e-4)
        return many[0].placements, kinds, total

    ranks = dtensor.simulate(math.prod(mesh))(program)
    assert all(r[:2] == ranks[0][:2] for r in ranks)
    return ranks[0][0], ranks[0][1], [r[2] for r in ranks]


X = rand(1024, 80)
ROW = X.shape[1]
CASES: list[tuple[str, Callable[[torch.Tensor], Any], Placement, list[str], list[int]]] = [
    ("slice", lambda x: x[:4], S0, ["all_to_all"], [0, ROW, ROW, ROW]),
    ("slice of the end", lambda x: x[768:], S0, ["all_to_all"], [64 * ROW, 64 * ROW, 64 * ROW, 0]),
    ("select", lambda x: x[300], R, ["broadcast"], [ROW, 0, ROW, ROW]),
    ("roll", lambda x: x.roll(2, 0), S0, ["all_to_all"], [2 * ROW] * 4),
    ("roll flat", lambda x: x.roll(3), S0, ["all_to_all"], [3] * 4),
    ("pad", lambda x: F.pad(x, (0, 0, 2, 2)), S0, ["all_to_all"], [0, ROW, ROW, 0]),
    ("pad of another dim", lambda x: F.pad(x, (1, 1)), S0, [], [0] * 4),
    ("reflect", lambda x: F.pad(x[None], (0, 0, 4, 0), "reflect")[0], S0, ["all_to_all"], [0, 3 * ROW, 2 * ROW, ROW]),
    ("split", lambda x: x.split([1022, 2]), S0, ["all_to_all"], [ROW, ROW, 0, 0]),
    ("windows", lambda x: x.unfold(0, 4, 4), S0, [], [0] * 4),
    ("overlapping windows", lambda x: x.unfold(0, 3, 1), S0, ["all_to_all"], [2 * ROW, 2 * ROW, 2 * ROW, 0]),
    ("cat", lambda x: torch.cat([x, x]), StridedShard(0, split_factor=2), [], [0] * 4),
    ("topk", lambda x: x.topk(2, 0), R, ["all_gather"], [2 * 3 * 3 * ROW] * 4),
    ("diagonal", lambda x: x.diagonal(), S0, ["all_to_all"], [0, 20, 20, 20]),
]


@pytest.mark.parametrize(("name", "fn", "layout", "kinds", "elements"), CASES, ids=[c[0] for c in CASES])
def test_traffic(name: str, fn: Any, layout: Placement, kinds: list[str], elements: list[int]) -> None:
    """One collective, of what is lacking."""
    assert traffic(fn, (X, [S0])) == ((layout,), kinds, elements)


def test_two_axes_that_cut_one_dim_exchange_at_once() -> None:
    for fn in (lambda x: x.roll(2, 0), lambda x: x[2:1000], lambda x: F.pad(x, (0, 0, 2, 2)), lambda x: x[9]):
        layout, kinds, _ = traffic(fn, (X, [S0, S0]), mesh=(2, 2))
        assert len(kinds) == 1
        assert layout in ((S0, S0), (R, R))


def test_the_cheaper_way_is_taken() -> None:
    """Reversing all rows is cheaper along another dim; where there is none, it is an exchange."""
    assert traffic(lambda x: x.flip(0), (X, [S0]))[::2] == ((S1,), [256 * 60] * 4)
    assert traffic(lambda x: x.flip(0), (rand(80000), [S0])) == ((S0,), ["all_to_all"], [20000] * 4)
    assert traffic(lambda x: x.sort(0), (X, [S0]))[:2] == ((S1,), ["all_to_all"])


def test_cat_of_uneven_parts_exchanges_them() -> None:
    a, b = rand(4000, 5), rand(2000, 5, seed=1)
    layout, kinds, elements = traffic(lambda x, y: torch.cat([x, y]), (a, [S0]), (b, [S0]))
    assert (layout, kinds) == ((S0,), ["all_to_all"])
    assert elements == [500 * 5, 1000 * 5, 1500 * 5, 1000 * 5]
    assert traffic(lambda x, y: torch.cat([x, y]), (a, [Partial()]), (b, [Partial()]))[1] == []


def test_packed_parts_are_taken_out_for_nothing() -> None:
    packed = [StridedShard(0, split_factor=3)]
    for fn in (lambda x: x[24:], lambda x: x[:12], lambda x: x.chunk(3), lambda x: x.split([12, 24])):
        assert traffic(fn, (rand(36, 2), packed), mesh=(2,))[1] == []
    assert traffic(lambda x: x[2:14], (rand(36, 2), packed), mesh=(2,))[1] != []


# ------------------------------------------------------------ views
def test_views_that_a_kernel_makes_are_marked() -> None:
    """They are copies: they carry the mark of views that had to move."""

    def program() -> None:
        x = make(rand(7, 5), init_device_mesh("cpu", (2,)), [S0])
        for view in (x[1:4], x[2], *x.split(3), x.unfold(0, 2, 1), x.diagonal()):
            assert isinstance(view, DTensor)
            assert isinstance(view._spec, MovedSpec), view._spec
        assert not isinstance(x[:, 1:]._spec, MovedSpec)

    dtensor.simulate(2)(program)


def test_results_lie_in_memory_as_their_strides_say() -> None:
    """Of transposed tensors too, so that later views are decided alike everywhere."""

    def program() -> None:
        x = make(rand(90, 600), init_device_mesh("cpu", (2,)), [S1]).t()
        for fn in (lambda x: x[1:], lambda x: x.unfold(0, 2, 1), lambda x: x.flip(0), lambda x: x.repeat(3, 1)[1:]):
            out = fn(x)
            order = sorted(range(out.ndim), key=lambda d: -out.stride(d))
            strides = [out._local_tensor.stride(d) for d in order if out._local_tensor.shape[d] > 1]
            assert strides == sorted(strides, reverse=True), (out._spec, out._local_tensor.stride())

    dtensor.simulate(2)(program)


def test_an_index_out_of_range_is_refused_on_all_ranks() -> None:
    def program() -> None:
        x = make(rand(6, 3), init_device_mesh("cpu", (4,)), [S0])
        assert x[5].shape == (3,)
        with pytest.raises(IndexError):
            torch.ops.aten.select.int(x, 0, 6)

    dtensor.simulate(4)(program)


# ------------------------------------------------------------ sorting
def _sorted_in_parts(call: Call) -> Rule:
    """The rule of sort whose kernel costs nothing, so that it is always taken."""
    rule = sort(call)
    return replace(rule, kernels=tuple(replace(k, collectives=0) for k in rule.kernels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_vector_is_sorted_in_parts(dtype: torch.dtype) -> None:
    """Stable, NaN last, for sizes below and above the ranks; nobody gets more than its part and the counts."""
    vectors = []
    for n in (0, 1, 3, 37, 64):
        x = rand(n, dtype=dtype)
        if n > 8 and dtype.is_floating_point:
            x = (x * 2).round()
            x[[3, n - 2]], x[5], x[7], x[[2, 6]] = math.nan, math.inf, -math.inf, torch.tensor([0.0, -0.0]).to(dtype)
        if n > 8 and dtype == torch.int64:
            x[4], x[9] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        vectors.append(x)

    def program() -> None:
        for mesh, placed in ((init_device_mesh("cpu", (4,)), [S0]), (init_device_mesh("cpu", (2, 2)), [S0, S0])):
            for x in vectors:
                for descending in (False, True):
                    value, index = make(x, mesh, placed).sort(stable=True, descending=descending)
                    assert value.placements == index.placements == tuple(placed)
                    want = x.sort(stable=True, descending=descending)
                    assert torch.equal(index.full_tensor(), want.indices)
                    torch.testing.assert_close(value.full_tensor(), want.values, rtol=0, atol=0, equal_nan=True)

    with override("aten.sort", _sorted_in_parts):
        dtensor.simulate(4)(program)


def test_a_long_vector_stays_cut_while_it_is_sorted() -> None:
    """Where gathering costs more than looking for the boundaries; the shard of a matrix moves to another dim."""
    with fake_world(64) as world:
        mesh = init_device_mesh("cpu", (64,))
        assert DTensor.from_local(torch.rand(600_000), mesh, [S0]).sort()[0].placements == (S0,)
        assert max(t.elements for t in world.traffic) < 64 * 600_000
        assert DTensor.from_local(torch.rand(100, 640), mesh, [S0]).sort(0)[0].placements == (S1,)


def test_gradients_of_nothing_have_the_leafs_layout() -> None:
    """Autograd's formulas make plain zeros where nothing was joined or repeated."""

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for n, fn in ((0, lambda x: torch.cat([x, x * 2])), (3, lambda x: x.repeat(0)), (3, lambda x: x[:0])):
            x = make(rand(n), mesh, [S0], requires_grad=True)
            fn(x).full_tensor().sum().backward()
            assert isinstance(x.grad, DTensor)
            assert x.grad.placements == (S0,)
            assert torch.equal(x.grad.full_tensor(), torch.zeros(n))

    dtensor.simulate(2)(program)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("n", [5, 11, 130])
def test_of_equal_values_torchs_own_index_is_given(shape: tuple[int, ...], n: int) -> None:
    """Values drawn from a few, and NaN: where they are equal, the index is the one that plain torch gives."""
    x = torch.randint(0, 4, (3, n), generator=torch.Generator().manual_seed(n)).double()
    x[1, ::3] = float("nan")

    def f() -> None:
        mesh = init_device_mesh("cpu", shape)
        d = distribute_tensor(x, mesh, [Shard(1)] * len(shape))
        for k, largest in ((1, True), (2, False), (3, True)):
            got, want = d.topk(k, 1, largest), x.topk(k, 1, largest)
            assert torch.equal(got.indices.full_tensor(), want.indices)
            got, want = d.kthvalue(k, 1), x.kthvalue(k, 1)
            assert torch.equal(got.indices.full_tensor(), want.indices)

    dtensor.simulate(4)(f)


@pytest.mark.parametrize(("step", "start"), [(1, 3), (-1, 0), (2, 1)])
def test_pieces_of_many_intervals_are_found_in_one_walk(
    monkeypatch: pytest.MonkeyPatch, step: int, start: int
) -> None:
    """Rows of columns that two axes cut, flattened: as many intervals as rows, each looked at a few times."""
    n, looked, within = 200, [], exchange_plan._within
    monkeypatch.setattr(exchange_plan, "_within", lambda *a: looked.append(a) or within(*a))
    places = tuple(tuple((8 * i + 2 * q, 2) for i in range(n)) for q in range(4))
    first = start if step > 0 else 8 * n - 1
    runs = (Run(0, first, (8 * n - start) // abs(step), step),)
    pieces = [c for q in range(4) for c in exchange_plan._pieces(runs, [places], [places], 0, q)]
    assert sum(c.length for c in pieces) > n // 2 and len(looked) <= 5 * n * 4
