"""An all-to-all in which this rank sends one box at most and receives one at most, besides what it keeps.

    [S(0), S(1)] -> [S(1), S(0)] on (2, 2)    ranks 1 and 2 change places, 0 and 3 keep what they have
    [S(0), R] -> [R, S(0)] on (2, 2)          rank 1 sends its rows and gets others; 0 and 3 keep what they have

What is sent is one copy, or the tensor as it lies; what arrives goes straight into the result where its box follows
itself in memory there. The sizes are those of the general way (`dtensor.redistribute.executor.run.exchange_others`),
so that ranks with several partners, or with a tensor that is not ready, take part in the same collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dtensor.comm.communicator import Communicator
from dtensor.redistribute.executor.even import Box, Local, box, one_part
from dtensor.redistribute.geometry import Region, region_shape, region_size
from dtensor.spec import contiguous_stride

__all__ = ["partner"]


def partner(
    comm: Communicator, leaving: Sequence[Region], shape: tuple[int, ...], into: Sequence[Region],
    out_shape: tuple[int, ...], me: int, small: bool,
) -> Local | None:  # fmt: skip
    """The whole step, for a contiguous tensor of `shape`, as new memory; None where it is of another kind.

    `leaving[i]` of the tensor goes to position i, `into[i]` of the result comes from there; `me` keeps its own. Where
    that lies beside what arrives, and tensors are `small`, `dtensor.redistribute.executor.uneven` needs fewer calls.
    """
    leave = [0 if i == me else region_size(part) for i, part in enumerate(leaving)]
    arrive = [0 if i == me else region_size(part) for i, part in enumerate(into)]
    goes, comes = [i for i, n in enumerate(leave) if n], [i for i, n in enumerate(arrive) if n]
    if len(goes) > 1 or len(comes) > 1 or not (comes or region_size(into[me])):
        return None
    exchange = comm.bind_exchange(leave, arrive)
    pack = _packer(leaving[goes[0]], shape) if goes else _nothing
    if exchange is None or pack is None:
        return None
    move, take = exchange, pack
    if not comes:
        keep = one_part(leaving[me], shape)
        if keep is None:
            return None
        kept = keep

        def stay(x: torch.Tensor) -> torch.Tensor:
            move(take(x), x.new_empty(0))
            return kept(x)

        return stay
    source, target = box(leaving[me], shape), box(into[me], out_shape)
    arriving = box(into[comes[0]], out_shape)
    if not region_size(into[me]):

        def change(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty(out_shape)
            move(take(x), out.view(-1))
            return out

        return change
    if source is None or target is None or arriving is None or small:
        return None
    return _beside(move, take, source, target, arriving, out_shape)


def _beside(
    move: Callable[[torch.Tensor, torch.Tensor], None], take: Local, source: Box, target: Box, arriving: Box,
    out_shape: tuple[int, ...],
) -> Local:  # fmt: skip
    """What arrives lies beside what is kept: `source` of the tensor is copied to `target` of the result."""
    part, stride, start = arriving
    numel, straight = math.prod(part), stride == contiguous_stride(part)
    size, of, at = source
    _, to, there = target

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(out_shape)
        if straight:
            move(take(x), out.as_strided((numel,), (1,), start))
        else:
            got = x.new_empty(part)
            move(take(x), got.view(-1))
            out.as_strided(part, stride, start).copy_(got)
        out.as_strided(size, to, there).copy_(x.as_strided(size, of, x.storage_offset() + at))
        return out

    return run


def _packer(region: Region, shape: tuple[int, ...]) -> Local | None:
    """A box of a contiguous tensor as a contiguous 1-D one."""
    if region_shape(region) == shape:
        return lambda x: x.view(-1)
    copy = one_part(region, shape)
    return None if copy is None else lambda x: copy(x).view(-1)


def _nothing(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0)
