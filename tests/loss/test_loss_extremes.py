"""Cross entropy at the edges: infinite and huge logits, nothing that counts, empty shards, wrong targets, and graphs
that are used twice or differentiated twice; each as the plain op does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers.laws import ints, rand

import dtensor
from dtensor import DeviceMesh, DTensor, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.loss import loss_parallel

R, S = Replicate(), Shard
INF, NAN = float("inf"), float("nan")

ROWS = {
    "some -inf": [-INF, 1.0, -INF, 2.0, 3.0, -INF],
    "one finite class": [-INF, -INF, -INF, 2.0, -INF, -INF],
    "all -inf": [-INF] * 6,
    "inf": [1.0, INF, 2.0, 0.0, 1.0, 2.0],
    "two inf": [INF, INF, 0.0, 1.0, 2.0, 3.0],
    "nan": [1.0, NAN, 2.0, 3.0, 0.0, 1.0],
    "inf and -inf": [INF, -INF, 0.0, 1.0, 2.0, 3.0],
    "huge": [1e30, -1e30, 3e30, 1e30, 0.0, 3e30],
    "tiny": [1e-38, 1e-40, 0.0, -1e-40, 1e-45, 0.0],
    "far apart": [-1e4, 1e4, 0.0, 0.0, 0.0, 0.0],
    "first shard -inf": [-INF, -INF, 0.0, 0.5, 1.0, 2.0],
}
TARGETS = (0, 3, 5, -100)


def on(f: Callable[[DeviceMesh], object], *shape: int) -> list[Any]:
    n = 1
    for k in shape:
        n *= k
    return dtensor.simulate(n)(lambda: f(init_device_mesh("cpu", shape)))


def laid(x: torch.Tensor, mesh: DeviceMesh, *layout: Placement) -> DTensor:
    return distribute_tensor(x, mesh, list(layout))


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    tol = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        got, want.to(got.dtype), rtol=tol, atol=tol, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_extreme_logits(dtype: torch.dtype, fused: bool) -> None:
    """Infinities and nans come out where the plain op in float32 has them, in value and gradient."""
    x = torch.tensor(list(ROWS.values())).to(dtype)
    w = torch.tensor([0.0, 1.0, 2.0, 0.5, 1.0, 0.0])

    def f(mesh: DeviceMesh) -> None:
        for t in TARGETS:
            target = torch.full((len(x),), t)
            for smoothing, weight in ((0.0, None), (0.1, None), (0.1, w)):
                wx = x.float().clone().requires_grad_()
                kw: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
                want = F.cross_entropy(wx, target, weight, **kw)
                want.sum().backward()
                dx = laid(x, mesh, S(1)).requires_grad_()
                dw = None if weight is None else laid(weight.to(dtype), mesh, R)
                if fused:
                    with loss_parallel():
                        got = F.cross_entropy(dx, target, dw, **kw)
                else:
                    got = F.cross_entropy(dx, laid(target, mesh, R), dw, **kw)
                got.sum().backward()
                what = f"target {t}, smoothing {smoothing}, weight {weight is not None}"
                close(got.full_tensor(), want.detach(), dtype, what)
                close(dx.grad.full_tensor(), wx.grad, dtype, f"gradient, {what}")

    on(f, 4)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_nothing_counts(smoothing: float) -> None:
    """All targets ignored, or only classes of weight 0: the mean is nan, as in the plain op, the sum 0."""
    x, none = rand(4, 6), torch.full((4,), -100)
    zero = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])

    def f(mesh: DeviceMesh) -> None:
        for target, weight in ((none, None), (none, zero), (torch.zeros(4, dtype=torch.int64), zero)):
            for reduction in ("mean", "sum", "none"):
                wx = x.clone().requires_grad_()
                want = F.cross_entropy(wx, target, weight, reduction=reduction, label_smoothing=smoothing)
                want.sum().backward()
                dx = laid(x, mesh, S(0), S(1)).requires_grad_()
                with loss_parallel():
                    got = F.cross_entropy(
                        dx, laid(target, mesh, S(0), R), weight, reduction=reduction, label_smoothing=smoothing
                    )
                got.sum().backward()
                close(got.full_tensor(), want.detach(), x.dtype, reduction)
                close(dx.grad.full_tensor(), wx.grad, x.dtype, f"gradient, {reduction}")

    on(f, 2, 2)


@pytest.mark.parametrize("shape", [(4, 1), (3, 2), (0, 8), (0, 3), (2, 3, 0), (1, 5), (3,), (1,)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_small_and_empty(shape: tuple[int, ...], smoothing: float) -> None:
    """Fewer classes than ranks, one class, no rows: shards without classes or rows."""
    c = 1 if len(shape) > 1 else 0

    def f(mesh: DeviceMesh) -> None:
        x, t = rand(*shape), ints(shape[c], *shape[:c], *shape[c + 1 :])
        for reduction in ("mean", "sum", "none"):
            for kind in ("index", "probabilities"):
                target = t if kind == "index" else rand(*shape, seed=1).softmax(c)
                wx = x.clone().requires_grad_()
                want = F.cross_entropy(wx, target, reduction=reduction, label_smoothing=smoothing)
                want.sum().backward()
                dx = laid(x, mesh, S(c)).requires_grad_()
                with loss_parallel():
                    got = F.cross_entropy(dx, target, reduction=reduction, label_smoothing=smoothing)
                got.sum().backward()
                close(got.full_tensor(), want.detach(), x.dtype, f"{kind} {reduction}")
                close(dx.grad.full_tensor(), wx.grad, x.dtype, f"gradient, {kind} {reduction}")

    on(f, 4)


def test_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the blocks that the rows are taken in, the numbers are the same."""
    from dtensor.loss import rows

    monkeypatch.setitem(rows.BLOCK_ELEMENTS, "cpu", 7)

    def f(mesh: DeviceMesh) -> None:
        for shape in ((5, 7), (3, 6, 4), (2, 5, 2, 6), (6,)):
            c = 1 if len(shape) > 1 else 0
            x, t, w = rand(*shape), ints(shape[c], *shape[:c], *shape[c + 1 :]), rand(shape[c]).abs()
            for target in (t, rand(*shape, seed=1).softmax(c)):
                for dtype in (torch.float32, torch.bfloat16):
                    wx = x.to(dtype).float().clone().requires_grad_()
                    want = F.cross_entropy(wx, target, w, label_smoothing=0.1, reduction="none")
                    want.square().sum().backward()
                    dx = laid(x.to(dtype), mesh, S(c)).requires_grad_()
                    with loss_parallel():
                        got = F.cross_entropy(dx, target, w, label_smoothing=0.1, reduction="none")
                    got.square().sum().backward()
                    close(got.full_tensor(), want.detach(), dtype, str(shape))
                    close(dx.grad.full_tensor(), wx.grad, dtype, f"gradient, {shape}")

    on(f, 3)


# ------------------------------------------------------------ wrong targets
WRONG = torch.tensor([1, 2, 9, 0, 1, 2, 3, 4])


@pytest.mark.parametrize("target", [WRONG, torch.where(WRONG == 9, -1, WRONG)], ids=["9", "-1"])
def test_a_target_out_of_bounds_is_an_error_on_all_ranks(target: torch.Tensor) -> None:
    def f(mesh: DeviceMesh) -> float:
        x = laid(rand(8, 5), mesh, S(0), S(1))
        cases = [("mean", [S(0), R]), *((r, [R, R]) for r in ("mean", "sum", "none"))]
        for reduction, layout in cases:
            with loss_parallel(), pytest.raises(IndexError, match="out of bounds for 5 classes"):
                F.cross_entropy(x, laid(target, mesh, *layout), reduction=reduction)
        return float(x.full_tensor().sum())  # the ranks are in step

    assert len(on(f, 2, 2)) == 4


def test_integer_types_of_targets() -> None:
    def f(mesh: DeviceMesh) -> None:
        x, t = rand(4, 6), ints(6, 4)
        want = F.cross_entropy(x, t)
        for dtype in (torch.uint8, torch.int32):
            with loss_parallel():
                torch.testing.assert_close(F.cross_entropy(laid(x, mesh, S(1)), t.to(dtype)).full_tensor(), want)
        with loss_parallel(), pytest.raises(RuntimeError, match="must be of an integer type"):
            F.cross_entropy(laid(x, mesh, S(1)), t.bool())

    on(f, 2)


# ------------------------------------------------------------ graphs
OPTIONS: list[dict[str, Any]] = [
    {"reduction": r, "label_smoothing": s} for r in ("mean", "sum", "none") for s in (0.0, 0.1)
]


@pytest.mark.parametrize("kind", ["index", "probabilities"])
def test_second_derivatives(kind: str) -> None:
    x, w = rand(4, 6, dtype=torch.float64), rand(6).double().abs()
    t = torch.tensor([-100, 3, 5, 0]) if kind == "index" else rand(4, 6, seed=2).double().softmax(1)

    def derivatives(loss: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        first = torch.autograd.grad(loss.square().sum(), inputs, create_graph=True)
        again = torch.autograd.grad(loss.square().sum(), inputs, retain_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), inputs)
        return [*first, *again, *second]

    def f(mesh: DeviceMesh) -> None:
        for kw in OPTIONS:
            wx, wt, ww = x.clone().requires_grad_(), t.clone(), w.clone()
            dx, dt = laid(x, mesh, S(0), S(1)).requires_grad_(), laid(t, mesh, S(0), R if kind == "index" else S(1))
            dw = laid(w, mesh, R, R)
            plain, ours = [wx], [dx]
            if kind != "index":
                plain, ours = (
                    [wx, wt.requires_grad_(), ww.requires_grad_()],
                    [dx, dt.requires_grad_(), dw.requires_grad_()],
                )
            with loss_parallel():
                got = F.cross_entropy(dx, dt, dw, **kw)
            want = derivatives(F.cross_entropy(wx, wt, ww, **kw), plain)
            for a, b in zip(derivatives(got, ours), want, strict=True):
                torch.testing.assert_close(a.full_tensor(), b)

    on(f, 2, 2)


def test_class_weights_with_class_indices_have_no_gradient() -> None:
    """Refused as the plain op refuses it, not left out in silence."""
    w = rand(6).abs().requires_grad_()
    with pytest.raises(RuntimeError, match="weight"):
        F.cross_entropy(rand(4, 6).requires_grad_(), ints(6, 4), w).backward()

    def f(mesh: DeviceMesh) -> None:
        with loss_parallel(), pytest.raises(RuntimeError, match="weight has no gradient"):
            F.cross_entropy(laid(rand(4, 6), mesh, S(1)), ints(6, 4), laid(w.detach(), mesh, R).requires_grad_())

    on(f, 2)


def test_logits_used_twice_and_graphs_kept() -> None:
    x, t = rand(4, 6), ints(6, 4)
    wx = x.clone().requires_grad_()
    want = F.cross_entropy(wx, t) + (wx * wx).sum() + F.cross_entropy(wx * 2, t, reduction="sum")
    want.backward(retain_graph=True)
    want.backward()

    def f(mesh: DeviceMesh) -> None:
        dx = laid(x, mesh, S(1)).requires_grad_()
        with loss_parallel():
            got = F.cross_entropy(dx, t) + (dx * dx).sum() + F.cross_entropy(dx * 2, t, reduction="sum")
            got.backward(retain_graph=True)
        got.backward()
        torch.testing.assert_close(dx.grad.full_tensor(), wx.grad)
        with pytest.raises(RuntimeError, match="second time"):
            got.backward()

    on(f, 4)


# ------------------------------------------------------------ where it runs
def test_ranks_outside_the_mesh() -> None:
    x, t = rand(4, 6), ints(6, 4)
    want = F.cross_entropy(x, t)

    def f() -> float | None:
        mesh = DeviceMesh("cpu", [0, 1])
        dx = laid(x, mesh, S(1)).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(dx, t)
        loss.backward()
        return loss.to_local().item() if mesh.get_coordinate() is not None else None

    assert dtensor.simulate(3)(f) == [pytest.approx(float(want)), pytest.approx(float(want)), None]


def test_meta_tensors_and_checkpointing() -> None:
    x, t = rand(4, 6), ints(6, 4)
    wx = x.clone().requires_grad_()
    F.cross_entropy(wx, t).backward()

    def inside(x: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            return F.cross_entropy(x, t)

    def f(mesh: DeviceMesh) -> None:
        meta = laid(torch.empty(4, 6, device="meta"), mesh, S(1))
        with loss_parallel():
            assert F.cross_entropy(meta, laid(torch.empty(4, dtype=torch.int64, device="meta"), mesh, R)).shape == ()
        dx = laid(x, mesh, S(1)).requires_grad_()
        torch.utils.checkpoint.checkpoint(inside, dx, use_reentrant=False).backward()
        torch.testing.assert_close(dx.grad.full_tensor(), wx.grad)

    on(f, 2)


def test_probabilities_refuse_an_ignored_class() -> None:
    """As the plain op does."""
    p = rand(4, 6).softmax(1)
    with pytest.raises(RuntimeError, match="ignore_index"):
        F.cross_entropy(rand(4, 6), p, ignore_index=1)

    def f(mesh: DeviceMesh) -> None:
        with loss_parallel(), pytest.raises(RuntimeError, match="ignore_index is for class indices"):
            F.cross_entropy(laid(rand(4, 6), mesh, S(1)), laid(p, mesh, S(1)), ignore_index=1)

    on(f, 2)
