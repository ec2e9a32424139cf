"""Copies between regions of a local tensor and a buffer: all that a rank does around a collective.

    pack      the regions of a tensor, one after the other in a 1-D buffer: what is sent
    unpack    a tensor of such a buffer, or of its parts: what has arrived
    Place     one region: read, or written

Only views and copies of whole boxes, so that tensors with gaps, on meta or of a trace are as good as any, and a view
stands for a copy wherever it can. On [4, 16] that two ranks want by columns:

    even             view [4, 2, 8], permuted to [2, 4, 8], copied: one copy, however many positions there are
    along one dim    split or concatenated along it
    other            box by box
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from dtensor.comm.wire import packed
from dtensor.intervals import Region, Runs, region_shape
from dtensor.redistribute.geometry import Parts

__all__ = ["Pack", "Place", "Unpack", "private"]

_MANY = 8
"""From this many runs of a dim on, one indexed copy is cheaper than one copy a run."""


def private(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """`x`, made of `of`, in memory that it does not share with it."""
    return x.clone(memory_format=torch.contiguous_format) if _shares(x, of) else x


def _shares(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x is y or x.untyped_storage()._cdata == y.untyped_storage()._cdata


class Pack:
    """The parts of a tensor, one after the other in a contiguous 1-D tensor; a view where they lie so already."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @cached_property
    def _places(self) -> list[Place]:
        return [*map(Place, self._parts.regions)]

    @cached_property
    def _along(self) -> list[int]:
        """What each part has of the dim along which they lie."""
        return [self._parts.shapes[i][self._parts.dim or 0] for i in self._parts.filled]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._parts.in_order:
            return x.contiguous().view(-1)
        tiling = self._parts.tiling
        if tiling is not None:
            return x.view(tiling.split).permute(tiling.order).reshape(-1).contiguous()
        if self._parts.dim is None and not all(place.is_view for place in self._places):
            return self._copied(x)
        some = self.each(x)
        if not some:
            return x.new_empty(0)
        return some[0].contiguous().view(-1) if len(some) == 1 else packed(some)

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        """As called, where some parts have several runs: each box is copied to its place in the buffer."""
        sizes = self._parts.sizes
        out = x.new_empty(sum(sizes))
        for place, slot in zip(self._places, torch.split(out, sizes)):
            place.read(x, slot.view(place.shape))
        return out

    def each(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The parts that have elements, in the order of their positions: views where that can be."""
        return [part for part, n in zip(self.parts(x), self._parts.sizes) if n]

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The parts, in the order of their positions: views where that can be."""
        parts = self._parts
        if parts.dim is None:
            return [place.get(x) for place in self._places]
        found = dict(zip(parts.filled, torch.split(x, self._along, parts.dim)))
        return [found[i] if i in found else x.new_empty(parts.shapes[i]) for i in range(parts.count)]


class Unpack:
    """A tensor of parts that together fill it. It is contiguous, and shares memory with what it is made of at most."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._split: tuple[int, ...] = ()
        self._order: tuple[int, ...] = ()
        if parts.tiling is not None:
            split, order = parts.tiling
            self._split = tuple([split[d] for d in order])
            self._order = tuple([order.index(d) for d in range(len(order))])

    @cached_property
    def _places(self) -> list[Place]:
        return [*map(Place, self._parts.regions)]

    def __call__(self, flat: torch.Tensor) -> torch.Tensor:
        """Of a 1-D tensor, that nobody else uses, of the parts one after the other."""
        parts = self._parts
        if parts.in_order or parts.single is not None:
            return flat.view(parts.shape)
        if parts.tiling is not None:
            # a reshape may be a view, whose strides are not those of the shape
            return flat.view(self._split).permute(self._order).reshape(parts.shape).contiguous()
        return self.of([part.view(shape) for part, shape in zip(torch.split(flat, parts.sizes), parts.shapes)])

    def of(self, some: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of the parts, one a position; the one that is all there is is returned as it is."""
        parts = self._parts
        if parts.single is not None:
            return some[parts.single]
        if parts.dim is not None:
            return torch.cat([some[i] for i in parts.filled], parts.dim)
        out = some[0].new_empty(parts.shape)
        for i in parts.filled:
            self._places[i].put(out, some[i])
        return out


class Place:
    """A region of a tensor, as boxes: where each lies in the tensor, and where in the part that the region is."""

    __slots__ = ("_boxes", "_dim", "_narrow", "_runs", "shape")

    def __init__(self, region: Region) -> None:
        self.shape = region_shape(region)
        self._dim = max(range(len(region)), key=lambda d: len(region[d]), default=0)
        many = bool(region) and len(region[self._dim]) >= _MANY
        self._runs: Runs = region[self._dim] if many else ()
        self._boxes = _boxes(region, self._dim if many else -1) if math.prod(self.shape) else []
        self._narrow = [(d, *runs[0]) for d, runs in enumerate(region) if len(runs) == 1]

    @property
    def is_view(self) -> bool:
        """True where the region is a view of the tensor."""
        return not self._runs and len(self._boxes) == 1

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """The region, where it is a view."""
        for d, start, n in self._narrow:
            if n != x.shape[d]:
                x = x.narrow(d, start, n)
        return x

    def get(self, x: torch.Tensor) -> torch.Tensor:
        """The region of `x`: a view, or new memory."""
        if self.is_view:
            return self.view(x)
        part = x.new_empty(self.shape)
        self.read(x, part)
        return part

    def read(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Copy the region of `x` to `part`."""
        for to, of in self._boxes:
            part[of].copy_(x[to].index_select(self._dim, self._index(x)) if self._runs else x[to])

    def put(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Write the region of `out`."""
        if self.is_view:
            self.view(out).copy_(part)
            return
        for to, of in self._boxes:
            if self._runs:
                out[to].index_copy_(self._dim, self._index(out), part[of])
            else:
                out[to].copy_(part[of])

    def _index(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack():  # a trace writes ops down, and no numbers
            return torch.cat([torch.arange(start, start + n, device=x.device) for start, n in self._runs])
        starts, sizes = np.array(self._runs).T
        steps = np.repeat(starts - sizes.cumsum() + sizes, sizes)
        return torch.from_numpy(steps + np.arange(len(steps))).to(x.device)


_Box = tuple[tuple[slice, ...], tuple[slice, ...]]


def _boxes(region: Region, whole: int) -> list[_Box]:
    """The boxes of a region, in the tensor and in the part; of the dim `whole` all."""
    choices: list[list[tuple[slice, slice]]] = []
    for d, runs in enumerate(region):
        at, some = 0, []
        for start, n in runs:
            some.append((slice(start, start + n), slice(at, at + n)))
            at += n
        choices.append([(slice(None), slice(None))] if d == whole else some)
    return [(tuple(to for to, _ in box), tuple(of for _, of in box)) for box in itertools.product(*choices)]
