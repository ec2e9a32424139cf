"""loss_parallel: values and gradients against F.cross_entropy, what is sent, layouts, errors, the context itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import ints, rand

import dtensor
from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.loss import loss_parallel

R, P, S = Replicate(), Partial(), Shard
REDUCTIONS = ("mean", "sum", "none")

# mesh shape, layout of [rows, classes, ...] logits, layout of the target
MESHES: dict[str, tuple[tuple[int, ...], list[Placement], list[Placement]]] = {
    "tp": ((4,), [S(1)], [R]),
    "dp,tp": ((2, 2), [S(0), S(1)], [S(0), R]),
    "tp,dp": ((3, 2), [S(1), S(0)], [R, S(0)]),
    "R,tp": ((2, 2), [R, S(1)], [R, R]),
    "dp,cp,tp": ((2, 2, 2), [S(0), S(2), S(1)], [S(0), S(1), R]),
}
OPTIONS = ((False, False, 0.0), (True, True, 0.0), (True, True, 0.1), (False, True, 0.3))
SHAPES = [(6, 16), (5, 7), (4, 3), (3, 6, 4), (2, 5, 2, 3)]


def on(f: Callable[[DeviceMesh], object], *shape: int) -> list[object]:
    n = 1
    for k in shape:
        n *= k
    return dtensor.simulate(n)(lambda: f(init_device_mesh("cpu", shape)))


def targets(shape: tuple[int, ...], ignored: bool) -> torch.Tensor:
    t = ints(shape[1], shape[0], *shape[2:])
    if ignored:
        t[0] = -100
        t.view(-1)[::3] = -100
    return t


@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_values_gradients_layouts_and_what_is_sent(where: str, shape: tuple[int, ...], reduction: str) -> None:
    mesh_shape, layout, target_layout = MESHES[where]
    if any(isinstance(p, Shard) and p.dim >= len(shape) for p in layout):
        return

    def f(mesh: DeviceMesh) -> None:
        for weight, ignored, smoothing in OPTIONS:
            x, t = rand(*shape), targets(shape, ignored)
            w = rand(shape[1]).abs() + 0.2 if weight else None
            kw: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
            want_x = x.clone().requires_grad_()
            want = F.cross_entropy(want_x, t, w, **kw)
            g = rand(*want.shape, seed=9) if want.ndim else torch.tensor(1.5)
            want.backward(g)
            dx = distribute_tensor(x, mesh, layout).requires_grad_()
            dt = distribute_tensor(t, mesh, target_layout)
            with loss_parallel(), CommDebugMode() as forward:
                got = F.cross_entropy(dx, dt, w, **kw)
            rows = [a for a, p in enumerate(target_layout) if p != R]
            if reduction == "none":
                assert got.placements == tuple(target_layout)
            else:
                assert got.placements == tuple(P if a in rows else R for a in range(mesh.ndim))
            back = distribute_tensor(g, mesh, got.placements if reduction == "none" else [R] * mesh.ndim)
            with CommDebugMode() as backward:
                got.backward(back)
            torch.testing.assert_close(got.full_tensor(), want.detach(), rtol=1e-4, atol=1e-5)
            assert dx.grad is not None and dx.grad.placements == tuple(layout)
            torch.testing.assert_close(dx.grad.full_tensor(), want_x.grad, rtol=1e-4, atol=1e-5)
            assert forward.get_total_counts() <= 1 + (reduction == "mean") * len(rows)
            assert backward.get_total_counts() == 0

    on(f, *mesh_shape)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("where", ["tp", "dp,tp"])
def test_class_probabilities(where: str, reduction: str) -> None:
    mesh_shape, layout, _ = MESHES[where]

    def f(mesh: DeviceMesh) -> None:
        for smoothing in (0.0, 0.2):
            x, p, w = rand(6, 7), rand(6, 7, seed=1).softmax(1), rand(7).abs()
            wx, wp = x.clone().requires_grad_(), p.clone().requires_grad_()
            want = F.cross_entropy(wx, wp, w, reduction=reduction, label_smoothing=smoothing)
            want.sum().backward()
            dx, dp = (distribute_tensor(t, mesh, layout).requires_grad_() for t in (x, p))
            with loss_parallel():
                got = F.cross_entropy(dx, dp, w, reduction=reduction, label_smoothing=smoothing)
                got.sum().backward()
            torch.testing.assert_close(got.full_tensor(), want.detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(dx.grad.full_tensor(), wx.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(dp.grad.full_tensor(), wp.grad, rtol=1e-4, atol=1e-5)

    on(f, *mesh_shape)


def test_huge_and_tiny_logits() -> None:
    """The maximum is taken over all ranks, so nothing overflows; rows of -inf off the target are fine."""

    def f(mesh: DeviceMesh) -> None:
        x = torch.tensor([[1e4, -1e4, 0.0, 5.0], [-1e4, -1e4, -1e4, -1e4], [float("-inf"), 2.0, float("-inf"), 1.0]])
        t = torch.tensor([0, 2, 3])
        wx = x.clone().requires_grad_()
        want = F.cross_entropy(wx, t, reduction="none")
        want.sum().backward()
        dx = distribute_tensor(x, mesh, [S(1)]).requires_grad_()
        with loss_parallel():
            got = F.cross_entropy(dx, t, reduction="none")
        got.sum().backward()
        torch.testing.assert_close(got.full_tensor(), want.detach())
        torch.testing.assert_close(dx.grad.full_tensor(), wx.grad)

    on(f, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Loss and gradient have the logits' dtype; sums are taken in float32, so the loss is exact to a rounding."""

    def f(mesh: DeviceMesh) -> None:
        x, t = rand(64, 40).to(dtype), ints(40, 64)
        dx = distribute_tensor(x, mesh, [S(1)]).requires_grad_()
        with loss_parallel():
            got = F.cross_entropy(dx, t)
        got.backward()
        assert got.dtype == dtype and dx.grad.dtype == dtype
        exact = F.cross_entropy(x.double(), t)
        torch.testing.assert_close(got.full_tensor(), exact.to(dtype))

    on(f, 4)


def test_log_softmax_and_nll_loss_apart() -> None:
    """F.log_softmax inside the context is the plain one, and so is its gradient, whoever consumes it."""

    def f(mesh: DeviceMesh) -> None:
        x, t, q = rand(6, 9), ints(9, 6), rand(6, 9, seed=3).softmax(1)
        consumers: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = [
            lambda l, t, q: F.nll_loss(l, t), lambda l, t, q: -(q * l).sum(), lambda l, t, q: (l.exp() * l).sum(),
        ]  # fmt: skip
        for use in consumers:
            wx = x.clone().requires_grad_()
            want = use(F.log_softmax(wx, 1), t, q)
            want.backward()
            dx = distribute_tensor(x, mesh, [S(1)]).requires_grad_()
            with loss_parallel():
                got = use(F.log_softmax(dx, 1), t, distribute_tensor(q, mesh, [S(1)]))
            got.backward()
            torch.testing.assert_close(got.full_tensor(), want.detach())
            torch.testing.assert_close(dx.grad.full_tensor(), wx.grad)

    on(f, 4)


def logits(mesh: DeviceMesh, *layout: Placement) -> DTensor:
    return distribute_tensor(rand(8, 12), mesh, list(layout))


BAD: dict[str, tuple[type[Exception], str, Callable[[DeviceMesh], object]]] = {
    "classes whole": (ValueError, "exactly one mesh axis", lambda m: F.cross_entropy(logits(m, R, R), ints(12, 8))),
    "rows only": (ValueError, "exactly one mesh axis", lambda m: F.cross_entropy(logits(m, S(0), R), ints(12, 8))),
    "two axes": (ValueError, "exactly one mesh axis", lambda m: F.cross_entropy(logits(m, S(1), S(1)), ints(12, 8))),
    "nll": (ValueError, "exactly one mesh axis", lambda m: F.nll_loss(logits(m, S(0), R), ints(12, 8))),
    "plain target": (ValueError, "a plain target counts as replicated",
                     lambda m: F.cross_entropy(logits(m, S(0), S(1)), ints(12, 8))),
    "no tensor": (TypeError, "must be a tensor", lambda m: F.cross_entropy(logits(m, R, S(1)), [1, 2])),  # type: ignore[arg-type]
    "shape": (ValueError, "does not fit the logits", lambda m: F.cross_entropy(logits(m, R, S(1)), ints(12, 7))),
    "reduction": (ValueError, "not a valid value",
                  lambda m: F.cross_entropy(logits(m, R, S(1)), ints(12, 8), reduction="x")),
    "smoothing": (RuntimeError, "between 0.0 and 1.0",
                  lambda m: F.cross_entropy(logits(m, R, S(1)), ints(12, 8), label_smoothing=2.0)),
    "integer probabilities": (RuntimeError, "must be floating point",
                              lambda m: F.cross_entropy(logits(m, R, S(1)), ints(12, 8, 12))),
    "weight": (RuntimeError, "one value for each of the 12 classes",
               lambda m: F.cross_entropy(logits(m, R, S(1)), ints(12, 8), rand(8))),
    "class": (IndexError, "target 12 is out of bounds",
              lambda m: F.cross_entropy(logits(m, R, S(1)), torch.tensor([0, 1, 2, 3, 12, 4, 5, 6]))),
}  # fmt: skip


@pytest.mark.parametrize(("error", "text", "call"), BAD.values(), ids=BAD)
def test_errors(error: type[Exception], text: str, call: Callable[[DeviceMesh], object]) -> None:
    def f(mesh: DeviceMesh) -> None:
        with loss_parallel(), pytest.raises(error, match=text):
            call(mesh)

    on(f, 2, 2)


def test_other_target_and_weight_layouts_are_moved() -> None:
    def f(mesh: DeviceMesh) -> None:
        x, t, w = rand(8, 12), ints(12, 8), rand(12).abs()
        want = F.cross_entropy(x, t, w)
        for layout in ([R, R], [S(0), S(0)], [R, S(0)]):
            with loss_parallel():
                got = F.cross_entropy(
                    distribute_tensor(x, mesh, [S(0), S(1)]), distribute_tensor(t, mesh, layout),
                    distribute_tensor(w, mesh, [S(0), R]),
                )  # fmt: skip
            torch.testing.assert_close(got.full_tensor(), want)

    on(f, 2, 2)


def test_nesting_exceptions_and_other_threads() -> None:
    """The context is gone after an exception, nests, and is this thread's own."""

    def f(mesh: DeviceMesh) -> None:
        x, t = distribute_tensor(rand(8, 12), mesh, [S(0)]), distribute_tensor(ints(12, 8), mesh, [R])
        want = F.cross_entropy(rand(8, 12), ints(12, 8))

        def outside() -> None:
            torch.testing.assert_close(F.cross_entropy(x, t).full_tensor(), want)

        with pytest.raises(KeyError), loss_parallel():
            raise KeyError
        outside()
        with loss_parallel():
            with loss_parallel():
                pass
            with pytest.raises(ValueError):
                F.cross_entropy(x, t)
        outside()
        if mesh.get_local_rank() == 0:
            found: list[object] = []

            def other() -> None:
                found.append(F.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))

            with loss_parallel():
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            assert len(found) == 1

    on(f, 4)


def test_plain_tensors_inside_are_left_alone() -> None:
    x, t = rand(4, 5), ints(5, 4)
    want = F.cross_entropy(x, t)
    with loss_parallel():
        torch.testing.assert_close(F.cross_entropy(x, t), want)
        torch.testing.assert_close(torch.nn.CrossEntropyLoss()(x, t), want)


def test_a_function_that_a_program_wraps_runs_once_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's function asks the mode under its name, which is the program's by then."""
    calls: list[str] = []

    def wrap(home: object, name: str) -> None:
        inner = getattr(home, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return inner(*args, **kwargs)

        monkeypatch.setattr(home, name, wrapped)

    for home, name in ((torch.Tensor, "backward"), (F, "dropout"), (torch.Tensor, "split")):
        wrap(home, name)
    x = torch.ones(4, requires_grad=True)
    with loss_parallel():
        (F.dropout(x, 0.0).split(2)[0] * 3).sum().backward()
    assert calls == ["dropout", "split", "backward"] and x.grad is not None
    assert x.grad.tolist() == [3, 3, 0, 0]
