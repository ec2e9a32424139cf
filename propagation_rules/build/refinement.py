"""The common factors of two shapes of the same number of elements: what a view is made of.

From the left, dims of both shapes give off their greatest common divisor as a factor, as long as it is not 1:

    (6, 4) -> (24,)      factors 6 4          (a b) of the output
    (12,)  -> (3, 4)     factors 3 4
    (8, 5) -> (2, 20)    factors 2 4 5        input (a b) c, output a (b c)

Where it is 1 the rest is tried from the right; what is left in the middle has no common factor and stays whole:

    (2, 3, 4, 7) -> (2, 4, 3, 7)     2 and 7 are factors, 3 4 and 4 3 whole

Dims of size 1 that face each other are one factor (so that a shard of such a dim stays), others carry none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["common_factors"]


class _Side:
    """One shape while factors are taken off it."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, self.rest = list(shape), list(shape)
        self.major: list[list[int]] = [[] for _ in shape]
        self.minor: list[list[int]] = [[] for _ in shape]

    def take(self, d: int, n: int, factor: int, left: bool) -> None:
        self.rest[d] //= n
        if left:
            self.major[d].append(factor)
        else:
            self.minor[d].insert(0, factor)


def common_factors(
    a: Sequence[int], b: Sequence[int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int], set[int]]:
    """Factors of each dim of `a` and of `b`, the factors' sizes, and which of them must stay whole."""
    if 0 in a:
        return _empty(a, b)
    x, y = _Side(a), _Side(b)
    sizes: list[int] = []
    i, j = _peel(x, y, sizes, left=True, stop=(0, 0))
    if i < len(a) and j < len(b):
        _peel(x, y, sizes, left=False, stop=(i, j))
    whole: set[int] = set()
    for side in (x, y):
        for d, n in enumerate(side.rest):
            if n > 1:
                side.major[d].append(len(sizes))
                whole.add(len(sizes))
                sizes.append(n)
    dims = [[tuple(p + q) for p, q in zip(side.major, side.minor, strict=True)] for side in (x, y)]
    return dims[0], dims[1], sizes, whole


def _peel(x: _Side, y: _Side, sizes: list[int], left: bool, stop: tuple[int, int]) -> tuple[int, int]:
    """Take factors off from one end until the facing dims have none in common; returns where that is."""
    step = 1 if left else -1
    i, j = (0, 0) if left else (len(x.shape) - 1, len(y.shape) - 1)
    low, high = (stop, (len(x.shape), len(y.shape)))
    while low[0] <= i < high[0] and low[1] <= j < high[1]:
        p, q = x.rest[i], y.rest[j]
        if p == 1 and x.shape[i] != 1:
            i += step
        elif q == 1 and y.shape[j] != 1:
            j += step
        elif (p == 1) != (q == 1):
            i, j = (i + step, j) if p == 1 else (i, j + step)
        else:
            n = math.gcd(p, q)
            if n == 1 and p != 1:
                break
            x.take(i, n, len(sizes), left)
            y.take(j, n, len(sizes), left)
            sizes.append(n)
            if p == 1:
                i, j = i + step, j + step
    return i, j


def _empty(
    a: Sequence[int], b: Sequence[int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int], set[int]]:
    """Tensors without elements: dims that agree from either end are factors, the others whole."""
    n, m = len(a), len(b)
    lead = next((d for d in range(min(n, m)) if a[d] != b[d]), min(n, m))
    most = min(n, m) - lead
    trail = next((d for d in range(most) if a[n - 1 - d] != b[m - 1 - d]), most)
    sizes = [*a[:lead], *a[n - trail :], *a[lead : n - trail], *b[lead : m - trail]]
    shared, middle = lead + trail, n - lead - trail
    head, tail = list(range(lead)), list(range(lead, shared))
    first = [*head, *range(shared, shared + middle), *tail]
    second = [*head, *range(shared + middle, len(sizes)), *tail]
    return [(f,) for f in first], [(f,) for f in second], sizes, set(range(shared, len(sizes)))
