"""The laws, for log_softmax, nll_loss and the operators behind loss_parallel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import HELD, Sample, check_layouts, check_strategies, ints, rand

import dtensor
from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.loss.cross_entropy import cross_entropy
from dtensor.propagation_rules.build.classes import local_slots
from dtensor.propagation_rules.loss import nll_loss
from dtensor.rules.registry import override


def ignoring(t: torch.Tensor, every: int = 3) -> torch.Tensor:
    t = t.clone()
    t.view(-1)[::every] = -100
    return t


def nll(reduction: str, **kw: object) -> Callable[..., torch.Tensor]:
    def f(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
        return F.nll_loss(x, t, w, reduction=reduction, **kw)  # type: ignore[arg-type]

    return f


def ce(reduction: str, smoothing: float = 0.0, **kw: object) -> Callable[..., torch.Tensor]:
    """Plain tensors: F.cross_entropy. DTensors: the operators in one piece."""

    def f(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(x, DTensor):
            return cross_entropy(x, t, w, reduction, int(kw.get("ignore_index", -100)), smoothing)  # type: ignore[arg-type,call-overload]
        return F.cross_entropy(x, t, w, reduction=reduction, label_smoothing=smoothing, **kw)  # type: ignore[arg-type]

    return f


def positive(*shape: int) -> torch.Tensor:
    return rand(*shape).abs() + 0.2


REDUCTIONS = ("mean", "sum", "none")
LINEAR = ("sum", "avg")
W = frozenset({2})

SOFTMAX = [
    Sample("log_softmax", lambda x: F.log_softmax(x, 1), (rand(5, 7),), pending=("sum",)),
    Sample("log_softmax dim 0", lambda x: F.log_softmax(x, 0), (rand(5, 6, 2),), pending=("sum",)),
    Sample("log_softmax last of 3", lambda x: F.log_softmax(x, -1), (rand(4, 3, 5),), pending=("sum",)),
    Sample("log_softmax 1-d", lambda x: F.log_softmax(x, 0), (rand(6),), pending=("sum",)),
    Sample("log_softmax 0-d", lambda x: F.log_softmax(x, 0), (torch.tensor(0.7),), pending=("sum",)),
    Sample("log_softmax of one class", lambda x: F.log_softmax(x, 1), (rand(5, 1),), pending=("sum",)),
    Sample("log_softmax double", lambda x: F.log_softmax(x, 1), (rand(3, 9, dtype=torch.float64),), pending=()),
    Sample("log_softmax to double", lambda x: F.log_softmax(x, 1, dtype=torch.float64), (rand(3, 9),), pending=()),
    Sample("log_softmax with -inf", lambda x: F.log_softmax(x, 1), (
        torch.where(rand(4, 8) > 0.3, float("-inf"), rand(4, 8, seed=2)).index_fill(1, torch.tensor([0]), 0.5),),
        grads=False, pending=()),
]  # fmt: skip
NLL = [
    *(Sample(f"nll {r}", nll(r), (rand(7, 5), ints(5, 7)), pending=LINEAR) for r in REDUCTIONS),
    *(Sample(f"nll ignoring {r}", nll(r), (rand(8, 5), ignoring(ints(5, 8))), pending=LINEAR) for r in REDUCTIONS),
    *(Sample(f"nll weight {r}", nll(r), (rand(8, 6), ignoring(ints(6, 8)), positive(6)), pending=(), fixed=W)
      for r in REDUCTIONS),
    *(Sample(f"nll ignore_index=1 {r}", nll(r, ignore_index=1), (rand(6, 3), ints(3, 6)), pending=())
      for r in REDUCTIONS),
    *(Sample(f"nll 1-d {r}", nll(r), (rand(6), torch.tensor(4)), pending=LINEAR) for r in REDUCTIONS),
    *(Sample(f"nll 2-d images {r}", nll(r), (rand(3, 4, 2, 3), ints(4, 3, 2, 3)), pending=LINEAR) for r in REDUCTIONS),
    Sample("nll images weight", nll("mean"), (rand(2, 4, 3, 2), ignoring(ints(4, 2, 3, 2)), positive(4)), pending=(),
           fixed=W),
]  # fmt: skip
CROSS = [
    *(Sample(f"F.cross_entropy {r}", lambda x, t, r=r: F.cross_entropy(x, t, reduction=r), (rand(6, 9), ints(9, 6)),
             pending=("sum",)) for r in REDUCTIONS),
    *(Sample(f"ce {r} {s}", ce(r, s), (rand(7, 5), ignoring(ints(5, 7))), pending=("sum",))
      for r in REDUCTIONS for s in (0.0, 0.2)),
    *(Sample(f"ce weight {r}", ce(r, 0.1), (rand(6, 5), ignoring(ints(5, 6)), positive(5)), pending=(), fixed=W)
      for r in REDUCTIONS),
    *(Sample(f"ce sequence {r}", ce(r), (rand(3, 6, 4), ints(6, 3, 4)), pending=()) for r in REDUCTIONS),
    *(Sample(f"ce 1-d {r}", ce(r, 0.1), (rand(6), torch.tensor(2)), pending=()) for r in REDUCTIONS),
    *(Sample(f"ce probabilities {r} {s}", ce(r, s), (rand(5, 6), rand(5, 6, seed=3).softmax(1)), pending=())
      for r in REDUCTIONS for s in (0.0, 0.2)),
    Sample("ce probabilities weight", ce("mean", 0.1), (rand(4, 5, 3), rand(4, 5, 3, seed=3).softmax(1), positive(5)),
           pending=(), fixed=W),
    Sample("ce probabilities 1-d", ce("mean"), (rand(6), rand(6, seed=3).softmax(0)), pending=()),
]  # fmt: skip


def without_weight_grad(sample: Sample) -> Sample:
    """Class weights get no gradient from the fused operators, nor from torch's."""
    if len(sample.tensors) < 3:
        return sample
    fn, w = sample.fn, sample.tensors[2]

    def f(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return fn(x, t, w)
        whole = [dtensor.Replicate()] * x.device_mesh.ndim
        return fn(x, t, DTensor.from_local(w, x.device_mesh, whole))

    return Sample(sample.name, f, sample.tensors[:2], sample.grads, sample.pending)


ALL = [without_weight_grad(s) for s in (*SOFTMAX, *NLL, *CROSS)]


@pytest.mark.parametrize("sample", ALL, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_layouts(sample, mesh, limit=16).must_hold()


@pytest.mark.parametrize("sample", ALL, ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    check_strategies(sample, (2, 3), limit=20, held=HELD).must_hold()


@pytest.mark.parametrize("sample", ALL[::9], ids=lambda s: s.name)
def test_strategies_of_three_axes(sample: Sample) -> None:
    check_strategies(sample, (2, 2, 2), limit=12, held=HELD).must_hold()


def test_a_mean_of_means_is_caught() -> None:
    """The rule that divides on each rank, and averages, is wrong where ranks count different numbers of rows."""

    def of_local_means(call: dtensor.rules.registry.Call) -> object:  # type: ignore[name-defined]
        rule = nll_loss(call)
        if rule is None or call["reduction"] != 1:
            return rule
        from dataclasses import replace

        return replace(rule, whole=frozenset({1}), reduce={0: "avg"}, kernels=())

    sample = Sample("nll", nll("mean"), (rand(8, 5), ignoring(ints(5, 8))), pending=(), grads=False)
    with override("aten.nll_loss_forward", of_local_means), pytest.raises(AssertionError):  # type: ignore[arg-type]
        check_strategies(sample, (2,)).must_hold()


@pytest.mark.parametrize("runs", [((0, 3),), ((3, 2),), ((1, 2), (5, 2)), ()], ids=str)
def test_local_slots(runs: tuple[tuple[int, int], ...]) -> None:
    held = [i for s, n in runs for i in range(s, s + n)]
    target = torch.arange(-1, 8)
    slot, mine = local_slots(target, runs)
    assert mine.tolist() == [i in held for i in target.tolist()]
    assert slot.tolist() == [held.index(i) if i in held else 0 for i in target.tolist()]


def test_a_class_that_does_not_exist_raises_on_all_ranks() -> None:
    def f() -> int:
        mesh = init_device_mesh("cpu", (4,))
        x = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(1)])
        for reduction in REDUCTIONS:
            with pytest.raises(IndexError, match="arget 8 is out of bounds"):
                F.nll_loss(x, DTensor.from_local(torch.tensor([0, 8, 1]), mesh), reduction=reduction)
        return 1

    assert sum(dtensor.simulate(4)(f)) == 4


@pytest.mark.parametrize("layout", [(Shard(0),), (Shard(0), Shard(1)), (Shard(0), Shard(0))], ids=str)
def test_a_target_that_one_shard_holds_raises_on_all_ranks_of_a_mean(layout: tuple) -> None:
    def f() -> int:
        mesh = init_device_mesh("cpu", (4,) if len(layout) == 1 else (2, 2))
        x = distribute_tensor(torch.randn(8, 5), mesh, layout)
        rows = [p if p == Shard(0) else Replicate() for p in layout]
        target = distribute_tensor(torch.tensor([1, 2, 9, 0, 1, 2, 3, 4]), mesh, rows)
        with pytest.raises(IndexError, match="out of bounds for 5 classes"):
            F.cross_entropy(x, target).item()
        return int(x.sum().isfinite().item())  # the ranks are in step

    assert sum(dtensor.simulate(4)(f)) == 4
