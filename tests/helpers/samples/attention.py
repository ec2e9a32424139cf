"""Samples of scaled dot-product attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from helpers.laws import Sample, rand


def qkv(
    b: int, h: int, s: int, e: int, heads_kv: int | None = None, length: int | None = None
) -> tuple[torch.Tensor, ...]:
    kv = (b, heads_kv or h, length or s, e)
    return rand(b, h, s, e), rand(*kv, seed=1), rand(*kv, seed=2)


sdpa = F.scaled_dot_product_attention
SUMS = ("sum",)

SAMPLES = [
    Sample("sdpa", sdpa, qkv(4, 4, 5, 4), pending=SUMS),
    Sample("sdpa causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), qkv(2, 4, 5, 4), pending=SUMS),
    Sample("sdpa uneven heads", sdpa, qkv(3, 5, 4, 4), pending=()),
    Sample("sdpa few heads", sdpa, qkv(1, 2, 4, 4), pending=()),
    Sample("sdpa cross", lambda q, k, v: sdpa(q, k, v, scale=0.3), qkv(2, 4, 3, 4, length=6), pending=()),
    Sample("sdpa grouped", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), qkv(2, 8, 3, 4, 4), pending=()),
    Sample("sdpa grouped 2", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), qkv(2, 6, 3, 4, 2), pending=()),
    Sample("sdpa one key head", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), qkv(2, 4, 3, 4, 1), pending=()),
    Sample(
        "sdpa mask",
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
        (*qkv(2, 4, 5, 4), torch.ones(5, 5).tril().bool()),
        pending=(),
    ),
    Sample(
        "sdpa mask of heads",
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m.detach()),
        (*qkv(2, 4, 5, 4), rand(1, 4, 5, 5)),
        pending=(),
    ),
    Sample(
        "sdpa mask of batches",
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m.detach()),
        (*qkv(2, 4, 5, 4), rand(2, 1, 5, 5)),
        pending=(),
    ),
    Sample(
        "sdpa key mask",
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m.detach()),
        (*qkv(2, 4, 5, 4), rand(2, 1, 1, 5)),
        pending=(),
    ),
    Sample(
        "sdpa learned bias",
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
        (*qkv(2, 4, 3, 4), rand(1, 4, 3, 3)),
        pending=(),
    ),
    Sample(
        "safe softmax",
        lambda x: torch.ops.aten._safe_softmax(x, -1),
        (torch.where(rand(4, 6) > 1.0, rand(4, 6), float("-inf")),),
        pending=(),
        grads=False,
    ),
]
