"""Samples of reductions, scans and order statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from helpers.laws import Sample, rand

X, X3, FEW = rand(5, 6), rand(5, 3, 4), rand(2, 3)
NAN = torch.where(X > 1, float("nan"), X)
TIES = rand(5, 6, dtype=torch.int64)
INF = float("inf")
AMINMAX_GRADS = torch.__version__ >= "2.12"  # 2.11 has no gradient for it


def _forms(name: str, *, whole: bool = True, few: bool = True, **more: Any) -> list[Sample]:
    """`x.name()`, over dim 0, over the last dim kept, and over a dim that is smaller than a mesh."""

    def call(**kwargs: Any) -> Callable[..., Any]:
        return lambda x: getattr(x, name)(**kwargs)

    found = [
        Sample(f"{name} dim 0", call(dim=0), (X,), **more),
        Sample(f"{name} kept", call(dim=-1, keepdim=True), (X3,), **more),
    ]
    found += [Sample(name, call(), (X,), **more)] if whole else []
    found += [Sample(f"{name} few rows", call(dim=0), (FEW,), **more)] if few else []
    return found


def _norm(p: float) -> Callable[..., Any]:
    return lambda x: torch.linalg.vector_norm(x, p, dim=0)


REDUCTIONS = [
    *_forms("sum"),
    *_forms("mean"),
    *_forms("prod", few=False, rtol=1e-2, pending=("sum", "product")),
    *_forms("amax"),
    *_forms("amin"),
    *_forms("logsumexp", whole=False),
    *_forms("argmax", grads=False),
    *_forms("argmin", grads=False),
    *_forms("var"),
    *_forms("std"),
    Sample("max", lambda x: x.max(), (X,)),
    Sample("min", lambda x: x.min(), (X,)),
    Sample("max few rows", lambda x: x.max(), (FEW,)),
    Sample("max dim", lambda x: x.max(0), (X,)),
    Sample("min dim kept", lambda x: x.min(-1, keepdim=True), (X3,)),
    Sample("max dim few rows", lambda x: x.max(0), (FEW,)),
    Sample("max dim ties", lambda x: x.max(0), (TIES,)),
    Sample("min dim bool", lambda x: x.min(0), (TIES > 0,)),
    Sample("argmax ties", lambda x: x.argmax(), (TIES,)),
    Sample("argmin ties", lambda x: x.argmin(), (TIES,)),
    Sample("argmax nan", lambda x: (x.argmax(), x.argmin(0)), (NAN,), grads=False, pending=()),
    Sample("amax nan", lambda x: (x.amax(), x.amin(0)), (NAN,), grads=False, pending=()),
    Sample("amax int", lambda x: (x.amax(), x.amin(0)), (rand(2, 3, dtype=torch.int64),)),
    Sample("amax bool", lambda x: (x.amax(0), x.amin(0)), (rand(2, 3) > 0,)),
    Sample("sum int", lambda x: (x.sum(), x.sum(0, dtype=torch.float32)), (TIES,)),
    Sample("sum bool", lambda x: (x.sum(), x.prod(0)), (TIES > 0,)),
    Sample("sum to int", lambda x: x.sum(0, dtype=torch.int64), (X * 4,), grads=False),
    Sample("mean int", lambda x: x.mean(0, dtype=torch.float32), (TIES,)),
    Sample("mean two dims", lambda x: x.mean((0, 2)), (X3,)),
    Sample("mean of nothing", lambda x: x.mean(0), (rand(0, 3),), pending=("sum",), grads=False),
    Sample("mean 0-d", lambda x: x.mean(), (rand(1).view(()),)),
    Sample("var_mean", lambda x: torch.var_mean(x, (0, 2)), (X3,)),
    Sample("std_mean", lambda x: torch.std_mean(x, 0, correction=0), (X,)),
    Sample("var of one", lambda x: x.var(0, correction=0), (rand(1, 3),), grads=False, pending=()),
    Sample("var of far numbers", lambda x: x.var(0), (X * 0.01 + 1000,), rtol=1e-2, grads=False, pending=()),
    Sample("logsumexp two dims", lambda x: x.logsumexp((0, -1)), (X3,)),
    Sample("logsumexp of -inf", lambda x: x.logsumexp(0), (torch.where(X > 0, -INF, X),), pending=(), grads=False),
    Sample("any", lambda x: ((x > 1.5).any(), (x > 1).any(0), (x > 0).any(-1, keepdim=True)), (X,), grads=False),
    Sample("all", lambda x: ((x > -3).all(), (x > 0).all(0), (x > 0).all((0, 1))), (X,), grads=False),
    Sample("any uint8", lambda x: (x.any(), x.all(0)), ((TIES > 1).to(torch.uint8),)),
    Sample("nansum", lambda x: (x.nansum(), x.nansum(0)), (NAN,), pending=(), grads=False),
    Sample("nanmean", lambda x: x.nanmean(0), (NAN,), pending=(), grads=False),
    Sample("count_nonzero", lambda x: (x.count_nonzero(), x.count_nonzero(0)), (TIES,)),
    Sample("aminmax", torch.aminmax, (X,), grads=AMINMAX_GRADS),
    Sample("aminmax dim", lambda x: torch.aminmax(x, dim=0), (FEW,), grads=AMINMAX_GRADS),
    *(Sample(f"vector_norm {p}", _norm(p), (X,), rtol=1e-2) for p in (1, 2, 3, INF, -INF)),
    Sample("vector_norm of no rows", lambda x: torch.linalg.vector_norm(x, -INF, -1), (rand(0, 5, 2),), grads=False),
    *(Sample(f"vector_norm {p}", _norm(p), (X,), rtol=1e-2, grads=False) for p in (0, 0.5, -1)),
    *(Sample(f"vector_norm {p} few rows", _norm(p), (FEW,), rtol=1e-2, grads=False) for p in (2, INF, -INF, 0)),
    Sample("norm of norms", lambda x: torch.stack([x.norm(), (x * 2).norm()]).norm(), (X,)),
    Sample("dist", torch.dist, (X, rand(6, seed=2))),
    Sample("dist inf", lambda x, y: torch.dist(x, y, INF), (X, rand(6, seed=2))),
    Sample("dist 0", lambda x, y: torch.dist(x, y, 0), (X, rand(6, seed=2)), grads=False),
    Sample("histc", lambda x: (x.histc(4, -2, 2), x.histc(4)), (X,), grads=False),
]

ALONG = [
    Sample("cumsum", lambda x: torch.cumsum(x, 0), (X,)),
    Sample("cumsum negative dim", lambda x: torch.cumsum(x, -1), (X3,)),
    Sample("cumsum few rows", lambda x: torch.cumsum(x, 0), (FEW,)),
    Sample("cumsum int", lambda x: torch.cumsum(x, 0), (rand(5, 6, dtype=torch.int32),)),
    Sample("cumsum_", lambda x: x.cumsum_(0), (X,), inplace=True, may_refuse=True),
    Sample("cumprod", lambda x: torch.cumprod(x, -2), (X,), grads=False),
    Sample("logcumsumexp", lambda x: torch.logcumsumexp(x, 0), (X,), grads=False),
    Sample("logcumsumexp few rows", lambda x: torch.logcumsumexp(x, 0), (FEW,), grads=False),
    Sample("cummax", lambda x: torch.cummax(x, 0), (X,), grads=False),
    Sample("sort", lambda x: torch.sort(x, -1, descending=True), (X,)),
    Sample("argsort", lambda x: torch.argsort(x, dim=0, stable=True), (TIES,)),
    Sample("topk", lambda x: x.topk(2, -1), (X,)),
    Sample("median", lambda x: x.median(-1), (X,)),
    Sample("median of all", lambda x: x.median(), (X,)),
    Sample("kthvalue", lambda x: x.kthvalue(2, 0, keepdim=True), (X,)),
    Sample("mode", lambda x: x.mode(0)[0], (TIES,)),
]

LAYOUTS_ONLY = [
    Sample("sum half", lambda x: x.half().sum(0), (X,), rtol=2e-2, atol=2e-2),
    Sample("mean bf16", lambda x: x.mean((0, 2)), (X3.bfloat16(),), rtol=5e-2, atol=5e-2, pending=("max",)),
    Sample("quantile", lambda x: x.quantile(0.3), (X,), pending=("sum",)),
]
"""Low precisions, and a function that changes its own intermediate results in shape."""

SAMPLES = [*REDUCTIONS, *ALONG]
