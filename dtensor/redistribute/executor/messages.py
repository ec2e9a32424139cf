"""What the ranks of a gather or an all-to-all send each other, as messages: from where, to where, cut into how many.

    group.sent(1, 0)     where what goes from position 1 to 0 lies, with 1 and with 0
    group.place(1, 0)    where in the result of 0 it begins, if it lies there in one piece: then it lands in place
    group.cut(1, 0)      the messages that it is, in rows: one if it lands in place, or if 0 has room for it

All of it is the same on all ranks. A rank has room for what its input has, less what it packs to be sent, so that with
the result it allocates no more than its input and output; but for one message, of 1/40 of both, it always has room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from dtensor.redistribute.executor.even import box
from dtensor.redistribute.executor.landing import Rows, rows_of, slabs
from dtensor.redistribute.executor.local import Take
from dtensor.redistribute.executor.pieces import packer
from dtensor.redistribute.geometry import Region, common, held_along, members, region_shape, region_size
from dtensor.redistribute.step import Step
from dtensor.spec import Spec, contiguous_stride

__all__ = ["MANY", "PIECE", "Group", "Leaving", "Outgoing", "straight"]

Coord = tuple[int, ...]

MANY = 64
"""Ranks up to which what each sends to each is looked at."""

PIECE = 1 << 14
"""Bytes of a message for which a rank has always room. Of one row it has always room, too."""


def straight(region: Region, whole: Sequence[int]) -> int | None:
    """Where a region of a contiguous tensor of shape `whole` begins, if it lies in one piece there; else None."""
    found = box(region, whole)
    if found is None or found[1] != contiguous_stride(found[0]):
        return None
    return found[2]


class Group:
    """The ranks of a step, by position: what each holds before and after. `me` is this rank's position.

    Of pending parts that are reduced as they arrive only those of the positions in `first` may land in place.
    """

    __slots__ = ("_rooms", "first", "have", "itemsize", "me", "want")

    def __init__(self, spec: Spec, step: Step, coord: Coord, itemsize: int) -> None:
        some = list(members(spec, step.axes, coord))
        self.me, self.itemsize = some.index(coord), itemsize
        self.have = held_along(spec, step.src, step.axes, coord)
        self.want = held_along(spec, step.dst, step.axes, coord)
        self.first: frozenset[int] = frozenset(range(len(some)))
        self._rooms: dict[int, int] = {}

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.have)

    def sent(self, one: int, to: int) -> tuple[Region, Region]:
        """What goes from a position to another: where it lies with the first, and with the second."""
        return common(self.have[one], self.want[to])

    def comes(self, to: int) -> int:
        """Elements that a position lacks."""
        return region_size(self.want[to]) - region_size(self.sent(to, to)[1])

    def place(self, one: int, to: int) -> int | None:
        """Where in the result of `to` what comes from `one` lands in place; None where it does not."""
        if one not in self.first:
            return None
        return straight(self.sent(one, to)[1], region_shape(self.want[to]))

    def packs(self, one: int) -> list[Region]:
        """What a position sends that does not lie in one piece there, each region once."""
        shape = region_shape(self.have[one])
        regions = {self.sent(one, (one + j) % self.size)[0]: None for j in range(1, self.size)}
        return [r for r in regions if region_size(r) and straight(r, shape) is None]

    def room(self, to: int) -> int:
        """Elements for which a position has room beside its result."""
        if to not in self._rooms:
            free = 0
            if self.size <= MANY or self.want[0] == self.want[-1]:
                free = region_size(self.have[to]) - sum(map(region_size, self.packs(to)))
            both = region_size(self.have[to]) + region_size(self.want[to])
            self._rooms[to] = max(free, PIECE // self.itemsize, both // 40)
        return self._rooms[to]

    def cut(self, one: int, to: int) -> list[Rows]:
        """The messages from a position to another, in rows of what is sent."""
        shape = region_shape(self.sent(one, to)[1])
        if self.place(one, to) is not None:
            return [(0, rows_of(shape)[1])]
        return slabs(shape, self.room(to))


class Leaving:
    """Regions of a tensor of `shape` as they are sent: views, or parts of a buffer if they do not lie in one piece.

    `packed`: elements of the buffer, which holds each region once.
    """

    __slots__ = ("_lies", "_pack", "_packed", "_sizes", "packed")

    def __init__(self, regions: Iterable[Region], shape: tuple[int, ...]) -> None:
        lies = {region: straight(region, shape) for region in regions}
        self._lies = [(region, at, region_size(region)) for region, at in lies.items() if at is not None]
        self._packed = [region for region, at in lies.items() if at is None]
        self._sizes = [*map(region_size, self._packed)]
        self.packed, self._pack = sum(self._sizes), _packer(self._packed, shape)

    def of(self, x: torch.Tensor) -> dict[Region, torch.Tensor]:
        """Each region of a contiguous tensor, 1-D and contiguous."""
        flat = x.view(-1)
        out = {region: flat.narrow(0, at, n) for region, at, n in self._lies}
        return out | dict(zip(self._packed, self._pack(x).split(self._sizes))) if self._packed else out


class Outgoing:
    """What this rank sends, each part cut into messages."""

    __slots__ = ("_leaving", "_parts", "packed")

    def __init__(self, group: Group) -> None:
        me, k = group.me, group.size
        to = [((me + j) % k, group.sent(me, (me + j) % k)[0]) for j in range(1, k)]
        self._leaving = Leaving([region for _, region in to if region_size(region)], region_shape(group.have[me]))
        self.packed = self._leaving.packed
        self._parts: list[tuple[int, Region, list[Rows]]] = []
        for i, region in to:
            if region_size(region):
                row = region_size(region) // rows_of(region_shape(region))[1]
                self._parts.append((i, region, [(start * row, n * row) for start, n in group.cut(me, i)]))

    def of(self, x: torch.Tensor) -> list[tuple[int, list[torch.Tensor]]]:
        """The messages to each position, contiguous and 1-D, of a contiguous tensor."""
        leaving = self._leaving.of(x)
        return [(i, [leaving[region].narrow(0, start, n) for start, n in some]) for i, region, some in self._parts]


def _packer(regions: Sequence[Region], shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Regions of a contiguous tensor one after the other, 1-D."""
    if not regions:
        return lambda x: x.new_empty(0)
    found = packer(regions, shape)
    return Take(regions, shape).flat if found is None else found
