"""Every collective of a communicator against its specification function, over the list of all ranks' tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from dtensor.comm.communicator import Communicator
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.simulation.communicator import SPECIFICATION

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

OTHERS = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip

DTYPES = FLOATS + OTHERS

OPS = ["sum", "avg", "min", "max", "product", "band", "bor", "bxor", "norm1", "norm2", "norm3"]

SHAPES = [(3, 2), (0, 2), (), (5,)]


def values(dtype: torch.dtype, shape: Sequence[int], rank: int, seed: int = 0) -> torch.Tensor:
    """Small numbers, a different tensor for every rank; floats have a negative one, and NaN where seed is 3."""
    g = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randint(0, 4, tuple(shape), generator=g).float()
    if dtype.is_complex:
        x = torch.complex(x, torch.randint(0, 4, tuple(shape), generator=g).float())
    elif dtype.is_floating_point and x.numel():
        x.view(-1)[rank % x.numel()] = float("nan") if seed == 3 else -1.5
    return x.to(dtype)


def same(got: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Equal dtype, shape and values (NaN equals NaN); sums of short floats may round differently."""
    assert got.dtype == expected.dtype and got.shape == expected.shape, (what, got, expected)
    if not got.dtype.is_complex:
        got, expected = got.double(), expected.double()
    rtol = 1e-2 if expected.dtype.itemsize <= 2 else 1e-5
    assert torch.allclose(got, expected, rtol=rtol, equal_nan=True), (what, got, expected)


def has_reduction(dtype: torch.dtype, op: str) -> bool:
    if op.startswith("norm"):
        return dtype.is_floating_point
    if op in ("band", "bor", "bxor"):
        return not dtype.is_floating_point and not dtype.is_complex
    return not (dtype.is_complex and op in ("min", "max"))


def fit(op: str, x: torch.Tensor) -> torch.Tensor:
    """Norms are of values that are not negative."""
    return x.float().abs().to(x.dtype) if op.startswith("norm") else x


def exercise_reductions(c: Communicator, dtypes: Sequence[torch.dtype]) -> None:
    for dtype, (seed, shape), op in itertools.product(dtypes, enumerate(SHAPES), OPS):
        if not has_reduction(dtype, op):
            with pytest.raises(TypeError, match="reduction"):
                c.all_reduce(values(dtype, shape, 0), op)
            with pytest.raises(TypeError, match="reduction"):
                c.reduce_scatter([values(dtype, shape, 0)] * c.size, op)
            continue
        xs = [fit(op, values(dtype, shape, r, seed)) for r in range(c.size)]
        mine = xs[c.rank].clone()
        same(c.all_reduce(mine, op), SPECIFICATION["all_reduce"](xs, op)[c.rank], (dtype, op, shape))
        same(mine, xs[c.rank], "input changed")
        shapes = [(i, *shape) if shape else () for i in range(c.size)]
        parts = [[fit(op, values(dtype, s, r, seed)) for s in shapes] for r in range(c.size)]
        same(c.reduce_scatter(parts[c.rank], op), SPECIFICATION["reduce_scatter"](parts, op)[c.rank], (dtype, op))


def exercise_movement(c: Communicator, dtypes: Sequence[torch.dtype]) -> None:
    for dtype, shape in itertools.product(dtypes, SHAPES):
        shapes = [(i, *shape) for i in range(c.size)]
        xs = [values(dtype, s, r) for r, s in enumerate(shapes)]
        for got, expected in zip(c.all_gather(xs[c.rank], shapes), SPECIFICATION["all_gather"](xs)[c.rank]):
            same(got, expected, (dtype, "all_gather"))
        flat = values(dtype, shape, c.rank)
        for r, got in enumerate(c.all_gather(flat, [shape] * c.size)):
            same(got, values(dtype, shape, r), (dtype, "even all_gather"))
        parts = [[values(dtype, ((i + 2 * j) % 3, *shape), 8 * i + j) for j in range(c.size)] for i in range(c.size)]
        expected_parts = SPECIFICATION["all_to_all"](parts)[c.rank]
        got_parts = c.all_to_all(parts[c.rank], [e.shape for e in expected_parts])
        for got, expected in zip(got_parts, expected_parts):
            same(got, expected, (dtype, "all_to_all"))
        for src in range(c.size):
            ys = [values(dtype, shape, r) for r in range(c.size)]
            same(c.broadcast(ys[c.rank], src), SPECIFICATION["broadcast"](ys, src)[c.rank], (dtype, "broadcast"))
            like = torch.empty(shapes[c.rank], dtype=dtype)
            given = xs if c.rank == src else None
            for known in (None, shapes):
                expected = SPECIFICATION["scatter"]([xs if i == src else None for i in range(c.size)], src)[c.rank]
                same(c.scatter(given, like, src, shapes=known), expected, (dtype, "scatter"))


def communicators() -> Iterator[Communicator]:
    """Of 4 ranks: an axis, several axes in both orders, a sub-mesh, a mesh in no order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    yield mesh.comm("a")
    yield mesh.comm((0, 1))
    yield mesh.comm((1, 0))
    yield mesh["b"].comm()
    yield DeviceMesh("cpu", [3, 1, 2, 0]).comm()


def every(exercise: Callable[..., None], *args: object, few: bool = False) -> None:
    for i, c in enumerate(communicators()):
        if not few or i in (1, 4):
            exercise(c, *args)
