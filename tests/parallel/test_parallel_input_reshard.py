"""input_reshard changes no value: whatever is saved for backward comes back exactly, or an error says so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.laws import rand
from helpers.modules import mlp
from helpers.parallel import grads_match, on_ranks, same, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

from dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, RowwiseParallel, input_reshard, parallelize_module

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [8, 5, 3, 1])
@pytest.mark.parametrize("dim", [0, 1, -1, 2])
@pytest.mark.parametrize("wrap", [lambda m: m, Checkpointed], ids=["plain", "checkpointed"])
def test_gradients_are_the_same(rows: int, dim: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = mlp(6, 10, 5)
        net = input_reshard(wrap(parallelize_module(copy.deepcopy(ref), mesh, PLAN)), mesh, dim)
        for step in range(2):
            a, b = rand(rows, 6, seed=step).requires_grad_(), rand(rows, 6, seed=step).requires_grad_()
            out = net(a)
            same(out, ref(b))
            out.square().sum().backward()
            ref(b).square().sum().backward()
            assert a.grad is not None and b.grad is not None
            same(a.grad, b.grad)
            grads_match(ref, net)

    on_ranks(f)


class Keep(nn.Module):
    """Saves its input for backward and hands back what came out of the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


SHAPES = [(8,), (7,), (1,), (2, 3), (4, 4), (5, 2, 3), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("kind", ["plain", "transposed", "replicated", "sharded"])
def test_every_saved_tensor_comes_back(shape: tuple[int, ...], dim: int, kind: str) -> None:
    def f(mesh: DeviceMesh) -> None:
        x = rand(*shape)
        x = x.t().contiguous().t() if kind == "transposed" and x.ndim == 2 else x
        given = {
            "replicated": lambda: distribute_tensor(x, mesh, [Replicate()]),
            "sharded": lambda: distribute_tensor(x, mesh, [Shard(0)]),
        }.get(kind, lambda: x.clone())()
        given.requires_grad_()
        net = input_reshard(Keep(), mesh, dim)
        net(given).sum().backward()
        grad = given.grad.full_tensor() if isinstance(given.grad, DTensor) else given.grad
        torch.testing.assert_close(grad, x.cos())

    on_ranks(f)


def test_what_is_kept_is_a_piece_and_one_gather_brings_it_back() -> None:
    def f(mesh: DeviceMesh) -> None:
        x = distribute_tensor(rand(8, 6), mesh, [Replicate()]).requires_grad_()
        y = input_reshard(Keep(), mesh, 0)(x).sum()
        with CommDebugMode() as mode:
            y.backward()
        assert mode.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor] == 1

    on_ranks(f)


class Shared(nn.Module):
    """A sine and query, key and value projections of one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        return self.o(self.q(x).sigmoid() * self.k(x) + self.v(x)) + x.sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("retain", [False, True])
def test_what_is_saved_often_is_gathered_once(retain: bool) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(Shared)
        plan = {"[qkv]": ColwiseParallel(), "o": RowwiseParallel(use_local_output=False)}
        net = input_reshard(parallelize_module(copy.deepcopy(ref), mesh, plan), mesh, 0)
        x = distribute_tensor(rand(8, 6), mesh, [Replicate()]).requires_grad_()
        y = rand(8, 6).requires_grad_()
        out, want = net(x), ref(y)
        for _ in range(1 + retain):
            with CommDebugMode() as mode:
                (got,) = torch.autograd.grad(out.square().sum(), x, retain_graph=retain)
            same(got, torch.autograd.grad(want.square().sum(), y, retain_graph=retain)[0])
            assert mode.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor] == 1

    on_ranks(f)


def test_memory_that_was_written_or_freed_is_not_taken_for_the_same() -> None:
    class Writes(nn.Module):
        def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.between = between

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x.sum() * 0
            for _ in range(4):
                y = x.detach() * 2
                total = total + (x * y).sum()
                y = self.between(y)
                total = total + (x * y).sum()
                del y  # its memory is likely to be used by the next
                x = x + 1
            return total

    def past(y: torch.Tensor) -> torch.Tensor:
        assert isinstance(y, DTensor)
        DTensor.from_local(y.to_local(), y.device_mesh, y.placements).mul_(3)
        return DTensor.from_local(y.to_local(), y.device_mesh, y.placements)

    def f(mesh: DeviceMesh) -> None:
        for between in (past, lambda y: y * 3):
            x = distribute_tensor(rand(8, 6), mesh, [Replicate()]).requires_grad_()
            y = rand(8, 6).requires_grad_()
            input_reshard(Writes(between), mesh, 0)(x).backward()
            want = lambda y: y * 3  # noqa: E731
            Writes(want)(y).backward()
            same(x.grad, y.grad)

    on_ranks(f)


def test_a_plain_input_that_differs_between_ranks_is_noticed() -> None:
    def f(mesh: DeviceMesh) -> None:
        x = rand(8, 6, seed=mesh.get_local_rank()).requires_grad_()
        y = input_reshard(Keep(), mesh, 0)(x).sum()
        with pytest.raises(RuntimeError, match="was not equal on all ranks"):
            y.backward()

    on_ranks(f)


def test_hooks_end_with_forward_whatever_happens() -> None:
    """An exception, a module inside itself: what is saved outside is left alone."""

    class Again(nn.Module):
        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            if depth == 0:
                raise KeyError("stop")
            if depth == 1:
                return x.sin()
            return self(x, depth - 1).sin()  # type: ignore[no-any-return]

    def f(mesh: DeviceMesh) -> None:
        net = input_reshard(Again(), mesh, 0)
        x = rand(8, 2).requires_grad_()
        net(x, 3).sum().backward()
        want = rand(8, 2).requires_grad_()
        want.sin().sin().sin().sum().backward()
        torch.testing.assert_close(x.grad, want.grad)
        for depth in (0, 2):
            try:
                net(x, 0 if depth == 0 else depth)
            except KeyError:
                pass
        z = x.detach().clone().requires_grad_()
        loss = z.sin().sum()
        with CommDebugMode() as mode:
            loss.backward()
        assert mode.get_total_counts() == 0

    on_ranks(f)


def test_arguments() -> None:
    def f() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = nn.Linear(2, 2)
        assert input_reshard(net, mesh) is net and not net._forward_pre_hooks
        with pytest.raises(ValueError, match="one mesh axis"):
            input_reshard(net, mesh, 0)
        with pytest.raises(TypeError, match="int or None"):
            input_reshard(net, mesh["tp"], "0")  # type: ignore[arg-type]

    simulate(4)(f)
