"""Reductions of a process group bound once: encoded, the group's own call, decoded (`dtensor.comm.encodings`).

    max of float32    4 calls make integers of the same order, all-reduce of int32 with max, 4 calls make floats again
    avg of int64      copied, all-reduce with sum, divided
    sum of bool       copied, seen as uint8, all-reduce with max, seen as bool
    product of complex64      gathered as int64; seen as complex64, multiplied in the order of positions

As in `dtensor.comm.fast_path`, what is issued is what the general way of `dtensor.comm.c10d` issues, from tensors that
are `dtensor.comm.fast_path.ready` and of the dtype that it was bound for. Sums and averages of complex numbers are
encoded as pairs of reals along a new last dim: what comes between encoding and decoding, and the shapes, are of those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtensor.comm import pending as comm_sent
from dtensor.comm.encodings import Reduction
from dtensor.comm.failure import Place
from dtensor.comm.fast_path import Bound, Try, options_of, send
from dtensor.comm.pending import NATIVE
from dtensor.comm.reduce_ops import Reducing, reduce_tensors
from dtensor.comm.wire import OPS, carrier_of, items_of

__all__ = ["reduce", "reduce_scatter", "scatter_list"]


def reduce(place: Place, how: Reduction, what: Reducing) -> Bound:
    """An all-reduce of tensors of any shape."""
    if how.wire is None:
        return _gathered(place, what)
    options = options_of(dist.AllreduceOptions, NATIVE[how.wire])
    encode, decode, copied, whole = how.encode, how.decode, how.view or how.encode is None, torch.contiguous_format

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.clone(memory_format=whole) if copied else x
        if encode is not None:
            out = encode(out)
        send(place, "all_reduce", out, out, options, place.group.allreduce, [out])
        return out if decode is None else decode(out)

    return run


def _gathered(place: Place, what: Reducing) -> Bound:
    """What the group does not reduce: all positions' tensors, reduced here."""
    options = options_of(c10d.AllgatherOptions)
    op, dtype, size = what.op, what.dtype, place.size
    carrier, pairs = carrier_of(dtype), items_of(dtype) > 1

    def run(x: torch.Tensor) -> torch.Tensor:
        sent = torch.view_as_real(x) if pairs else x.view(carrier)
        every = sent.new_empty((size, *sent.shape))
        send(place, "all_gather", every, sent, options, place.group._allgather_base, every.view(-1), sent.view(-1))
        got = torch.view_as_complex(every) if pairs else every.view(dtype)
        return reduce_tensors(got.unbind(), op)

    return run


def reduce_scatter(place: Place, how: Reduction, pack: Bound, shape: Sequence[int], most: int | None) -> Bound:
    """A reduce-scatter of what `pack` makes of what is encoded, parts of one size; mine is of `shape`.

    `most`: elements of a part, where some have less and are padded.
    """
    options = options_of(dist.ReduceScatterOptions, NATIVE[how.wire or "sum"])
    encode, decode, shape = how.encode, how.decode, tuple(shape)
    made = shape if most is None else (most,)

    def run(x: torch.Tensor) -> torch.Tensor:
        sent = pack(x if encode is None else encode(x))
        out = sent.new_empty(made)
        send(place, "reduce_scatter", out, sent, options, place.group._reduce_scatter_base, out, sent)
        if most is not None:
            out.resize_(shape)
        return out if decode is None else decode(out)

    return run


def scatter_list(
    place: Place, how: Reduction, views: Callable[[torch.Tensor], list[torch.Tensor]], shape: Sequence[int]
) -> Try:
    """A reduce-scatter of `views` of what is encoded, of unlike sizes; mine is of `shape`. It is not queued."""
    wire = how.wire or "sum"
    options = options_of(dist.ReduceScatterOptions, OPS[wire])
    encode, decode, size, averaged = how.encode, how.decode, place.size, wire == "avg"
    shape = tuple(shape)

    def run(x: torch.Tensor) -> torch.Tensor | None:
        if not x.is_cpu and comm_sent.in_queue(x):
            return None
        if encode is not None:
            x = encode(x)
        out = x.new_empty(shape)
        send(place, "reduce_scatter", out, out, options, place.group.reduce_scatter, [out], [views(x)])
        if averaged:
            out.div_(size)
        return out if decode is None else decode(out)

    return run
