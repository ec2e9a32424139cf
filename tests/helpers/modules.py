"""Small modules that the tests of styles and plans parallelize."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from helpers.parallel import seeded


def mlp(i: int, h: int, o: int, bias: bool = True) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(i, h, bias=bias), nn.GELU(), nn.Linear(h, o, bias=bias)))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) * self.k(x) + self.v(x))


class Block(nn.Module):
    """A transformer block: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.att, self.norm2, self.mlp = nn.LayerNorm(16), Attention(), nn.LayerNorm(16), MLP()

    def forward(self, x: Any) -> Any:
        x = x + self.att(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PackedAttention(nn.Module):
    """`heads` query heads and twice `kv` of keys and values, of width `e`, from one layer."""

    def __init__(self, heads: int, kv: int, e: int, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.kv, self.e = heads, kv, e
        self.qkv = nn.Linear(8, (heads + 2 * kv) * e, bias=bias)
        self.o = nn.Linear(heads * e, 8, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.qkv(x)
        each = y.shape[-1] / (self.heads + 2 * self.kv)
        parts = y.split([round(each * n) for n in (self.heads, self.kv, self.kv)], -1)
        q, k, v = (z.unflatten(-1, (-1, self.e)).transpose(1, 2) for z in parts)
        k, v = (z.repeat_interleave(self.heads // self.kv, 1) for z in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(6, 10), "down": nn.Linear(10, 6)}) for _ in range(n)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["down"](layer["up"](x).relu())  # type: ignore[index]
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(t))  # type: ignore[no-any-return]
