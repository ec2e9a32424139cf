"""Dtypes and kernels: matmuls in 16 and 8 bits, autocast, memory, what a device does otherwise than the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from environment import Environment, Skip, close, placed, rand

from dtensor import DTensor, Partial, Replicate, Shard

R = Replicate()


def case_matmuls(env: Environment) -> None:
    """Matmuls in f32, bf16 and f16: every layout of the operands, values and gradients near the plain ones."""
    for mesh in env.meshes():
        n = mesh.ndim
        for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 1e-2)):
            a, b = rand(env, 32, 48, dtype=dtype), rand(env, 48, 16, seed=1, dtype=dtype)
            x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
            want = x @ y
            want.sum().backward()
            assert x.grad is not None and y.grad is not None
            for pa, pb in ((R, R), (Shard(0), R), (R, Shard(1)), (Shard(1), Shard(0)), (Shard(1), R), (Partial(), R)):
                near = rtol * 20 * (max(1, env.world / 2) if pa == Partial() else 1)  # as many parts are rounded
                p, q = placed(a, mesh, [pa] * n, True), placed(b, mesh, [pb] * n, True)
                got = p @ q
                close(got.full_tensor(), want, rtol, near, (dtype, pa, pb))
                got.sum().backward()
                close(p.grad.full_tensor(), x.grad, rtol, near, (dtype, pa, pb))
                close(q.grad.full_tensor(), y.grad, rtol, near, (dtype, pa, pb))


def case_autocast(env: Environment) -> None:
    """Inside autocast a linear layer runs in bf16, sharded as replicated."""
    mesh = env.mesh(env.world)
    x, w = rand(env, 8, 32), rand(env, 16, 32, seed=1)
    with torch.autocast(env.device.type, torch.bfloat16):
        want = F.linear(x, w)
        for layout in (R, Shard(0)):
            got = F.linear(placed(x, mesh, [R]), placed(w, mesh, [layout]))
            assert got.dtype == want.dtype == torch.bfloat16
            close(got.full_tensor(), want, 3e-2, 0.1)


def case_bytes(env: Environment) -> None:
    """8-bit floats, booleans, integers and complex numbers keep their bits through every move."""
    for mesh in env.meshes():
        for name in ("float8_e4m3fn", "float8_e5m2", "bool", "int16", "int64", "complex64"):
            dtype = getattr(torch, name)
            full = rand(env, 2 * env.world + 1, 6, dtype=dtype)
            x = placed(full, mesh, [Shard(0)] * mesh.ndim)
            y = x.redistribute(mesh, [Shard(1)] * mesh.ndim).redistribute(mesh, [R] * mesh.ndim)
            assert torch.equal(y.to_local().view(torch.uint8), full.view(torch.uint8)), (mesh, name)


def case_scaled_matmul(env: Environment) -> None:
    """torch._scaled_mm of 8-bit floats: sharded rows and columns give what the whole one gives."""
    if not env.cuda or torch.cuda.get_device_capability() < (8, 9):
        raise Skip("8-bit matmuls need a GPU of compute capability 8.9")
    mesh, e4m3 = env.mesh(env.world), torch.float8_e4m3fn
    a = rand(env, 64 * env.world, 128).to(e4m3)
    b = rand(env, 64 * env.world, 128, seed=1).to(e4m3)
    one = torch.ones((), device=env.device)
    want = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
    for pa, pb in ((R, R), (Shard(0), R), (R, Shard(0))):
        x, y = placed(a, mesh, [pa]), placed(b, mesh, [pb])
        scale = placed(one, mesh, [R])
        got = torch._scaled_mm(x, y.t(), scale, scale, out_dtype=torch.bfloat16)
        assert isinstance(got, DTensor)
        close(got.full_tensor(), want, 3e-2, 0.5, (pa, pb))


def case_memory(env: Environment) -> None:
    """A redistribution allocates no more than its input and output and a little, by the allocator's count."""
    if not env.cuda:
        raise Skip("the CPU's allocator does not count")
    mesh, n = env.mesh(env.world), 1 << (20 if env.quick else 24)
    full = torch.ones(n, device=env.device)
    for src, dst in ((Shard(0), R), (R, Shard(0)), (Partial(), R), (Partial(), Shard(0))):
        x = placed(full, mesh, [src])
        x.redistribute(mesh, [dst])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = x.redistribute(mesh, [dst])
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        most = y.to_local().nbytes + x.to_local().nbytes
        assert peak <= most * 1.05 + (1 << 20), (src, dst, peak, most)
