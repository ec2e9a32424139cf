"""Scaled dot-product attention: every backend of the device, sharded by batch and heads, against the whole one."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from environment import Environment, Skip, close, placed, rand
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor import Placement, Replicate, Shard

BACKENDS = {
    "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip


def _inputs(env: Environment, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = lambda heads: (8, 32, heads, 64)  # noqa: E731
    return [
        rand(env, *shape(h), seed=i, dtype=dtype).transpose(1, 2) for i, h in enumerate((8, kv_heads, kv_heads))
    ]  # fmt: skip


def _runs(env: Environment, backend: SDPBackend, dtype: torch.dtype) -> bool:
    q, k, v = (t.requires_grad_() for t in _inputs(env, 8, dtype))
    try:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    except RuntimeError:
        return False
    return True


def _check(env: Environment, name: str) -> None:
    backend = BACKENDS[name]
    dtype = torch.float32 if name == "math" or not env.cuda else torch.bfloat16
    if not _runs(env, backend, dtype):
        raise Skip(f"{name} attention does not run on this device with {dtype}")
    rtol = 1e-4 if dtype == torch.float32 else 3e-2
    for mesh in env.meshes():
        layouts: list[list[Placement]] = [[Shard(0)] * mesh.ndim, [Shard(1)] * mesh.ndim, [Replicate()] * mesh.ndim]
        if mesh.ndim == 2:
            layouts.append([Shard(0), Shard(1)])
        for layout in layouts:
            for causal in (False, True):
                whole = [t.requires_grad_() for t in _inputs(env, 8, dtype)]
                given = [placed(t.detach(), mesh, layout, True) for t in whole]
                with sdpa_kernel(backend):
                    want = F.scaled_dot_product_attention(*whole, is_causal=causal)
                    got = F.scaled_dot_product_attention(*given, is_causal=causal)
                    assert got.placements == tuple(layout), got.placements
                    grad = rand(env, *want.shape, seed=9, dtype=dtype)
                    want.backward(grad)
                    got.backward(placed(grad, mesh, layout))
                close(got.full_tensor(), want, rtol, rtol, (name, layout, causal))
                for g, w in zip(given, whole, strict=True):
                    assert g.grad is not None and w.grad is not None
                    close(g.grad.full_tensor(), w.grad, rtol, rtol * 10, (name, layout, causal))


def case_math(env: Environment) -> None:
    """The plain formula."""
    _check(env, "math")


def case_flash(env: Environment) -> None:
    """Flash attention."""
    _check(env, "flash")


def case_efficient(env: Environment) -> None:
    """Memory-efficient attention."""
    _check(env, "efficient")


def case_cudnn(env: Environment) -> None:
    """cuDNN's attention."""
    _check(env, "cudnn")


def case_grouped(env: Environment) -> None:
    """Fewer heads of keys than of queries, whatever backend torch chooses."""
    mesh = env.mesh(env.world)
    q, k, v = _inputs(env, 4, torch.bfloat16 if env.cuda else torch.float32)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    layouts = [Shard(0), Shard(1)] if 4 % env.world == 0 else [Shard(0)]
    for layout in layouts:
        given = [placed(t, mesh, [layout]) for t in (q, k, v)]
        got = F.scaled_dot_product_attention(*given, enable_gqa=True)
        close(got.full_tensor(), want, 3e-2, 3e-2, layout)


def case_masked(env: Environment) -> None:
    """With a mask that is added, one for all heads or one each, and its gradient; whatever backend torch chooses."""
    dtype = torch.bfloat16 if env.cuda else torch.float32
    for mesh in env.meshes():
        for heads, layout in itertools.product((1, 8), (Shard(0), Shard(1), Replicate())):
            whole = [
                t.requires_grad_() for t in (*_inputs(env, 8, dtype), rand(env, 8, heads, 32, 32, seed=5, dtype=dtype))
            ]
            of_mask = Replicate() if heads == 1 and layout == Shard(1) else layout
            given = [placed(t.detach(), mesh, [layout] * mesh.ndim, True) for t in whole[:3]]
            given.append(placed(whole[3].detach(), mesh, [of_mask] * mesh.ndim, True))
            want = F.scaled_dot_product_attention(*whole[:3], attn_mask=whole[3])
            got = F.scaled_dot_product_attention(*given[:3], attn_mask=given[3])
            close(got.full_tensor(), want, 3e-2, 3e-2, (heads, layout))
            want.sum().backward()
            got.sum().backward()
            for g, w in zip(given, whole, strict=True):
                assert g.grad is not None and w.grad is not None
                close(g.grad.full_tensor(), w.grad, 3e-2, 0.1, (heads, layout))


def case_dropout(env: Environment) -> None:
    """Dropout inside of attention: replicas drop the same, shards differ, backward drops what forward dropped."""
    dtype = torch.bfloat16 if env.cuda else torch.float32
    for name, backend in BACKENDS.items():
        if not _runs(env, backend, dtype):
            continue
        for mesh in env.meshes():
            q, k = (torch.zeros(8, 8, 32, 64, dtype=dtype, device=env.device) for _ in range(2))
            v = torch.eye(32, 64, dtype=dtype, device=env.device).expand(8, 8, 32, 64).contiguous()
            for layout in ([Replicate()] * mesh.ndim, [Shard(0)] * mesh.ndim, [Shard(1)] * mesh.ndim):
                torch.manual_seed(3)
                given = [placed(t, mesh, layout, True) for t in (q, k, v)]
                with sdpa_kernel(backend):
                    try:
                        out = F.scaled_dot_product_attention(*given, dropout_p=0.5)
                    except RuntimeError:
                        break  # this backend has no dropout
                    out.sum().backward()
                whole = out.full_tensor().float()
                kept = whole[..., :32] != 0
                assert 0.4 < kept.float().mean() < 0.6, (name, layout, kept.float().mean())
                env.same_everywhere(whole)
                if env.world > 1 and layout[0] != Replicate():
                    parts = kept.chunk(env.world, 0 if layout[0] == Shard(0) else 1)
                    assert not torch.equal(parts[0], parts[1]), (name, layout)
                grad = given[2].grad.full_tensor().float()[..., 0]  # of v: the sum of the weights that were kept
                close(grad, (kept.float() / 32 * 2).sum(-2), 3e-2, 3e-2, (name, layout, "the backward's mask"))
