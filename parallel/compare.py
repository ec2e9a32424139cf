"""Do the plain inputs of the ranks go together? A comparison for `parallelize_module(..., check_inputs=True)`.

A plain tensor does not say how it lies; a style takes it as its `input_layouts` says. Two mistakes show only in the
numbers: replicas that differ (each rank of the axis has its own batch), and pieces that are not of even size, of
which each rank makes another global shape. Here the ranks exchange shapes and digests, one small gather an input:

    an axis that replicates    shapes and digests are the same along it
    any other axis             shapes are the same along it, but for a dim whose global size the module knows

All ranks see what all others have, so an error is raised on all or none.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from dtensor import DeviceMesh, Placement, Replicate

__all__ = ["compare_inputs", "digest"]

MAX_DIMS = 8


def compare_inputs(x: torch.Tensor, mesh: DeviceMesh, placed: list[Placement], call: str, known: int | None) -> None:
    """Raise ValueError on all ranks of `mesh` where their `x` do not make one tensor laid out as `placed`.

    `known`: a dim that may be cut unevenly.
    """
    if mesh.get_coordinate() is None or mesh.size() == 1 or x.is_meta or isinstance(x, FakeTensor):
        return
    mine = [x.ndim, *x.shape[:MAX_DIMS], *[0] * (MAX_DIMS - x.ndim), int(digest(x))]
    comm = mesh.comm(tuple(range(mesh.ndim)))
    facts = torch.tensor(mine, dtype=torch.int64, device=x.device)
    seen = [tuple(f.tolist()) for f in comm.all_gather(facts, [facts.shape] * comm.size)]
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
    return "of different values" if same and a[-1] != b[-1] else ""


def _told(call: str, ranks: tuple[int, int], axis: str, placement: Placement, what: str) -> str:
    fix = (
        "pass the same tensor on all of them, or say what it is, e.g. input_layouts=Shard(0)"
        if isinstance(placement, Replicate)
        else "pass DTensors, which may be cut unevenly: use_local_output=False in the layer before"
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
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    place = torch.arange(1, raw.numel() + 1, device=raw.device, dtype=torch.int64) * 2654435761
    return ((raw + 1) * place).sum()
