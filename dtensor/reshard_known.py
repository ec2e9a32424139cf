"""Which of the bound ways a step goes that is carried out again: that of even parts, of a partner, or of any boxes.

    parts of one shape, large, or as they lie          `dtensor.reshard_even`
    one partner at most, large, or nothing beside it   `dtensor.reshard_partner`
    all else, and small ones, where calls count        `dtensor.reshard_uneven`

None: it is of another kind, and the general way (`dtensor.reshard_run`) remains. What is bound takes contiguous tensors
of the dtype that is given, which are `dtensor.comm_bound.ready`, and gives new memory, contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dtensor.comm import Communicator
from dtensor.comm_bound import Try, in_carrier
from dtensor.reshard_even import Even, Local, as_it_lies, even, joiner, stacker, taker
from dtensor.reshard_geometry import Region
from dtensor.reshard_partner import partner
from dtensor.reshard_pieces import SMALL
from dtensor.reshard_uneven import exchange_uneven, gather_uneven, scatter_uneven

__all__ = ["exchange_known", "gather_known", "scatter_known"]

Shape = tuple[int, ...]


def scatter_known(
    comm: Communicator, leaving: Sequence[Region], have: Shape, shape: Shape, op: str, dtype: torch.dtype
) -> Try | None:
    """A reduce-scatter of a tensor of shape `have`, of which `leaving[i]` is for position i; the result has `shape`."""
    parts = even(leaving, have)
    if parts is None or (math.prod(have) <= SMALL and not as_it_lies(parts)):
        return scatter_uneven(comm, leaving, have, shape, op, dtype)
    stack, scatter = stacker(parts), comm.bind_reduce_scatter(shape, op, dtype)
    return lambda x: scatter(stack(x))


def gather_known(
    comm: Communicator, shapes: Sequence[Shape], into: Sequence[Region], out_shape: Shape, dtype: torch.dtype
) -> Try | None:
    """An all-gather of parts of one shape by way of a buffer; `into[i]` of the result is the part of position i."""
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
    """An all-to-all, as `dtensor.reshard_uneven.exchange_uneven` has it."""
    small = max(math.prod(shape), math.prod(out_shape)) <= SMALL
    if apart is not None:
        known = partner(comm, leaving, shape, into, out_shape, apart, small)
    else:
        known = None if small else _exchange_even(comm, even(leaving, shape), even(into, out_shape))
    made = known or exchange_uneven(comm, leaving, shape, into, out_shape, apart)
    return None if made is None else in_carrier(made, dtype)


def _exchange_even(comm: Communicator, leaving: Even | None, into: Even | None) -> Local | None:
    """All parts, of one shape, through one all-to-all, with nothing left to decide; None where they are not even."""
    joined = None if into is None else joiner(into)
    if leaving is None or into is None or joined is None:
        return None
    (in_order, put), (stacked, take), exchange = joined, taker(leaving), comm.bind_all_to_all()
    if in_order and stacked == into.whole:
        return lambda x: exchange(take(x))
    return lambda x: put(exchange(take(x)))
