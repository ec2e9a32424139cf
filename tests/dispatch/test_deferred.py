"""The mean of a loss over a sharded batch waits for its collective until something reads it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor
from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.errors import LayoutError

Layout = tuple[dtensor.Placement, ...]
ROWS, CLASSES = 10, 6


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and targets of which the first rank's do not count."""
    torch.manual_seed(3)
    target = torch.randint(0, CLASSES, (ROWS,))
    target[:3] = -100
    return torch.randn(ROWS, CLASSES).to(dtype), target


def laid_out(mesh: dtensor.DeviceMesh, layout: Layout, x: torch.Tensor, t: torch.Tensor) -> tuple[DTensor, DTensor]:
    """Logits as leaves, and targets sharded along the same rows."""
    rows = [Replicate() if p == Shard(1) else p for p in layout]
    return distribute_tensor(x.detach(), mesh, layout).requires_grad_(), distribute_tensor(t, mesh, rows)


def loss_of(mesh: dtensor.DeviceMesh, grad: bool = True) -> tuple[DTensor, DTensor]:
    """Cross entropy of the batch, sharded along its rows, and the logits."""
    logits, target = laid_out(mesh, (Shard(0),), *batch())
    return F.cross_entropy(logits.requires_grad_(grad), target), logits


def on_ranks(f: Callable[[dtensor.DeviceMesh], Any], shape: tuple[int, ...] = (4,)) -> list[Any]:
    n = 1
    for k in shape:
        n *= k
    return dtensor.simulate(n)(lambda: f(init_device_mesh("cpu", shape)))


LAYOUTS: list[tuple[tuple[int, ...], Layout]] = [
    ((4,), (Shard(0),)), ((3,), (Shard(0),)), ((4,), (Shard(1),)), ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Shard(0), Shard(0))), ((2, 2), (Replicate(), Shard(0))), ((2, 2), (Shard(1), Shard(0))),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradient_share_one_collective(shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> None:
    x, t = batch(dtype)
    x.requires_grad_()
    plain = F.cross_entropy(x, t)
    plain.backward()
    tol = {"atol": 1e-6, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-3, "rtol": 1e-2}

    def f(mesh: dtensor.DeviceMesh) -> int:
        logits, target = laid_out(mesh, layout, x, t)
        log_p = F.log_softmax(logits, 1)
        with CommDebugMode() as sent:
            loss = F.nll_loss(log_p, target)
            waiting = sent.get_total_counts()
            assert all(p.is_partial() for p, cut in zip(loss.placements, layout, strict=True) if cut.is_shard())
            alias = loss.detach()
            first = loss.item()
            assert loss.placements == (Replicate(),) * mesh.ndim and alias.placements != loss.placements
            again = alias.item()
        assert waiting == 0 and sent.get_total_counts() == 1
        assert first == again and loss.dtype is dtype
        torch.testing.assert_close(loss.full_tensor(), plain.detach(), check_dtype=True, **tol)
        with CommDebugMode() as sent:
            loss.backward()
        assert Shard(1) in layout or sent.get_total_counts() == 0
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad.full_tensor(), x.grad, **tol)
        return 1

    assert sum(on_ranks(f, shape)) == len(on_ranks(lambda mesh: 0, shape))


def test_backward_first() -> None:
    x, t = batch()
    x.requires_grad_()
    plain = F.cross_entropy(x, t, torch.arange(1.0, CLASSES + 1))
    plain.backward()

    def f(mesh: dtensor.DeviceMesh) -> int:
        weight = distribute_tensor(torch.arange(1.0, CLASSES + 1), mesh, [Replicate()])
        logits, target = laid_out(mesh, (Shard(0),), x, t)
        with CommDebugMode() as sent:
            loss = F.cross_entropy(logits, target, weight)
            assert sent.get_total_counts() == 0
            loss.backward()
            assert sent.get_total_counts() == 1 and loss.placements == (Replicate(),)
            assert abs(loss.item() - plain.item()) < 1e-6 and sent.get_total_counts() == 1
        torch.testing.assert_close(logits.grad.full_tensor(), x.grad)
        return 1

    assert sum(on_ranks(f)) == 4


READS: dict[str, Callable[[DTensor], Any]] = {
    "item": lambda x: x.item(), "add": lambda x: (x + 1).full_tensor() - 1, "clone": lambda x: x.clone(),
    "detach, then item": lambda x: x.detach().item(), "data": lambda x: x.data * 1,
    "redistribute": lambda x: x.redistribute(placements=[Replicate()]), "full_tensor": lambda x: x.full_tensor(),
    "own layout": lambda x: x.redistribute(placements=x.placements), "numpy": lambda x: x.detach().numpy(),
    "deepcopy": lambda x: copy.deepcopy(x.detach()), "view": lambda x: x.view(1)[0],
    "float": lambda x: float(x.detach()),
    "stack": lambda x: torch.stack([x.detach(), x])[1], "equal": lambda x: x if torch.equal(x, x) else None,
    "foreach": lambda x: torch._foreach_mul([x.detach(), x.detach()], 1)[1], "out": lambda x: out_of(x.detach()),
    "in place": lambda x: x.add_(1).sub_(1), "foreach in place": lambda x: torch._foreach_mul_([x.detach()], 1)[0],
    "as_strided": lambda x: x.as_strided((), ()), "set_": lambda x: zeros(x).set_(x.detach()),
    "share_memory_": lambda x: x.detach().share_memory_(), "inference": lambda x: in_inference(x),
    "where": lambda x: torch.where(x > 0, x, 0), "copy_": lambda x: zeros(x).copy_(x.detach()),
    "save": lambda x: saved(x.detach()), "set data": lambda x: with_data(zeros(x), x.detach()),
}  # fmt: skip


def zeros(x: DTensor) -> DTensor:
    return distribute_tensor(torch.zeros(()), x.device_mesh, [Replicate()])


def out_of(x: DTensor) -> DTensor:
    torch.mul(x, 1, out=x)
    return x


def in_inference(x: DTensor) -> DTensor:
    with torch.inference_mode():
        x.item()
    x.backward()
    return x.detach().mul_(1)


def saved(x: DTensor) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def with_data(x: DTensor, y: DTensor) -> DTensor:
    x.data = y
    return x


@pytest.mark.parametrize("name", READS)
def test_whatever_reads_it_finds_the_mean(name: str) -> None:
    want = F.cross_entropy(*batch()).item()

    def f(mesh: dtensor.DeviceMesh) -> int:
        loss, _ = loss_of(mesh)
        got = READS[name](loss)
        got = got.full_tensor() if isinstance(got, DTensor) else got
        assert abs(float(got.detach() if isinstance(got, torch.Tensor) else got) - want) < 1e-5
        return 1

    assert sum(on_ranks(f)) == 4


def test_aliases_share_memory() -> None:
    def f(mesh: dtensor.DeviceMesh) -> int:
        loss, _ = loss_of(mesh, grad=False)
        before, late = loss.detach(), loss.detach()
        value = loss.item()
        before.add_(1)
        assert abs(late.item() - value - 1) < 1e-6 and abs(loss.item() - value - 1) < 1e-6
        return 1

    assert sum(on_ranks(f)) == 4


def test_the_part_is_this_ranks_mean_and_sends_nothing() -> None:
    x, t = batch()
    x.requires_grad_()
    F.cross_entropy(x, t).backward()

    def f(mesh: dtensor.DeviceMesh) -> int:
        logits, target = laid_out(mesh, (Shard(0),), x, t)
        with CommDebugMode() as sent:
            loss = F.cross_entropy(logits, target)
            part = loss.to_local()
            assert sent.get_total_counts() == 0 and loss.placements[0].is_partial()
        mine = slice(3 * mesh.get_rank(), 3 * mesh.get_rank() + 3)
        torch.testing.assert_close(part.detach(), F.cross_entropy(x[mine], t[mine]).detach(), equal_nan=True)
        part.backward()
        torch.testing.assert_close(logits.grad.full_tensor(), x.grad)
        return 1

    assert sum(on_ranks(f)) == 4


def test_what_cannot_be_right_is_refused() -> None:
    def f(mesh: dtensor.DeviceMesh) -> int:
        loss, _ = loss_of(mesh, grad=False)
        with pytest.raises(ValueError, match="known to the one result that has it"):
            DTensor.from_local(loss.to_local(), mesh, loss.placements)
        with pytest.raises(RuntimeError, match="cannot be asked for"):
            loss.redistribute(placements=[dtensor.Partial()])
        loss.to_local().mul_(2)
        with pytest.raises(LayoutError, match="written to since"):
            loss.item()
        return 1

    assert sum(on_ranks(f)) == 4


@pytest.mark.parametrize("first", ["item", "backward"])
def test_a_target_out_of_bounds_is_an_error_on_all_ranks_at_every_reading(first: str) -> None:
    def f(mesh: dtensor.DeviceMesh) -> int:
        x, t = batch()
        t[9] = CLASSES
        logits = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        loss = F.cross_entropy(logits, distribute_tensor(t, mesh, [Shard(0)]))
        here = mesh.get_rank() == 3
        with pytest.raises(IndexError, match="target 6 is out of bounds" if here else "on another rank is out of"):
            getattr(loss, first)()
        with CommDebugMode() as sent, pytest.raises(IndexError, match="out of bounds for 6 classes"):
            loss.item()
        assert sent.get_total_counts() == 0
        return int(logits.sum().isfinite().item())  # the ranks are in step

    assert sum(on_ranks(f)) == 4


def test_gradients_of_gradients_and_checkpoints() -> None:
    x, t = batch()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(x, t), x, create_graph=True)
    grad.square().sum().backward()

    def f(mesh: dtensor.DeviceMesh) -> int:
        loss, logits = loss_of(mesh)
        (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
        grad.square().sum().backward()
        torch.testing.assert_close(logits.grad.full_tensor(), x.grad)
        target = distribute_tensor(t, mesh, [Shard(0)])
        plain = batch()[0].requires_grad_()
        F.cross_entropy(plain, t).backward()
        for reentrant in (False, True):
            logits = logits.detach().requires_grad_()
            run = lambda z: F.cross_entropy(z, target)  # noqa: E731
            torch.utils.checkpoint.checkpoint(run, logits, use_reentrant=reentrant).backward()
            torch.testing.assert_close(logits.grad.full_tensor(), plain.grad)
        return 1

    assert sum(on_ranks(f)) == 4
