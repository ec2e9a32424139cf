"""linear_cross_entropy against F.linear and F.cross_entropy: values, gradients, layouts, what is sent, what is held."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import HELD, Sample, check_layouts, check_strategies, ints, rand

import dtensor
from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.loss import linear_cross_entropy, loss_parallel
from dtensor.loss.linear_kernels import _part, tile_sizes
from meter import Meter

R, S, P = Replicate(), Shard, Partial()
REDUCTIONS = ("mean", "sum", "none")


def on(f: Callable[[DeviceMesh], object], *shape: int) -> list[Any]:
    n = 1
    for k in shape:
        n *= k
    return dtensor.simulate(n)(lambda: f(init_device_mesh("cpu", shape)))


def laid(x: torch.Tensor, mesh: DeviceMesh, layout: list[Placement]) -> DTensor:
    return distribute_tensor(x, mesh, layout)


def unfused(
    h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, b: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None, **kw: Any,
) -> torch.Tensor:  # fmt: skip
    return F.cross_entropy(F.linear(h, w, b).movedim(-1, 1 if h.ndim > 1 else 0), t, class_weight, **kw)


def inputs(rows: tuple[int, ...], classes: int, features: int) -> tuple[torch.Tensor, ...]:
    t = ints(classes, *rows)
    if t.ndim:
        t.view(-1)[::4] = -100
    return rand(*rows, features), rand(classes, features), t, rand(classes), rand(classes, seed=2).abs()


# mesh, rows, classes, layout of hidden, of weight, of target; gradients' layouts of hidden and weight;
# collectives forward (not for a mean) and backward
PLACES: dict[str, tuple[Any, ...]] = {
    "tp": ((4,), (3, 4), 13, [R], [S(0)], [R], (P,), (S(0),), 1, 0),
    "fewer classes than ranks": ((4,), (5,), 3, [R], [S(0)], [R], (P,), (S(0),), 1, 0),
    "one row": ((2,), (), 5, [R], [S(0)], [R], (P,), (S(0),), 1, 0),
    "no rows": ((2,), (0,), 5, [R], [S(0)], [R], (P,), (S(0),), 1, 0),
    "sequence over tp": ((4,), (2, 8), 12, [S(1)], [S(0)], [R], (S(1),), (S(0),), 2, 1),
    "dp": ((3,), (7,), 5, [S(0)], [R], [S(0)], (S(0),), (P,), 0, 0),
    "features": ((2,), (4,), 6, [S(1)], [S(1)], [R], (S(1),), (S(1),), 2, 0),
    "dp,tp": ((2, 2), (3, 4), 13, [S(0), R], [R, S(0)], [S(0), R], (S(0), P), (P, S(0)), 1, 0),
    "tp,dp": ((2, 3), (5,), 7, [R, S(0)], [S(0), R], [R, S(0)], (P, S(0)), (S(0), P), 1, 0),
    "dp,tp, sequence over tp": (
        (2, 2), (4, 4), 8, [S(0), S(1)], [R, S(0)], [R, R], (S(0), S(1)), (P, S(0)), 2, 1),
    "classes over both": ((2, 2), (3, 4), 13, [R, R], [S(0), S(0)], [R, R], (P, P), (S(0), S(0)), 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("where", PLACES)
def test_values_gradients_layouts_and_what_is_sent(where: str) -> None:
    shape, rows, classes, of_h, of_w, of_t, grad_h, grad_w, sent, sent_back = PLACES[where]
    of_b = [p if p == S(0) else R for p in of_w]
    h, w, t, b, c = inputs(rows, classes, 6)
    options = list(itertools.product(REDUCTIONS, ((0.0, False, False), (0.1, True, True)), (None, 2)))
    wants = []
    for reduction, (smoothing, bias, scaled), _ in options:
        plain = [x.clone().requires_grad_() for x in (h, w, b)]
        kw = {"reduction": reduction, "label_smoothing": smoothing}
        want = unfused(*plain[:2], t, plain[2] if bias else None, c if scaled else None, **kw)
        want.sum().backward()
        wants.append((kw, want.detach(), [x.grad for x in plain]))

    def f(mesh: DeviceMesh) -> None:
        for (reduction, (_, bias, scaled), chunk), (kw, want, grads) in zip(options, wants, strict=True):
            dh, dw, db = (laid(x, mesh, y).requires_grad_() for x, y in ((h, of_h), (w, of_w), (b, of_b)))
            dt = laid(t, mesh, of_t)
            with CommDebugMode() as forward:
                got = linear_cross_entropy(
                    dh, dw, dt, db if bias else None, class_weight=c if scaled else None, chunk_rows=chunk,
                    chunk_classes=chunk, **kw,
                )  # fmt: skip
            with CommDebugMode() as backward:
                got.sum().backward()
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-5, equal_nan=True)
            for d, grad in zip((dh, dw, db), grads, strict=True):
                assert (d.grad is None) == (grad is None)
                if grad is not None:
                    torch.testing.assert_close(d.grad.full_tensor(), grad, rtol=1e-4, atol=1e-5, equal_nan=True)
            cut = [p.is_shard() and p.dim < h.ndim - 1 and q != S(0) for p, q in zip(of_h, of_w, strict=True)]
            per_row = tuple(p if c else R for p, c in zip(of_h, cut, strict=True))
            assert got.placements == (per_row if reduction == "none" else tuple(P if c else R for c in cut))
            assert dh.grad.placements == grad_h and dw.grad.placements == grad_w
            if not bias:
                assert forward.get_total_counts() == sent + (reduction == "mean" and any(p != R for p in of_t))
                assert backward.get_total_counts() == sent_back

    on(f, *shape)


def fused(reduction: str, smoothing: float, **kw: Any) -> Callable[..., torch.Tensor]:
    def f(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(h, DTensor):
            return linear_cross_entropy(h, w, t, b, reduction=reduction, label_smoothing=smoothing, **kw)
        return unfused(h, w, t, b, reduction=reduction, label_smoothing=smoothing)

    return f


SAMPLES = [
    Sample(f"fused {r} {s}", fused(r, s, chunk_rows=3, chunk_classes=2), inputs((5,), 7, 4)[:n], pending=("sum",))
    for r in REDUCTIONS for s, n in ((0.0, 3), (0.1, 4))
]  # fmt: skip
SAMPLES += [Sample("fused sequence", fused("mean", 0.0), inputs((3, 4), 6, 4)[:4], pending=("avg",))]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_layouts(sample, mesh, limit=16).must_hold()


@pytest.mark.parametrize("sample", SAMPLES[::2], ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    check_strategies(sample, (2, 3), limit=20, held=HELD).must_hold()


# ------------------------------------------------------------ precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    """As near to the exact numbers as with logits that are kept, however many rows are added up."""
    h, w, t = rand(512, 16).to(dtype), rand(40, 16).to(dtype), ints(40, 512)
    exact = [x.double().requires_grad_() for x in (h, w)]
    unfused(*exact, t).backward()
    kept = [x.clone().requires_grad_() for x in (h, w)]
    unfused(*kept, t).backward()

    def error(found: torch.Tensor, x: torch.Tensor) -> float:
        return float((found.double() - x.grad).norm() / x.grad.norm())

    def f(mesh: DeviceMesh) -> None:
        dh, dw = laid(h, mesh, [R]).requires_grad_(), laid(w, mesh, [S(0)]).requires_grad_()
        loss = linear_cross_entropy(dh, dw, t, chunk_rows=4, chunk_classes=4)
        assert loss.dtype == dtype
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), unfused(*exact, t).detach().to(dtype))
        for d, want, plain in zip((dh, dw), exact, kept, strict=True):
            assert d.grad.dtype == dtype
            assert error(d.grad.full_tensor(), want) < 1.5 * error(plain.grad, want) + 1e-3

    on(f, 2)


def test_autocast() -> None:
    def f(mesh: DeviceMesh) -> None:
        h, w, t = rand(6, 8), rand(10, 8), ints(10, 6)
        dh, dw = laid(h, mesh, [R]).requires_grad_(), laid(w, mesh, [S(0)]).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            want, loss = unfused(h, w, t), linear_cross_entropy(dh, dw, t)
        loss.backward()
        assert loss.dtype == want.dtype == torch.float32 and dw.grad.dtype == torch.float32
        torch.testing.assert_close(loss.full_tensor(), want, rtol=1e-2, atol=1e-2)

    on(f, 2)


# ------------------------------------------------------------ uses
def test_plain_tensors() -> None:
    for rows in ((6,), (2, 3), ()):
        h, w, t, b, c = inputs(rows, 7, 4)
        for reduction in REDUCTIONS:
            ours, plain = ([x.clone().requires_grad_() for x in (h, w, b)] for _ in range(2))
            got = linear_cross_entropy(*ours[:2], t, ours[2], class_weight=c, reduction=reduction, chunk_rows=2)
            want = unfused(*plain[:2], t, plain[2], c, reduction=reduction)
            torch.testing.assert_close(got, want)
            got.sum().backward()
            want.sum().backward()
            for x, y in zip(ours, plain, strict=True):
                torch.testing.assert_close(x.grad, y.grad)


def test_an_embedding_tied_to_the_layer() -> None:
    e, tokens, t = rand(10, 6), ints(10, 4, 3), ints(10, 4, 3, seed=1)
    plain = e.clone().requires_grad_()
    unfused(torch.tanh(F.embedding(tokens, plain)), plain, t).backward()

    def f(mesh: DeviceMesh) -> None:
        weight = laid(e, mesh, [S(0)]).requires_grad_()
        hidden = torch.tanh(F.embedding(laid(tokens, mesh, [R]), weight))
        linear_cross_entropy(hidden, weight, t).backward()
        torch.testing.assert_close(weight.grad.full_tensor(), plain.grad)

    on(f, 4)


def test_plain_hidden_states_beside_sharded_classes() -> None:
    """What a layer of local outputs hands over, say ColwiseParallel: replicated, its gradient whole."""
    h, w, t = rand(5, 4), rand(9, 4), ints(9, 5)
    plain = h.clone().requires_grad_()
    unfused(plain, w, t).backward()

    def f(mesh: DeviceMesh) -> None:
        hidden = h.clone().requires_grad_()
        linear_cross_entropy(hidden, laid(w, mesh, [S(0)]), t).backward()
        torch.testing.assert_close(hidden.grad, plain.grad)

    on(f, 3)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="not in this torch")
def test_the_function_of_torch_inside_loss_parallel() -> None:
    h, w, t, b, c = inputs((6,), 9, 4)
    kw: dict[str, Any] = {"weight": c, "label_smoothing": 0.1}
    want = F.linear_cross_entropy(h, w, t, linear_bias=b, **kw)

    def f(mesh: DeviceMesh) -> None:
        dh, dw, db = (laid(x, mesh, y).requires_grad_() for x, y in ((h, [R]), (w, [S(0)]), (b, [S(0)])))
        with loss_parallel(), CommDebugMode() as sent:
            got = F.linear_cross_entropy(dh, dw, t, linear_bias=db, **kw)
        torch.testing.assert_close(got.full_tensor(), want)
        assert sent.get_total_counts() == 1 and "Linear" in type(got.grad_fn).__name__
        with loss_parallel():
            torch.testing.assert_close(F.linear_cross_entropy(h, w, t, linear_bias=b, **kw), want)

    on(f, 3)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    h, w, t = rand(5, 4), rand(9, 4), ints(9, 5)
    plain = [h.clone().requires_grad_(frozen != "hidden"), w.clone().requires_grad_(frozen != "weight")]
    unfused(*plain, t).backward()

    def f(mesh: DeviceMesh) -> None:
        ours = [laid(h, mesh, [R]), laid(w, mesh, [S(0)])]
        for d, x in zip(ours, plain, strict=True):
            d.requires_grad_(x.requires_grad)
        linear_cross_entropy(*ours, t).backward()
        for d, x in zip(ours, plain, strict=True):
            assert (d.grad is None) == (x.grad is None)
            if x.grad is not None:
                torch.testing.assert_close(d.grad.full_tensor(), x.grad)

    on(f, 2)


def test_second_derivatives() -> None:
    h, w, t, b, _ = (x.double() if x.is_floating_point() else x for x in inputs((2, 3), 7, 4))

    def derivatives(loss: torch.Tensor, of: list[torch.Tensor]) -> list[torch.Tensor]:
        first = torch.autograd.grad(loss.square().sum(), of, create_graph=True)
        return [*first, *torch.autograd.grad(sum((g * g).sum() for g in first), of)]

    def f(mesh: DeviceMesh) -> None:
        for reduction in REDUCTIONS:
            plain = [x.clone().requires_grad_() for x in (h, w, b)]
            of = [laid(x, mesh, y).requires_grad_() for x, y in ((h, [S(0), R]), (w, [R, S(0)]), (b, [R, S(0)]))]
            want = unfused(*plain[:2], t, plain[2], reduction=reduction, label_smoothing=0.1)
            got = linear_cross_entropy(
                *of[:2], laid(t, mesh, [S(0), R]), of[2], reduction=reduction, label_smoothing=0.1
            )
            for a, x in zip(derivatives(got, of), derivatives(want, plain), strict=True):
                torch.testing.assert_close(a.full_tensor(), x)

    on(f, 2, 2)


# ------------------------------------------------------------ memory
def held(rows: int, classes: int, use: Callable[..., torch.Tensor]) -> tuple[int, int]:
    """(most bytes held at one time beside the inputs, bytes of the logits) on one of 2 ranks, forward and backward."""

    def f(mesh: DeviceMesh) -> int:
        h, w = laid(rand(rows, 8), mesh, [R]).requires_grad_(), laid(rand(classes, 8), mesh, [S(0)]).requires_grad_()
        t = laid(ints(classes, rows), mesh, [R])
        use(h, w, t).backward()  # plans are made outside of the measurement
        h.grad = w.grad = None
        kept = [x.detach().to_local() for x in (h, w, t)]
        with Meter(kept) as meter:
            use(h, w, t).backward()
        return meter.peak - sum(x.nbytes for x in kept)

    return max(on(f, 2)), rows * classes // 2 * 4


def test_memory_does_not_grow_with_the_logits() -> None:
    def ours(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(h, w, t, chunk_rows=64, chunk_classes=128)

    def with_logits(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            return F.cross_entropy(F.linear(h, w), t)

    (small, few), (large, many) = held(256, 512, ours), held(1024, 2048, ours)
    tile = 64 * 128 * 4
    linear = 1024 * 4 * 48 + 1024 * 8 * 4 * 4  # numbers a row; gradients of hidden states and weight
    assert many == 16 * few
    assert large <= 4 * tile + linear, (large, tile, linear)
    assert large - small <= 4 * small
    assert large < many / 10
    assert held(1024, 2048, with_logits)[0] > 2 * many  # the logits and their gradient


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 1), (torch.bfloat16, 1)], ids=str)
def test_loss_parallel_makes_no_copy_of_the_logits(dtype: torch.dtype, copies: int) -> None:
    """Beside the logits it holds their gradient, in their dtype, and blocks of rows."""
    rows, classes = 2048, 2048

    def f(mesh: DeviceMesh) -> float:
        x = laid(rand(rows, classes).to(dtype), mesh, [S(1)]).requires_grad_()
        t = laid(ints(classes, rows), mesh, [R])
        with loss_parallel():
            F.cross_entropy(x, t, label_smoothing=0.1).backward()
            x.grad = None
            kept = [x.detach().to_local(), t.to_local()]
            with Meter(kept) as meter:
                F.cross_entropy(x, t, label_smoothing=0.1).backward()
        return (meter.peak - sum(k.nbytes for k in kept)) / kept[0].nbytes

    assert copies <= max(on(f, 2)) < copies + 0.75


# ------------------------------------------------------------ errors
def given(mesh: DeviceMesh, **other: Any) -> dict[str, Any]:
    full = {"hidden": laid(rand(8, 6), mesh, [S(0), R]), "weight": laid(rand(12, 6), mesh, [R, S(0)]),
            "target": laid(ints(12, 8), mesh, [S(0), R])}  # fmt: skip
    return {**full, **other}


BAD: dict[str, tuple[type[Exception], str, Callable[[DeviceMesh], dict[str, Any]]]] = {
    "plain target": (ValueError, "a plain target counts as replicated", lambda m: {"target": ints(12, 8)}),
    "plain hidden": (ValueError, "every mesh axis shards the classes", lambda m: {"hidden": rand(8, 6)}),
    "two meshes": (ValueError, "must be on one mesh",
                   lambda m: {"weight": laid(rand(12, 6), init_device_mesh("cpu", (4,)), [S(0)])}),
    "plain weight": (ValueError, "weight is plain", lambda m: {"weight": rand(12, 6)}),
    "only the target": (TypeError, "a DTensor among", lambda m: {"weight": rand(12, 6), "hidden": rand(8, 6)}),
    "no tensor": (TypeError, "target must be a tensor", lambda m: {"target": [1, 2]}),
    "features": (RuntimeError, "do not fit", lambda m: {"weight": laid(rand(12, 5), m, [R, R])}),
    "rows": (ValueError, "one class index a row", lambda m: {"target": laid(ints(12, 7), m, [R, R])}),
    "bias": (RuntimeError, "bias must have shape", lambda m: {"bias": rand(8)}),
    "class weight": (RuntimeError, "one value for each of the 12", lambda m: {"class_weight": rand(8)}),
    "gradient of class weight": (RuntimeError, "no gradient", lambda m: {"class_weight": rand(12).requires_grad_()}),
    "probabilities": (NotImplementedError, "class probabilities", lambda m: {"target": rand(8, 12)}),
    "bool": (RuntimeError, "integer type", lambda m: {"target": ints(2, 8).bool()}),
    "dtypes": (RuntimeError, "one floating-point dtype", lambda m: {"weight": laid(rand(12, 6).double(), m, [R, R])}),
    "reduction": (ValueError, "not a valid value", lambda m: {"reduction": "x"}),
    "smoothing": (RuntimeError, "between 0.0 and 1.0", lambda m: {"label_smoothing": 2.0}),
    "chunk": (ValueError, "chunk_rows must be a positive int", lambda m: {"chunk_rows": 0}),
    "class": (IndexError, "out of bounds for 12 classes",
              lambda m: {"target": laid(torch.tensor([0, 1, 2, 3, 12, 4, 5, 6]), m, [S(0), R])}),
}  # fmt: skip


@pytest.mark.parametrize(("error", "text", "change"), BAD.values(), ids=BAD)
def test_errors(error: type[Exception], text: str, change: Callable[[DeviceMesh], dict[str, Any]]) -> None:
    def f(mesh: DeviceMesh) -> None:
        arguments = given(mesh, **change(mesh))
        with CommDebugMode() as sent, pytest.raises(error, match=text):
            linear_cross_entropy(**arguments)
        assert error is IndexError or sent.get_total_counts() == 0

    on(f, 2, 2)


def test_tiles() -> None:
    assert _part(((10, 4), (30, 4)), 2, 3) == ((12, 2), (30, 1))
    assert _part(((0, 5),), 5, 2) == ()
    assert tile_sizes(1000, 50000, "cpu", 0, 0) == (64, 32768)
    assert tile_sizes(10, 100, "cpu", 0, 0) == (10, 100)
    assert tile_sizes(10, 100, "cuda", 3, 7) == (3, 7)
    assert tile_sizes(0, 0, "cpu", 0, 0) == (1, 1)
