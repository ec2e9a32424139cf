"""Do the plain inputs of the ranks go together? A comparison for `parallelize_module(..., check_inputs="first")`.

A plain tensor does not say how it lies; a style takes it as its `input_layouts` says. Two mistakes show only in the
numbers: replicas that differ (each rank of the axis has its own batch), and pieces that are not of even size, of
which each rank makes another global shape. Here the ranks exchange shapes and digests, one small gather an input:

    an axis that replicates    shapes and digests are the same along it
    any other axis             shapes are the same along it, but for a dim whose global size the module knows

All ranks see what all others have, so an error is raised on all or none. With "first" a module compares once for every
shape and dtype that an input has: enough for what a program does wrong in every step. A rank that has a shape for the
first time in a step in which others have one that they know waits for a comparison that does not come: True, in every
call, finds that too.
"""

from __future__ import annotations

import os
import zlib
from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor

from dtensor.errors import CollectiveError, short
from dtensor.mesh import DeviceMesh
from dtensor.placement import Placement, Replicate

__all__ = ["Checks", "check_mode", "checking", "compare_inputs", "digest", "set_check_inputs"]

Checks = bool | Literal["first"]
ENVIRONMENT = "DTENSOR_CHECK_INPUTS"
MAX_DIMS = 8
CHUNK = 1 << 22
"""Bytes that are digested at a time."""

_all: Checks | None = None


def check_mode(mode: object, what: str) -> Checks:
    """`mode` where it is True, False or "first"; ValueError otherwise."""
    if mode in ("first", True, False):
        return "first" if mode == "first" else bool(mode)
    raise ValueError(f'{what} must be True, False or "first", got {short(mode)}')


def set_check_inputs(mode: Checks | None) -> None:
    """Have all modules under plans compare their plain inputs, from the next call on; on every rank alike.

    "first": in the first call with inputs of a shape; True: in every call; False: not, but where `parallelize_module`
    was told so; None: as the environment variable DTENSOR_CHECK_INPUTS says ("first", "1", "0"; by default "0").
    """
    global _all
    _all = None if mode is None else check_mode(mode, "set_check_inputs(mode)")


def checking() -> Checks:
    """What holds for all modules."""
    if _all is not None:
        return _all
    text = os.environ.get(ENVIRONMENT, "0")
    if text == "first":
        return "first"
    if text not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT}={short(text)} must be first, 1 or 0")
    return text == "1"


def compare_inputs(x: torch.Tensor, mesh: DeviceMesh, placed: list[Placement], call: str, known: int | None) -> None:
    """Raise ValueError on all ranks of `mesh` where their `x` do not make one tensor laid out as `placed`.

    `known`: a dim that may be sharded unevenly.
    """
    if mesh.get_coordinate() is None or mesh.size() == 1 or x.is_meta or isinstance(x, FakeTensor):
        return
    if torch.compiler.is_compiling() or x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    kind = zlib.crc32(str(x.dtype).encode())
    mine = [x.ndim, *x.shape[:MAX_DIMS], *[0] * (MAX_DIMS - x.ndim), kind, int(digest(x))]
    comm = mesh.comm(tuple(range(mesh.ndim)))
    facts = torch.tensor(mine, dtype=torch.int64, device=x.device)
    try:
        seen = [tuple(f.tolist()) for f in comm.all_gather(facts, [facts.shape] * comm.size)]
    except CollectiveError as error:
        error.during(f"{call}: a comparison of the ranks' inputs (check_inputs), here of shape {list(x.shape)}")
        raise
    grid = torch.arange(comm.size).view(tuple(mesh.shape))
    for axis, placement in enumerate(placed):
        for line in grid.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist():
            for i in line[1:]:
                what = _difference(seen[line[0]], seen[i], isinstance(placement, Replicate), known)
                if what:
                    ranks = comm.ranks[line[0]], comm.ranks[i]
                    raise ValueError(_told(call, ranks, mesh.axis_name(axis), placement, what))


def _difference(a: tuple[int, ...], b: tuple[int, ...], same: bool, known: int | None) -> str:
    """In what two ranks' facts disagree; "" where they go together. `same`: the values count too."""
    left, right = list(a[1 : 1 + a[0]]), list(b[1 : 1 + b[0]])
    if len(left) != len(right) or any(m != n for d, (m, n) in enumerate(zip(left, right, strict=True)) if d != known):
        return f"of shapes {left} and {right}"
    if a[-2] != b[-2]:
        return "of different dtypes"
    return "of different values" if same and a[-1] != b[-1] else ""


def _told(call: str, ranks: tuple[int, int], axis: str, placement: Placement, what: str) -> str:
    fix = (
        "pass the same tensor on all of them, or say what it is, e.g. input_layouts=Shard(0)"
        if isinstance(placement, Replicate)
        else "pass DTensors, which may be sharded unevenly: use_local_output=False in the layer before"
    )
    return (
        f"{call}: the plain inputs of the ranks do not go together\n"
        f"  got: on ranks {ranks[0]} and {ranks[1]}, tensors {what}\n"
        f"  rule: over {axis} the input is taken as {placement!r}\n  fix: {fix}"
    )


def digest(x: torch.Tensor) -> torch.Tensor:
    """An int64 that tells tensors apart: the sum of the bytes, each weighted by its place."""
    if x.dtype.is_complex:
        x = torch.view_as_real(x.detach().resolve_conj())
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, raw.numel(), CHUNK):
        part = raw[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=raw.device, dtype=torch.int64)
        total += ((part + 1) * place * 2654435761).sum()
    return total
