"""Bringing what arrives, a few rows at a time, to its place in a result, or adding it to what is there.

    columns [2, 4) of a result [6, 8], from a message of rows [0, 3) of [6, 2]:   out[0:3, 2:4] = message.view(3, 2)

A part that is large is cut along its first dim longer than 1 into slabs of whole rows. Few copies by strides known
before (`dtensor.redistribute.executor.pieces`) where that can be, else run by run
(`dtensor.redistribute.executor.local`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dtensor.redistribute.executor.local import Embed, Take
from dtensor.redistribute.executor.pieces import moved
from dtensor.redistribute.geometry import Region, region_shape, region_size

__all__ = ["Add", "Landing", "Rows", "rows_of", "slabs"]

Add = Callable[[torch.Tensor, torch.Tensor], None]
"""Puts what two tensors of one shape are together in place of the first."""
Rows = tuple[int, int]
"""Start and number."""


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """The first dim of a part that is longer than 1 (else 0), and how many rows it has."""
    dim = next((d for d, n in enumerate(shape) if n > 1), 0)
    return dim, shape[dim] if shape else 1


def slabs(shape: Sequence[int], most: int) -> list[Rows]:
    """A part cut into slabs of at most `most` elements and about one size, or of one row where that is longer."""
    _, n = rows_of(shape)
    row = math.prod(shape) // max(n, 1)
    each = max(1, most // max(row, 1))
    each = -(-n // max(-(-n // each), 1))
    return [(start, min(each, n - start)) for start in range(0, n, each)]


def only(region: Region, rows: Rows) -> Region:
    """Some rows of a region."""
    if not region:
        return region
    dim, _ = rows_of(region_shape(region))
    (start, n), at, some = rows, 0, []
    for first, length in region[dim]:
        lo, hi = max(start - at, 0), min(start + n - at, length)
        if lo < hi:
            some.append((first + lo, hi - lo))
        at += length
    return (*region[:dim], tuple(some), *region[dim + 1 :])


class Landing:
    """Rows of a part on the way to `region` of a contiguous tensor of shape `whole`: all, or only `rows`.

    They come as a contiguous message or, with `source`, lie in a region of a tensor of a shape. `few` is True where
    that takes few copies.
    """

    __slots__ = ("_pieces", "_put", "_shape", "_take", "few", "numel")

    def __init__(
        self, region: Region, whole: tuple[int, ...], source: tuple[Region, tuple[int, ...]] | None = None,
        rows: Rows | None = None,
    ) -> None:  # fmt: skip
        if rows is not None:
            region = only(region, rows)
        part = region_shape(region)
        of, shape = (tuple([((0, n),) for n in part]), part) if source is None else source
        if source is not None and rows is not None:
            of = only(of, rows)
        self.numel = region_size(region)
        pieces = moved(of, shape, region, whole)
        self.few = pieces is not None
        self._pieces, self._shape = pieces or [], shape
        self._take = None if self.few else (Take([of], shape), Take([region], whole))
        self._put = None if self.few else Embed(region, whole)

    def bring(self, source: torch.Tensor, out: torch.Tensor, add: Add | None) -> None:
        """Copy, or `add`, what `source` holds to `out`, which begins at its memory's first element."""
        if self._put is not None and self._take is not None:
            part = self._take[0](source.view(self._shape))[0]
            if add is not None:
                now = self._take[1](out)[0].clone(memory_format=torch.contiguous_format)
                add(now, part)
                part = now
            self._put.into(out, part)
            return
        first = source.storage_offset()
        for size, of, at, to, there in self._pieces:
            to_view, of_view = out.as_strided(size, to, there), source.as_strided(size, of, first + at)
            if add is None:
                to_view.copy_(of_view)
            else:
                add(to_view, of_view)
