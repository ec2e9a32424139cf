"""What the ranks of a gather or an all-to-all send each other, as messages: from where, to where, cut into how many.

    group.sent(1, 0)     where what goes from position 1 to 0 lies, with 1 and with 0
    group.place(1, 0)    where in the result of 0 it begins, if it lies there in one piece: then it lands in place
    group.cut(1, 0)      the messages that it is, in rows: one if it lands in place, or if 0 has room for it

All of it is the same on all ranks. A rank has room for what its input has, less what it packs to be sent, so that with
the result it allocates no more than its input and output; but for one message, of 1/40 of both, it always has room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from dtensor.reshard_even import box
from dtensor.reshard_geometry import Region, common, holdings, members, region_shape, region_size
from dtensor.reshard_land import Rows, rows_of, slabs
from dtensor.reshard_local import Take
from dtensor.reshard_pieces import packer
from dtensor.reshard_step import Step
from dtensor.spec import Spec, contiguous_stride

__all__ = ["MANY", "PIECE", "Group", "Outgoing"]

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
        self.have = [holdings(spec, step.src, c) for c in some]
        self.want = [holdings(spec, step.dst, c) for c in some]
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


class Outgoing:
    """What this rank sends: views of its tensor, or of a buffer that holds, once, what does not lie in one piece."""

    __slots__ = ("_pack", "_parts", "packed")

    def __init__(self, group: Group) -> None:
        me, k = group.me, group.size
        shape = region_shape(group.have[me])
        regions = group.packs(me)
        starts = [0, *accumulate(map(region_size, regions))]
        places, self.packed = dict(zip(regions, starts)), starts[-1]
        self._parts: list[tuple[int, list[tuple[bool, int, int]]]] = []
        for to in [(me + j) % k for j in range(1, k)]:
            region = group.sent(me, to)[0]
            numel = region_size(region)
            if not numel:
                continue
            at = straight(region, shape)
            start = places[region] if at is None else at
            row = numel // rows_of(region_shape(region))[1]
            self._parts.append((to, [(at is not None, start + i * row, n * row) for i, n in group.cut(me, to)]))
        self._pack = _packer(regions, shape)

    def of(self, x: torch.Tensor) -> list[tuple[int, list[torch.Tensor]]]:
        """The messages to each position, contiguous and 1-D, of a contiguous tensor."""
        flat = x.view(-1)
        packed = self._pack(x) if self.packed else flat
        return [
            (to, [(flat if lies else packed).narrow(0, start, n) for lies, start, n in some])
            for to, some in self._parts
        ]


def _packer(regions: Sequence[Region], shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Regions of a contiguous tensor one after the other, 1-D."""
    if not regions:
        return lambda x: x.new_empty(0)
    found = packer(regions, shape)
    return Take(regions, shape).flat if found is None else found
