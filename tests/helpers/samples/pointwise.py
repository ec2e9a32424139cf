"""Samples of pointwise ops, of numbers in pending tensors and of losses that compare element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from helpers.laws import Sample, rand

X, Y, ROW, ONE = rand(5, 6), rand(5, 6, seed=1), rand(6, seed=2), rand(5, 1, seed=3)
I64 = torch.int64


def _unary(name: str, fn: Callable[..., Any], x: torch.Tensor = X, **more: Any) -> Sample:
    return Sample(name, fn, (x,), **more)


def _inplace(name: str, fn: Callable[..., Any], *others: torch.Tensor) -> Sample:
    return Sample(name, fn, (X, *others), inplace=True, may_refuse=True)


UNARY = [
    *(_unary(fn.__name__, fn) for fn in (torch.neg, torch.relu, torch.exp, torch.abs, torch.round, torch.floor)),
    *(_unary(fn.__name__, fn) for fn in (torch.sigmoid, torch.tanh, torch.sign, torch.erf, torch.clone, torch.isnan)),
    *(_unary(fn.__name__, fn) for fn in (F.gelu, F.silu, F.mish, F.elu, F.leaky_relu, F.hardtanh, F.hardswish)),
    *(_unary(fn.__name__, fn) for fn in (F.softplus, F.logsigmoid, F.hardsigmoid, F.softshrink, F.hardshrink, F.relu6)),
    _unary("sqrt", torch.sqrt, X.abs() + 0.5),
    *(_unary(fn.__name__, fn, X.abs() + 1.5) for fn in (torch.log, torch.log10, torch.log1p, torch.log2, torch.acosh)),
    _unary("angle", torch.angle, grads=False),
    _unary("neg int", torch.neg, rand(5, 6, dtype=I64)),
    _unary("to double", lambda x: x.double()),
    _unary("to int", lambda x: x.to(torch.int32), X * 4, grads=False),
    _unary("int to float", lambda x: x.float(), rand(5, 6, dtype=I64)),
    _unary("glu", lambda x: F.glu(x, 1)),
    _unary("glu other dim", lambda x: F.glu(x, -2), rand(4, 3)),
    _unary("0-d", lambda x: (x * 2).exp(), rand(1).view(())),
    _unary("empty", lambda x: x * 2 + 1, rand(0, 3)),
    _unary("one row", torch.tanh, rand(1, 3)),
]

BINARY = [
    Sample("add", torch.add, (X, Y)),
    Sample("add row", torch.add, (X, ROW)),
    Sample("add column", torch.add, (X, ONE)),
    Sample("add alpha", lambda a, b: torch.add(a, b, alpha=-2), (X, Y)),
    Sample("sub outer", torch.sub, (rand(5, 1), rand(6))),
    Sample("rsub", torch.rsub, (X, Y)),
    Sample("mul", torch.mul, (X, Y)),
    Sample("mul row", torch.mul, (ROW, X)),
    Sample("div", torch.div, (X, Y.abs() + 0.5)),
    Sample("div int", torch.div, (rand(5, 6, dtype=I64), rand(5, 6, dtype=I64).abs() + 1)),
    Sample("floor_divide", lambda a, b: a // b, (X, Y.abs() + 0.5), grads=False),
    Sample("maximum", torch.maximum, (X, Y)),
    Sample("minimum row", torch.minimum, (X, ROW)),
    Sample("fmax", torch.fmax, (X, Y)),
    Sample("atan2", torch.atan2, (X, Y)),
    Sample("greater", torch.gt, (X, Y), grads=False),
    Sample("lerp", lambda a, b: torch.lerp(a, b, 0.3), (X, Y)),
    Sample("lerp tensor", torch.lerp, (X, Y, ROW)),
    Sample("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), (X, Y, ROW)),
    Sample("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), (X, Y, ROW.abs() + 0.5)),
    Sample("where", lambda a, b: torch.where(a.detach() > 0, a, b), (X, Y)),
    Sample("where row", lambda a, b: torch.where(a.detach() > 0, b, a), (X, ROW)),
    Sample("where mixed dtypes", lambda a, b: torch.where(a.detach() > 0, a, b), (X, rand(5, 6, dtype=I64))),
    Sample("masked_fill tensor", lambda a, v: a.masked_fill(a.detach() > 0, v), (X, rand(1).view(()))),
    Sample("clamp tensors", torch.clamp, (X, rand(5, 6, seed=4) - 1, rand(6, seed=5) + 1)),
    Sample("prelu", F.prelu, (X, rand(6, seed=6))),
    Sample("threshold", lambda a: F.threshold(a, 0.1, 20.0), (X,)),
    Sample("bucketize", torch.bucketize, (X, torch.tensor([-1.0, 0.0, 1.0])), grads=False),
]

NUMBERS = [
    _unary("x + 1", lambda x: x + 1),
    _unary("x - 1", lambda x: x - 1),
    _unary("1 - x", lambda x: 1 - x),
    _unary("add alpha number", lambda x: torch.add(x, 10, alpha=-2)),
    _unary("rsub alpha", lambda x: torch.rsub(x, 10, alpha=3)),
    _unary("x * -2", lambda x: x * -2),
    _unary("x / -2", lambda x: x / -2),
    _unary("2 / x", lambda x: 2 / x, X.abs() + 0.5),
    _unary("x ** 2", lambda x: x**2),
    _unary("x % 2", lambda x: x % 2),
    _unary("clamp", lambda x: x.clamp(-0.5, 0.5)),
    _unary("int + 1", lambda x: x + 1, rand(5, 6, dtype=I64)),
    _unary("masked_fill", lambda x: x.masked_fill(x.detach() > 0, 3.0)),
    _unary("where number", lambda x: torch.where(x.detach() > 0, x, 2.0)),
    _unary("nan_to_num", torch.nan_to_num, torch.where(X > 1, float("nan"), X)),
    _unary("fill of a clone", lambda x: x.detach().clone().fill_(3.0), grads=False),
    _unary("zero of a clone", lambda x: x.detach().clone().zero_().add_(1), grads=False),
    _unary("product + 1", lambda x: x + 1, pending=("product",)),
    _unary("product filled", lambda x: x.detach().clone().fill_(3.0), grads=False, pending=("product",)),
]

INPLACE = [
    _inplace("add_ number", lambda x: x.add_(10)),
    _inplace("sub_ number", lambda x: x.sub_(10)),
    _inplace("mul_ number", lambda x: x.mul_(3)),
    _inplace("add_", lambda x, y: x.add_(y), Y),
    _inplace("add_ row", lambda x, y: x.add_(y, alpha=2), ROW),
    _inplace("mul_", lambda x, y: x.mul_(y), Y),
    _inplace("lerp_", lambda x, y: x.lerp_(y, 0.2), Y),
    _inplace("copy_", lambda x, y: x.copy_(y), Y),
    _inplace("copy_ row", lambda x, y: x.copy_(y), ROW),
    _inplace("clamp_", lambda x: x.clamp_(max=0.2)),
    _inplace("masked_fill_", lambda x, m: x.masked_fill_(m, 2.0), Y > 0),
    _inplace("relu_", lambda x: x.relu_()),
    _inplace("zero_", lambda x: x.zero_()),
    _inplace("fill_", lambda x: x.fill_(2.5)),
    _inplace("fill_ tensor", lambda x: x.fill_(torch.tensor(2.5))),
]

_LOSSES: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "mse": (F.mse_loss, Y),
    "smooth_l1": (lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.7), Y),
    "huber": (lambda x, y, reduction: F.huber_loss(x, y, reduction=reduction, delta=0.7), Y),
    "l1": (F.l1_loss, Y),
    "kl_div": (lambda x, y, reduction: F.kl_div(x, y.sigmoid(), reduction=reduction.replace("mean", "batchmean")), Y),
    "bce": (lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction), Y),
    "bce logits": (lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y, reduction=reduction), Y.sigmoid()),
    "soft margin": (lambda x, y, reduction: F.soft_margin_loss(x, y.detach().sign(), reduction=reduction), Y),
}


def _loss(fn: Callable[..., Any], reduction: str) -> Callable[..., Any]:
    return lambda x, y: fn(x, y, reduction=reduction)


def _weighted(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(x, y.sigmoid(), weight=w.detach(), pos_weight=w.detach().abs())


LOSSES = [
    Sample(f"{name} {reduction}", _loss(fn, reduction), (X, y), pending=("sum", "avg"))
    for name, (fn, y) in _LOSSES.items()
    for reduction in ("mean", "sum", "none")
] + [
    Sample("bce logits weights", _weighted, (X, Y, ROW), pending=("sum",)),
    Sample("mse few rows", F.mse_loss, (rand(2, 3), rand(2, 3, seed=1)), pending=("sum",)),
]

SAMPLES = [*UNARY, *BINARY, *NUMBERS, *INPLACE, *LOSSES]
