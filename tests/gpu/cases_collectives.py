"""Communicators over process groups: what they give, in every dtype, and in which order on which stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from environment import Environment, Skip, close

from dtensor import DTensor, Partial, Placement, Replicate, Shard
from dtensor.comm import issue as comm_sent
from dtensor.comm.c10d import C10dCommunicator
from dtensor.comm.communicator import Communicator
from dtensor.comm.reduce_ops import reduce_tensors
from dtensor.propagation_rules.optimizers.pending_gradients import settle
from dtensor.redistribute.executor.coalescing import redistribute_together
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.spec import Spec

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip
OPS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor", "norm2")


def _values(env: Environment, dtype: torch.dtype, shape: Sequence[int], position: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(50 + position)
    x = torch.randint(0, 4, tuple(shape), generator=g).float()
    if dtype.is_complex:
        x = torch.complex(x, torch.randint(0, 4, tuple(shape), generator=g).float())
    elif dtype.is_floating_point and x.numel():
        x.view(-1)[position % x.numel()] = -1.5
    return x.to(dtype).to(env.device)


def _has(dtype: torch.dtype, op: str) -> bool:
    if op.startswith("norm"):
        return dtype.is_floating_point
    if op in ("band", "bor", "bxor"):
        return not dtype.is_floating_point and not dtype.is_complex
    return not (dtype.is_complex and op in ("min", "max"))


def _communicators(env: Environment) -> Iterator[Communicator]:
    for mesh in env.meshes():
        for axis, size in enumerate(mesh.shape):
            if size > 1:
                yield mesh.comm(axis)
        if mesh.ndim > 1:
            yield mesh.comm(tuple(range(mesh.ndim)))
            yield mesh.comm(tuple(reversed(range(mesh.ndim))))


def _tolerance(dtype: torch.dtype) -> float:
    return 0.1 if dtype.itemsize == 1 else 1e-2 if dtype.itemsize == 2 else 1e-5


def _wait(result: object, late: bool) -> object:
    return result.wait() if late else result  # type: ignore[attr-defined]


def case_reductions(env: Environment) -> None:
    """all_reduce and reduce_scatter give what their definition says: all dtypes and operations, now and later."""
    for c in _communicators(env):
        for dtype in DTYPES[:: 3 if env.quick else 1]:
            for op in OPS:
                if not _has(dtype, op):
                    continue
                make = lambda shape, i, d=dtype, o=op: (  # noqa: E731
                    _values(env, d, shape, i).abs() if o.startswith("norm") else _values(env, d, shape, i)
                )
                for shape in ((3, 2), (0, 2), ()):
                    for late in (False, True):
                        x = make(shape, c.rank)
                        kept = x.clone()
                        got = _wait(c.all_reduce(x, op, async_op=late), late)
                        want = reduce_tensors([make(shape, i) for i in range(c.size)], op)
                        close(got, want, _tolerance(dtype), 1e-5, (c, dtype, op, shape, late))
                        close(x, kept, 0, 0, "the input was written to")
                for shapes in ([(3, 2)] * c.size, [(i, 2) for i in range(c.size)], [(64 * i,) for i in range(c.size)]):
                    parts = [make(s, c.rank) for s in shapes]
                    got = c.reduce_scatter(parts, op)
                    want = reduce_tensors([make(shapes[c.rank], i) for i in range(c.size)], op)
                    close(got, want, _tolerance(dtype), 1e-5, (c, dtype, op, shapes))


def case_movement(env: Environment) -> None:
    """all_gather, all_to_all, broadcast and scatter: uneven, empty and 0-d parts, all dtypes, now and later."""
    for c in _communicators(env):
        for dtype in DTYPES[:: 3 if env.quick else 1]:
            for late in (False, True):
                for shapes in (
                    [(3, 2)] * c.size,
                    [(i, 2) for i in range(c.size)],
                    [()] * c.size,
                    [(99 * i,) for i in range(c.size)],
                ):
                    got = _wait(c.all_gather(_values(env, dtype, shapes[c.rank], c.rank), shapes, async_op=late), late)
                    for i, t in enumerate(got):  # type: ignore[arg-type]
                        close(t, _values(env, dtype, shapes[i], i), 0, 0, (c, dtype, "all_gather", shapes))
                sends = lambda i, j: ((i + j) % 3 * 5, 2)  # noqa: E731 - what i sends to j; some of it nothing
                parts = [_values(env, dtype, sends(c.rank, j), c.rank) for j in range(c.size)]
                arrive = [sends(i, c.rank) for i in range(c.size)]
                got = _wait(c.all_to_all(parts, arrive, async_op=late), late)
                for i, t in enumerate(got):  # type: ignore[arg-type]
                    close(t, _values(env, dtype, arrive[i], i), 0, 0, (c, dtype, "all_to_all"))
                src = c.size - 1
                got = _wait(c.broadcast(_values(env, dtype, (4,), c.rank), src, async_op=late), late)
                close(got, _values(env, dtype, (4,), src), 0, 0, (c, dtype, "broadcast"))
                shapes = [(i + 1, 3) for i in range(c.size)]
                given = [_values(env, dtype, s, 7) for s in shapes] if c.rank == src else None
                like = torch.empty(shapes[c.rank], dtype=dtype, device=env.device)
                for told in (shapes, None):
                    got = _wait(c.scatter(given, like, src, shapes=told, async_op=late), late)
                    close(got, _values(env, dtype, shapes[c.rank], 7), 0, 0, (c, dtype, "scatter"))


def case_one_rank(env: Environment) -> None:
    """Every collective of a group, issued on it directly: also where the group has one rank, as on one GPU."""
    group = dist.group.WORLD
    place = C10dCommunicator(group, range(env.world), env.rank)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        for late in (False, True):
            x = _values(env, dtype, (4 * env.world,), env.rank)
            every = [_values(env, dtype, (4 * env.world,), i) for i in range(env.world)]
            total = reduce_tensors(every, "sum")
            close(comm_sent.all_reduce(place, x, x, "sum", late).wait(), total, 1e-2, what="all_reduce")
            close(comm_sent.all_gather(place, x, late).wait(), torch.cat(every), 0, 0, "all_gather")
            mine = total[4 * env.rank : 4 * env.rank + 4]
            close(comm_sent.reduce_scatter(place, x, "sum", late).wait(), mine, 1e-2, what="reduce_scatter")
            n = [4] * env.world
            swapped = torch.cat([t[4 * env.rank : 4 * env.rank + 4] for t in every])
            close(comm_sent.all_to_all(place, x, n, n, late).wait(), swapped, 0, 0, "all_to_all")
            close(comm_sent.broadcast(place, x, 0, late).wait(), every[0], 0, 0, "broadcast")


def case_one_launch(env: Environment) -> None:
    """Small moves of one group, even and uneven, give together what each gives; ten rounds, as memory is used again."""
    ends: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
    for mesh in env.meshes():
        rest = (Replicate(),) * (mesh.ndim - 1)
        for turn in range(2 if env.quick else 10):
            moves = []
            for a, b, (n, m) in itertools.product(ends, ends[:3], ((8 * env.world, 8 * env.world), (5, 3), (1, 9))):
                src = Spec.make(mesh, (a, *rest), (n, m), (m, 1), torch.float32)
                local = _values(env, torch.float32, src.local_shape, env.rank + turn)
                moves.append((local, src, src.with_placements((b, *rest))))
            for got, move in zip(redistribute_together(moves), moves, strict=True):
                close(got, redistribute_local(*move), 1e-5, 1e-5, (mesh, move[1:]))


def case_gradients_in_one_launch(env: Environment) -> None:
    """Pending gradients of several dtypes and axes, settled together, have the values that each has by itself."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    for mesh in env.meshes():
        for turn in range(2 if env.quick else 10):
            grads = []
            for i, (axis, dtype) in enumerate(itertools.product(range(mesh.ndim), dtypes * 2)):
                layout: list[Placement] = [Replicate()] * mesh.ndim
                layout[axis] = Partial("avg" if i % 3 == 2 else "sum")
                local = _values(env, dtype, (i + 1, 3), env.rank + turn)
                grads.append(DTensor.from_local(local, mesh, layout, run_check=False))
            want = [g.full_tensor() for g in grads]
            settle(grads)
            for g, full in zip(grads, want, strict=True):
                assert not any(isinstance(p, Partial) for p in g.placements)
                close(g.to_local(), full, 1e-2, 1e-2, (mesh, g))


def case_groups(env: Environment) -> None:
    """NCCL groups are bound to this process's GPU and connected; a flattened axis has the same ranks everywhere."""
    for mesh in env.meshes():
        for axis, size in enumerate(mesh.shape):
            group = mesh.get_group(axis)
            ranks = dist.get_process_group_ranks(group)
            every: list[object] = [None] * size
            dist.all_gather_object(every, ranks, group=group)
            assert all(other == ranks for other in every), every
            if env.cuda and size > 1:
                assert group.bound_device_id == env.device, (group.bound_device_id, env.device)
        if mesh.ndim > 1:
            names: list[object] = [None] * env.world
            flat = mesh.comm(tuple(range(mesh.ndim)))
            dist.all_gather_object(names, flat.ranks)
            assert all(other == flat.ranks for other in names), names


def case_streams(env: Environment) -> None:
    """Results are right whatever stream they are waited on, whatever was freed or written meanwhile."""
    if not env.cuda:
        raise Skip("the CPU has no streams")
    place = C10dCommunicator(dist.group.WORLD, range(env.world), env.rank)
    n = 1 << (18 if env.quick else 22)
    side = torch.cuda.Stream()
    for round_ in range(4 if env.quick else 20):
        x = torch.full((n,), float(env.rank + round_), device=env.device)
        sent = comm_sent.all_reduce(place, x, x, "sum", True)
        x.fill_(-1.0)  # the collective sends a copy
        del x
        busy = torch.full((n,), 7.0, device=env.device)  # may get the memory that was freed
        with torch.cuda.stream(side):
            got = sent.wait() + 0.0
            got.record_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(side)
        want = sum(r + round_ for r in range(env.world))
        assert (got == want).all() and (busy == 7.0).all()
        y = torch.full((n,), float(env.rank), device=env.device)
        now = comm_sent.all_reduce(place, y, y, "sum", False).wait()  # in the queue: no wait between
        y.zero_()
        assert (now == sum(range(env.world))).all()
