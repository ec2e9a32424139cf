"""The arithmetic of mesh axes.

A mesh is sharded out of a *rank map*, the flat list of ranks of the mesh that it all began with. An axis is a
tuple of (size, stride) pairs, major to minor, over positions in that list: position = sum(digit * stride).
One pair is the rule; a flattened axis that skips another one has several:

    rank map 0..7, mesh (dp=2, cp=2, tp=2)     dp ((2, 4),)   cp ((2, 2),)   tp ((2, 1),)
    mesh["dp", "cp"] flattened                 ((2, 4), (2, 2)) = ((4, 2),)
    mesh["dp", "tp"] flattened                 ((2, 4), (2, 1))

All pairs that occur on a mesh are digits of one mixed-radix number, so a position's digit is
(position // stride) % size. Everything here is pure and knows no rank of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

__all__ = ["Axis", "axis_digit", "axis_offsets", "axis_size", "coalesce", "overlap", "row_major", "split_axis"]

Axis = tuple[tuple[int, int], ...]
Positions = npt.NDArray[np.int64]


def row_major(shape: Sequence[int]) -> tuple[Axis, ...]:
    """The axes of a mesh of `shape` over positions 0..n-1 in order."""
    axes: list[Axis] = []
    stride = 1
    for size in reversed(shape):
        axes.append(((size, stride),))
        stride *= size
    return tuple(reversed(axes))


def axis_size(axis: Axis) -> int:
    """Positions along `axis`."""
    return prod(size for size, _ in axis)


def coalesce(pairs: Iterable[tuple[int, int]]) -> Axis:
    """The shortest axis of the same positions in the same order: pairs that continue each other are one."""
    out: list[tuple[int, int]] = []
    last = (1, 1)
    for size, stride in pairs:
        last = (size, stride)
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out) or (last,)


def split_axis(axis: Axis, sizes: Sequence[int]) -> tuple[Axis, ...] | None:
    """`axis` sharded into axes of `sizes`, major to minor; None where a size would have to sharded across a pair."""
    if prod(sizes) != axis_size(axis):
        return None
    rest = [list(pair) for pair in axis]
    out: list[Axis] = []
    for size in reversed(sizes):
        taken: list[tuple[int, int]] = []
        need = size
        while need > 1 and rest:
            have, stride = rest[-1]
            take = min(need, have)
            if need % take or have % take:
                return None
            taken.append((take, stride))
            need //= take
            rest[-1] = [have // take, stride * take]
            if rest[-1][0] == 1 and len(rest) > 1:
                rest.pop()
        out.append(coalesce(reversed(taken)) if taken else ((1, rest[-1][1]),))
    return tuple(reversed(out))


def axis_digit(axis: Axis, position: int) -> int:
    """Where on `axis` the `position` of the rank map lies."""
    digit = 0
    for size, stride in axis:
        digit = digit * size + position // stride % size
    return digit


def axis_offsets(axis: Axis) -> Positions:
    """The offset in the rank map of each position along `axis`, in order."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in axis:
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return offsets


def overlap(axes: Iterable[Axis]) -> bool:
    """True where two of the axes share a digit, so that a position would have two coordinates."""
    pairs = sorted((stride, size) for axis in axes for size, stride in axis if size > 1)
    return any(low[0] * low[1] > high[0] for low, high in zip(pairs, pairs[1:]))
