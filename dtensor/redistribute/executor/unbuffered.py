"""Steps of large tensors without a buffer: parts go straight from tensor to result, as messages.

    [S(0), S(0)] -> [R, S(0)] on (2, 2)   rank 1 sends its rows, as they lie, to ranks 1 and 3 and gets two others
    S(1) -> R on 4                        each sends its columns, packed once; what arrives is copied to its columns
                                          some rows at a time
    P -> S(0) on 4                        pending parts are added up as they arrive, in the order of the positions

What a rank allocates is its result, what it sends that does not lie in one piece (each element once), and a message or
more under way. A collective of one buffer holds what is sent once for each receiver, or all that arrives until it is in
its place; gloo's gathers hold their result twice besides, and its reduce-scatters their input.

`unbuffered` is the one door, asked when a plan is bound. It decides by layouts, sizes and the kind of group, and so
alike on all ranks of the group: which steps go this way, and into how many messages a part is divided. Results are bit
for bit those of the usual way, but for sums of a reduce-scatter, which gloo adds up in another order than
`dtensor.comm.reduce_ops` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dtensor.comm.communicator import Communicator, padding_counts
from dtensor.comm.reduce_ops import Fold, fold_of
from dtensor.comm.wire import waited
from dtensor.intervals import Region, chunk_size, common, region_shape, region_size
from dtensor.placement import Partial
from dtensor.redistribute.executor.copies import Pack, Place
from dtensor.redistribute.executor.unbuffered_messages import Messenger, Turn, messenger_of
from dtensor.redistribute.geometry import Coord, Parts, held_along, members
from dtensor.redistribute.step import Step
from dtensor.spec import Spec, contiguous_stride

__all__ = ["EVEN", "PIECE", "SAVES", "unbuffered"]

Run = Callable[[torch.Tensor, bool], torch.Tensor]
Rows = tuple[int, int]
"""Start and number."""

SAVES = 1 << 17
"""Bytes that a rank must save, at least, for its group to go this way."""
EVEN = 1 << 22
"""Bytes of the result of a gather of even parts from which on it goes this way, and four times those of a part of a
reduce-scatter: below, a collective of the group holds little besides, and is one call to whoever looks on."""
PIECE = 1 << 14
"""Bytes of a message for which a rank always has room. It always has room for one row, too."""
_MANY = 64
"""Ranks up to which what each sends to each is looked at."""


def unbuffered(spec: Spec, step: Step, coord: Coord, usual: Run) -> Run:
    """`usual`, which is `step` at `coord`; or the step by messages, for the tensors that it takes, alike on all ranks.

    Those are tensors with values on the mesh's device. All else goes the usual way.
    """
    direct = _bound(spec, step, coord)
    if direct is None:
        return usual
    dtype, on, run_direct = spec.dtype, spec.mesh.device_type, direct

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor:
        if async_op or x.dtype is not dtype or x.device.type != on:
            return usual(x, async_op)
        x = waited(x)
        if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
            return usual(x, async_op)
        return run_direct((x.detach() if x.requires_grad else x).contiguous())

    return run


def _bound(spec: Spec, step: Step, coord: Coord) -> Callable[[torch.Tensor], torch.Tensor] | None:
    sent = spec.dtype if step.wire is None else step.wire
    if step.kind not in ("all_gather", "all_to_all", "reduce_scatter"):
        return None
    if math.prod(spec.shape) * sent.itemsize < SAVES:
        return None
    comm: Communicator = spec.mesh.comm(step.axes if len(step.axes) > 1 else step.axes[0])
    by = messenger_of(comm, spec.mesh.device_type)
    if by is None:
        return None
    group, fold = _Group(spec, step, coord, sent.itemsize), None
    if step.kind == "all_gather" and not _gather_saves(group, by.in_place_only):
        return None
    if step.kind == "all_to_all" and not _exchange_saves(group):
        return None
    if step.kind == "reduce_scatter":
        op = next(p.reduce_op for a in step.axes if isinstance(p := step.src[a], Partial) and p is not step.dst[a])
        fold = fold_of(op, sent, group.size)
        if by.in_place_only or fold is None or max(map(region_size, group.want)) * sent.itemsize < EVEN // 4:
            return None
    if by.in_place_only and not group.all_in_place():
        return None
    return _Exchange(step.kind, group, by, fold, sent, spec.dtype)


def _gather_saves(group: _Group, in_place_only: bool) -> bool:
    """Whether a gather is large; for NCCL, which gathers in place, whether its parts differ much in size."""
    made, sizes = region_size(group.want[0]) * group.itemsize, [*map(region_size, group.have)]
    if in_place_only:
        padded, exact = (group.size - 1) * max(sizes), sum(sizes) - min(sizes)
        return made >= SAVES and padding_counts(padded * group.itemsize, exact * group.itemsize)
    boxes = len({*map(region_shape, group.have)}) == 1 and all(len(runs) < 2 for part in group.have for runs in part)
    return made >= (EVEN if boxes else SAVES)


def _exchange_saves(group: _Group) -> bool:
    """Whether at some rank the usual way takes more than input and output, and enough comes for it to matter."""
    for i, (have, want) in enumerate(zip(group.have, group.want)):
        held, wanted = region_size(have), region_size(want)
        come = wanted - region_size(group.sent(i, i)[1])
        if come * group.itemsize < SAVES:
            continue
        if come > held:
            return True
        if group.size <= _MANY:
            leave = sum([region_size(group.sent(i, j)[0]) for j in range(group.size) if j != i])
            if leave + come > held + wanted:
                return True
    return False


class _Group:
    """The ranks of a step, by position: what each holds before and after. The same on all ranks but for `me`."""

    def __init__(self, spec: Spec, step: Step, coord: Coord, itemsize: int) -> None:
        self.me, self.itemsize = [*members(spec, step.axes, coord)].index(coord), itemsize
        self.have = held_along(spec, step.src, step.axes, coord)
        self.want = held_along(spec, step.dst, step.axes, coord)
        self.reduces = step.kind == "reduce_scatter"
        self.size = len(self.have)

    def sent(self, one: int, to: int) -> tuple[Region, Region]:
        """What goes from a position to another: where it lies with the first, and with the second."""
        return common(self.have[one], self.want[to])

    def place(self, one: int, to: int) -> int | None:
        """Where in the result of `to` what comes from `one` is received in place; None where it is not.

        Of pending parts only the first: the others are added to it.
        """
        if self.reduces and one:
            return None
        return _offset(self.sent(one, to)[1], region_shape(self.want[to]))

    def messages(self, one: int, to: int) -> list[Rows]:
        """The messages from a position to another, in rows of what is sent: one where it is received in place."""
        shape = region_shape(self.sent(one, to)[1])
        if self.place(one, to) is not None:
            return [(0, _rows(shape)[1])]
        both = region_size(self.have[to]) + region_size(self.want[to])
        return _slabs(shape, max(PIECE // self.itemsize, both // 40))

    def all_in_place(self) -> bool:
        """Whether all that is sent is received in place. False where there are too many ranks to look at."""
        return self.size <= _MANY and all(
            self.place(i, j) is not None
            for i in range(self.size) for j in range(self.size) if i != j and region_size(self.sent(i, j)[1])
        )  # fmt: skip


class _Exchange:
    """One step, bound to one rank, for contiguous tensors."""

    def __init__(
        self, kind: str, group: _Group, by: Messenger, fold: Fold | None, sent: torch.dtype, dtype: torch.dtype
    ) -> None:
        self._kind, self._by, self._fold, self._sent, self._dtype = kind, by, fold, sent, dtype
        me, k = group.me, group.size
        shape, self._shape = region_shape(group.have[me]), region_shape(group.want[me])
        to = [((me + j) % k, group.sent(me, (me + j) % k)[0]) for j in range(1, k)]
        to = [(i, region) for i, region in to if region_size(region)]
        regions = [*dict.fromkeys([region for _, region in to])]
        self._offsets = [(r, at, region_size(r)) for r in regions if (at := _offset(r, shape)) is not None]
        self._packed = [r for r in regions if _offset(r, shape) is None]
        self._sizes = [*map(region_size, self._packed)]
        self._pack = Pack(Parts(shape, len(self._packed), lambda: self._packed))
        self._leave = [(i, region, _flat_rows(region, group.messages(me, i))) for i, region in to]
        self._room = region_size(group.have[me]) - sum(self._sizes)
        self._arrive: list[tuple[int, int, int]] = []
        self._turns: list[tuple[int | None, int, Place, Place | None, bool]] = []
        order = range(k) if fold is not None else [(me - j) % k for j in range(k)]
        messages: list[tuple[int | None, int, Place, Place | None, bool]] = []
        for i in order:
            mine, region = group.sent(i, me)
            if not region_size(region):
                continue
            at, adds = group.place(i, me), fold is not None and i > 0
            if i != me and at is not None:
                self._arrive.append((i, at, region_size(region)))
                continue
            for number, rows in enumerate(group.messages(i, me)):
                source = Place(_only(mine, rows)) if i == me else None
                turn = (None if i == me else i, number, Place(_only(region, rows)), source, adds)
                (self._turns if fold is not None or i == me else messages).append(turn)
        self._turns += sorted(messages, key=lambda m: m[1])  # the first of each, so that all are under way

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._sent)
        out = x.new_empty(self._shape)
        flat, result = x.view(-1), out.view(-1)
        leaving = {region: flat.narrow(0, at, n) for region, at, n in self._offsets}
        if self._packed:
            leaving |= dict(zip(self._packed, self._pack(x).split(self._sizes)))
        leave = [(i, [leaving[region].narrow(0, *rows) for rows in some]) for i, region, some in self._leave]
        leaving.clear()
        arrive = [(i, 0, result.narrow(0, at, n)) for i, at, n in self._arrive]
        turns = [
            Turn(i, number, 0 if i is None else math.prod(place.shape), self._putting(place, source, adds, x, out))
            for i, number, place, source, adds in self._turns
        ]
        self._by.exchange(self._kind, x, out, leave, arrive, turns, self._room)
        if self._fold is None:
            return out
        return self._fold.finish(out).to(self._dtype)

    def _putting(
        self, place: Place, source: Place | None, adds: bool, x: torch.Tensor, out: torch.Tensor
    ) -> Callable[[torch.Tensor], None]:
        """What brings a message, or what lies at `source` of my own tensor, to its place, or adds it there."""

        def put(message: torch.Tensor) -> None:
            part = message.view(place.shape) if source is None else source.get(x)
            if not adds or self._fold is None:
                place.put(out, part)
            else:
                self._fold.add(place.view(out), part)  # the whole result, some rows of it

        return put


# ------------------------------------------------------------ rows
def _offset(region: Region, shape: Sequence[int]) -> int | None:
    """Where a region of a contiguous tensor of `shape` begins, if it lies in one piece there; else None."""
    if any(len(runs) != 1 for runs in region):
        return None
    part = region_shape(region)
    longer = [d for d, (n, whole) in enumerate(zip(part, shape)) if n < whole]
    if longer and any(n > 1 for n in part[: longer[-1]]):
        return None
    return sum([runs[0][0] * step for runs, step in zip(region, contiguous_stride(shape))])


def _rows(shape: Sequence[int]) -> Rows:
    """The first dim of a part that is longer than 1 (else 0), and how many rows it has."""
    dim = next((d for d, n in enumerate(shape) if n > 1), 0)
    return dim, shape[dim] if shape else 1


def _slabs(shape: Sequence[int], most: int) -> list[Rows]:
    """A part divided into slabs of at most `most` elements and about one size, or of one row where that is longer."""
    _, n = _rows(shape)
    row = math.prod(shape) // max(n, 1)
    each = max(1, most // max(row, 1))
    each = chunk_size(n, max(chunk_size(n, each), 1))
    return [(start, min(each, n - start)) for start in range(0, n, each)]


def _flat_rows(region: Region, rows: Sequence[Rows]) -> list[Rows]:
    """Rows of a region as elements of it in one piece."""
    row = region_size(region) // _rows(region_shape(region))[1]
    return [(start * row, n * row) for start, n in rows]


def _only(region: Region, rows: Rows) -> Region:
    """Some rows of a region."""
    if not region:
        return region
    dim, _ = _rows(region_shape(region))
    (start, n), at, some = rows, 0, []
    for first, length in region[dim]:
        lo, hi = max(start - at, 0), min(start + n - at, length)
        if lo < hi:
            some.append((first + lo, hi - lo))
        at += length
    return (*region[:dim], tuple(some), *region[dim + 1 :])
