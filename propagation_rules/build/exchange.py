"""Elements of a sharded dim go to other indices, each rank being sent just what it lacks.

Where the elements go is a list of *runs*. A run takes `length` elements of a source, from `start` on in steps of
`step`, to the places `out`, `out + stride`, ... of a target:

    x[1:7:2]     Run(out=0, start=1, length=3, step=2)
    flip         Run(0, n - 1, n, -1)
    roll by s    Run(s, 0, n - s)  Run(0, n - s, s)
    edges        Run(0, 0, 3, step=0)                       the first element, three times
    cat          Run(0, 0, a)  Run(a, 0, b, source=1)

A rank knows from the intervals that every position holds of the sources, and must hold of the targets, what goes
from where to where: the pieces of the runs that lie in both. `x[2:8]` of 8 elements on 2 ranks:

    rank 0 holds [0, 4), must hold x[2:5]      takes 2 3 of its own, 4 from rank 1
    rank 1 holds [4, 8), must hold x[5:8]      takes 5 6 7 of its own

One all-to-all with split sizes over the axes that shard the dim carries all of it, for several sources and targets
together; an element that a rank needs several times is sent once. Where no rank lacks anything, which all ranks know,
nothing is called. With `adds` what arrives at one place is summed (the backward of runs that read elements twice).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.redistribute.executor.run import resolved

from .exchange_plan import (
    Block,
    Piece,
    Places,
    Run,
    axes_of,
    backwards,
    busiest,
    divides,
    places,
    places_of,
    plan,
    row,
)

__all__ = ["Places", "Run", "axes_of", "backwards", "busiest", "divides", "exchange", "places", "places_of", "row"]


# ------------------------------------------------------------ doing it
def _in_order(like: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """An uninitialised dense tensor whose dims lie in memory in the order of `stride`."""
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], d))
    back = sorted(range(len(shape)), key=order.__getitem__)
    return like.new_empty([shape[d] for d in order]).permute(back)


def _every(x: torch.Tensor, dim: int, start: int, step: int, length: int) -> torch.Tensor:
    near = x.narrow(dim, start, (length - 1) * step + 1)
    return near if step == 1 else near[(slice(None),) * dim + (slice(None, None, step),)]


def exchange(
    mesh: DeviceMesh, axes: Sequence[int], dim: int, sources: Sequence[torch.Tensor], runs: Sequence[Run],
    ins: Sequence[Places], outs: Sequence[Places], *, strides: Sequence[Sequence[int]] = (),
    fill: bool | float | complex = 0, into: Sequence[torch.Tensor] = (), adds: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """This rank's parts of the targets; at most one all-to-all over `axes`, which all their ranks must call alike.

    Args:
        axes: the mesh axes that shard the dim, ascending.
        dim: the dim, the same in all sources and targets; the others have equal local sizes.
        sources: local parts, of one dtype.
        ins, outs: what every position of `axes` holds of each source, and gets of each target.
        strides: per target the global strides whose order its dims are to have in memory; contiguous by default.
        fill: what no run writes.
        into: tensors to write into, in place of new ones filled with `fill`.
        adds: places written several times hold the sum.
    """
    sources = [resolved(x) for x in sources]
    comm = mesh.comm(tuple(axes)) if axes else None
    at = 0 if comm is None else comm.rank
    todo = plan(tuple(runs), tuple(ins), tuple(outs), at, adds)
    first = sources[0]
    targets = list(into)
    for t in range(len(into), len(outs)):
        shape = list(first.shape)
        shape[dim] = sum(n for _, n in outs[t][at])
        made = _in_order(first, shape, strides[t] if strides else [0] * len(shape))
        targets.append(made if not adds and todo.covered[t] == shape[dim] else made.fill_(fill))
    arrived: list[torch.Tensor] = []
    if not todo.silent and comm is not None:
        lead, tail = first.shape[:dim], first.shape[dim + 1 :]
        nothing = first.new_empty((*lead, 0, *tail))
        parts = [_pack(sources, dim, blocks) if blocks else nothing for blocks in todo.sends]
        arrived = comm.all_to_all(parts, [(*lead, total, *tail) for total, _ in todo.receives])
    for piece in todo.own:
        if piece.step:
            low = min(piece.at, piece.at + piece.step * (piece.length - 1))
            data = _every(sources[piece.source], dim, low, abs(piece.step), piece.length)
        else:
            data = sources[piece.source].narrow(dim, piece.at, 1)
        _write(targets[piece.target], dim, piece, data, adds)
    for message, (_, read) in zip(arrived, todo.receives, strict=False):
        for piece in read:
            data = message.narrow(dim, piece.at, piece.length if piece.step else 1)
            _write(targets[piece.target], dim, piece, data, adds)
    return targets


def _pack(sources: Sequence[torch.Tensor], dim: int, blocks: Sequence[Block]) -> torch.Tensor:
    cut = [_every(sources[b.source], dim, b.start, b.step, b.length) for b in blocks]
    return torch.cat(cut, dim) if len(cut) > 1 else cut[0].contiguous()


def _write(target: torch.Tensor, dim: int, piece: Piece, data: torch.Tensor, adds: bool) -> None:
    """`data` holds the elements of the piece, ascending, or the one that a step of 0 repeats."""
    if piece.step < 0:
        data = data.flip(dim)
    if piece.stride == 0:
        data = data.sum(dim, keepdim=True, dtype=data.dtype) if piece.step else data * piece.length
        place = target.narrow(dim, piece.out, 1)
    elif piece.stride > 0:
        place = _every(target, dim, piece.out, piece.stride, piece.length)
    else:
        place = _every(target, dim, piece.out + piece.stride * (piece.length - 1), -piece.stride, piece.length)
        data = data.flip(dim) if piece.step else data
    if adds:
        place.add_(data)
    else:
        place.copy_(data)
