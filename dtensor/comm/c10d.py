"""Communicators over the process groups of `torch.distributed`.

Each call is one collective that goes through torch's dispatcher, so dispatch modes see it. What travels, where a
backend does not carry or reduce a dtype as `dtensor.comm.reduce_ops` says, is the matter of `dtensor.comm.wire`; on
which stream it travels, and what is said where it does not arrive, that of `dtensor.comm.issue`.

A group that was given (`DeviceMesh.from_group`) may count its ranks in another order than the mesh: `_order[i]` is
the group rank of position i.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtensor.comm import issue
from dtensor.comm.communicator import Communicator, Shape, padding_counts
from dtensor.comm.encodings import Reduction, reduction
from dtensor.comm.issue import Sent
from dtensor.comm.observers import standing_for
from dtensor.comm.pending import Pending
from dtensor.comm.reduce_ops import reduce_tensors
from dtensor.comm.wire import eager, flat_of, items_of, packed, padded, spaced, unflat

__all__ = ["C10dCommunicator"]


def _result(sent: Sent, dtype: torch.dtype, async_op: bool) -> torch.Tensor | Pending[torch.Tensor]:
    """The 1-D tensor that is filled, as one of `dtype`."""
    if not async_op:
        got = sent.wait()
        return got if got.dtype is dtype else unflat(got, dtype, (-1,))
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

    def group_rank(self, position: int) -> int:
        """The group's rank of a position."""
        return position if self._order is None else self._order[position]

    @property
    def compiled(self) -> bool:
        """False for a group written in Python, as that of ranks that are threads: what it has is what torch calls."""
        return type(self.group) is dist.ProcessGroup

    def _reduction(self, x: torch.Tensor, op: str) -> Reduction:
        return reduction(op, x.dtype, self.size, not self._nccl or x.is_cpu)

    def _all_reduce(self, x: torch.Tensor, op: str, async_op: bool) -> Pending[torch.Tensor]:
        how = self._reduction(x, op)
        if how.wire is None:
            gathered = self._all_gather(x, [tuple(x.shape)] * self.size, async_op)
            return Pending(finish=lambda: reduce_tensors(gathered.wait(), op))
        sent = issue.all_reduce(self, x if how.encode is None else how.encode(x), x, how.wire, async_op)
        decode = how.decode
        if decode is None:
            return Pending(finish=sent.wait, raw=sent.lazy)
        return Pending(finish=lambda: decode(sent.wait()))

    def _all_gather(self, x: torch.Tensor, shapes: Sequence[Shape], async_op: bool) -> Pending[list[torch.Tensor]]:
        dtype, width = x.dtype, items_of(x.dtype)
        numels = [prod(s) * width for s in shapes]
        most, itemsize = max(numels), x.itemsize // width
        if not _gather_pads(numels, itemsize):
            flat = flat_of(x)
            every, splits = flat.repeat(self.size), [flat.numel()] * self.size
            with standing_for("all_gather"):
                return self._exchange(every, splits, dtype, shapes, async_op)
        sent = issue.all_gather(self, padded(flat_of(x), most), async_op)

        def finish() -> list[torch.Tensor]:
            got = sent.wait()
            return [unflat(got.narrow(0, self.group_rank(i) * most, n), dtype, shapes[i]) for i, n in enumerate(numels)]

        return Pending(finish=finish)

    def _reduce_scatter(self, parts: Sequence[torch.Tensor], op: str, async_op: bool) -> Pending[torch.Tensor]:
        own, ordered = parts[self.rank], self._by_group_rank(parts)
        how, shape = self._reduction(own, op), own.shape
        if how.wire is None:
            arriving = self._all_to_all(parts, [tuple(shape)] * self.size, async_op)
            return Pending(finish=lambda: reduce_tensors(arriving.wait(), op))
        if all(p.shape == shape for p in parts):
            pending = self._scatter_even(packed(ordered), how, async_op)
            return pending if own.dim() == 1 else Pending(finish=lambda: pending.wait().view(shape))
        encode, decode, size, me = how.encode, how.decode, self.size, self.group_rank(self.rank)
        coded = list(ordered) if encode is None else [encode(p.reshape(-1)) for p in ordered]
        numels = [c.numel() for c in coded]
        numel, tail, averaged = numels[me], () if encode is None else coded[me].shape[1:], False
        if eager(own) and not _scatter_pads(numels, coded[me].itemsize):
            averaged = how.wire == "avg"  # which lists are not reduced with
            wire = "sum" if averaged else how.wire
            sent = issue.reduce_scatter_list(self, [c.reshape(-1) for c in coded], me, wire, async_op)
        else:
            sent = issue.reduce_scatter(self, spaced(coded, max(numels)), how.wire, async_op)
        del coded

        def finish() -> torch.Tensor:
            got = sent.wait()
            got = (got.div_(size) if averaged else got).narrow(0, 0, numel).view(-1, *tail)
            return (got if decode is None else decode(got)).view(shape)

        return Pending(finish=finish)

    def _scatter_even(self, flat: torch.Tensor, how: Reduction, async_op: bool) -> Pending[torch.Tensor]:
        """The reduction of this position's part of `flat`, of as many parts of one size as positions."""
        decode = how.decode
        if how.encode is not None:
            flat = how.encode(flat)
        tail = flat.shape[1:]  # complex numbers are encoded as pairs
        sent = issue.reduce_scatter(self, flat.view(-1) if tail else flat, how.wire or "sum", async_op)
        if decode is None:
            return Pending(finish=sent.wait, raw=sent.lazy)
        return Pending(finish=lambda: decode(sent.wait().view(-1, *tail)))

    def _in_order(self, flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The parts of `flat`, which are by group rank, by position."""
        parts = torch.split(flat, list(sizes))
        return [parts[self.group_rank(i)] for i in range(self.size)]

    def all_gather_flat(self, x: torch.Tensor, async_op: bool = False) -> torch.Tensor | Pending[torch.Tensor]:
        """See `Communicator`: here without making parts."""
        if self._order is not None or self.size == 1:
            return super().all_gather_flat(x, async_op)
        return _result(
            issue.all_gather(self, flat_of(x.detach() if x.requires_grad else x), async_op), x.dtype, async_op
        )

    def all_to_all_flat(
        self, flat: torch.Tensor, leave: list[int], arrive: list[int], async_op: bool = False
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """See `Communicator`: here without making parts."""
        if self._order is not None or self.size == 1:
            return super().all_to_all_flat(flat, leave, arrive, async_op)
        dtype = flat.dtype
        if dtype is torch.complex128:
            leave, arrive = _times(leave, flat), _times(arrive, flat)
        flat = flat_of(flat.detach() if flat.requires_grad else flat)
        return _result(issue.all_to_all(self, flat, arrive, leave, async_op), dtype, async_op)

    def reduce_scatter_flat(
        self, flat: torch.Tensor, op: str, async_op: bool = False
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """See `Communicator`: here without making parts."""
        how = self._reduction(flat, op)
        if self._order is not None or self.size == 1 or how.wire is None:
            return super().reduce_scatter_flat(flat, op, async_op)
        pending = self._scatter_even(flat.detach() if flat.requires_grad else flat, how, async_op)
        return pending if async_op else pending.wait()

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
        sent = issue.all_to_all(self, flat, arrive, leave, async_op)

        def finish() -> list[torch.Tensor]:
            parts = self._in_order(sent.wait(), arrive)
            return [unflat(part, dtype, shape) for part, shape in zip(parts, shapes)]

        return Pending(finish=finish)

    def _broadcast(self, x: torch.Tensor, src: int, async_op: bool) -> Pending[torch.Tensor]:
        dtype, shape = x.dtype, x.shape
        sent = issue.broadcast(self, flat_of(x), self.group_rank(src), async_op)
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
        given = None if flats is None else [padded(f, most) for f in flats]
        sent = issue.scatter(self, flat_of(like).new_empty(most), given, self.group_rank(src), async_op)
        numel = prod(shape) * items_of(dtype)
        return Pending(finish=lambda: unflat(sent.wait().narrow(0, 0, numel), dtype, shape))


def _times(sizes: Sequence[int], x: torch.Tensor) -> list[int]:
    """Elements of `x` as those of its carrier."""
    return [n * items_of(x.dtype) for n in sizes]


_all: weakref.WeakSet[C10dCommunicator] = weakref.WeakSet()


class _Destroyed:
    """In the place of a group that was destroyed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"the process group {self._name!r} has been destroyed; make a mesh of groups that are there")
