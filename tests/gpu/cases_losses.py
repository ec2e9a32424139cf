"""Losses over sharded classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from environment import Environment, close, placed, rand

from dtensor import Replicate, Shard
from dtensor.loss import linear_cross_entropy, loss_parallel

R = Replicate()


def _targets(env: Environment, rows: int, classes: int) -> torch.Tensor:
    t = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(2))
    t[::5] = -100
    return t.to(env.device)


def case_cross_entropy(env: Environment) -> None:
    """loss_parallel: values and gradients in f32 and bf16, uneven classes too."""
    mesh = env.mesh(env.world)
    for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        for rows, classes in ((24, 64), (7, 33)):
            full, target = rand(env, rows, classes, dtype=dtype), _targets(env, rows, classes)
            for reduction in ("mean", "sum"):
                x = full.clone().requires_grad_()
                want = F.cross_entropy(x, target, reduction=reduction, label_smoothing=0.1)
                want.backward()
                d = placed(full, mesh, [Shard(1)], True)
                with loss_parallel():
                    got = F.cross_entropy(d, placed(target, mesh, [R]), reduction=reduction, label_smoothing=0.1)
                    got.backward()
                close(got.full_tensor(), want, rtol, rtol, (dtype, reduction))
                assert d.grad is not None and d.grad.placements == (Shard(1),) and x.grad is not None
                close(d.grad.full_tensor(), x.grad, rtol, rtol, (dtype, reduction))


def case_linear_cross_entropy(env: Environment) -> None:
    """The last layer and its loss without logits."""
    mesh = env.mesh(env.world)
    rows, features, classes = 40, 32, 50
    h, w, t = rand(env, rows, features), rand(env, classes, features, seed=1), _targets(env, rows, classes)
    x, y = h.clone().requires_grad_(), w.clone().requires_grad_()
    want = F.cross_entropy(F.linear(x, y), t)
    want.backward()
    p, q = placed(h, mesh, [R], True), placed(w, mesh, [Shard(0)], True)
    got = linear_cross_entropy(p, q, placed(t, mesh, [R]))
    got.backward()
    close(got.full_tensor(), want, 1e-4, 1e-4)
    for mine, theirs in ((p, x), (q, y)):
        assert mine.grad is not None and theirs.grad is not None
        close(mine.grad.full_tensor(), theirs.grad, 1e-3, 1e-4)
