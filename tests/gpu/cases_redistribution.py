"""From layout to layout on process groups: values, asynchronous ones, overlap with what comes after."""

from __future__ import annotations

import itertools
import random

import torch
from environment import Environment, Skip, close, placed, rand

from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

SHAPES = ((8, 12), (5, 7), (3, 2, 9), (1,), (16, 0))


def _layouts(mesh: DeviceMesh, ndim: int, pending: bool) -> list[tuple[Placement, ...]]:
    kinds: list[Placement] = [Replicate(), *(Shard(d) for d in range(ndim))]
    if pending:
        kinds += [Partial(), Partial("max")]
    return [
        c for c in itertools.product(kinds, repeat=mesh.ndim)
        if len({p.reduce_op for p in c if isinstance(p, Partial)}) <= 1
    ]  # fmt: skip


def case_values(env: Environment) -> None:
    """Between all layouts the value stays what it is: even and uneven shapes, empty ones, 16 bits, integers."""
    rng = random.Random(1)
    for mesh in env.meshes():
        for shape in SHAPES:
            pairs = list(itertools.product(_layouts(mesh, len(shape), True), _layouts(mesh, len(shape), False)))
            rng.shuffle(pairs)
            for src, dst in pairs[: 12 if env.quick else 120]:
                for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
                    full = rand(env, *shape, dtype=dtype)
                    near = tolerance * env.world  # as many parts of a pending tensor are added
                    for late in (False, True):
                        x = placed(full, mesh, src)
                        got = x.redistribute(mesh, dst, async_op=late)
                        assert got.placements == dst
                        close(got.full_tensor(), full, near, near, (shape, src, dst, dtype, late))
        for dtype in (torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn):
            full = rand(env, 6, 5, dtype=dtype)
            for src, dst in itertools.product(_layouts(mesh, 2, False), repeat=2):
                got = placed(full, mesh, src).redistribute(mesh, dst).full_tensor()
                close(got, full, 0, 0, (src, dst, dtype))


def case_other_order(env: Environment) -> None:
    """A mesh whose ranks stand in another order gives the same values as one in rank order."""
    mesh = DeviceMesh(env.device.type, list(reversed(range(env.world))), mesh_dim_names=("x",))
    full = rand(env, 7, 6)
    for src, dst in itertools.product([Replicate(), Shard(0), Shard(1), Partial()], [Replicate(), Shard(0), Shard(1)]):
        close(placed(full, mesh, [src]).redistribute(mesh, [dst]).full_tensor(), full, what=(src, dst))


def case_between_meshes(env: Environment) -> None:
    """From one mesh to another over the same ranks, and gradients on the way back."""
    if env.world < 4 or env.world % 2:
        raise Skip("a mesh of two axes needs 4 ranks")
    one, two = env.mesh(env.world), env.mesh(2, env.world // 2)
    full = rand(env, 8, 6)
    x = placed(full, one, [Shard(0)], grad=True)
    y = x.redistribute(two, [Shard(1), Replicate()])
    close(y.full_tensor(), full)
    (y * 2).sum().backward()
    assert x.grad is not None
    close(x.grad.full_tensor(), torch.full_like(full, 2.0))


def case_gradients(env: Environment) -> None:
    """The gradient of a redistribution, also of one that was under way while something else was computed."""
    for mesh in env.meshes():
        full, weight = rand(env, 8, 8), rand(env, 8, 8, seed=1)
        for src, dst in [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1)), (Partial(), Shard(0))]:
            x = placed(full, mesh, [src] * mesh.ndim, grad=True)
            w = distribute_tensor(weight, mesh, [Replicate()] * mesh.ndim)
            y = x.redistribute(mesh, [dst] * mesh.ndim, async_op=True)
            z = w @ w
            (y * z).sum().backward()
            assert x.grad is not None
            close(x.grad.full_tensor(), weight @ weight, 1e-3, 1e-3, (src, dst))


def case_overlap(env: Environment) -> None:
    """Redistributions of several collectives run on a stream beside, and give the same whatever runs meanwhile."""
    if not env.cuda or env.world < 4:
        raise Skip("it needs streams and a mesh of two axes")
    from dtensor.redistribute.executor.asynchronous import _sides

    mesh, n = env.mesh(2, env.world // 2), 256 if env.quick else 2048
    full = rand(env, n, n)
    src, dst = [Partial(), Partial("sum")], [Shard(0), Replicate()]
    heavy = torch.randn(n, n, device=env.device)
    for _ in range(4 if env.quick else 20):
        x = placed(full, mesh, src)
        y = x.redistribute(mesh, dst, async_op=True)
        del x
        for _ in range(3):
            heavy = torch.nn.functional.normalize(heavy @ heavy)
        junk = torch.full((n, n), float("nan"), device=env.device)
        close(y.full_tensor(), full, 1e-3, 1e-3)
        del junk, y
    assert env.device in _sides, "nothing ran beside"


def case_distribute(env: Environment) -> None:
    """distribute_tensor and full_tensor from every rank's values, from the source's only, and back."""
    for mesh in env.meshes():
        for shape in SHAPES:
            full = rand(env, *shape)
            mine = full if env.rank == 0 else torch.zeros_like(full)
            for layout in _layouts(mesh, len(shape), False):
                x = distribute_tensor(mine, mesh, layout)
                assert isinstance(x, DTensor) and x.to_local().device == env.device
                close(x.full_tensor(), full, 0, 0, (shape, layout))
