"""Gathers, scatters and exchanges of parts of unlike sizes, bound once: a handful of calls around the group's own.

    S(0) -> R of [7, 5] on 4       all-gather of [2, 5] into 8 rows, the last a padding: the result is the first 7
    S(1) -> R of [7, 5] on 4       all-gather of [7, 2] into views of the result; the last column by way of a spare
    S(1) -> S(0) of [7, 5] on 4    my rows as they lie; what arrives is copied to its columns: those of 2, that of 1
    P -> S(0) of [7, 5] on 4       copied into 8 rows, reduce-scatter; the last rank's row is the first of its 2

What is issued is what the general way (`dtensor.redistribute.executor.run`, `dtensor.comm.c10d`) issues, with the same
sizes, so that ranks may go either way. Everything here takes tensors that are `dtensor.comm.fast_path.ready` and of a
dtype that groups carry, and gives new contiguous memory. None for what is bound: it is of another kind. None for a
result: the general way is to be taken, as nothing was sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from dtensor.comm.communicator import Communicator, padding_counts
from dtensor.comm.fast_path import Try, in_carrier, in_pairs
from dtensor.comm.pending import in_queue
from dtensor.comm.reduce_ops import Reducing, reduce_tensors
from dtensor.comm.wire import carrier_of, items_of
from dtensor.redistribute.executor.local import Boxes, side_by_side
from dtensor.redistribute.executor.pieces import (
    SMALL,
    Local,
    Piece,
    copier,
    in_order,
    lies,
    maker,
    moved,
    packer,
    paired,
)
from dtensor.redistribute.geometry import Region, region_shape, region_size

__all__ = ["Try", "exchange_uneven", "gather_uneven", "scatter_here", "scatter_uneven"]

Shape = tuple[int, ...]
_Views = Callable[[torch.Tensor], list[torch.Tensor]]


def exchange_uneven(
    comm: Communicator, leaving: Sequence[Region], shape: Shape, into: Sequence[Region], out_shape: Shape,
    apart: int | None, dtype: torch.dtype,
) -> Try | None:  # fmt: skip
    """An all-to-all of a contiguous tensor of `shape`, whose `leaving[i]` goes to position i, to one of `out_shape`.

    `into[i]` of the result comes from there. The part of position `apart`, this rank's, is copied and not sent, except
    where tensors are small: then a copy more costs more than to send it to oneself.
    """
    if not shape:
        return None
    if items_of(dtype) > 1:
        pairs = paired(leaving), (*shape, 2), paired(into), (*out_shape, 2)
        known = exchange_uneven(comm, *pairs, apart, torch.float64)
        return None if known is None else in_pairs(known)
    stay: list[Piece] | None = []
    if apart is not None and max(math.prod(shape), math.prod(out_shape)) > SMALL:
        if region_size(leaving[apart]):
            stay = moved(leaving[apart], shape, into[apart], out_shape)
        nothing: Region = ((),) * len(shape)
        leaving, into = ([nothing if i == apart else r for i, r in enumerate(some)] for some in (leaving, into))
    pack = packer(leaving, shape)
    if pack is None or stay is None:
        return None
    made = _exchange(comm, pack, [*map(region_size, leaving)], into, out_shape, stay)
    return None if made is None else in_carrier(made, dtype)


def _exchange(
    comm: Communicator, pack: Local, leave: list[int], into: Sequence[Region], out_shape: Shape, stay: Sequence[Piece]
) -> Try | None:
    """What `pack` makes is sent; what arrives is brought to its place, and what stays is copied."""
    arrive = [*map(region_size, into)]
    total = sum(arrive)
    landing, move = lies(into, out_shape, [0, *accumulate(arrive)], True), comm.bind_exchange(leave, arrive)
    if landing is None or move is None:
        return None
    send, keep = move, copier(stay) if stay else None
    straight = in_order(landing) if landing else 0  # nothing arrives
    if straight is not None and total == math.prod(out_shape):

        def whole(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty(total)
            send(pack(x), out)
            return out.resize_(out_shape)

        return whole
    if straight is not None:
        start = -straight

        def beside(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty(out_shape)
            send(pack(x), out.as_strided((total,), (1,), start))
            if keep is not None:
                keep(x, out)
            return out

        return beside
    put = maker(landing, out_shape)

    def run(x: torch.Tensor) -> torch.Tensor:
        got = x.new_empty(total)
        send(pack(x), got)
        out = put(got)
        if keep is not None:
            keep(x, out)
        return out

    return run


def gather_uneven(
    comm: Communicator, shapes: Sequence[Shape], into: Sequence[Region], out_shape: Shape, dtype: torch.dtype,
    straight: bool,
) -> Try | None:  # fmt: skip
    """An all-gather of parts of `shapes`, each contiguous; `into[i]` of the result is the part of position i.

    `straight`: padded parts are gathered into views of the result, not into a buffer.
    """
    if items_of(dtype) > 1:
        widths, whole = [(*s, 2) for s in shapes], (*out_shape, 2)
        known = gather_uneven(comm, widths, paired(into), whole, torch.float64, straight) if out_shape else None
        return None if known is None else in_pairs(known)
    sizes, carrier = [*map(math.prod, shapes)], carrier_of(dtype)
    pads = comm.pads_gather(sizes, carrier)
    if pads is None or not max(sizes) or not out_shape:
        return None
    own = sizes[comm.rank]
    if not pads:
        every = Piece((comm.size, own), (0, 1), 0, (own, 1), 0)
        pack = maker([every], (comm.size * own,)) if own else lambda x: x.new_empty(0)
        run = _exchange(comm, pack, [own] * comm.size, into, out_shape, [])
        return None if run is None else in_carrier(run, dtype)
    full = max(shapes, key=math.prod)
    found = lies(into, out_shape, [i * max(sizes) for i in range(comm.size)], True)
    if found is None:
        return None
    held, made = comm.size * max(sizes), math.prod(out_shape)
    begins = in_order(found) == 0 and not padding_counts(held * carrier.itemsize, made * carrier.itemsize)
    how, fill = _gather_into if straight else _gather, _filled(shapes[comm.rank], full)
    run = how(comm, shapes, None if begins else found, into, out_shape, fill)
    return None if run is None else in_carrier(run, dtype)


def _filled(shape: Shape, full: Shape) -> Local | None:
    """A contiguous tensor of `shape` as the beginning of a contiguous one of shape `full`; None where it is that."""
    numel, most = math.prod(shape), math.prod(full)
    if shape == full:
        return None
    if not numel:
        return lambda x: x.new_zeros(full)
    if numel == most:
        return lambda x: x.view(full)
    return maker([Piece((numel,), (1,), 0, (1,), 0)], full, [(numel, most - numel)])


def _gather(
    comm: Communicator, shapes: Sequence[Shape], found: Sequence[Piece] | None, into: Sequence[Region],
    out_shape: Shape, fill: Local | None,
) -> Try | None:  # fmt: skip
    """Padded parts into one buffer, which begins with the result or is copied to it; `found` are the copies."""
    full = max(shapes, key=math.prod)
    gather = comm.bind_all_gather((comm.size * full[0], *full[1:]))
    if found is None:
        return lambda x: gather(x if fill is None else fill(x)).resize_(out_shape)
    put = maker(found, out_shape)
    return lambda x: put(gather(x if fill is None else fill(x)))


def _gather_into(
    comm: Communicator, shapes: Sequence[Shape], found: Sequence[Piece] | None, into: Sequence[Region],
    out_shape: Shape, fill: Local | None,
) -> Try | None:  # fmt: skip
    """Straight into the result, whose parts are boxes; parts that are smaller than others by way of spare tensors."""
    bound = comm.bind_gather_into()
    if bound is None:
        return None
    gather, full = bound, max(shapes, key=math.prod)
    if found is None:
        stacked = comm.size, *full

        def first(x: torch.Tensor) -> torch.Tensor | None:
            if not x.is_cpu and in_queue(x):
                return None
            buffer = x.new_empty(stacked)
            if not gather(x if fill is None else fill(x), [*buffer.unbind()]):
                return None
            return buffer.resize_(out_shape)

        return first
    sizes, most = [*map(math.prod, shapes)], math.prod(full)
    some = [i for i, shape in enumerate(shapes) if shape != full and sizes[i]]
    back = lies([into[i] for i in some], out_shape, [j * most for j in range(len(some))], True)
    if back is None:
        return None
    straight = [i for i, shape in enumerate(shapes) if shape == full or side_by_side(into, out_shape) is not None]
    views, put = _views([into[i] for i in straight], out_shape), copier(back)
    spare = len(some) + (0 in sizes), *full  # parts of no elements have one together
    several = spare[0] > 1
    places = [
        straight.index(i) if shape == full else len(straight) + (some.index(i) if sizes[i] else len(some))
        for i, shape in enumerate(shapes)
    ]

    def run(x: torch.Tensor) -> torch.Tensor | None:
        if not x.is_cpu and in_queue(x):
            return None
        out = x.new_empty(out_shape)
        if not spare[0]:
            return out if gather(x, views(out)) else None
        kept = x.new_empty(spare if several else full)
        ends = [*views(out), *(kept.unbind() if several else (kept,))]
        if not gather(x if fill is None else fill(x), [ends[i] for i in places]):
            return None
        put(kept, out)
        return out

    return run


def _views(regions: Sequence[Region], whole: Shape) -> _Views:
    """Boxes of a contiguous tensor of shape `whole`."""
    dim = side_by_side(regions, whole)
    if dim is None:
        return Boxes(regions, whole)
    sizes = [region_shape(region)[dim] for region in regions]
    return lambda x: [*x.split_with_sizes(sizes, dim)]


def scatter_uneven(
    comm: Communicator, leaving: Sequence[Region], shape: Shape, out_shape: Shape, what: Reducing
) -> Try | None:
    """A reduce-scatter of a contiguous tensor of `shape`, of which `leaving[i]` is for position i.

    Of complex numbers all is that of pairs of reals, as `Communicator.bind_reduce_scatter` has it.
    """
    sizes = [*map(region_size, leaving)]
    most = max(sizes)
    if not most:
        return None
    if not comm.pads_scatter(sizes, what):
        if any(len(runs) > 1 for region in leaving for runs in region):
            return None
        return comm.bind_scatter_list(_views(leaving, shape), out_shape, what)
    found = lies(leaving, shape, [i * most for i in range(comm.size)], False)
    if found is None:
        return None
    gaps = [(i * most + n, most - n) for i, n in enumerate(sizes) if n < most]
    return comm.bind_reduce_scatter(maker(found, (comm.size * most,), gaps), out_shape, what, most)


def scatter_here(
    comm: Communicator, leaving: Sequence[Region], shape: Shape, out_shape: Shape, what: Reducing
) -> Try | None:
    """As `scatter_uneven`, where the group does not reduce: an all-to-all of the parts, which are reduced here."""
    every = (comm.size, *out_shape)
    rows: list[Region] = [(((i, 1),), *[((0, n),) for n in out_shape]) for i in range(comm.size)]
    run = exchange_uneven(comm, leaving, shape, rows, every, None, what.dtype)
    if run is None:
        return None
    move = run

    def reduced(x: torch.Tensor) -> torch.Tensor | None:
        got = move(x)
        return None if got is None else reduce_tensors(got.unbind(), what.op)

    return reduced
