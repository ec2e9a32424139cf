"""Samples of softmax and of normalisations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from helpers.laws import Sample, rand

X, X3, SUM = rand(5, 6), rand(5, 3, 4), ("sum", "avg")
W, B, W2 = rand(4, seed=3), rand(4, seed=4), rand(3, 4, seed=3)
W3, B3, W8, B8 = rand(3), rand(3, seed=1), rand(8), rand(8, seed=1)
INF = float("inf")


def _fused_rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The fused op, which CPU never reaches by itself."""
    return torch.ops.aten._fused_rms_norm(x, [4], w, 1e-5)[0]


def _fused_rms_backward(grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.ops.aten._fused_rms_norm_backward(grad, x, [4], rstd, w, [True, True])


SOFTMAX = [
    Sample("softmax", lambda x: x.softmax(-1), (X,)),
    Sample("softmax dim 0", lambda x: x.softmax(0), (X3,)),
    Sample("softmax few rows", lambda x: x.softmax(0), (rand(2, 3),)),
    Sample("softmax double", lambda x: F.softmax(x, -1, dtype=torch.float64), (X,)),
    Sample("softmax with -inf", lambda x: x.softmax(0), (torch.where(X > 0, -INF, X),), pending=(), grads=False),
    Sample("softmax of -inf", lambda x: x.softmax(0), (torch.full((5, 2), -INF),), pending=(), grads=False),
    Sample("softmax large", lambda x: x.softmax(0), (X * 100,), pending=()),
    Sample("softmax 0-d", lambda x: x.softmax(0), (rand(1).view(()),)),
    Sample("softmin", lambda x: F.softmin(x, 1), (X,), pending=SUM),
]

NORMS = [
    Sample("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), (X3, W, B), pending=SUM),
    Sample("layer_norm two dims", lambda x, w: F.layer_norm(x, (3, 4), w), (X3, W2), pending=SUM),
    Sample("layer_norm bias only", lambda x, b: F.layer_norm(x, (4,), None, b), (X3, B), pending=SUM),
    Sample("layer_norm plain", lambda x: F.layer_norm(x, (6,)), (X,)),
    Sample("layer_norm few rows", lambda x, w, b: F.layer_norm(x, (4,), w, b), (rand(1, 4), W, B), pending=SUM),
    Sample("layer_norm narrow", lambda x, w: F.layer_norm(x, (2,), w), (rand(5, 2), rand(2)), pending=SUM),
    Sample("layer_norm no weight grad", lambda x, w: F.layer_norm(x, (4,), w.detach(), w), (X3, W), pending=SUM),
    Sample("rms_norm", lambda x, w: F.rms_norm(x, (4,), w, 1e-5), (X3, W), pending=SUM, rtol=1e-2, atol=1e-3),
    Sample("rms_norm plain", lambda x: F.rms_norm(x, (4,)), (X3,), pending=SUM, rtol=1e-2, atol=1e-3),
    Sample("rms_norm fused", _fused_rms, (X3, W), pending=SUM, grads=False),
    Sample("group_norm", lambda x, w, b: F.group_norm(x, 4, w, b), (rand(5, 8, 3), W8, B8), pending=SUM),
    Sample("group_norm plain", lambda x: F.group_norm(x, 3), (rand(3, 6, 2),), pending=SUM),
    Sample("group_norm of no channels", lambda x: F.group_norm(x, 1), (rand(8, 0),), pending=SUM),
    Sample("group_norm of no rows", lambda x: F.group_norm(x, 1), (rand(0, 1, 2),), pending=SUM),
    Sample("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (X3, W3, B3), pending=SUM),
    Sample("batch_norm eval", lambda x, m, v, w: F.batch_norm(x, m.detach(), v.detach(), w),
           (X3, W3, B3.abs() + 0.5, rand(3, seed=2)), pending=SUM),
    Sample("instance_norm", F.instance_norm, (rand(3, 4, 5),), pending=SUM),
    Sample("normalize", lambda x: F.normalize(x, dim=0), (X,), pending=SUM),
]  # fmt: skip

STRATEGIES_ONLY: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    ("rms_norm fused backward", _fused_rms_backward, (X3, rand(5, 3, 4, seed=1), rand(5, 3, 1).abs() + 0.5, W)),
]

SAMPLES = [*SOFTMAX, *NORMS]
