"""Attention and random numbers of CUDA tensors, as far as they can be held to something without a GPU.

Layouts: on fake CUDA tensors, whose shapes and strides are those that torch says its CUDA kernels give. Numbers: the
CUDA ops get stand-ins on the CPU, which compute what the kernels do; the laws then hold the rules to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.laws import Sample, check_layouts, check_strategies
from helpers.samples.attention import qkv
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor import DTensor, Placement, Replicate, Shard, init_device_mesh
from dtensor.dispatch import random as rng
from dtensor.simulate import fake_world
from dtensor.spec import Spec

aten = torch.ops.aten
R, S = Replicate(), Shard
BACKENDS: dict[str, Callable[..., Any]] = {
    "flash": lambda q, k, v, p: aten._scaled_dot_product_flash_attention(q, k, v, p, True),
    "efficient": lambda q, k, v, p: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, p, True),
    "efficient, no sums": lambda q, k, v, p: aten._scaled_dot_product_efficient_attention(q, k, v, None, False, p),
    "cudnn": lambda q, k, v, p: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p, True),
}


def back(name: str, q: Any, k: Any, v: Any, got: Any, p: float) -> Any:
    """The gradients, by the backward's own op: autograd does not run on CUDA tensors in a torch without CUDA."""
    out, sums, grad = got[0], got[1], torch.ones_like(got[0])
    if name == "flash":
        cum_q, cum_k, max_q, max_k, seed, offset = got[2:8]
        op = aten._scaled_dot_product_flash_attention_backward
        return op(grad, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, p, True, seed, offset)
    if name == "efficient":
        op = aten._scaled_dot_product_efficient_attention_backward
        return op(grad, q, k, v, None, out, sums, got[2], got[3], p, [True, True, True, False], True)[:3]
    cum_q, cum_k, max_q, max_k, seed, offset = got[2:8]
    op = aten._scaled_dot_product_cudnn_attention_backward
    return op(grad, q, k, v, out, sums, seed, offset, None, cum_q, cum_k, max_q, max_k, p, True)


def inputs(batch: int, heads: int, mesh: Any = None, layout: Sequence[Placement] = ()) -> list[Any]:
    """Query, key and value of a model in bf16, whole, or as DTensors of those sizes."""
    out: list[Any] = []
    for _ in range(3):
        whole = torch.empty(batch, 40, heads, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        if mesh is None:
            out.append(whole)
            continue
        spec = Spec.make(mesh, tuple(layout), whole.shape, whole.stride(), whole.dtype)
        b, h = spec.local_shape[0], spec.local_shape[1]
        local = torch.empty(b, 40, h, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        out.append(DTensor(local, spec, requires_grad=False))
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("shape", "layout"), [((4,), [S(0)]), ((4,), [S(1)]), ((2, 2), [S(0), S(1)]), ((2, 2), [R, S(1)]), ((3,), [S(1)])]
)  # fmt: skip
def test_layouts_of_the_cuda_ops(backend: str, dropout: float, shape: tuple[int, ...], layout: list[Placement]) -> None:
    """Outputs and gradients have the shapes of torch's, locally and as a whole; nothing is sent; seeds stay."""
    op = BACKENDS[backend]
    heads = 12 if shape == (3,) else 8
    for rank in range(torch.Size(shape).numel()):
        with fake_world(torch.Size(shape).numel(), rank) as world, FakeTensorMode():
            mesh = init_device_mesh("cuda", shape)
            plain, given = inputs(4, heads), inputs(4, heads, mesh, layout)
            want, got = op(*plain, dropout), op(*given, dropout)
            local = op(*(x.to_local().detach() for x in given), dropout)
            for w, g, piece in zip(want, got, local, strict=True):
                assert isinstance(g, DTensor) == isinstance(w, torch.Tensor), (w, g)
                if not isinstance(g, DTensor):
                    assert g == w
                    continue
                assert (g.shape, g.dtype, g.device) == (w.shape, w.dtype, w.device)
                assert (g._local_tensor.shape, g._local_tensor.stride()) == (piece.shape, piece.stride())
                batched = g.ndim >= 3
                assert g.placements == (tuple(layout) if batched else (R,) * mesh.ndim), g._spec
            if backend != "efficient, no sums":
                grads = back(backend, *given, got, dropout)
                for w, g, x in zip(back(backend, *plain, want, dropout), grads, given, strict=True):
                    assert isinstance(g, DTensor) and g.placements == tuple(layout)
                    assert (g.shape, g.dtype) == (w.shape, w.dtype)
                    assert g._local_tensor.shape == x._local_tensor.shape
            sent = {(t.kind, t.bytes) for t in world.traffic}
            assert all(dropout and kind == "broadcast" and n <= 8 for kind, n in sent), sent  # of a number to draw by


def test_sharded_sequences_are_gathered_or_moved() -> None:
    """A sharded sequence cannot stay sharded: it moves to the batch, in all backends."""
    for op in BACKENDS.values():
        with fake_world(4) as world, FakeTensorMode():
            mesh = init_device_mesh("cuda", (4,))
            x = [
                DTensor.from_local(torch.empty(4, 8, 10, 64, device="cuda", dtype=torch.bfloat16), mesh, [S(2)])
                for _ in range(3)
            ]
            out = op(*x, 0.0)[0]
            assert out.shape == (4, 8, 40, 64) and out.placements in ((S(0),), (S(1),))
            assert {t.kind for t in world.traffic} == {"all_to_all"}


# ------------------------------------------------------------ numbers, by stand-ins
def _attend(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float | None) -> tuple[torch.Tensor, ...]:
    """The output, the logarithms of the sums, the weights."""
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    weights = scores.softmax(-1)
    return weights @ v, scores.logsumexp(-1), weights


def _back(grad: Any, q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float | None) -> tuple[Any, ...]:
    weights = _attend(q, k, v, bias, causal, scale)[2]
    of_weights = grad @ v.transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    scaled = of_scores * (scale if scale is not None else q.shape[-1] ** -0.5)
    return scaled @ k, scaled.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad, of_scores


def _number() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Kernels on the CPU for the ops that CUDA has."""
    lib = torch.library.Library("aten", "IMPL")  # noqa: TOR901 - taken back below

    def efficient(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
        out, sums, _ = _attend(q, k, v, attn_bias, is_causal, scale)
        long = -(-q.shape[2] // 32) * 32 if compute_log_sumexp else 0
        padded = torch.full((*sums.shape[:2], long), float("inf"))
        padded[..., : q.shape[2]] = sums[..., :long]
        return out.transpose(1, 2).contiguous().transpose(1, 2), padded, _number(), _number()

    def efficient_backward(
        grad, q, k, v, bias, out, sums, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
    ):
        assert torch.allclose(out, _attend(q, k, v, bias, is_causal, scale)[0], atol=1e-5), "not this rank's output"
        assert torch.allclose(sums[..., : q.shape[2]], _attend(q, k, v, bias, is_causal, scale)[1], atol=1e-5)
        return tuple(g if m else None for g, m in zip(_back(grad, q, k, v, bias, is_causal, scale), mask))

    def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        out, sums, _ = _attend(q, k, v, None, is_causal, scale)
        state = torch.zeros(2, dtype=torch.uint64)
        return (
            out,
            sums,
            None,
            None,
            q.shape[2],
            k.shape[2],
            state,
            torch.zeros((), dtype=torch.uint64),
            out.new_empty(0),
        )

    def flash_backward(
        grad, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
    ):
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert torch.allclose(sums, _attend(q, k, v, None, is_causal, scale)[1], atol=1e-5), "not this rank's sums"
        return _back(grad, q, k, v, None, is_causal, scale)[:3]

    def cudnn(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
        out, sums, _ = _attend(q, k, v, bias, is_causal, scale)
        cut = sums.unsqueeze(-1) if compute_log_sumexp else out.new_empty(0)
        return out, cut, None, None, q.shape[2], k.shape[2], _number(), _number(), None

    def cudnn_backward(
        grad, q, k, v, out, sums, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale=None
    ):
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert torch.allclose(sums[..., 0], _attend(q, k, v, bias, is_causal, scale)[1], atol=1e-5), "not its sums"
        return _back(grad, q, k, v, bias, is_causal, scale)[:3]

    kernels = {
        "efficient": efficient, "efficient_backward": efficient_backward, "flash": flash,
        "flash_backward": flash_backward, "cudnn": cudnn, "cudnn_backward": cudnn_backward,
    }  # fmt: skip
    for name, kernel in kernels.items():
        backend, _, back = name.partition("_")
        lib.impl(f"_scaled_dot_product_{backend}_attention{'_' * bool(back)}{back}", kernel, "CPU")
    try:
        yield
    finally:
        lib._destroy()


SAMPLES = [
    Sample("flash", lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0],
           qkv(4, 4, 5, 4), pending=("sum",)),
    Sample("flash, one scale", lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, scale=0.3)[0],
           qkv(2, 6, 3, 4), pending=()),
    Sample("efficient",
           lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0],
           qkv(4, 4, 5, 4), pending=("sum",)),
    Sample("efficient, a bias",
           lambda q, k, v, b: aten._scaled_dot_product_efficient_attention(q, k, v, b.expand(2, 4, 5, 5), True)[0],
           (*qkv(2, 4, 5, 4), qkv(1, 4, 5, 5)[0]), pending=()),
    Sample("cudnn",
           lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0],
           qkv(4, 4, 5, 4), pending=("sum",)),
]  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_numbers_of_the_cuda_ops(sample: Sample, on_cpu: None) -> None:
    """Forward and backward, in all layouts: each rank's backward gets the sums of that rank."""
    check_layouts(sample, (2, 2), limit=12).must_hold()
    check_layouts(sample, (3,), limit=5).must_hold()


def test_strategies_of_the_cuda_ops(on_cpu: None) -> None:
    check_strategies(SAMPLES[2], (2, 2), limit=12).must_hold()


# ------------------------------------------------------------ random numbers
class Philox:
    """A CUDA generator: a seed and an offset, on the host. What is drawn from it is written down."""

    device = torch.device("cuda", 0)

    def __init__(self, seed: int, offset: int = 0) -> None:
        self.seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def manual_seed(self, seed: int) -> None:
        assert 0 <= seed < 1 << 63
        self.seed, self.offset = seed, 0

    def get_state(self) -> torch.Tensor:
        return torch.tensor([self.seed, self.offset]).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        self.seed, self.offset = state.view(torch.int64).tolist()


def test_seeded_draws_of_a_cuda_generator() -> None:
    """Replicas draw alike, shards differ, the stream goes on by one number; no host waits where nothing must agree."""
    from dtensor import simulate
    from dtensor.comm.observers import observers

    def body() -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2))
        out: list[Any] = []
        for seed in (5, 5 + mesh.get_rank()):  # ranks seeded alike, and not
            for layout in ((S(0), S(1)), (R, S(0)), (S(0), R), (R, R)):
                spec, g, sent = Spec.make(mesh, layout, (8, 8), (8, 1), torch.float32), Philox(seed, 8), []
                watch = lambda kind, *rest, sent=sent: sent.append(kind)  # noqa: E731
                observers.append(watch)
                inside = rng.run_seeded(lambda g=g: (g.seed, g.offset), spec, g, torch.device("cpu"))  # type: ignore[arg-type]
                observers.remove(watch)
                assert (g.seed, g.offset) == (seed, 12) and inside[1] == 0  # type: ignore[index]
                assert len(sent) == sum(p == R for p in layout), sent
                with rng.equal_seeds():
                    observers.append(watch)
                    again = rng.run_seeded(lambda g=g: g.seed, spec, Philox(5, 8), torch.device("cpu"))  # type: ignore[arg-type]
                    observers.remove(watch)
                assert len(sent) == sum(p == R for p in layout) and isinstance(again, int)
                out.append(inside[0])  # type: ignore[index]
        return out

    ranks = simulate(4)(body)
    for half in (0, 4):
        both, first, second, neither = (tuple(r[half + i] for r in ranks) for i in range(4))
        if half == 0:
            assert len(set(both)) == 4
        assert first[0] == first[2] and first[1] == first[3] and first[0] != first[1]
        assert second[0] == second[1] and second[2] == second[3] and second[0] != second[2]
        assert len(set(neither)) == 1


def test_generators_agree_before_a_whole_draw_on_cuda() -> None:
    """Position 0's stream counts where ranks replicate; a rank's own goes on by one number. In a capture: refused."""
    from dtensor import simulate

    def body() -> Any:
        mesh = init_device_mesh("cpu", (2,))
        spec, g = Spec.make(mesh, (R,), (8,), (1,), torch.float32), Philox(5 + mesh.get_rank(), 8)
        with rng._common_stream(spec, g, torch.device("cpu")):  # type: ignore[arg-type]
            inside = (g.seed, g.offset)
            g.offset += 4  # the draw
        return inside, (g.seed, g.offset)

    assert simulate(2)(body) == [((5, 8), (5, 12)), ((5, 8), (6, 12))]


def test_no_seeding_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        spec = Spec.make(mesh, (S(0),), (8,), (1,), torch.float32)
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            rng.run_seeded(lambda: None, spec, Philox(1), torch.device("cuda", 0))  # type: ignore[arg-type]
