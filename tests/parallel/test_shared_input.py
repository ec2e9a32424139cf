"""An input of several modules is laid out once: the collectives, and that nothing else can be told apart."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.laws import make, rand
from helpers.parallel import grads_match, on_ranks, same, seeded, sent
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dtensor import DeviceMesh, DTensor, Placement, Replicate, Shard, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from dtensor.parallel.styles import shared_input

R, S = Replicate(), Shard
Act = Callable[[Any], Any]


class Attention(nn.Module):
    """Query, key and value from one input; `between` is done to it before the key is made, `end` to what comes out."""

    def __init__(self, between: Act | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.between = between

    def forward(self, x: Any) -> Any:
        q = self.q(x)
        if self.between is not None:
            x = self.between(x)
        return self.o(q * self.k(x) + self.v(x))


def plan(cut: bool) -> dict[str, Any]:
    given, out = (S(1), S(1)) if cut else (R, R)
    return {"[qkv]": ColwiseParallel(input_layouts=given), "o": RowwiseParallel(output_layouts=out)}


def pair(mesh: DeviceMesh, cut: bool, between: Act | None = None) -> tuple[Any, Any]:
    ref = seeded(lambda: Attention(between))
    net = parallelize_module(copy.deepcopy(ref), mesh, plan(cut))
    return ref, net


def piece(x: torch.Tensor, mesh: DeviceMesh, cut: bool) -> torch.Tensor:
    return x.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone() if cut else x.clone()


def grad(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad


def counted(f: Callable[[], Any]) -> tuple[Any, str]:
    with CommDebugMode() as mode:
        got = f()
    return got, sent(mode)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_one_gather_forward_and_one_reduction_backward(cut: bool, distributed: bool, frozen: bool) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref, net = pair(mesh, cut)
        for m in (net.q, net.k, net.v):
            m.requires_grad_(not frozen)
        want = rand(2, 8, 16).requires_grad_()
        ref(want).square().sum().backward()
        layout: list[Placement] = [S(1) if cut else R]
        full = rand(2, 8, 16)
        leaf = make(full, mesh, layout, True) if distributed else piece(full, mesh, cut).requires_grad_()
        x = leaf * 1 if distributed else leaf
        out, forward = counted(lambda: net(x))
        _, backward = counted(lambda: out.square().sum().backward())
        if cut:
            assert (forward, backward) == ("all_gather 1, reduce_scatter 1", "all_gather 1, reduce_scatter 1")
        else:  # a DTensor's gradient may stay pending
            assert (forward, backward) == ("all_reduce 1", "" if distributed else "all_reduce 1")
        same(grad(leaf), grad(want) if distributed else piece(grad(want), mesh, cut))
        if not frozen:
            grads_match(ref, net)
        with torch.no_grad():
            assert counted(lambda: net(x))[1] == forward

    on_ranks(f)


def test_backward_through_one_of_them_and_again() -> None:
    class Three(Attention):
        def forward(self, x: Any) -> Any:
            return self.q(x), self.k(x), self.v(x)

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(Three)
        net = parallelize_module(copy.deepcopy(ref), mesh, {"[qkv]": ColwiseParallel(output_layouts=R)})
        a, b = rand(2, 3, 16).requires_grad_(), rand(2, 3, 16).requires_grad_()
        want, got = ref(a), net(b)
        for i in (1, 0, 1, 2):
            (w,) = torch.autograd.grad(want[i].square().sum(), a, retain_graph=True)
            (g,), n = counted(partial(torch.autograd.grad, got[i].square().sum(), b, retain_graph=True))
            same(g, w)
            assert n == "all_reduce 1"
        loss = lambda out: (out[0] * out[1] * out[2]).sum()  # noqa: E731
        (w,) = torch.autograd.grad(loss(want), a, create_graph=True)
        (g,) = torch.autograd.grad(loss(got), b, create_graph=True)
        same(g, w)
        same(*(torch.autograd.grad(t.square().sum(), leaf)[0] for t, leaf in ((g, b), (w, a))))

    on_ranks(f)


def write(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.mul_(2)


def write_past(x: torch.Tensor) -> torch.Tensor:
    """Through another DTensor of the same memory, whose writes the version counter of `x` does not see."""
    local = x.to_local() if isinstance(x, DTensor) else x
    if x.shape[1] == 2 or isinstance(x, DTensor):
        DTensor.from_local(local, init_device_mesh("cpu", (4,)), [S(1)]).mul_(2)
        return x
    return x.mul_(2)


BETWEEN: dict[str, tuple[Act, str]] = {
    "written": (write, "all_gather 2, reduce_scatter 1"),
    "written through a view": (lambda x: (write(x[:, :, :1]), x)[1], "all_gather 2, reduce_scatter 1"),
    "written past it": (write_past, "all_gather 2, reduce_scatter 1"),
    "another object": (lambda x: x.view_as(x), "all_gather 2, reduce_scatter 1"),
    "no gradients before": (lambda x: x, "all_gather 1, reduce_scatter 1"),
}


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("case", BETWEEN)
def test_what_was_written_meanwhile_is_laid_out_anew(case: str, distributed: bool) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref, net = pair(mesh, True, BETWEEN[case][0])
        with torch.no_grad():
            want = ref(rand(2, 8, 16))
            x = make(rand(2, 8, 16), mesh, [S(1)]) if distributed else piece(rand(2, 8, 16), mesh, True)
            got, n = counted(lambda: net(x))
        same(got, piece(want, mesh, True))
        assert n == BETWEEN[case][1]

    on_ranks(f)


def test_a_write_into_what_was_made_is_not_handed_on() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x.mul_(3))

    def f(mesh: DeviceMesh) -> None:
        ref, net = pair(mesh, True)
        net.q.__class__ = Writes
        x = rand(2, 8, 16)
        with torch.no_grad():
            got = net(piece(x, mesh, True))
            same(got, piece(ref.o(ref.q(3 * x) * ref.k(x) + ref.v(x)), mesh, True))

    on_ranks(f)


def test_gradients_switched_on_between() -> None:
    class Half(Attention):
        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                q = self.q(x)
            return self.o(q * self.k(x) + self.v(x))

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(Half)
        net = parallelize_module(copy.deepcopy(ref), mesh, plan(False))
        a, b = rand(2, 8, 16).requires_grad_(), rand(2, 8, 16).requires_grad_()
        ref(a).sum().backward()
        out = net(b)
        assert counted(lambda: out.sum().backward())[1] == "all_reduce 1"
        same(grad(b), grad(a))

    on_ranks(f)


class Model(nn.Module):
    """`how` runs the attention, in whole or in a region of its own below its scope."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.att, self.how = Attention(), how

    def forward(self, x: Any) -> Any:
        if self.how == "inside":
            y = checkpoint(lambda t: self.att.q(t) * self.att.k(t) + self.att.v(t), x, use_reentrant=False)
            return self.att.o(y + self.att.q(x))
        kw: dict[str, Any] = {"use_reentrant": self.how == "reentrant"}
        if self.how == "selective":
            ops = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
            kw["context_fn"] = lambda: create_selective_checkpoint_contexts(ops)
        return checkpoint(self.att, x, **kw)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("how", ["reentrant", "recomputed", "selective", "inside"])
def test_checkpointed_regions(how: str, cut: bool) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: Model(how))
        net = parallelize_module(copy.deepcopy(ref), mesh, {f"att.{k}": v for k, v in plan(cut).items()})
        a = rand(2, 8, 16).requires_grad_()
        b = piece(rand(2, 8, 16), mesh, cut).requires_grad_()
        ref(a).square().sum().backward()
        out = net(b)
        n = counted(lambda: out.square().sum().backward())[1]
        same(grad(b), piece(grad(a), mesh, cut))
        grads_match(ref, net)
        if how != "inside":  # the region is computed again: reentrant ones up to the reduction of the output
            again = 1 + (how == "reentrant")
            assert n == (f"all_gather 2, reduce_scatter {again}" if cut else f"all_reduce {again}")

    on_ranks(f)


def test_nothing_is_kept_after_forward() -> None:
    def f(mesh: DeviceMesh) -> None:
        made: list[weakref.ref[Any]] = []

        def note(x: Any) -> Any:
            made.extend(weakref.ref(m.result) for m in shared_input._running.made)
            return x

        _, net = pair(mesh, True, note)
        gc.disable()
        try:
            x = piece(rand(2, 8, 16), mesh, True)
            with torch.no_grad():
                net(x)
            assert made and not any(r() for r in made)
            made.clear()
            leaf = x.clone().requires_grad_()
            out, gone = net(leaf), weakref.ref(leaf)
            out.sum().backward()
            del out, leaf
            assert gone() is None and made and not any(r() for r in made)
        finally:
            gc.enable()

    on_ranks(f)


def test_a_forward_that_raises_ends_its_scope() -> None:
    def stop(x: Any) -> Any:
        raise KeyError("stop")

    def f(mesh: DeviceMesh) -> None:
        _, net = pair(mesh, False, stop)
        with pytest.raises(KeyError):
            net(rand(2, 8, 16))
        assert shared_input._running.scopes == [] and shared_input._running.made == []
        net.between = None
        with torch.inference_mode():
            net(rand(2, 8, 16))
        assert shared_input._running.scopes == []

    on_ranks(f)


def test_two_blocks_that_read_one_input_share_it_too() -> None:
    """Attention and MLP side by side, each with an input prepared for the whole block."""

    class Side(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(16, 16)), nn.Sequential(nn.Linear(16, 16))

        def forward(self, x: Any) -> Any:
            return self.a(x) + self.b(x)

    def f(mesh: DeviceMesh) -> None:
        prepare = PrepareModuleInput(input_layouts=S(1), desired_input_layouts=R)
        styles = {"[ab]": prepare, "[ab].0": ColwiseParallel()}
        ref = seeded(Side)
        net = parallelize_module(copy.deepcopy(ref), mesh, styles)
        a = rand(2, 8, 16).requires_grad_()
        ref(a).sum().backward()
        b = piece(rand(2, 8, 16), mesh, True).requires_grad_()
        out, forward = counted(lambda: net(b))
        _, backward = counted(lambda: out.sum().backward())
        assert (forward, backward) == ("all_gather 1", "reduce_scatter 1")
        same(grad(b), piece(grad(a), mesh, True))

    on_ranks(f)
