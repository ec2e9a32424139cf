"""Which indices of a dim a position holds, and which of them two positions share: the arithmetic of shards.

A dim of `n` sharded over `k` positions has chunks of `ceil(n / k)`, the last ones smaller or empty, as `torch.chunk`
gives them. With a split factor each of so many chunks is sharded, and a position holds its chunk of each. What a
position holds of a dim are runs (start, length), ascending; a `Region` has the runs of every dim:

    10 over 4 positions                 [0,3) [3,6) [6,9) [9,10)
    8 over 2, split factor 2            [0,2)+[4,6)  [2,4)+[6,8)
    have [0,4), want [2,6)              in common [2,4): elements [2,4) of have, elements [0,2) of want

Parts of one shape need no list: a `Tiling` has them in closed form, by step and count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = [
    "Split", "Interval", "Region", "Runs", "Tiling", "chunk", "chunk_size", "common", "common_runs", "split_runs",
    "dim_intervals", "local_sizes", "part_of_runs", "parts_of_runs", "region_shape", "region_size", "share_of",
    "split_tensor",
]  # fmt: skip

Interval = tuple[int, int]
"""Start and length of a run of indices of one dim."""
Runs = tuple[Interval, ...]
Region = tuple[Runs, ...]
"""Per dim, runs of a tensor's indices, ascending; () where there are none."""
Split = tuple[int, int, int]
"""One placement on a dim: size of the axis, position on it, split factor (0 for a plain shard)."""


def chunk_size(n: int, k: int) -> int:
    """Elements of the first of `k` chunks of `n`."""
    return -(-n // k)


def chunk(n: int, k: int, r: int) -> Interval:
    """Start and length of chunk `r` of `k` of a dim of `n`; an empty one starts at the dim's end."""
    size = chunk_size(n, k)
    start = min(r * size, n)
    return start, min(size, n - start)


def share_of(n: int, k: int, r: int, factor: int = 1) -> int:
    """Elements that position `r` of `k` has of `n`, with a split factor."""
    if factor < 2:
        return chunk(n, k, r)[1]
    outer = chunk_size(n, factor)
    return n // outer * chunk(outer, k, r)[1] + chunk(n % outer, k, r)[1] if n else 0


def local_sizes(n: int, k: int, split: int = 1) -> set[int]:
    """The sizes that there are of the parts of `n` elements sharded over `k` positions, with a split factor.

    All of them, since the smallest part of what is split twice need not come from the smallest part of the first
    split: over 3 positions 3 gives 1, 1, 1 and 4 gives 2, 2, 0.
    """
    outer = chunk_size(n, max(split, 1))
    sizes = [outer, n % outer] if n else []  # chunks of one size, and a shorter one
    turns = {0, k - 1, *(size // (chunk_size(size, k) or 1) + more for size in sizes for more in (0, 1))}
    return {share_of(n, k, r, split) for r in turns if r < k}


def part_of_runs(runs: Sequence[Interval], lo: int, hi: int) -> list[Interval]:
    """Elements lo to hi of the concatenated runs."""
    return parts_of_runs(runs, [(lo, hi)])


def parts_of_runs(runs: Sequence[Interval], windows: Iterable[tuple[int, int]]) -> list[Interval]:
    """Elements lo to hi of the concatenated runs, for each of `windows`, which ascend: one walk over both."""
    out: list[Interval] = []
    i = at = 0  # the run that is looked at, and the elements before it
    for lo, hi in windows:
        while i < len(runs):
            start, length = runs[i]
            a, b = max(lo - at, 0), min(hi - at, length)
            if a < b:
                out.append((start + a, b - a))
            if hi < at + length:
                break
            i, at = i + 1, at + length
    return out


@lru_cache(maxsize=65536)
def dim_intervals(size: int, splits: tuple[Split, ...]) -> Runs:
    """The intervals of a dim of `size` that are left after `splits`, ascending; () when nothing is."""
    runs: Runs = ((0, size),) if size else ()
    for cut in splits:
        runs = split_runs(runs, *cut)
    return runs


def split_runs(runs: Runs, k: int, r: int, factor: int) -> Runs:
    """What a split, whose size, position and split factor are given, leaves of `runs`, which are ascending."""
    if factor < 2 and len(runs) == 1:
        start, n = runs[0]
        first, length = chunk(n, k, r)
        return ((start + first, length),) if length else ()
    n = sum([length for _, length in runs])
    outer = chunk_size(n, max(factor, 1))
    windows: list[tuple[int, int]] = []
    for base in range(0, n, outer) if outer else ():
        first, length = chunk(min(outer, n - base), k, r)
        windows.append((base + first, base + first + length))
    out: list[Interval] = []
    for start, length in parts_of_runs(runs, windows):
        _add(out, start, length)
    return tuple(out)


def _add(runs: list[Interval], start: int, length: int) -> None:
    """Add a run behind the others, joined with the last where it follows it."""
    if runs and runs[-1][0] + runs[-1][1] == start:
        runs[-1] = (runs[-1][0], runs[-1][1] + length)
    else:
        runs.append((start, length))


# ------------------------------------------------------------ regions
def region_shape(region: Region) -> tuple[int, ...]:
    """Shape of the tensor that a region is."""
    return tuple([runs[0][1] if len(runs) == 1 else sum([n for _, n in runs]) for runs in region])


def region_size(region: Region) -> int:
    """Elements of a region."""
    return math.prod(region_shape(region))


def common(have: Region, want: Region) -> tuple[Region, Region]:
    """The shared part of two shards, given by their global intervals: as a region of the first and of the second."""
    pairs = [*map(common_runs, have, want)]
    return tuple([first for first, _ in pairs]), tuple([second for _, second in pairs])


def common_runs(a: Runs, b: Runs) -> tuple[Runs, Runs]:
    """The indices that two lists of runs share: as runs of the elements of the first, and of the second."""
    if len(a) != 1 or len(b) != 1:
        return _common_of_many(a, b)
    (start_a, n_a), (start_b, n_b) = a[0], b[0]
    lo = max(start_a, start_b)
    n = min(start_a + n_a, start_b + n_b) - lo
    return (((lo - start_a, n),), ((lo - start_b, n),)) if n > 0 else ((), ())


@lru_cache(maxsize=65536)
def _common_of_many(a: Runs, b: Runs) -> tuple[Runs, Runs]:
    in_a: list[Interval] = []
    in_b: list[Interval] = []
    i = j = at_a = at_b = 0
    while i < len(a) and j < len(b):
        (start_a, n_a), (start_b, n_b) = a[i], b[j]
        lo, hi = max(start_a, start_b), min(start_a + n_a, start_b + n_b)
        if lo < hi:
            _add(in_a, at_a + lo - start_a, hi - lo)
            _add(in_b, at_b + lo - start_b, hi - lo)
        if start_a + n_a <= start_b + n_b:
            i, at_a = i + 1, at_a + n_a
        else:
            j, at_b = j + 1, at_b + n_b
    return tuple(in_a), tuple(in_b)


class Tiling(NamedTuple):
    """Parts of one shape that tile a tensor, one for each member of a group: no list, however large the group is.

    [6, 8] over axes of 2 and 4, by columns and then columns again: `split` (6, 2, 4, 1), `order` (1, 2, 0, 3)

    Attributes:
        split: the tensor's shape, each dim as the counts of the axes that shard it and what is left.
        order: the dims of `split`, those of the axes first, in the order of the group: parts one after the other.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(
        cls, shape: Sequence[int], by_dim: Sequence[Sequence[tuple[int, int]]], axes: Sequence[int]
    ) -> Tiling | None:
        """Of a tensor of `shape`, of which `by_dim` has the axes that shard each dim: (number of the axis, size).

        None where some part would be smaller than others, or where an axis of `axes`, the sizes, shards nothing.
        """
        split: list[int] = []
        first: dict[int, int] = {}
        rest: list[int] = []
        for n, splits in zip(shape, by_dim):
            for axis, k in splits:
                if n % k:
                    return None
                n //= k
                first[axis] = len(split)
                split.append(k)
            rest.append(len(split))
            split.append(n)
        if any(k > 1 and axis not in first for axis, k in enumerate(axes)):
            return None
        return cls(tuple(split), (*[first[axis] for axis in sorted(first)], *rest))

    @property
    def in_order(self) -> bool:
        """True where the parts follow each other in memory as they lie in the tensor."""
        long = [d for d in self.order if self.split[d] != 1]
        return long == sorted(long)


# ------------------------------------------------------------ tensors
def split_tensor(
    x: torch.Tensor, dim: int, split_factor: int, count: int, padded: bool, contiguous: bool
) -> tuple[list[torch.Tensor], list[int]]:
    """What `count` positions hold of `x`, sharded along `dim`; with a split factor, of each of so many chunks of it.

    With `padded` each part is filled up with zeros to the length of the longest, and the second list says by how many
    elements; without, it is empty. Raises IndexError for a dim that `x` does not have.
    """
    dim = range(x.ndim)[dim]
    chunks = x.chunk(split_factor, dim) if split_factor > 1 else (x,)
    cut = [[*some.chunk(count, dim), *(some.narrow(dim, 0, 0),) * count][:count] for some in chunks]
    parts = [torch.cat(of_one, dim) if split_factor > 1 else of_one[0] for of_one in zip(*cut, strict=True)]
    pads: list[int] = []
    if padded:
        longest = max(part.shape[dim] for part in parts)
        pads = [longest - part.shape[dim] for part in parts]
        parts = [_filled_up(part, dim, n) if n else part for part, n in zip(parts, pads, strict=True)]
    return [part.contiguous() for part in parts] if contiguous else parts, pads


def _filled_up(part: torch.Tensor, dim: int, missing: int) -> torch.Tensor:
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim)
