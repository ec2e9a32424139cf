"""Communicators over the process groups of `torch.distributed`.

Each call is one collective that goes through torch's dispatcher, so dispatch modes see it. What travels, where a
backend does not carry or reduce a dtype as `dtensor.comm.reduce_ops` says, is the matter of `dtensor.comm.wire`; on
which stream it travels, and what is said where it does not arrive, that of `dtensor.comm.pending`.

A group that was given (`DeviceMesh.from_group`) may count its ranks in another order than the mesh: `_order[i]` is
the group rank of position i.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtensor.comm import fast_path as comm_bound
from dtensor.comm import fast_reductions as comm_reduced
from dtensor.comm import pending as sent_by
from dtensor.comm.communicator import Communicator, Pending, Shape, padding_counts, standing_for
from dtensor.comm.encodings import Reduction, reduction, widened
from dtensor.comm.fast_path import Try
from dtensor.comm.messages import Direct, direct_of
from dtensor.comm.pending import Sent, issued
from dtensor.comm.reduce_ops import Reducing, reduce_tensors
from dtensor.comm.wire import (
    OPS,
    carried,
    eager,
    flat_of,
    items_of,
    packed,
    padded,
    put,
    shaped,
    spaced,
    unflat,
    waited,
)  # fmt: skip

__all__ = ["C10dCommunicator"]


def _as(dtype: torch.dtype, sent: Sent, flat: torch.Tensor) -> Pending[torch.Tensor]:
    """What was `sent` as elements of `flat`'s dtype, as those of `dtype`."""
    if flat.dtype is dtype:
        return Pending(finish=sent.wait)
    return Pending(finish=lambda: unflat(sent.wait(), dtype, (-1,)))


def _gather_pads(sizes: Sequence[int], itemsize: int) -> bool:
    """Whether parts of these sizes, in elements, one a position, are padded to be gathered; else they are exchanged."""
    return not padding_counts((len(sizes) - 1) * max(sizes) * itemsize, (sum(sizes) - min(sizes)) * itemsize)


def _scatter_pads(sizes: Sequence[int], itemsize: int) -> bool:
    """Whether parts of these sizes are padded to be reduced and scattered; else they go as a list."""
    return not padding_counts(len(sizes) * max(sizes) * itemsize, sum(sizes) * itemsize)


class C10dCommunicator(Communicator):
    """The collectives of one process group. `group` holds exactly `ranks`; `ranks` are in mesh order.

    `axis`: what errors call the axis, with its quotes; "" where there is nothing to call it.
    """

    __slots__ = ("__weakref__", "_launches", "_nccl", "_order", "axis", "group", "name")

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, axis: str = "") -> None:
        super().__init__(ranks, rank)
        self.group: Any = group
        self.name: str = group.group_name
        self.axis = axis
        place = {r: i for i, r in enumerate(c10d.get_process_group_ranks(group))}
        if set(place) != set(self.ranks):
            raise ValueError(f"the group holds ranks {sorted(place)}, but the axis is over {sorted(self.ranks)}")
        order = [place[r] for r in self.ranks]
        self._order: list[int] | None = None if order == sorted(order) else order
        self._nccl = "nccl" in c10d.get_backend_config(group)
        self._launches: bool | None = None
        _all.add(self)

    @staticmethod
    def let_go(group: dist.ProcessGroup) -> None:
        """Hold `group` no longer, as it was destroyed: a collective that is asked for says so."""
        for comm in list(_all):
            if comm.group is group:
                comm.group = _Destroyed(comm.name)
                comm.name += " (destroyed)"  # the next default group has the same name

    def has_launches(self, device: torch.device) -> bool:
        """True where the group can launch several collectives on `device` as one: `dtensor.comm.coalescing`."""
        if self._launches is None:
            self._launches = self._nccl and bool(self.group._get_backend(device).supports_coalescing)
        return self._launches

    def _by_group_rank(self, values: Sequence[Any]) -> Sequence[Any]:
        """`values`, one a position, in the order of the group's ranks."""
        if self._order is None:
            return values
        out: list[Any] = [None] * self.size
        for i, g in enumerate(self._order):
            out[g] = values[i]
        return out

    def _place(self, position: int) -> int:
        return position if self._order is None else self._order[position]

    def _all_reduce(self, x: torch.Tensor, op: str, async_op: bool) -> Pending[torch.Tensor]:
        how = reduction(op, x.dtype, self.size, not self._nccl or x.device.type == "cpu")
        if how.wire is None:
            gathered = self._all_gather(x, [tuple(x.shape)] * self.size, None, async_op)
            return Pending(finish=lambda: reduce_tensors(gathered.wait(), op))
        sent = sent_by.all_reduce(self, x if how.encode is None else how.encode(x), x, how.wire, async_op)
        decode = how.decode
        if decode is None:
            return Pending(finish=sent.wait, raw=sent.lazy)
        return Pending(finish=lambda: decode(sent.wait()))

    def _all_gather(
        self, x: torch.Tensor, shapes: Sequence[Shape], into: Sequence[torch.Tensor] | None, async_op: bool
    ) -> Pending[list[torch.Tensor]]:
        if into is not None and shapes.count(shapes[0]) == self.size and eager(x) and not sent_by.in_queue(x):
            return self._gather_into(x, into)
        dtype, width = x.dtype, items_of(x.dtype)
        numels = [prod(s) * width for s in shapes]
        most, itemsize = max(numels), x.itemsize // width
        direct = eager(x) and not sent_by.in_queue(x)
        if not _gather_pads(numels, itemsize):
            flat = flat_of(x)
            every, splits = flat.repeat(self.size), [flat.numel()] * self.size
            with standing_for("all_gather"):
                return put(self._exchange(every, splits, dtype, shapes, async_op), into)
        if into is not None and direct:
            return self._gather_uneven_into(x, shapes, into)
        flat = padded(flat_of(x), most)
        sent = self._gather(flat) if direct else sent_by.all_gather(self, flat, async_op)

        def finish() -> list[torch.Tensor]:
            got = sent.wait()
            return [unflat(got.narrow(0, self._place(i) * most, n), dtype, shapes[i]) for i, n in enumerate(numels)]

        return put(Pending(finish=finish), into)

    def _gather(self, flat: torch.Tensor) -> Sent:
        """All positions' `flat` in one tensor, by group rank, asked of the group itself.

        Several functional gathers under way in one gloo group can spoil the heap of the process.
        """
        out = flat.new_empty(self.size * flat.numel())
        options = c10d.AllgatherOptions()
        options.asyncOp = True
        call = self.group._allgather_base
        if not self._in_c:  # it may know torch's newer name only
            call = getattr(self.group, "all_gather_single", call)
        return issued(self, "all_gather", out, call, out, waited(flat), options)

    def _gather_into(self, x: torch.Tensor, into: Sequence[torch.Tensor]) -> Pending[list[torch.Tensor]]:
        """A gather straight into tensors of one shape, that may be views: gloo puts the parts there itself."""
        options = c10d.AllgatherOptions()
        options.asyncOp = True
        x, outputs = carried(waited(x).contiguous()), [carried(t) for t in self._by_group_rank(into)]
        sent = issued(self, "all_gather", x, self.group.allgather, [outputs], [x], options)

        def finish() -> list[torch.Tensor]:
            sent.wait()
            return list(into)

        return Pending(finish=finish)

    def _gather_uneven_into(
        self, x: torch.Tensor, shapes: Sequence[Shape], into: Sequence[torch.Tensor]
    ) -> Pending[list[torch.Tensor]]:
        """As `_gather_into`; parts that are smaller than others travel in tensors of their own."""
        x = waited(x)
        shape = max([tuple(s) for s in shapes], key=prod)
        short = [i for i, s in enumerate(shapes) if tuple(s) != shape]
        if self.rank in short:
            x = spaced([x], prod(shape)).view(shape)
        spare = {i: x if i == self.rank else x.new_empty(shape) for i in short}
        sent = self._gather_into(x, [spare.get(i, t) for i, t in enumerate(into)])

        def finish() -> list[torch.Tensor]:
            sent.wait()
            for i in short:
                into[i].copy_(spare[i].view(-1)[: prod(shapes[i])].view(tuple(shapes[i])))
            return list(into)

        return Pending(finish=finish)

    def _reduce_scatter(self, parts: Sequence[torch.Tensor], op: str, async_op: bool) -> Pending[torch.Tensor]:
        own = parts[self.rank]
        dtype, shape = own.dtype, own.shape
        how = reduction(op, dtype, self.size, not self._nccl or own.device.type == "cpu")
        if how.wire is None:
            received = self._all_to_all(parts, [tuple(shape)] * self.size, async_op)
            return Pending(finish=lambda: reduce_tensors(received.wait(), op))
        wire: str = how.wire
        encode, decode = how.encode, how.decode
        if encode is None and all(p.shape == shape for p in parts):
            sent = sent_by.reduce_scatter(self, packed(self._by_group_rank(parts)), wire, async_op)
            if decode is None and own.dim() == 1:
                return Pending(finish=sent.wait, raw=sent.lazy)
            return Pending(finish=lambda: shaped(sent.wait(), decode, shape))
        flats = list(parts) if encode is None else [encode(p.reshape(-1)) for p in parts]
        wire_shape, numel = flats[self.rank].shape, flats[self.rank].numel()
        numels = [f.numel() for f in flats]
        if eager(own) and not _scatter_pads(numels, own.itemsize):
            return self._uneven_scatter([f.reshape(-1) for f in flats], how, wire_shape, shape, async_op)
        even = sent_by.reduce_scatter(self, spaced(self._by_group_rank(flats), max(numels)), wire, async_op)

        def finish() -> torch.Tensor:
            return shaped(even.wait().narrow(0, 0, numel).view(wire_shape), decode, shape)

        return Pending(finish=finish)

    def _uneven_scatter(
        self, flats: Sequence[torch.Tensor], how: Reduction, wire_shape: Shape, shape: Shape, async_op: bool
    ) -> Pending[torch.Tensor]:
        """A reduce-scatter of parts of unlike sizes, as a list."""
        out = torch.empty_like(flats[self.rank], memory_format=torch.contiguous_format)
        options = dist.ReduceScatterOptions()
        options.reduceOp = OPS[how.wire or "sum"]  # type: ignore[assignment]
        options.asyncOp = async_op or not sent_by.in_queue(out)
        lists = [list(self._by_group_rank(flats))]
        sent = issued(self, "reduce_scatter", out, self.group.reduce_scatter, [out], lists, options)
        decode, size = how.decode, self.size

        def finish() -> torch.Tensor:
            got = sent.wait()
            return shaped((got / size if how.wire == "avg" else got).view(tuple(wire_shape)), decode, shape)

        return Pending(finish=finish)

    def all_gather_flat(self, x: torch.Tensor, *, async_op: bool = False) -> Pending[torch.Tensor]:
        """See `Communicator`: here without a detour by way of parts."""
        if self._order is not None or self.size == 1:
            return super().all_gather_flat(x, async_op=async_op)
        dtype, flat = x.dtype, flat_of(x.detach() if x.requires_grad else x)
        direct = eager(x) and not sent_by.in_queue(x)
        return _as(dtype, self._gather(flat) if direct else sent_by.all_gather(self, flat, async_op), flat)

    def all_to_all_flat(
        self, flat: torch.Tensor, leave: list[int], arrive: list[int], *, async_op: bool = False
    ) -> Pending[torch.Tensor]:
        """See `Communicator`: here without a detour by way of parts."""
        if self._order is not None or self.size == 1:
            return super().all_to_all_flat(flat, leave, arrive, async_op=async_op)
        dtype, width = flat.dtype, items_of(flat.dtype)
        if width > 1:
            leave, arrive = [n * width for n in leave], [n * width for n in arrive]
        flat = flat_of(flat.detach() if flat.requires_grad else flat)
        return _as(dtype, sent_by.all_to_all(self, flat, arrive, leave, async_op), flat)

    def reduce_scatter_flat(self, flat: torch.Tensor, op: str, *, async_op: bool = False) -> Pending[torch.Tensor]:
        """See `Communicator`: here without a detour by way of parts, where the group reduces the dtype itself."""
        how = reduction(op, flat.dtype, self.size, not self._nccl or flat.device.type == "cpu")
        plain = how.encode is None and how.decode is None and self._order is None
        if how.wire is None or not plain or self.size == 1:
            return super().reduce_scatter_flat(flat, op, async_op=async_op)
        sent = sent_by.reduce_scatter(self, flat.detach() if flat.requires_grad else flat, how.wire, async_op)
        return Pending(finish=sent.wait, raw=sent.lazy)

    @property
    def _in_c(self) -> bool:
        """False for a group written in Python, as that of ranks that are threads: what it has is what torch calls."""
        return type(self.group) is dist.ProcessGroup

    @property
    def _plain(self) -> bool:
        """True where a collective of the group is one of this communicator, without a look at positions.

        Not where torch compares the shapes that ranks give (`TORCH_DISTRIBUTED_DEBUG=DETAIL`), and not only sizes.
        """
        own = self._order is None and self.size > 1 and self._in_c
        return own and dist.get_debug_level() != dist.DebugLevel.DETAIL

    def _reduction(self, what: Reducing) -> Reduction | None:
        """How the group reduces, for what is bound; None where nothing is, as that depends on where a tensor is."""
        if not self._plain or (self._nccl and what.op in ("band", "bor", "bxor")):
            return None
        how = reduction(what.op, what.reduced, self.size, True, bound=True)
        return how if what.wire is None else widened(how, what.wire, what.dtype)

    def bind_all_gather(self, shape: Shape) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `Communicator`: the group's own call. So are the following."""
        general = super().bind_all_gather(shape)
        return comm_bound.gather(self, shape, general) if self._plain else general

    def bind_all_to_all(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `Communicator`."""
        general = super().bind_all_to_all()
        return comm_bound.exchange(self, general) if self._plain else general

    def bind_reduce_scatter(
        self, pack: Callable[[torch.Tensor], torch.Tensor], shape: Shape, what: Reducing, most: int | None = None
    ) -> Try | None:
        """See `Communicator`."""
        how = self._reduction(what)
        return None if how is None or how.wire is None else comm_reduced.reduce_scatter(self, how, pack, shape, most)

    def bind_all_reduce(self, what: Reducing) -> Try | None:
        """See `Communicator`."""
        how = self._reduction(what)
        return None if how is None else comm_reduced.reduce(self, how, what)

    def bind_exchange(
        self, leave: Sequence[int], arrive: Sequence[int]
    ) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """See `Communicator`."""
        return comm_bound.exchange_into(self, leave, arrive) if self._plain else None

    def bind_gather_into(self) -> Callable[[torch.Tensor, list[torch.Tensor]], bool] | None:
        """See `Communicator`."""
        return comm_bound.gather_into(self) if self._plain else None

    def bind_scatter_list(
        self, views: Callable[[torch.Tensor], list[torch.Tensor]], shape: Shape, what: Reducing
    ) -> Try | None:
        """See `Communicator`."""
        how = self._reduction(what)
        return None if how is None or how.wire is None else comm_reduced.scatter_list(self, how, views, shape)

    def pads_gather(self, sizes: Sequence[int], dtype: torch.dtype) -> bool | None:
        """See `Communicator`."""
        if not self._plain or not comm_bound.carried(dtype):
            return None
        return _gather_pads(sizes, dtype.itemsize)

    def pads_scatter(self, sizes: Sequence[int], what: Reducing) -> bool:
        """See `Communicator`."""
        return _scatter_pads(sizes, what.reduced.itemsize)

    def reduces_here(self, what: Reducing) -> bool:
        """See `Communicator`."""
        how = self._reduction(what)
        return how is not None and how.wire is None

    def direct(self, device_type: str) -> Direct | None:
        """See `Communicator`."""
        return direct_of(self, device_type)

    def _all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], async_op: bool
    ) -> Pending[list[torch.Tensor]]:
        dtype = parts[0].dtype
        ordered, width = self._by_group_rank(parts), items_of(dtype)
        return self._exchange(flat_of(packed(ordered)), [p.numel() * width for p in ordered], dtype, shapes, async_op)

    def _exchange(
        self, flat: torch.Tensor, leave: list[int], dtype: torch.dtype, shapes: Sequence[Shape], async_op: bool
    ) -> Pending[list[torch.Tensor]]:
        """One all-to-all of a flat buffer. `leave` (elements to each) by group rank, `shapes` by position."""
        width = items_of(dtype)
        arrive = [prod(s) * width for s in self._by_group_rank(shapes)]
        sent = sent_by.all_to_all(self, flat, arrive, leave, async_op)
        starts = [0, *accumulate(arrive)]

        def finish() -> list[torch.Tensor]:
            got = sent.wait()
            places = [self._place(i) for i in range(self.size)]
            return [unflat(got.narrow(0, starts[g], arrive[g]), dtype, shapes[i]) for i, g in enumerate(places)]

        return Pending(finish=finish)

    def _broadcast(self, x: torch.Tensor, src: int, async_op: bool) -> Pending[torch.Tensor]:
        dtype, shape = x.dtype, x.shape
        sent = sent_by.broadcast(self, flat_of(x), self._place(src), async_op)
        return Pending(finish=lambda: unflat(sent.wait(), dtype, shape))

    def _scatter(
        self,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int,
        shapes: Sequence[Shape] | None,
        async_op: bool,
    ) -> Pending[torch.Tensor]:
        dtype, shape = like.dtype, like.shape
        flats = None if parts is None else [flat_of(p) for p in self._by_group_rank(parts)]
        if shapes is None or not eager(like):
            sizes = [0] * self.size if flats is None else [f.numel() for f in flats]
            flat = flat_of(like).new_empty(0) if flats is None else torch.cat(flats)
            arriving: list[Shape] = [(0,)] * self.size
            arriving[src] = tuple(shape)
            with standing_for("scatter"):
                pending = self._exchange(flat, sizes, dtype, arriving, async_op)
            return Pending(finish=lambda: pending.wait()[src])
        most = max(prod(s) for s in shapes) * items_of(dtype)
        out = flat_of(like).new_empty(most)
        sent_parts = [] if flats is None else [[padded(f, most) for f in flats]]
        options = dist.ScatterOptions()
        options.rootRank = self._place(src)
        options.asyncOp = async_op or not sent_by.in_queue(out)
        sent = issued(self, "scatter", out, self.group.scatter, [out], sent_parts, options)
        numel = prod(shape) * items_of(dtype)
        return Pending(finish=lambda: unflat(sent.wait().narrow(0, 0, numel), dtype, shape))


_all: weakref.WeakSet[C10dCommunicator] = weakref.WeakSet()


class _Destroyed:
    """In the place of a group that was destroyed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"the process group {self._name!r} has been destroyed; make a mesh of groups that are there")
