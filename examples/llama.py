"""A small Llama-style decoder, plain PyTorch. It knows nothing of sharding.

Shapes: b batch, t positions, d width, v vocabulary, h query heads, g key and value heads, e width of a head.
Attention reads the number of heads off its input, so it runs unchanged on all the heads or on one rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `hidden` is the inner width of the feed-forward block."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 352
    positions: int = 128

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


def rotary_table(positions: int, head_width: int) -> Tensor:
    """Angles' cosines and sines, [2, t, e/2]."""
    rates = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), rates)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary positions: turn each pair of x[b, h, t, e] by its position's angle."""
    cos, sin = rotary
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Attention(nn.Module):
    """Causal attention with grouped queries: h / g query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.groups = config.heads // config.kv_heads
        self.wq = nn.Linear(config.width, config.heads * self.head_width, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.wo = nn.Linear(config.heads * self.head_width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """x[b, t, d] to [b, t, d]."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = (y.repeat_interleave(self.groups, dim=1) for y in (rotate(k, rotary), v))
        mixed = F.scaled_dot_product_attention(rotate(q, rotary), k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x[b, t, d] to [b, t, d]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """x[b, t, d] to [b, t, d]."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Token numbers [b, t] to logits [b, t, v]."""

    rotary: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False)
        self.register_buffer("rotary", rotary_table(config.positions, config.head_width), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("wo.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.04 / (2 * config.layers) ** 0.5 if last else 0.04)

    def features(self, tokens: Tensor) -> Tensor:
        """tokens[b, t] to what the last layer takes, [b, t, d]."""
        rotary = self.rotary[:, : tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens[b, t] to logits[b, t, v]."""
        return self.logits(self.features(tokens))
