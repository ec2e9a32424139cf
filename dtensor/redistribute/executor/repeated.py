"""Which of the bound ways a step goes that is carried out again: that of even parts, of a partner, or of any boxes.

    parts of one shape, large, or as they lie          `dtensor.redistribute.executor.even`
    one partner at most, large, or nothing beside it   `dtensor.redistribute.executor.partner`
    all else, and small ones, where calls count        `dtensor.redistribute.executor.uneven`

None: it is of another kind, and the general way (`dtensor.redistribute.executor.run`) remains. What is bound takes
contiguous tensors of the dtype that is given, which are `dtensor.comm.fast_path.ready`, and gives new memory,
contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dtensor.comm.communicator import Communicator
from dtensor.comm.fast_path import Try, in_carrier, in_pairs
from dtensor.comm.reduce_ops import Reducing
from dtensor.comm.wire import items_of
from dtensor.redistribute.executor.even import Even, Local, as_it_lies, even, joiner, stacker, taker
from dtensor.redistribute.executor.partner import partner
from dtensor.redistribute.executor.pieces import SMALL, paired
from dtensor.redistribute.executor.uneven import exchange_uneven, gather_uneven, scatter_here, scatter_uneven
from dtensor.redistribute.geometry import Region

__all__ = ["exchange_known", "gather_known", "scatter_known"]

Shape = tuple[int, ...]


def scatter_known(
    comm: Communicator, leaving: Sequence[Region], have: Shape, shape: Shape, what: Reducing
) -> Try | None:
    """A reduce-scatter of a tensor of shape `have`, of which `leaving[i]` is for position i; the result has `shape`."""
    if not have:
        return None
    if comm.reduces_here(what):
        return scatter_here(comm, leaving, have, shape, what)
    if what.reduced.is_complex:
        leaving, have, shape = paired(leaving), (*have, 2), (*shape, 2)
    parts = even(leaving, have)
    if parts is None or (math.prod(have) <= SMALL and not as_it_lies(parts)):
        return scatter_uneven(comm, leaving, have, shape, what)
    return comm.bind_reduce_scatter(stacker(parts), shape, what)


def gather_known(
    comm: Communicator, shapes: Sequence[Shape], into: Sequence[Region], out_shape: Shape, dtype: torch.dtype
) -> Try | None:
    """An all-gather of parts of one shape by way of a buffer; `into[i]` of the result is the part of position i."""
    if items_of(dtype) > 1:
        pairs = [(*s, 2) for s in shapes], paired(into), (*out_shape, 2)
        even_pairs = gather_known(comm, *pairs, torch.float64) if out_shape else None
        return None if even_pairs is None else in_pairs(even_pairs)
    known = _gather_even(comm, even(into, out_shape), out_shape, dtype)
    return known or gather_uneven(comm, shapes, into, out_shape, dtype, False)


def _gather_even(comm: Communicator, parts: Even | None, out_shape: Shape, dtype: torch.dtype) -> Try | None:
    joined = None if parts is None else joiner(parts)
    if parts is None or joined is None or (math.prod(out_shape) <= SMALL and not joined[0]):
        return None
    along = (comm.size * parts.part[0], *parts.part[1:])
    gather, put = comm.bind_all_gather(along), joined[1]
    if joined[0] and along == out_shape:
        return in_carrier(gather, dtype)
    return in_carrier(lambda x: put(gather(x)), dtype)


def exchange_known(
    comm: Communicator, leaving: Sequence[Region], shape: Shape, into: Sequence[Region], out_shape: Shape,
    apart: int | None, dtype: torch.dtype,
) -> Try | None:  # fmt: skip
    """An all-to-all, as `dtensor.redistribute.executor.uneven.exchange_uneven` has it."""
    if items_of(dtype) > 1:
        pairs = paired(leaving), (*shape, 2), paired(into), (*out_shape, 2)
        known_pairs = exchange_known(comm, *pairs, apart, torch.float64) if shape else None
        return None if known_pairs is None else in_pairs(known_pairs)
    small = max(math.prod(shape), math.prod(out_shape)) <= SMALL
    if apart is not None:
        known = partner(comm, leaving, shape, into, out_shape, apart, small)
    else:
        known = None if small else _exchange_even(comm, even(leaving, shape), even(into, out_shape))
    if known is None:
        return exchange_uneven(comm, leaving, shape, into, out_shape, apart, dtype)
    return in_carrier(known, dtype)


def _exchange_even(comm: Communicator, leaving: Even | None, into: Even | None) -> Local | None:
    """All parts, of one shape, through one all-to-all, with nothing left to decide; None where they are not even."""
    joined = None if into is None else joiner(into)
    if leaving is None or into is None or joined is None:
        return None
    (in_order, put), (stacked, take), exchange = joined, taker(leaving), comm.bind_all_to_all()
    if in_order and stacked == into.whole:
        return lambda x: exchange(take(x))
    return lambda x: put(exchange(take(x)))
