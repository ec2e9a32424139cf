"""Parts of one shape at even distances: taken by one copy, joined by at most one, all sizes and strides known before.

    S(0) -> S(1) of [16, 16] on 4    parts of my [4, 16]: as_strided [4, 4, 4] by (4, 16, 1), copied: what is sent
                                     parts of my result: rows, as they arrive

Boxes of several axes (`S(0), S(1)` on two) are the same with a distance for each level. Regions of other kinds (uneven,
empty, of many runs, apart by other distances) have no such form: None, and `dtensor.redistribute.executor.local` sees
to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dtensor.redistribute.geometry import Region, region_shape
from dtensor.spec import contiguous_stride

__all__ = ["Box", "Even", "Local", "as_it_lies", "box", "even", "joiner", "one_part", "stacker", "taker"]

Shape = tuple[int, ...]
Local = Callable[[torch.Tensor], torch.Tensor]
Box = tuple[Shape, Shape, int]
"""Shape, strides and start of a part of a contiguous tensor."""


class Level(NamedTuple):
    """`n` parts (or groups of parts), each `step` elements of dim `dim` behind the one before."""

    n: int
    dim: int
    step: int


class Even(NamedTuple):
    """Parts of shape `part` in a tensor of shape `whole`, the first at `start`; levels from the outermost."""

    whole: Shape
    part: Shape
    start: Shape
    levels: tuple[Level, ...]


def even(regions: Sequence[Region], whole: Sequence[int]) -> Even | None:
    """The parts `regions` of a tensor of shape `whole` as an `Even`, in their order; None where they are not even."""
    part, starts = region_shape(regions[0]), []
    if not part or not math.prod(part):
        return None
    for n, column in zip(part, zip(*regions)):  # dim by dim
        if any(len(runs) != 1 or runs[0][1] != n for runs in column):
            return None
        starts.append([runs[0][0] for runs in column])
    first, levels = tuple([at[0] for at in starts]), []
    while len(starts[0]) > 1:
        level = _innermost(starts)
        if level is None:
            return None
        levels.append(level)
        starts = [at[:: level.n] for at in starts]
    return Even(tuple(whole), part, first, tuple(reversed(levels)))


def _innermost(starts: list[list[int]]) -> Level | None:
    """The level of the parts that follow each other, of which the starts are given by dim."""
    moved = [d for d, at in enumerate(starts) if at[0] != at[1]]
    if len(moved) != 1:
        return None
    dim = moved[0]
    along, others = starts[dim], starts[:dim] + starts[dim + 1 :]
    step, n = along[1] - along[0], 2
    if step < 0:
        return None
    while n < len(along) and along[n] == along[0] + n * step and all(at[n] == at[0] for at in others):
        n += 1
    while len(along) % n:
        n -= 1
    if n < 2 or along != [a + i * step for a in along[::n] for i in range(n)]:
        return None
    return Level(n, dim, step) if all(at == [a for a in at[::n] for _ in range(n)] for at in others) else None


def taker(parts: Even) -> tuple[Shape, Local]:
    """The parts of a contiguous tensor, along a new dim 0 or, where they are the tensor as it lies, along its own.

    What is returned is contiguous; the tensor itself, or a view of it, only where it is sent as it lies.
    """
    stride = contiguous_stride(parts.whole)
    k = math.prod(level.n for level in parts.levels)
    size = tuple(level.n for level in parts.levels) + parts.part
    steps = tuple(level.step * stride[level.dim] for level in parts.levels) + stride
    first = sum(a * s for a, s in zip(parts.start, stride))
    stacked = (k, *parts.part)
    if as_it_lies(parts):
        if parts.whole[0] % k == 0:
            return parts.whole, lambda x: x
        return stacked, lambda x: x.view(stacked)
    copy = torch.as_strided_copy
    if len(parts.levels) == 1 and not first:
        return stacked, lambda x: copy(x, size, steps)
    if len(parts.levels) == 1:
        return stacked, lambda x: copy(x, size, steps, x.storage_offset() + first)
    return stacked, lambda x: copy(x, size, steps, x.storage_offset() + first).view(stacked)


def as_it_lies(parts: Even) -> bool:
    """True where the parts are all of the tensor, in order, so that it can be sent as it is."""
    size = tuple(level.n for level in parts.levels) + parts.part
    stride = contiguous_stride(parts.whole)
    steps = tuple(level.step * stride[level.dim] for level in parts.levels) + stride
    return math.prod(size) == math.prod(parts.whole) and _same_order(size, steps)


def stacker(parts: Even) -> Local:
    """As `taker`, along dim 0 of the parts, so that chunks of what is returned have the shape of the parts."""
    along = (math.prod(level.n for level in parts.levels) * parts.part[0], *parts.part[1:])
    stacked, take = taker(parts)
    return take if stacked == along else lambda x: take(x).view(along)


def box(region: Region, whole: Sequence[int]) -> Box | None:
    """Where a region of a tensor of shape `whole` lies; None where a dim has several runs or none."""
    if any(len(runs) != 1 for runs in region):
        return None
    stride, size = contiguous_stride(whole), region_shape(region)
    steps = tuple(s if n > 1 else t for n, s, t in zip(size, stride, contiguous_stride(size)))  # of 1 any will do
    return size, steps, sum(runs[0][0] * s for runs, s in zip(region, stride))


def one_part(region: Region, whole: Sequence[int]) -> Local | None:
    """A box of a contiguous tensor of shape `whole` as new memory, contiguous; None where it is no box or empty."""
    found = box(region, whole)
    if found is None or not found[0] or not math.prod(found[0]):
        return None
    (size, stride, first), copy = found, torch.as_strided_copy
    if not first:
        return lambda x: copy(x, size, stride)
    return lambda x: copy(x, size, stride, x.storage_offset() + first)


def _same_order(size: Sequence[int], stride: Sequence[int]) -> bool:
    """True where a view of these strides is the memory as it lies."""
    return all(n == 1 or s == t for n, s, t in zip(size, stride, contiguous_stride(size)))


def joiner(parts: Even) -> tuple[bool, Local] | None:
    """The whole from its parts, which lie in order in one contiguous tensor that nobody else uses.

    True: they are the whole as they lie, of whatever shape that tensor is. The result is contiguous, with the strides
    of its shape. None where the parts are not all of the whole.
    """
    by_dim: list[list[int]] = [[] for _ in parts.whole]
    for i, level in enumerate(parts.levels):
        by_dim[level.dim].append(i)
    groups: list[list[int]] = []
    for d, n in enumerate(parts.part):
        inner = n
        for i in sorted(by_dim[d], key=lambda i: parts.levels[i].step):
            if parts.levels[i].step != inner:
                return None
            inner *= parts.levels[i].n
        if inner != parts.whole[d] or parts.start[d]:
            return None
        groups.append([*sorted(by_dim[d], key=lambda i: -parts.levels[i].step), len(parts.levels) + d])
    lie = tuple(level.n for level in parts.levels) + parts.part
    strides = contiguous_stride(lie)
    order = [i for group in groups for i in group]
    size, stride, out = tuple(lie[i] for i in order), tuple(strides[i] for i in order), parts.whole
    if _same_order(size, stride):
        return True, lambda flat: flat.view(out)
    if all(_one_run([lie[i] for i in group], [strides[i] for i in group]) for group in groups):
        # a reshape would be a view, whose strides are not those of the whole
        return False, lambda flat: flat.as_strided(size, stride).clone(memory_format=torch.contiguous_format).view(out)
    return False, lambda flat: flat.as_strided(size, stride).reshape(out)


def _one_run(size: Sequence[int], stride: Sequence[int]) -> bool:
    """True where dims of these strides are one dim of even steps."""
    long = [(n, s) for n, s in zip(size, stride) if n != 1]
    return all(s == t * m for (_, s), (m, t) in zip(long, long[1:]))
