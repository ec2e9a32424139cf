"""A training step of a transformer block, written four ways for the benchmarks.

`dtensor_step(name, ...)` is one text for both engines; `hand_step` is the same model on plain local tensors with
`torch.distributed` calls where data has to move (tensor parallel: heads and hidden units are split, one all-reduce
after each half forward, one backward); `lowered_step` is ours, lowered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import side_by_side as bench
import torch
import torch.distributed as dist
import torch.nn.functional as F

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """The block's sizes; `ranks` split the heads and the hidden units."""

    ranks: int
    batch: int = 2
    length: int = 8
    width: int = 32
    heads: int = 8
    hidden: int = 64


SPLIT = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "b1": 0, "w2": 1}
"""The dim of each parameter that the ranks split; the others are replicated."""


def made(width: int, hidden: int, scale: float) -> dict[str, torch.Tensor]:
    """The whole parameters, the same everywhere."""
    torch.manual_seed(0)
    d, h = width, hidden
    shapes = {
        "g1": (d,), "c1": (d,), "wq": (d, d), "wk": (d, d), "wv": (d, d), "wo": (d, d), "bo": (d,),
        "g2": (d,), "c2": (d,), "w1": (h, d), "b1": (h,), "w2": (d, h), "b2": (d,),
    }  # fmt: skip
    return {n: torch.randn(shape) * scale + (1.0 if n[0] == "g" else 0.0) for n, shape in shapes.items()}


def parameters(s: Sizes) -> dict[str, torch.Tensor]:
    """Those of the block."""
    return made(s.width, s.hidden, 0.1)


def inputs(s: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and its targets."""
    torch.manual_seed(1)
    return torch.randn(s.batch, s.length, s.width), torch.randn(s.batch, s.length, s.width)


def optimizer(p: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer of all variants."""
    return torch.optim.AdamW(list(p.values()), lr=1e-3, foreach=True)


def attention(h: torch.Tensor, p: dict[str, Any], heads: int, width: int) -> torch.Tensor:
    """Attention of `heads` heads, `width` elements together; by hand, as torch's engine has no fused one on CPU."""
    b, t = h.shape[:2]
    q, k, v = (F.linear(h, p[n]).view(b, t, heads, -1).transpose(1, 2) for n in ("wq", "wk", "wv"))
    weights = torch.softmax(q @ k.transpose(-2, -1) * 0.5, -1)
    return (weights @ v).transpose(1, 2).reshape(b, t, width)


def finished(loss: torch.Tensor, opt: torch.optim.Optimizer) -> torch.Tensor:
    """Backward and the optimizer's step."""
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def dtensor_parts(name: str, s: Sizes) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """The step of one engine, and its arguments."""
    e = bench.engine(name)
    mesh = e.init_device_mesh("cpu", (s.ranks,), mesh_dim_names=("tp",))
    whole = [e.Replicate()]

    def make(n: str, t: torch.Tensor) -> torch.Tensor:
        layout = [e.Shard(SPLIT[n])] if n in SPLIT else whole
        local = t.chunk(s.ranks, SPLIT[n])[mesh.get_local_rank()].contiguous() if n in SPLIT else t
        return e.DTensor.from_local(local, mesh, layout).requires_grad_()

    p = {n: make(n, t) for n, t in parameters(s).items()}
    x, y = (e.DTensor.from_local(t, mesh, whole) for t in inputs(s))
    opt = optimizer(p)

    def gathered(t: Any) -> Any:
        return t.redistribute(placements=whole)

    def step(x: Any, y: Any) -> torch.Tensor:
        h = F.layer_norm(x, (s.width,), p["g1"], p["c1"])
        a = gathered(F.linear(attention(h, p, s.heads, s.width), p["wo"]))
        x = x + a + p["bo"]
        h = F.layer_norm(x, (s.width,), p["g2"], p["c2"])
        m = gathered(F.linear(F.gelu(F.linear(h, p["w1"], p["b1"])), p["w2"]))
        x = x + m + p["b2"]
        return finished(F.mse_loss(x, y), opt)

    return step, (x, y)


def dtensor_step(name: str, s: Sizes) -> Step:
    """A step on DTensors of engine `name`."""
    step, args = dtensor_parts(name, s)
    return lambda: step(*args)


def lowered_step(s: Sizes) -> Step:
    """A step of our engine, lowered."""
    import dtensor

    step, args = dtensor_parts("ours", s)
    program = dtensor.lower(step, *args)
    return lambda: program(*args)


class _Enter(torch.autograd.Function):
    """What every rank uses a part of the weights on: its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    """The sum of what the ranks computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def hand_step(s: Sizes) -> Step:
    """The same model by hand, on plain tensors."""
    rank = dist.get_rank()
    cut = lambda n, t: t.chunk(s.ranks, SPLIT[n])[rank].contiguous() if n in SPLIT else t  # noqa: E731
    p = {n: cut(n, t).requires_grad_() for n, t in parameters(s).items()}
    x0, y = inputs(s)
    opt = optimizer(p)
    heads, width = s.heads // s.ranks, s.width // s.ranks

    def step() -> torch.Tensor:
        h = _Enter.apply(F.layer_norm(x0, (s.width,), p["g1"], p["c1"]))
        a = _Leave.apply(F.linear(attention(h, p, heads, width), p["wo"]))
        x = x0 + a + p["bo"]
        h = _Enter.apply(F.layer_norm(x, (s.width,), p["g2"], p["c2"]))
        m = _Leave.apply(F.linear(F.gelu(F.linear(h, p["w1"], p["b1"])), p["w2"]))
        x = x + m + p["b2"]
        return finished(F.mse_loss(x, y), opt)

    return step


VARIANTS: dict[str, Callable[[Sizes], Step]] = {
    "torch": lambda s: dtensor_step("torch", s),
    "ours": lambda s: dtensor_step("ours", s),
    "lowered": lowered_step,
    "by hand": hand_step,
}
