"""Communicators over the process groups of `torch.distributed`.

Each call is one collective that goes through torch's dispatcher, so dispatch modes see it. What a backend
cannot carry is carried as something else of the same width (bool as uint8, int16 as the bits of float16);
what it cannot reduce, or reduces differently than `dtensor.comm.reduce_tensors` says, is encoded first or
gathered and reduced here:

    max, min of floats   as integers of the same order in which NaN is the extreme: gloo and NCCL may drop NaN
    sum of booleans      as max of uint8
    complex              sums as pairs of reals, products gathered
    bit operations       native on gloo, gathered on NCCL

A group that was given (`DeviceMesh.from_group`) may count its ranks in another order than the mesh: `_order[i]` is
the group rank of position i.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtensor.comm import Communicator, Pending, Shape, padding_counts, purpose
from dtensor.reductions import check_reduction, reduce_tensors

__all__ = ["C10dCommunicator"]

_F = torch.ops._c10d_functional
_wait: Callable[[torch.Tensor], torch.Tensor] = _F.wait_tensor.default
_Step = Callable[[torch.Tensor], torch.Tensor]

# dtypes that backends do not carry, and what they are carried as: the same bits, the same number of elements
_CARRIER = {
    torch.int16: torch.float16, torch.uint16: torch.float16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    torch.complex32: torch.int32, torch.complex64: torch.int64, torch.bool: torch.uint8,
}  # fmt: skip
_CARRIER |= {
    d: torch.uint8 for n in dir(torch) if n.startswith("float8") and isinstance(d := getattr(torch, n), torch.dtype)
}
# dtypes that backends do not reduce, and what they are converted to first
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_WIDER |= {d: torch.float32 for d, c in _CARRIER.items() if c == torch.uint8 and d != torch.bool}


def _eager(x: torch.Tensor) -> bool:
    """False for tensors without values, of which a graph is made: its collectives must be functional ones."""
    return type(x).__name__ not in ("FakeTensor", "FunctionalTensor")


def _waited(x: torch.Tensor) -> torch.Tensor:
    """`x` itself, if it is the result of a collective that nobody has waited for yet."""
    wait: Callable[[], torch.Tensor] | None = getattr(x, "trigger_wait", None)
    return x if wait is None else wait()


def _carried(x: torch.Tensor) -> torch.Tensor:
    """A view of `x`, which may have gaps, as a dtype that every backend carries."""
    if x.dtype == torch.complex128:
        return torch.view_as_real(x)
    carrier = _CARRIER.get(x.dtype)
    return x if carrier is None else x.view(carrier)


def _put(pending: Pending[list[torch.Tensor]], into: Sequence[torch.Tensor] | None) -> Pending[list[torch.Tensor]]:
    """Parts that arrive, copied to where they are wanted."""
    if into is None:
        return pending

    def finish() -> list[torch.Tensor]:
        for to, part in zip(into, pending.wait()):
            to.copy_(part)
        return list(into)

    return Pending(finish=finish)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """`x` as a contiguous 1-D tensor of a dtype that every backend carries (complex128: pairs of reals)."""
    if x.is_conj():
        x = x.resolve_conj()
    if x.is_neg():
        x = x.resolve_neg()
    x = x.reshape(-1)
    if not x.is_contiguous():
        x = x.contiguous()
    if x.dtype == torch.complex128:
        return torch.view_as_real(x).view(-1)
    carrier = _CARRIER.get(x.dtype)
    return x if carrier is None else x.view(carrier)


def _width(dtype: torch.dtype) -> int:
    """Elements of the carrier for one element of `dtype`."""
    return 2 if dtype == torch.complex128 else 1


def _unflat(flat: torch.Tensor, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """A view of `flat`, as `_flat` made it, as a tensor of `shape` and `dtype`."""
    if dtype == torch.complex128:
        return torch.view_as_complex(flat.view(-1, 2)).view(tuple(shape))
    return (flat if flat.dtype == dtype else flat.view(dtype)).view(tuple(shape))


def _pad(flat: torch.Tensor, numel: int) -> torch.Tensor:
    if flat.numel() == numel:
        return flat
    return torch.cat([flat, flat.new_zeros(numel - flat.numel())])


def _as_one(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts in one flat tensor: a view where they follow each other in memory, else a copy."""
    some = [f for f in flats if f.numel()]
    if not some:
        return flats[0]
    at, storage = some[0].storage_offset(), some[0].untyped_storage()._cdata  # tensors without data have one too
    for f in some:
        if f.storage_offset() != at or f.untyped_storage()._cdata != storage:
            return torch.cat(list(flats))
        at += f.numel()
    return some[0].as_strided((at - some[0].storage_offset(),), (1,))


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts in one flat tensor of their dtype: a view where they follow each other, else one copy."""
    if all(p.is_contiguous() and not p.is_conj() and not p.is_neg() for p in parts):
        return _as_one([p.view(-1) for p in parts])
    out = torch.empty(sum(p.numel() for p in parts), dtype=parts[0].dtype, device=parts[0].device)
    at = 0
    for p in parts:
        out[at : at + p.numel()].view(p.shape).copy_(p)
        at += p.numel()
    return out


def _spaced(parts: Sequence[torch.Tensor], numel: int) -> torch.Tensor:
    """The parts in one flat tensor, `numel` elements from one to the next, zeros between."""
    out = torch.empty(len(parts) * numel, dtype=parts[0].dtype, device=parts[0].device)
    for i, p in enumerate(parts):
        slot = out[i * numel : (i + 1) * numel]
        slot[: p.numel()].view(p.shape).copy_(p)
        slot[p.numel() :].zero_()
    return out


def _shaped(got: torch.Tensor, decode: _Step | None, shape: Shape) -> torch.Tensor:
    return (got if decode is None else decode(got)).view(tuple(shape))


_OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT, "band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip


class _Reduction(NamedTuple):
    """How a backend reduces: `encode`, reduce with the backend's `wire` op, `decode`. `wire` None: gather instead."""

    wire: str | None
    encode: _Step | None = None
    decode: _Step | None = None


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _ordered(op: str, dtype: torch.dtype) -> _Reduction:
    """max or min of floats by integers of the same order, NaN beyond the infinity that `op` looks for."""
    wide = dtype if dtype in _BITS else torch.float32
    bits = _BITS[wide]
    mask, nan = torch.iinfo(bits).max, torch.iinfo(bits).max if op == "max" else torch.iinfo(bits).min

    def encode(x: torch.Tensor) -> torch.Tensor:
        b = x.to(wide).contiguous().view(bits)
        return torch.where(b < 0, b ^ mask, b).masked_fill_(x.isnan(), nan)

    def decode(b: torch.Tensor) -> torch.Tensor:
        return torch.where(b < 0, b ^ mask, b).view(wide).to(dtype)

    return _Reduction(op, encode, decode)


@functools.cache
def _reduction(op: str, dtype: torch.dtype, size: int, native_bits: bool) -> _Reduction:
    """How a group of `size` reduces `dtype` with `op`. Raises as `check_reduction` does."""
    p = check_reduction(op, dtype)
    if op in ("band", "bor", "bxor") and not native_bits and dtype != torch.bool:
        return _Reduction(None)
    if dtype == torch.bool:
        return _bool_reduction(op)
    if dtype in _WIDER:
        wide = _WIDER[dtype]
        inner = _reduction(op, wide, size, native_bits)
        enc, dec = inner.encode, inner.decode
        return _Reduction(
            inner.wire,
            (lambda x: enc(x.to(wide))) if enc else (lambda x: x.to(wide)),
            (lambda x: dec(x).to(dtype)) if dec else (lambda x: x.to(dtype)),
        )
    if dtype == torch.uint64:
        return _Reduction(None)
    if dtype.is_complex:
        if op not in ("sum", "avg") or dtype == torch.complex32:
            return _Reduction(None)
        return _Reduction(op, lambda x: torch.view_as_real(x.resolve_conj()), torch.view_as_complex)
    if p is not None:
        if p == 0:
            return _Reduction("sum")
        return _Reduction("sum", lambda x: x**p, lambda x: x ** (1 / p))
    if dtype.is_floating_point:
        return _ordered(op, dtype) if op in ("max", "min") else _Reduction(op)
    if op == "avg":
        return _Reduction("sum", None, lambda x: torch.div(x, size, rounding_mode="trunc"))
    return _Reduction(op)


def _bool_reduction(op: str) -> _Reduction:
    def encode(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(torch.uint8)

    if op == "bxor":
        return _Reduction("sum", encode, lambda x: (x & 1).view(torch.bool))  # parity survives uint8's wrap-around
    return _Reduction("max" if op in ("sum", "max", "bor") else "min", encode, lambda x: x.view(torch.bool))


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
        how = _reduction(op, x.dtype, self.size, not self._nccl or x.device.type == "cpu")
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
        dtype, width = x.dtype, _width(x.dtype)
        numels = [prod(s) * width for s in shapes]
        most, itemsize = max(numels), x.itemsize // width
        direct = _eager(x) and x.device.type == "cpu"
        if padding_counts((self.size - 1) * most * itemsize, (sum(numels) - min(numels)) * itemsize):
            flat = _flat(x)
            purpose.kind = "all_gather"
            try:
                return _put(self._exchange(flat.repeat(self.size), [flat.numel()] * self.size, dtype, shapes), into)
            finally:
                purpose.kind = None
        if into is not None and direct:
            return self._gather_into(x, shapes, into)
        wait = self._gather(_pad(_flat(x), most), direct)

        def finish() -> list[torch.Tensor]:
            got = wait()
            return [_unflat(got.narrow(0, self._place(i) * most, n), dtype, shapes[i]) for i, n in enumerate(numels)]

        return _put(Pending(finish=finish), into)

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
        work = self.group._allgather_base(out, _waited(flat), options)

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
        x = _waited(x)
        shape = max([tuple(s) for s in shapes], key=prod)
        short = [i for i, s in enumerate(shapes) if tuple(s) != shape]
        if self.rank in short:
            x = _spaced([x], prod(shape)).view(shape)
        spare = {i: x if i == self.rank else x.new_empty(shape) for i in short}
        options = c10d.AllgatherOptions()
        options.asyncOp = True
        outputs = [_carried(t) for t in self._by_group_rank([spare.get(i, t) for i, t in enumerate(into)])]
        work = self.group.allgather([outputs], [_carried(x.contiguous())], options)

        def finish() -> list[torch.Tensor]:
            work.wait()
            for i in short:
                into[i].copy_(spare[i].view(-1)[: prod(shapes[i])].view(tuple(shapes[i])))
            return list(into)

        return Pending(finish=finish)

    def _reduce_scatter(self, parts: Sequence[torch.Tensor], op: str) -> Pending[torch.Tensor]:
        own = parts[self.rank]
        dtype, shape = own.dtype, own.shape
        how = _reduction(op, dtype, self.size, not self._nccl or own.device.type == "cpu")
        if how.wire is None:
            received = self._all_to_all(parts, [tuple(shape)] * self.size)
            return Pending(finish=lambda: reduce_tensors(received.wait(), op))
        encode, decode = how.encode, how.decode
        if encode is None and all(p.shape == shape for p in parts):
            raw = _F.reduce_scatter_tensor.default(_packed(self._by_group_rank(parts)), how.wire, self.size, self._name)
            if decode is None and own.dim() == 1:
                return Pending(finish=lambda: _wait(raw), raw=raw)
            return Pending(finish=lambda: _shaped(_wait(raw), decode, shape))
        flats = list(parts) if encode is None else [encode(p.reshape(-1)) for p in parts]
        wire_shape, numel = flats[self.rank].shape, flats[self.rank].numel()
        most = max(f.numel() for f in flats)
        total = sum(f.numel() for f in flats)
        if _eager(own) and padding_counts(self.size * most * own.itemsize, total * own.itemsize):
            return self._uneven_scatter([f.reshape(-1) for f in flats], how, wire_shape, shape)
        sent = _spaced(self._by_group_rank(flats), most)
        raw = _F.reduce_scatter_tensor.default(sent, how.wire, self.size, self._name)

        def finish() -> torch.Tensor:
            return _shaped(_wait(raw).narrow(0, 0, numel).view(wire_shape), decode, shape)

        return Pending(finish=finish)

    def _uneven_scatter(
        self, flats: Sequence[torch.Tensor], how: _Reduction, wire_shape: Shape, shape: Shape
    ) -> Pending[torch.Tensor]:
        """A reduce-scatter of parts of unlike sizes, as a list."""
        out = torch.empty_like(flats[self.rank], memory_format=torch.contiguous_format)
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[how.wire or "sum"]  # type: ignore[assignment]
        options.asyncOp = True
        work = self.group.reduce_scatter([out], [list(self._by_group_rank(flats))], options)
        decode, size = how.decode, self.size

        def finish() -> torch.Tensor:
            work.wait()
            return _shaped((out / size if how.wire == "avg" else out).view(tuple(wire_shape)), decode, shape)

        return Pending(finish=finish)

    def _all_to_all(self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> Pending[list[torch.Tensor]]:
        dtype = parts[0].dtype
        ordered, width = self._by_group_rank(parts), _width(dtype)
        return self._exchange(_flat(_packed(ordered)), [p.numel() * width for p in ordered], dtype, shapes)

    def _exchange(
        self, sent: torch.Tensor, out_splits: list[int], dtype: torch.dtype, shapes: Sequence[Shape]
    ) -> Pending[list[torch.Tensor]]:
        """One all-to-all of a flat buffer. `out_splits` by group rank, `shapes` by position."""
        width = _width(dtype)
        splits = [prod(s) * width for s in self._by_group_rank(shapes)]
        raw = _F.all_to_all_single.default(sent, splits, out_splits, self._name)
        starts = [0, *accumulate(splits)]

        def finish() -> list[torch.Tensor]:
            got = _wait(raw)
            places = [self._place(i) for i in range(self.size)]
            return [_unflat(got.narrow(0, starts[g], splits[g]), dtype, shapes[i]) for i, g in enumerate(places)]

        return Pending(finish=finish)

    def _broadcast(self, x: torch.Tensor, src: int) -> Pending[torch.Tensor]:
        dtype, shape = x.dtype, x.shape
        raw = _F.broadcast.default(_flat(x), self._place(src), self._name)
        return Pending(finish=lambda: _unflat(_wait(raw), dtype, shape))

    def _scatter(
        self, parts: Sequence[torch.Tensor] | None, like: torch.Tensor, src: int, shapes: Sequence[Shape] | None
    ) -> Pending[torch.Tensor]:
        dtype, shape = like.dtype, like.shape
        flats = None if parts is None else [_flat(p) for p in self._by_group_rank(parts)]
        if shapes is None or not _eager(like):
            sizes = [0] * self.size if flats is None else [f.numel() for f in flats]
            sent = _flat(like).new_empty(0) if flats is None else torch.cat(flats)
            arriving: list[Shape] = [(0,)] * self.size
            arriving[src] = tuple(shape)
            pending = self._exchange(sent, sizes, dtype, arriving)
            return Pending(finish=lambda: pending.wait()[src])
        most = max(prod(s) for s in shapes) * _width(dtype)
        out = _flat(like).new_empty(most)
        sent_parts = [] if flats is None else [[_pad(f, most) for f in flats]]
        options = dist.ScatterOptions()
        options.rootRank = self._place(src)
        options.asyncOp = True
        work = self.group.scatter([out], sent_parts, options)
        numel = prod(shape) * _width(dtype)

        def finish() -> torch.Tensor:
            work.wait()
            return _unflat(out.narrow(0, 0, numel), dtype, shape)

        return Pending(finish=finish)
