"""Small language models in the manner of well-known ones, for the tests of plans that nobody wrote."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 32


def rotary(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * table[0] + torch.cat([-b, a], -1) * table[1]


class LlamaAttention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 8, kv: int = 4, norm: bool = False) -> None:
        super().__init__()
        self.e, self.groups = width // heads, heads // kv
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, kv * self.e, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)
        self.q_norm = nn.RMSNorm(self.e) if norm else None

    def forward(self, hidden_states: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.e)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q = q if self.q_norm is None else self.q_norm(q)
        k, v = (y.repeat_interleave(self.groups, 1) for y in (rotary(k, table), v))
        out = F.scaled_dot_product_attention(rotary(q, table), k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class SparseMoe(nn.Module):
    """Mixtral's block: each token goes to two experts, picked by a router."""

    def __init__(self, width: int = 16, hidden: int = 24, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = torch.topk(F.softmax(self.gate(x), -1), 2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            if len(token):
                out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out.view(hidden_states.shape)


class LlamaLayer(nn.Module):
    def __init__(self, moe: bool, norm: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(16), nn.RMSNorm(16)
        self.self_attn = LlamaAttention(norm=norm)
        self.mlp = SparseMoe() if moe else LlamaMLP()

    def forward(self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), table)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Llama; Mixtral with `moe`; with `norm` a norm of queries, as Qwen has."""

    def __init__(self, moe: bool = False, norm: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, 16)
        self.model.layers = nn.ModuleList(LlamaLayer(moe, norm) for _ in range(2))
        self.model.norm = nn.RMSNorm(16)
        self.lm_head = nn.Linear(16, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        m = self.model
        angles = torch.outer(torch.arange(input_ids.shape[1]), torch.tensor([1.0]))
        angles = torch.cat([angles, angles], -1)
        x = m.embed_tokens(input_ids)  # type: ignore[operator]
        for layer in m.layers:  # type: ignore[union-attr]
            x = layer(x, (angles.cos(), angles.sin()))
        return self.lm_head(m.norm(x))  # type: ignore[no-any-return, operator]


class Conv1D(nn.Module):
    """GPT-2's own layer: y = x W + b, with W of [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class GPTBlock(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.width, self.e = width, width // heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.mlp.c_fc, self.mlp.c_proj = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attn.c_attn(self.ln_1(x)).split(self.width, dim=2)  # type: ignore[operator]
        q, k, v = (y.view(*y.shape[:-1], -1, self.e).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.attn.c_proj(y.reshape(*y.shape[:-2], -1))  # type: ignore[operator]
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))  # type: ignore[no-any-return, operator]


class GPT(nn.Module):
    """GPT-2, with tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.h = nn.ModuleList(GPTBlock() for _ in range(2))
        self.ln_f = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


class ViTAttention(nn.Module):
    """q, k and v side by side, taken apart by a view."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.o = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(b, t, c))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """`heads` makes heads of a projection; "sdpa" scales by the width of what it is given."""

    def __init__(self, heads: Callable[[torch.Tensor], torch.Tensor], sdpa: bool = True, masked: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.heads, self.sdpa, self.masked = heads, sdpa, masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(p(x)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mask = torch.full((x.shape[1],) * 2, -1e9).triu(1) if self.masked else None
        if self.sdpa:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class NeoXAttention(nn.Module):
    """q, k and v of the first head, then those of the next."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.e, self.qkv, self.o = width // heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).view(*x.shape[:2], -1, 3 * self.e)
        q, k, v = (y.transpose(1, 2) for y in heads.split(self.e, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class GateUp(nn.Module):
    """Two projections side by side."""

    def __init__(self, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.gate_up, self.o = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.o(F.silu(gate) * up)  # type: ignore[no-any-return]


class TiledQueries(nn.Module):
    """Grouped queries in an order that goes over all key heads before it repeats one: heads cannot stay sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, n) for n in (16, 8, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
        return self.o(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class TwoOutputs(nn.Module):
    """What stands between goes out as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).relu()
        return self.b(h) + h.pow(2).mean()
