"""Communicators over the process groups of `torch.distributed`.

Each call is one collective that goes through torch's dispatcher, so dispatch modes see it. What travels, where a
backend does not carry or reduce a dtype as `dtensor.reductions` says, is the matter of `dtensor.comm_wire`.

A group that was given (`DeviceMesh.from_group`) may count its ranks in another order than the mesh: `_order[i]` is
the group rank of position i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtensor.comm import Communicator, Pending, Shape, padding_counts, purpose
from dtensor.comm_wire import (
    OPS,
    Reduction,
    carried,
    eager,
    flat_of,
    items_of,
    packed,
    padded,
    put,
    reduction,
    shaped,
    spaced,
    unflat,
    waited,
)  # fmt: skip
from dtensor.reductions import reduce_tensors

__all__ = ["C10dCommunicator"]

_F = torch.ops._c10d_functional
_wait: Callable[[torch.Tensor], torch.Tensor] = _F.wait_tensor.default


class C10dCommunicator(Communicator):
    """The collectives of one process group. `group` holds exactly `ranks`; `ranks` are in mesh order."""

    __slots__ = ("_name", "_nccl", "_order", "group")

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        super().__init__(ranks, rank)
        self.group = group
        self._name: str = group.group_name
        place = {r: i for i, r in enumerate(c10d.get_process_group_ranks(group))}
        if set(place) != set(self.ranks):
            raise ValueError(f"the group holds ranks {sorted(place)}, but the axis is over {sorted(self.ranks)}")
        order = [place[r] for r in self.ranks]
        self._order: list[int] | None = None if order == sorted(order) else order
        self._nccl = "nccl" in c10d.get_backend_config(group)

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

    def _all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        how = reduction(op, x.dtype, self.size, not self._nccl or x.device.type == "cpu")
        if how.wire is None:
            gathered = self._all_gather(x, [tuple(x.shape)] * self.size, None)
            return Pending(finish=lambda: reduce_tensors(gathered.wait(), op))
        sent = x if how.encode is None else how.encode(x)
        raw = _F.all_reduce.default(sent.contiguous(), how.wire, self._name)
        decode = how.decode
        if decode is None:
            return Pending(finish=lambda: _wait(raw), raw=raw)
        return Pending(finish=lambda: decode(_wait(raw)))

    def _all_gather(
        self, x: torch.Tensor, shapes: Sequence[Shape], into: Sequence[torch.Tensor] | None
    ) -> Pending[list[torch.Tensor]]:
        dtype, width = x.dtype, items_of(x.dtype)
        numels = [prod(s) * width for s in shapes]
        most, itemsize = max(numels), x.itemsize // width
        direct = eager(x) and x.device.type == "cpu"
        if padding_counts((self.size - 1) * most * itemsize, (sum(numels) - min(numels)) * itemsize):
            flat = flat_of(x)
            purpose.kind = "all_gather"
            try:
                return put(self._exchange(flat.repeat(self.size), [flat.numel()] * self.size, dtype, shapes), into)
            finally:
                purpose.kind = None
        if into is not None and direct:
            return self._gather_into(x, shapes, into)
        wait = self._gather(padded(flat_of(x), most), direct)

        def finish() -> list[torch.Tensor]:
            got = wait()
            return [unflat(got.narrow(0, self._place(i) * most, n), dtype, shapes[i]) for i, n in enumerate(numels)]

        return put(Pending(finish=finish), into)

    def _gather(self, flat: torch.Tensor, direct: bool) -> Callable[[], torch.Tensor]:
        """All positions' `flat` in one tensor, by group rank, once the returned function is called.

        With `direct` the group itself is asked: several functional gathers under way in one gloo group can spoil
        the heap of the process.
        """
        if not direct:
            raw = _F.all_gather_into_tensor.default(flat, self.size, self._name)
            return lambda: _wait(raw)
        out = flat.new_empty(self.size * flat.numel())
        options = c10d.AllgatherOptions()
        options.asyncOp = True
        work = self.group._allgather_base(out, waited(flat), options)

        def wait() -> torch.Tensor:
            work.wait()
            return out

        return wait

    def _gather_into(
        self, x: torch.Tensor, shapes: Sequence[Shape], into: Sequence[torch.Tensor]
    ) -> Pending[list[torch.Tensor]]:
        """A gather straight into tensors that may be views: gloo puts the parts there itself.

        They must be of one shape; smaller parts travel in tensors of their own.
        """
        x = waited(x)
        shape = max([tuple(s) for s in shapes], key=prod)
        short = [i for i, s in enumerate(shapes) if tuple(s) != shape]
        if self.rank in short:
            x = spaced([x], prod(shape)).view(shape)
        spare = {i: x if i == self.rank else x.new_empty(shape) for i in short}
        options = c10d.AllgatherOptions()
        options.asyncOp = True
        outputs = [carried(t) for t in self._by_group_rank([spare.get(i, t) for i, t in enumerate(into)])]
        work = self.group.allgather([outputs], [carried(x.contiguous())], options)

        def finish() -> list[torch.Tensor]:
            work.wait()
            for i in short:
                into[i].copy_(spare[i].view(-1)[: prod(shapes[i])].view(tuple(shapes[i])))
            return list(into)

        return Pending(finish=finish)

    def _reduce_scatter(self, parts: Sequence[torch.Tensor], op: str) -> Pending[torch.Tensor]:
        own = parts[self.rank]
        dtype, shape = own.dtype, own.shape
        how = reduction(op, dtype, self.size, not self._nccl or own.device.type == "cpu")
        if how.wire is None:
            received = self._all_to_all(parts, [tuple(shape)] * self.size)
            return Pending(finish=lambda: reduce_tensors(received.wait(), op))
        encode, decode = how.encode, how.decode
        if encode is None and all(p.shape == shape for p in parts):
            raw = _F.reduce_scatter_tensor.default(packed(self._by_group_rank(parts)), how.wire, self.size, self._name)
            if decode is None and own.dim() == 1:
                return Pending(finish=lambda: _wait(raw), raw=raw)
            return Pending(finish=lambda: shaped(_wait(raw), decode, shape))
        flats = list(parts) if encode is None else [encode(p.reshape(-1)) for p in parts]
        wire_shape, numel = flats[self.rank].shape, flats[self.rank].numel()
        most = max(f.numel() for f in flats)
        total = sum(f.numel() for f in flats)
        if eager(own) and padding_counts(self.size * most * own.itemsize, total * own.itemsize):
            return self._uneven_scatter([f.reshape(-1) for f in flats], how, wire_shape, shape)
        sent = spaced(self._by_group_rank(flats), most)
        raw = _F.reduce_scatter_tensor.default(sent, how.wire, self.size, self._name)

        def finish() -> torch.Tensor:
            return shaped(_wait(raw).narrow(0, 0, numel).view(wire_shape), decode, shape)

        return Pending(finish=finish)

    def _uneven_scatter(
        self, flats: Sequence[torch.Tensor], how: Reduction, wire_shape: Shape, shape: Shape
    ) -> Pending[torch.Tensor]:
        """A reduce-scatter of parts of unlike sizes, as a list."""
        out = torch.empty_like(flats[self.rank], memory_format=torch.contiguous_format)
        options = dist.ReduceScatterOptions()
        options.reduceOp = OPS[how.wire or "sum"]  # type: ignore[assignment]
        options.asyncOp = True
        work = self.group.reduce_scatter([out], [list(self._by_group_rank(flats))], options)
        decode, size = how.decode, self.size

        def finish() -> torch.Tensor:
            work.wait()
            return shaped((out / size if how.wire == "avg" else out).view(tuple(wire_shape)), decode, shape)

        return Pending(finish=finish)

    def _all_to_all(self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> Pending[list[torch.Tensor]]:
        dtype = parts[0].dtype
        ordered, width = self._by_group_rank(parts), items_of(dtype)
        return self._exchange(flat_of(packed(ordered)), [p.numel() * width for p in ordered], dtype, shapes)

    def _exchange(
        self, sent: torch.Tensor, out_splits: list[int], dtype: torch.dtype, shapes: Sequence[Shape]
    ) -> Pending[list[torch.Tensor]]:
        """One all-to-all of a flat buffer. `out_splits` by group rank, `shapes` by position."""
        width = items_of(dtype)
        splits = [prod(s) * width for s in self._by_group_rank(shapes)]
        raw = _F.all_to_all_single.default(sent, splits, out_splits, self._name)
        starts = [0, *accumulate(splits)]

        def finish() -> list[torch.Tensor]:
            got = _wait(raw)
            places = [self._place(i) for i in range(self.size)]
            return [unflat(got.narrow(0, starts[g], splits[g]), dtype, shapes[i]) for i, g in enumerate(places)]

        return Pending(finish=finish)

    def _broadcast(self, x: torch.Tensor, src: int) -> Pending[torch.Tensor]:
        dtype, shape = x.dtype, x.shape
        raw = _F.broadcast.default(flat_of(x), self._place(src), self._name)
        return Pending(finish=lambda: unflat(_wait(raw), dtype, shape))

    def _scatter(
        self, parts: Sequence[torch.Tensor] | None, like: torch.Tensor, src: int, shapes: Sequence[Shape] | None
    ) -> Pending[torch.Tensor]:
        dtype, shape = like.dtype, like.shape
        flats = None if parts is None else [flat_of(p) for p in self._by_group_rank(parts)]
        if shapes is None or not eager(like):
            sizes = [0] * self.size if flats is None else [f.numel() for f in flats]
            sent = flat_of(like).new_empty(0) if flats is None else torch.cat(flats)
            arriving: list[Shape] = [(0,)] * self.size
            arriving[src] = tuple(shape)
            pending = self._exchange(sent, sizes, dtype, arriving)
            return Pending(finish=lambda: pending.wait()[src])
        most = max(prod(s) for s in shapes) * items_of(dtype)
        out = flat_of(like).new_empty(most)
        sent_parts = [] if flats is None else [[padded(f, most) for f in flats]]
        options = dist.ScatterOptions()
        options.rootRank = self._place(src)
        options.asyncOp = True
        work = self.group.scatter([out], sent_parts, options)
        numel = prod(shape) * items_of(dtype)

        def finish() -> torch.Tensor:
            work.wait()
            return unflat(out.narrow(0, 0, numel), dtype, shape)

        return Pending(finish=finish)
