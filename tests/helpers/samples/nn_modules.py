"""Layers of `torch.nn` and small networks, as functions of their inputs, parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from helpers.laws import Sample, flat, ints, rand


def of(name: str, module: nn.Module, *inputs: torch.Tensor, pending: Sequence[str] = (), **kw: Any) -> Sample:
    """A sample whose tensors are the inputs, parameters and buffers; what is written into buffers is a result too."""
    g = torch.Generator().manual_seed(5)
    parameters = {n: torch.randn(p.shape, generator=g) / 3 for n, p in module.named_parameters()}
    buffers = {n: b.abs() + 0.5 if b.is_floating_point() else b for n, b in module.named_buffers()}
    names, at = [*parameters, *buffers], len(inputs)

    def fn(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = dict(zip(names, tensors[at:], strict=True))
        given |= {n: given[n].detach().clone() for n in buffers}
        outs = flat(functional_call(copy.deepcopy(module), given, tensors[:at]))  # simulated ranks are threads
        return [*outs, *(given[n] for n in buffers)]

    return Sample(name, fn, (*inputs, *parameters.values(), *buffers.values()), pending=tuple(pending), **kw)


class Residual(nn.Module):
    """A residual block with stride, as in ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.Conv2d(6, 6, 3, 1, 1, bias=False)
        self.a, self.b, self.down = nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.Conv2d(4, 6, 1, 2)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.a(self.one(x)))
        y = F.relu(self.b(self.two(y)) + self.down(x))
        return self.head(F.adaptive_avg_pool2d(F.max_pool2d(y, 3, 2, 1), 1).flatten(1))


class UNet(nn.Module):
    """Down by a pool, up by a transposed convolution and by interpolation, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.deep = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(12, 2, 1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.silu(self.inside(x))
        b = F.silu(self.norm(self.deep(F.avg_pool2d(a, 2))))
        wide = F.interpolate(b[:, :4], scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(torch.cat([a, self.up(b), wide], 1))


class Vision(nn.Module):
    """Patches, a class token, positions, one block of attention and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 8, 2, 2), nn.Parameter(torch.zeros(1, 1, 8))
        self.place, self.head = nn.Parameter(torch.zeros(1, 5, 8)), nn.Linear(8, 4)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        t = self.patch(x).flatten(2).transpose(1, 2)
        t = torch.cat([self.token.expand(t.shape[0], -1, -1), t], 1) + self.place
        return F.cross_entropy(self.head(self.block(t)[:, 0]), y, label_smoothing=0.1)


class Speech(nn.Module):
    """A gated depthwise convolution over time, and a recurrent layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.deep = nn.LayerNorm(4), nn.Conv1d(4, 8, 1), nn.Conv1d(4, 4, 3, padding=1, groups=4)
        self.rnn = nn.GRU(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.glu(self.wide(self.norm(x).transpose(1, 2)), 1)
        return self.rnn(x + self.deep(y).transpose(1, 2))[0]


class Pairs(nn.Module):
    """Two towers and the loss that tells pairs from the rest, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(6, 5), nn.EmbeddingBag(9, 5), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(self.image(x), dim=-1), F.normalize(self.text(t), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        return (logits.logsumexp(0) + logits.logsumexp(1)).mean() / 2 - logits.diagonal().mean()


class Attend(nn.Module):
    """Attention with all its outputs."""

    def __init__(self, **kw: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, **kw)

    def forward(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return self.layer(q, k, k, key_padding_mask=mask)


IMAGES, STEPS = rand(4, 4, 8, 6), rand(5, 3, 4)
PADDED = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()
MODULES = [
    of("BatchNorm2d", nn.BatchNorm2d(4), IMAGES),
    of("BatchNorm2d eval", nn.BatchNorm2d(4).eval(), IMAGES),
    of("BatchNorm1d cumulative", nn.BatchNorm1d(6, momentum=None), rand(5, 6)),
    of("InstanceNorm2d", nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGES),
    of("LocalResponseNorm", nn.LocalResponseNorm(3), IMAGES),
    of("Conv2d reflect", nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), IMAGES),
    of("Conv1d circular", nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"), STEPS),
    of("LSTM", nn.LSTM(4, 6), STEPS),
    of("LSTM two ways", nn.LSTM(4, 6, 2, bidirectional=True, batch_first=True, bias=False), STEPS),
    of("GRU", nn.GRU(4, 6), STEPS),
    of("RNN", nn.RNN(4, 6), STEPS),
    of("LSTMCell", nn.LSTMCell(4, 6), rand(5, 4)),
    of("GRUCell", nn.GRUCell(4, 6), rand(5, 4)),
    of("encoder layer", nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), rand(3, 5, 8)),
    of("decoder layer", nn.TransformerDecoderLayer(8, 2, 16, 0.0), rand(5, 3, 8), rand(4, 3, 8)),
    of("attention", Attend(), rand(5, 3, 8), rand(4, 3, 8), PADDED, pending=()),
    of("attention with more", Attend(add_bias_kv=True, add_zero_attn=True), rand(5, 3, 8), rand(4, 3, 8)),
    of("adaptive softmax", nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8], 2.0), rand(7, 6), ints(12, 7)),
    of("Bilinear", nn.Bilinear(4, 3, 5), rand(5, 4), rand(5, 3)),
]
NETS = [
    of("residual block", Residual(), IMAGES),
    of("u-net", UNet(), rand(3, 2, 8, 6), rtol=1e-2, atol=1e-3),
    of("vision transformer", Vision(), rand(3, 3, 4, 4), ints(4, 3)),
    of("speech", Speech(), rand(3, 7, 4)),
    of("pairs", Pairs(), rand(4, 6), ints(9, 4, 3)),
]
