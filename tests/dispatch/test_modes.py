"""Every sample in every mode: what runs with gradients runs under `inference_mode` and below autograd.

There composites of torch reach dispatch whole, as they do on a device that has kernels of its own for them.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import Report, Sample, _reference, _run_layouts, all_samples, check_layouts, flat, layouts_of, rand
from torch import nn

import dtensor
from dtensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from dtensor.dispatch.hit import OpInfo
from dtensor.errors import MixedTensorError

aten = torch.ops.aten
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode, "below autograd": torch._C._AutoDispatchBelowAutograd,
}  # fmt: skip
R, S0 = Replicate(), Shard(0)


def within(mode: Callable[[], AbstractContextManager[Any]], sample: Sample) -> Sample:
    """The sample, run inside `mode`."""

    def fn(*tensors: torch.Tensor) -> Any:
        with mode():
            return sample.fn(*tensors)

    return replace(sample, fn=fn, grads=False)


def cases_of(sample: Sample, axes: int, count: int) -> list[tuple[tuple[Placement, ...], ...]]:
    options = [
        [(R,) * axes] if i in sample.fixed else layouts_of(t, axes, sample.pending)
        for i, t in enumerate(sample.tensors)
    ]
    rng = random.Random(sample.name)
    return [tuple(rng.choice(o) for o in options) for _ in range(count)]


def failures(samples: list[Sample], shape: tuple[int, ...], count: int) -> list[str]:
    """Where samples differ from plain torch, or are refused, in `count` drawn layouts each; all in one simulation."""
    given = [(s, cases_of(s, len(shape), count), _reference(s)) for s in samples]

    def program() -> list[list[tuple[str, str]]]:
        return [_run_layouts(s, shape, cases, want) for s, cases, want in given]

    per_rank = dtensor.simulate(torch.Size(shape).numel())(program)
    found = []
    for i, (s, cases, _) in enumerate(given):
        for j, case in enumerate(cases):
            outcomes = {rank[i][j] for rank in per_rank}
            if {kind for kind, _ in outcomes} != {"right"} and not s.may_refuse:
                found.append(f"{s.name}, {case}: {sorted(outcomes)}")
    return found


@pytest.mark.parametrize("mode", MODES)
def test_samples_in_other_modes(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = all_samples() if mode == "inference" else all_samples()[::3]
        found = failures([within(MODES[mode], s) for s in every], (2,), 1)
    assert not found, "\n".join(found[:10])


def test_the_check_can_fail() -> None:
    wrong = Sample("wrong", lambda x: x * 2 if isinstance(x, DTensor) else x, (rand(3, 2),))
    refused = Sample("refused", lambda x: x + torch.ones(3, 2), (rand(3, 2),))
    found = failures([within(torch.inference_mode, s) for s in (wrong, refused)], (2,), 1)
    assert len(found) == 2, found


# ------------------------------------------------------------ kinds of ops
def test_an_op_of_lists_is_told_by_its_schema() -> None:
    """Those that do to every element what another op does; no op with lists of numbers, none that joins."""
    kinds: dict[str, set[str]] = {}
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            if torch._C._dispatch_has_kernel(op.name()):
                kinds.setdefault(OpInfo(op).kind, set()).add(name)
    named = {n for n in kinds["lists"] | kinds["ordinary"] if n.startswith("_foreach_")}
    steps = {f"_fused_{n}_" for n in ("adagrad", "adam", "adamw", "sgd")}
    assert named <= kinds["lists"], named - kinds["lists"]
    others = {"_amp_foreach_non_finite_check_and_unscale_", "dequantize", "quantize_per_tensor"}
    assert kinds["lists"] - named <= steps | others
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward", "_fused_dropout", "cat", "stack", "meshgrid"):
        assert name in kinds["ordinary"], name


# ------------------------------------------------------------ ops that have kernels on accelerators only
def _rms(x: Any, shape: Any, weight: Any, eps: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dims = tuple(range(-len(shape), 0))
    rstd = (x.square().mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return x * rstd * (1 if weight is None else weight), rstd


def _rms_backward(grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> tuple[Any, Any]:
    dims = tuple(range(-len(shape), 0))
    g, scaled = grad * (1 if weight is None else weight), x * rstd
    dx = (g - scaled * (g * scaled).mean(dims, keepdim=True)) * rstd
    outer = tuple(range(x.ndim - len(shape)))
    return dx, None if weight is None else (grad * scaled).sum(outer) if outer else grad * scaled


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    lib = torch.library.Library("aten", "IMPL")  # noqa: TOR901 - taken back below
    lib.impl("_fused_rms_norm", _rms, "CPU")
    lib.impl("_fused_rms_norm_backward", _rms_backward, "CPU")
    try:
        yield
    finally:
        lib._destroy()


X, W = rand(5, 3, 4), rand(4, seed=3)
FUSED = [
    Sample("rms", lambda x, w: aten._fused_rms_norm(x, [4], w, 1e-5), (X, W), pending=("sum", "avg")),
    Sample("rms, two dims, no eps", lambda x, w: aten._fused_rms_norm(x, [3, 4], w, None), (X, rand(3, 4)), pending=()),
    Sample("rms, no weight", lambda x: aten._fused_rms_norm(x, [4], None, 1e-5), (X,), pending=("sum",)),
    Sample("rms of few rows", lambda x, w: aten._fused_rms_norm(x, [4], w, 1e-5), (rand(1, 4), W), pending=()),
    Sample("rms backward", lambda g, x, r, w: aten._fused_rms_norm_backward(g, x, [4], r, w, [True, True]),
           (X, rand(5, 3, 4, seed=1), rand(5, 3, 1).abs() + 0.5, W), pending=("sum",)),
    Sample("rms backward, no weight",
           lambda g, x, r: aten._fused_rms_norm_backward(g, x, [4], r, None, [True, False])[0],
           (X, rand(5, 3, 4, seed=1), rand(5, 3, 1).abs() + 0.5), pending=("sum",)),
]  # fmt: skip


@pytest.mark.parametrize("sample", FUSED, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_fused_norms_as_accelerators_call_them(sample: Sample, mesh: tuple[int, ...]) -> None:
    with kernels_on_cpu():
        report: Report = check_layouts(within(torch._C._AutoDispatchBelowAutograd, sample), mesh, limit=12)
    report.must_hold()


# ------------------------------------------------------------ what torch makes on the way
@pytest.mark.parametrize("mode", MODES)
def test_states_and_offsets_that_torch_makes(mode: str) -> None:
    """A first state, the starts of bags: made by torch's Python code and given to a composite, which comes whole."""

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, i = rand(4, 3), torch.tensor([[0, 1], [2, 3], [4, 0]])
        table, weights = rand(5, 4), rand(3, 2)
        for cell in (nn.LSTMCell(3, 6), nn.GRUCell(3, 6), nn.RNNCell(3, 6)):
            plain = cell(x)
            ours = distribute_module(cell, mesh)
            for part in (x, x[0]):
                with MODES[mode]():
                    got = ours(distribute_tensor(part, mesh, [R]))
                for g, w in zip(flat(got), flat(plain), strict=True):
                    torch.testing.assert_close(g.full_tensor(), (w if part.ndim == 2 else w[0]).detach())
        put = lambda t, p: distribute_tensor(t, mesh, [p])  # noqa: E731
        with MODES[mode]():
            got = F.embedding_bag(put(i, R), put(table, S0), per_sample_weights=put(weights, S0), mode="sum")
        torch.testing.assert_close(got.full_tensor(), F.embedding_bag(i, table, per_sample_weights=weights, mode="sum"))

    torch.manual_seed(0)
    dtensor.simulate(2)(program)


def test_a_users_plain_state_is_refused_in_inference_mode() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        cell, x = distribute_module(nn.LSTMCell(3, 6), mesh), distribute_tensor(rand(4, 3), mesh, [R])
        state = rand(4, 6)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), pytest.raises(MixedTensorError):
                cell(x, (state, state))

    dtensor.simulate(2)(program)


# ------------------------------------------------------------ low precision
P = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
HALF = [
    Sample("batch_norm", lambda x, w, b, m, v: F.batch_norm(x, m.detach().clone(), v.detach().clone(), w, b, True),
           (rand(5, 3, 4), rand(3), rand(3, seed=1), torch.zeros(3), torch.ones(3)), pending=()),
    Sample("batch_norm, evaluating", lambda x, w, b, m, v: F.batch_norm(x, m.detach(), v.detach(), w, b),
           (rand(5, 3, 4), rand(3), rand(3, seed=1), torch.zeros(3), torch.ones(3)), pending=()),
    Sample("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), (X, W, rand(4, seed=4)), pending=("sum",)),
    Sample("layer_norm, cut, then whole", lambda x, w: _then_whole(x, w), (X, W), pending=()),
    Sample("group_norm", lambda x, w, b: F.group_norm(x, 4, w, b), (rand(2, 8, 3), rand(8), rand(8)), pending=()),
]  # fmt: skip


class _Moved(torch.autograd.Function):
    """Gives gradients back replicated, so that a backward has other layouts than its forward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad.redistribute(placements=[R] * grad.device_mesh.ndim) if isinstance(grad, DTensor) else grad


def _then_whole(x: Any, w: Any) -> Any:
    return _Moved.apply(F.layer_norm(x, (4,), w))


@pytest.mark.parametrize("sample", HALF, ids=lambda s: s.name)
@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("f16", "f16"), ("bf16", "f32")], ids="-".join)
def test_norms_in_low_precision(sample: Sample, dtypes: tuple[str, str]) -> None:
    """Forward and backward run where plain torch's do, whatever the layouts, also with shards that are empty."""
    first, others = P[dtypes[0]], P[dtypes[1]]
    tensors = [t.to(others if i else first) for i, t in enumerate(sample.tensors)]
    low = replace(sample, tensors=tensors, rtol=0.1, atol=0.15)
    shapes: Iterator[tuple[int, ...]] = itertools.cycle([(4,), (2, 2)])
    for _ in range(2):
        check_layouts(low, next(shapes), limit=6).must_hold()
