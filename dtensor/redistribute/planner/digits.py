"""Digits of an index: what each mesh axis fixes of where an element of a dim lies.

    16 by axis 0 (2), axis 1 (4)             index = 8 * a + 2 * b + c         {0: ((8, 2),), 1: ((2, 4),)}
    16 by axis 1 (4) with split factor 2     index = 8 * a + 2 * b + c         {1: ((2, 4),)}

So a split that skips what another axis would have sharded first is seen to be the same split.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Pieces", "cross", "digits"]

Pieces = tuple[tuple[int, int], ...]
"""Digits of an index, major first, as (stride, size)."""


def digits(n: int, splits: tuple[tuple[int, int], ...], sizes: Sequence[int]) -> dict[int, Pieces] | None:
    """What each axis of `splits`, (axis, split factor) in order, fixes of the index of a dim of `n`: its digits.

    `sizes`: of the mesh axes. None where the splits leave uneven shards.
    """
    if len(splits) == 1 and splits[0][1] == 0:
        axis = splits[0][0]
        inner, rest = divmod(n, sizes[axis])
        return None if rest else {axis: ((inner, sizes[axis]),)}
    free: Pieces = ((1, n),)
    out: dict[int, Pieces] = {}
    for axis, factor in splits:
        split = _split(free, factor or 1)
        mine = None if split is None else _split(split[1], sizes[axis])
        if split is None or mine is None:
            return None
        out[axis] = mine[0]
        free = _joined(split[0] + mine[1])
    return out


def _split(free: Pieces, n: int) -> tuple[Pieces, Pieces] | None:
    """The major digits of an index that together count to `n`, and the others; None where they do not."""
    major: list[tuple[int, int]] = []
    for i, (stride, size) in enumerate(free):
        if n == 1:
            return tuple(major), free[i:]
        if n % size == 0:
            major.append((stride, size))
            n //= size
        elif size % n == 0:
            major.append((stride * (size // n), n))
            return tuple(major), ((stride, size // n), *free[i + 1 :])
        else:
            return None
    return (tuple(major), ()) if n == 1 else None


def _joined(pieces: Pieces) -> Pieces:
    """The same digits, neighbours as one."""
    out: list[tuple[int, int]] = []
    for stride, size in pieces:
        if out and out[-1][0] == stride * size:
            out[-1] = (stride, out[-1][1] * size)
        elif size > 1:
            out.append((stride, size))
    return tuple(out)


def cross(a: Pieces, b: Pieces) -> bool:
    """True where two sets of digits have something in common."""
    return any(s < t * m and t < s * n for s, n in a for t, m in b)
