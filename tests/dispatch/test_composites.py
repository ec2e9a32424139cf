"""Plain tensors that torch's composites make themselves: eagerly, lowered and compiled, in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.gloo_ranks import run_ranks
from torch import nn
from torch.testing import assert_close

import dtensor
from dtensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.errors import MixedTensorError

Composite = Callable[[torch.Tensor], torch.Tensor]
R, S0 = Replicate(), Shard(0)
LINE, IMAGE = torch.arange(90.0).sin().reshape(5, 3, 6), torch.arange(240.0).sin().reshape(5, 3, 4, 4)
VOLUME = torch.arange(180.0).sin().reshape(5, 1, 3, 4, 3)
TABLE, SQUARE = torch.arange(20.0).reshape(5, 4).sin(), torch.arange(9.0).reshape(3, 3).cos()
CLASSES = torch.arange(20).reshape(5, 4) % 3


def resized(**options: Any) -> Composite:
    return lambda x: F.interpolate(x, **options)


def margin(x: torch.Tensor) -> torch.Tensor:
    return F.multi_margin_loss(x, (x.detach() * 0).sum(1).long(), reduction="none")


LISTED: dict[str, tuple[torch.Tensor, Composite]] = {
    "nearest": (LINE, resized(scale_factor=2)),
    "nearest, two dims": (IMAGE, resized(size=(3, 5))),
    "nearest, three dims": (VOLUME, resized(scale_factor=2)),
    "nearest-exact": (LINE, resized(size=4, mode="nearest-exact")),
    "nearest-exact, two dims": (IMAGE, resized(scale_factor=1.5, mode="nearest-exact")),
    "linear": (LINE, resized(scale_factor=2, mode="linear")),
    "bilinear": (IMAGE, resized(size=(7, 2), mode="bilinear", align_corners=True)),
    "bicubic": (IMAGE, resized(scale_factor=2, mode="bicubic")),
    "trilinear": (VOLUME, resized(scale_factor=2, mode="trilinear")),
    "quantile": (TABLE, lambda x: x.quantile(0.3, dim=0)),
    "quantile of all": (TABLE, lambda x: torch.quantile(x, 0.3)),
    "nanquantile": (TABLE, lambda x: x.nanquantile(0.3, dim=1, keepdim=True)),
    "one_hot": (CLASSES, lambda x: F.one_hot(x, 3)),
    "power 0": (SQUARE, lambda x: torch.matrix_power(x, 0) + x),
    "multi_margin_loss": (TABLE, margin),
    "unravel_index": (CLASSES[0], lambda x: torch.stack(torch.unravel_index(x, (2, 2)))),
    "masked var": (TABLE, lambda x: torch.masked.var(x, dim=0)),
    "combinations": (TABLE[:, 0].clone(), lambda x: torch.combinations(x, 3, True)),
}  # fmt: skip
OTHERS: dict[str, tuple[torch.Tensor, Composite]] = {
    "adaptive_avg_pool2d": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, 3)),
    "pad, reflect": (IMAGE, lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "cdist": (TABLE, lambda x: torch.cdist(x, x + 1)),
    "block_diag": (TABLE, lambda x: torch.block_diag(x, x)),
    "cummax": (TABLE, lambda x: x.cummax(0)[0]),
    "prod": (TABLE, lambda x: x.cumprod(1)),
    "multigammaln": (TABLE, lambda x: torch.mvlgamma(x + 5, 3)),
    "affine_grid": (torch.arange(30.0).reshape(5, 2, 3).sin(), lambda x: F.affine_grid(x, [5, 1, 3, 4], False)),
    "causal attention": (IMAGE, lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
}  # fmt: skip
"""Composites whose forward meets no plain tensor, and formulas of autograd that make some."""

ALL = LISTED | OTHERS


def gradient(f: Composite, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `f` gives, and the gradient of a sum of it."""
    x = x.detach().requires_grad_(x.is_floating_point())
    y = f(x)
    if not y.requires_grad:
        return (y,)
    (y.double() * 1.5).square().sum().backward()
    return y.detach(), x.grad  # type: ignore[return-value]


def agree(got: Any, want: Any, what: str) -> None:
    for g, w in zip(got, want, strict=True):
        g = g.full_tensor() if isinstance(g, DTensor) else g
        assert_close(g, w, rtol=1e-4, atol=1e-5, msg=lambda m: f"{what}: {m}")


def layouts(x: torch.Tensor, axes: int = 1) -> list[tuple[Placement, ...]]:
    options: list[Placement] = [R, *(Shard(d) for d in range(x.ndim))]
    return list(itertools.product(options, repeat=axes))


@pytest.mark.parametrize("name", ALL)
def test_eager_and_lowered(name: str) -> None:
    x, f = ALL[name]
    want = gradient(f, x)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placed in layouts(x):
            d = distribute_tensor(x, mesh, placed)
            step = lambda t: gradient(f, t)  # noqa: E731
            agree(step(d), want, f"{name}, {placed}")
            agree(dtensor.lower(step, d)(d), want, f"{name}, lowered, {placed}")

    dtensor.simulate(2)(program)


def layers() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Layers that make a first state, or a key and a value, of zeros; what they are called with."""
    torch.manual_seed(0)
    steps = SQUARE.repeat(2, 1).reshape(2, 3, 3)
    return {
        "attention": (nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True), IMAGE[0]),
        "GRU": (nn.GRU(3, 4), steps), "LSTM": (nn.LSTM(3, 4, bidirectional=True), steps), "RNN": (nn.RNN(3, 4), steps),
        "GRUCell": (nn.GRUCell(3, 4), steps[0]), "LSTMCell": (nn.LSTMCell(3, 4), steps[0]),
    }  # fmt: skip


def called(layer: nn.Module) -> Composite:
    def run(x: torch.Tensor) -> torch.Tensor:
        out = layer(*[x] * (3 if isinstance(layer, nn.MultiheadAttention) else 1))
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize("name", layers())
def test_layers_eager_and_lowered(name: str) -> None:
    layer, x = layers()[name]
    want = gradient(called(layer), x)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        run = called(distribute_module(layers()[name][0], mesh))
        for placed in layouts(x):
            d = distribute_tensor(x, mesh, placed)
            step = lambda t: gradient(run, t)  # noqa: E731
            agree(step(d), want, f"{name}, {placed}")
            agree(dtensor.lower(step, d)(d), want, f"{name}, lowered, {placed}")

    dtensor.simulate(2)(program)


@pytest.mark.parametrize("name", ["nearest, two dims", "quantile", "one_hot", "power 0", "cummax"])
def test_two_axes(name: str) -> None:
    x, f = ALL[name]
    want = gradient(f, x)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for placed in layouts(x, 2)[::3]:
            d = distribute_tensor(x, mesh, placed)
            step = lambda t: gradient(f, t)  # noqa: E731
            agree(step(d), want, f"{name}, {placed}")
            agree(dtensor.lower(step, d)(d), want, f"{name}, lowered, {placed}")

    dtensor.simulate(4)(program)


def case_compiled(rank: int, world: int) -> None:
    """Many in one graph, each in another layout, with the gradients."""
    mesh = init_device_mesh("cpu", (world,))
    alike = {"nearest", "nearest, three dims", "nearest-exact, two dims", "linear", "trilinear", "adaptive_avg_pool2d"}
    names = [n for n in ALL if n not in alike]
    placed = {n: [(S0, Shard(-1), R)[i % 3]] for i, n in enumerate(names)}

    def step(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [ALL[n][1](x) for n, x in zip(names, xs, strict=True)]

    torch._dynamo.reset()
    xs = [distribute_tensor(ALL[n][0], mesh, p) for n, p in placed.items()]
    xs = [x.requires_grad_(x.is_floating_point()) for x in xs]
    ys = torch.compile(step, backend="aot_eager")(xs)
    sum((y.double() * 1.5).square().sum() for y in ys if y.requires_grad).backward()
    for n, x, y in zip(names, xs, ys, strict=True):
        got = (y,) if x.grad is None else (y.detach(), x.grad)
        agree(got, gradient(ALL[n][1], ALL[n][0]), f"{n}, compiled, {placed[n]}")
    torch._dynamo.reset()
    layer, x = layers()["attention"]
    run = torch.compile(called(distribute_module(layers()["attention"][0], mesh)), backend="aot_eager")
    agree(gradient(run, distribute_tensor(x, mesh, [S0])), gradient(called(layer), x), "attention, compiled")


@pytest.mark.processes
@pytest.mark.slow
def test_compiled() -> None:
    run_ranks(2, [case_compiled], timeout=300).check()


def test_what_is_listed_is_not_compared() -> None:
    """A layout that needs no collective sends none."""

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for name, (x, f) in LISTED.items():
            d = distribute_tensor(x, mesh, [R])
            for mode in (torch.enable_grad, torch.inference_mode):
                with mode(), CommDebugMode() as comm:
                    f(d)
                assert comm.get_total_counts() == 0, (name, mode, comm.get_comm_counts())

    dtensor.simulate(2)(program)


OF_THE_USER: dict[str, Callable[[DTensor, torch.Tensor], object]] = {
    "an addend": lambda d, t: d + t,
    "made on the way": lambda d, t: d + torch.ones(5, 4),
    "after a composite": lambda d, t: (torch.quantile(d, 0.3, dim=0), d + t),
    "a mask": lambda d, t: d.masked_fill(t > 0, 0),
    "a mask of a composite": lambda d, t: torch.masked.var(d, dim=1, mask=t > 0),
    "weights of classes": lambda d, t: F.multi_margin_loss(d, (d.detach() * 0).sum(1).long(), weight=t[0]),
}  # fmt: skip


@pytest.mark.parametrize("what", OF_THE_USER)
def test_a_users_plain_tensor_is_refused(what: str) -> None:
    call = OF_THE_USER[what]

    def program() -> None:
        mesh = init_device_mesh("cpu", (1,))
        for placed in (R, S0):
            d = distribute_tensor(TABLE, mesh, [placed])
            with pytest.raises(MixedTensorError):
                call(d, TABLE)
            with pytest.raises(MixedTensorError):
                dtensor.lower(call, d, TABLE)(d, TABLE)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="mixed"):
            torch.compile(call, backend="aot_eager")(d, TABLE)

    dtensor.simulate(1)(program)


def test_an_input_of_a_lowered_program_is_no_constant() -> None:
    """A formula of autograd may be given the program's own plain tensors, which may differ between ranks."""

    def step(d: DTensor, g: torch.Tensor) -> Any:
        d = d.detach().requires_grad_()
        (d * d).backward(g)
        return d.grad

    def copied(d: DTensor, g: torch.Tensor) -> Any:
        zeros = torch.zeros(5, 4)
        zeros.copy_(g)
        return d + zeros.clone()

    def program() -> None:
        d = distribute_tensor(TABLE, init_device_mesh("cpu", (2,)), [R])
        for program in (step, copied):
            with pytest.raises(Exception, match="mixed"):
                dtensor.lower(program, d, TABLE)(d, TABLE)

    dtensor.simulate(2)(program)


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError, match="wrong"):
        agree((TABLE,), (TABLE + 1,), "wrong")
