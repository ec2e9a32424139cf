"""Reductions of small tensors at ranks that were sent the parts, bound once: copies by an index, sums of whole rows.

    [P, S(0)] -> [S(0), S(0)]    one index lays out what is sent, one what has come: a row for each pending part of what
                                 I want, in the order of the parts; the rows are added up
    a spread reduction           the same for the pieces that I reduce; results and what comes later lie in one buffer,
                                 from which one index makes what is sent next and, at last, my shard

What is sent is what the general ways send (`dtensor.redistribute.executor.run`,
`dtensor.redistribute.executor.balanced_reduction`), with the same sizes between any two ranks, and parts are added up
in the same order, so that ranks may go either way and bits agree. My own parts go through the first all-to-all too: a
copy more would cost more. Everything here takes tensors on the CPU that are `dtensor.comm.fast_path.ready`, of a dtype
that groups carry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from dtensor.comm.communicator import Communicator
from dtensor.comm.fast_path import Try, carried
from dtensor.comm.reduce_ops import fold_of
from dtensor.comm.wire import carrier_of, items_of
from dtensor.redistribute.geometry import Region, region_size
from dtensor.spec import contiguous_stride

__all__ = [
    "MOST",
    "Index",
    "Send",
    "joined",
    "places",
    "reduce_arriving",
    "sender",
    "span",
]

MOST = 1 << 15
"""Elements up to which copies by an index take less time than as many of boxes as pieces need."""

Index = torch.Tensor
"""Places of elements in a 1-D tensor, int64."""

Send = Callable[[torch.Tensor, torch.Tensor], None]
"""An all-to-all from the first tensor into the second, both 1-D and contiguous."""


def places(region: Region, shape: Sequence[int]) -> Index:
    """Where the elements of a region of a contiguous tensor of `shape` lie, 1-D, in the region's order."""
    at = torch.zeros((), dtype=torch.int64, device="cpu")
    for runs, stride in zip(region, contiguous_stride(shape)):
        steps = [torch.arange(start, start + n, device="cpu") * stride for start, n in runs]
        at = at.unsqueeze(-1) + (torch.cat(steps) if steps else torch.empty(0, dtype=torch.int64, device="cpu"))
    return at.reshape(-1)


def joined(parts: Sequence[Index]) -> Index:
    """One after the other."""
    return torch.cat([*parts]) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def span(start: int, n: int) -> Index:
    """`n` places from `start` on."""
    return torch.arange(start, start + n, device="cpu")


def sender(comm: Communicator, leave: Sequence[int], arrive: Sequence[int], dtype: torch.dtype) -> Send | None:
    """An all-to-all of tensors of `dtype`, 1-D, contiguous; None where there is none that is bound."""
    width, carrier = items_of(dtype), torch.float64 if dtype == torch.complex128 else carrier_of(dtype)
    if not carried(carrier):
        return None
    send = comm.bind_exchange([n * width for n in leave], [n * width for n in arrive])
    if send is None or carrier is dtype:
        return send
    move = send
    return lambda x, out: move(x.view(carrier), out.view(carrier))


def reduce_arriving(
    comm: Communicator, leaving: Sequence[Region], shape: Sequence[int], into: Sequence[Region],
    out_shape: Sequence[int], by_part: Sequence[Sequence[int]], op: str, dtype: torch.dtype,
) -> Try | None:  # fmt: skip
    """An all-to-all of pending parts, which are reduced where they arrive.

    `leaving[i]` of my tensor, of `shape`, goes to position i; from there comes `into[i]` of one part of the result, of
    `out_shape`; `by_part`: the positions that have each part.
    """
    known, wanted = fold_of(op, dtype, len(by_part)), math.prod(out_shape)
    if known is None or not wanted or max(math.prod(shape), wanted * len(by_part)) > MOST:
        return None
    arrive = [*map(region_size, into)]
    send, total = sender(comm, [*map(region_size, leaving)], arrive, dtype), sum(arrive)
    if send is None or total != wanted * len(by_part):
        return None
    move, fold = send, known
    with torch.inference_mode(False):
        sent = joined([places(region, shape) for region in leaving])
        starts, rows = [0, *accumulate(arrive)], torch.empty(len(by_part), wanted, dtype=torch.int64, device="cpu")
        for row, some in zip(rows, by_part):
            for i in some:
                row[places(into[i], out_shape)] = span(starts[i], arrive[i])
        rows = rows.view(-1)

    def run(x: torch.Tensor) -> torch.Tensor | None:
        if not x.is_cpu:
            return None
        got = x.new_empty(total)
        move(x.view(-1).index_select(0, sent), got)
        first, second, *others = got.index_select(0, rows).split(wanted)
        out = fold.pairwise(first, second)
        for part in others:
            fold.add(out, part)
        return fold.finish(out).view(out_shape)

    return run
