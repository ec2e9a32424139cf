"""Boxes copied between contiguous tensors, all sizes and strides known before: few copies for parts of unlike sizes.

    S(0) -> S(1) of [7, 5] on 4, rank 0    columns [0,2), [2,4), [4,5) of my [2, 5], one after the other in a buffer:
                                           one copy of two parts, [2, 2, 2] by (2, 5, 1), and one of [2, 1] by (5, 1)

A `Piece` is one such copy, between any two layouts in memory. Parts of one shape are one piece where they lie at even
distances on both sides, as are the runs of a split-factor shard. On the CPU the pieces of a small tensor are one copy
by an index, as calls cost more than elements there. Parts of one shape alone are the matter of
`dtensor.redistribute.executor.even`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from dtensor.redistribute.geometry import Region, Runs, region_shape, region_size
from dtensor.spec import contiguous_stride

__all__ = ["SMALL", "Local", "Piece", "copier", "in_order", "lies", "maker", "moved", "packer", "paired", "pieces"]

Shape = tuple[int, ...]
Local = Callable[[torch.Tensor], torch.Tensor]

SMALL = 4096
"""Elements up to which one copy by an index, on the CPU, takes less time than two of boxes."""

_FEW = 512
"""Elements up to which `take` is the quickest copy by an index."""

_MOST = 64
"""Pieces from which on the general way is no dearer to run, and far cheaper to find."""


class Piece(NamedTuple):
    """A copy of `size` elements: read by the strides `of` from `at`, written by the strides `to` from `there`."""

    size: Shape
    of: Shape
    at: int
    to: Shape
    there: int


class _Side(NamedTuple):
    """Regions of a contiguous tensor of a shape, which begins at an element of another."""

    region: Region
    whole: Shape
    start: int = 0


def _paired(a: Runs, b: Runs) -> list[tuple[int, int, int]]:
    """Two ways to cut as many elements into runs, as one: start in the first, start in the second, length."""
    pairs = []
    i = j = used_a = used_b = 0
    while i < len(a) and j < len(b):
        n = min(a[i][1] - used_a, b[j][1] - used_b)
        if n:
            pairs.append((a[i][0] + used_a, b[j][0] + used_b, n))
        used_a, used_b = used_a + n, used_b + n
        if used_a == a[i][1]:
            i, used_a = i + 1, 0
        if used_b == b[j][1]:
            j, used_b = j + 1, 0
    return pairs


def _dim(pairs: list[tuple[int, int, int]], s: int, t: int) -> list[Piece]:
    """The pieces of one dim of strides `s` and `t`; runs of one length at even distances are one."""
    found, i = [], 0
    while i < len(pairs):
        a, b, n = pairs[i]
        k, da, db = 1, 0, 0
        if i + 1 < len(pairs):
            da, db = pairs[i + 1][0] - a, pairs[i + 1][1] - b
            while i + k < len(pairs) and pairs[i + k] == (a + k * da, b + k * db, n):
                k += 1
        if k == 1:
            found.append(Piece((n,), (s,), a * s, (t,), b * t))
        else:
            found.append(Piece((k, n), (da * s, s), a * s, (db * t, t), b * t))
        i += k
    return found


def _plain(given: Sequence[tuple[int, int, int]]) -> tuple[Shape, Shape, Shape]:
    """Size and strides of the same elements with as few dims as can be, but one at least."""
    dims: list[tuple[int, int, int]] = []
    for n, s, t in given:
        if n == 1:
            continue
        if dims and dims[-1][1] == s * n and dims[-1][2] == t * n:
            dims[-1] = dims[-1][0] * n, s, t
        else:
            dims.append((n, s, t))
    if not dims:
        dims.append((1, 1, 1))
    return tuple([d[0] for d in dims]), tuple([d[1] for d in dims]), tuple([d[2] for d in dims])


def _between(of: _Side, to: _Side) -> list[Piece]:
    """The copies that bring a region of one tensor to one of another."""
    strides = contiguous_stride(of.whole), contiguous_stride(to.whole)
    if all(len(a) == 1 == len(b) for a, b in zip(of.region, to.region)):
        boxes = [*zip(of.region, to.region, *strides)]
        size, read, written = _plain([(a[0][1], s, t) for a, _, s, t in boxes])
        at, there = sum([a[0][0] * s for a, _, s, _ in boxes]), sum([b[0][0] * t for _, b, _, t in boxes])
        return [Piece(size, read, of.start + at, written, to.start + there)]
    by_dim = [_dim(_paired(a, b), s, t) for a, b, s, t in zip(of.region, to.region, *strides)]
    if math.prod([len(d) for d in by_dim]) > _MOST:
        return []
    found = []
    for parts in itertools.product(*by_dim):
        dims = [d for p in parts for d in zip(p.size, p.of, p.to)]
        size, read, written = _plain(dims)
        at, there = sum([p.at for p in parts]), sum([p.there for p in parts])
        found.append(Piece(size, read, of.start + at, written, to.start + there))
    return found


def _levels(points: list[tuple[int, int]]) -> list[tuple[int, int, int]] | None:
    """Places in two tensors as levels of even distances, from the outermost; None where they are not such."""
    found = []
    while len(points) > 1:
        s, t = points[1][0] - points[0][0], points[1][1] - points[0][1]
        if s < 0 or t < 0:
            return None
        n = 2
        while n < len(points) and points[n] == (points[0][0] + n * s, points[0][1] + n * t):
            n += 1
        if len(points) % n:
            return None
        for i in range(0, len(points), n):
            a, b = points[i]
            if any(points[i + j] != (a + j * s, b + j * t) for j in range(1, n)):
                return None
        found.append((n, s, t))
        points = points[::n]
    return found[::-1]


def _grouped(found: Sequence[Piece]) -> list[Piece]:
    """As few pieces as those that are alike can be."""
    kinds: dict[tuple[Shape, Shape, Shape], list[tuple[int, int]]] = {}
    for p in found:
        kinds.setdefault((p.size, p.of, p.to), []).append((p.at, p.there))
    out = []
    for (size, of, to), points in kinds.items():
        runs = [points] if _levels(points) is not None else _runs(points)
        for some in runs:
            levels = _levels(some) or []
            n, read, written = _plain([*levels, *zip(size, of, to)])
            out.append(Piece(n, read, some[0][0], written, some[0][1]))
    return out


def _runs(points: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Places cut into stretches of even distances."""
    out: list[list[tuple[int, int]]] = [[points[0]]]
    for p in points[1:]:
        run = out[-1]
        apart = p[0] - run[-1][0], p[1] - run[-1][1]
        if min(apart) >= 0 and (len(run) == 1 or apart == (run[1][0] - run[0][0], run[1][1] - run[0][1])):
            run.append(p)
        else:
            out.append([p])
    return out


def pieces(moves: Sequence[tuple[_Side, _Side]]) -> list[Piece] | None:
    """The copies that bring each first region to its second; None where they are too many."""
    found: list[Piece] = []
    for of, to in moves:
        if not region_size(of.region):
            continue
        some = _between(of, to)
        found += some
        if not some or len(found) > _MOST * 8:
            return None
    found = _joined(_grouped(found))
    return found if len(found) <= _MOST else None


def _joined(found: list[Piece]) -> list[Piece]:
    """Stretches that follow each other on both sides as one."""
    out: list[Piece] = []
    for p in sorted(found, key=lambda p: p.there):
        last = out[-1] if out else p
        ends = last.at + last.size[0], last.there + last.size[0]
        if out and p.of == p.to == last.of == last.to == (1,) and ends == (p.at, p.there):
            out[-1] = last._replace(size=(last.size[0] + p.size[0],))
        else:
            out.append(p)
    return out


def moved(of: Region, shape: Shape, to: Region, out_shape: Shape) -> list[Piece] | None:
    """The copies that bring a region of a tensor of `shape` to one of a tensor of `out_shape`."""
    return pieces([(_Side(of, shape), _Side(to, out_shape))])


def lies(regions: Sequence[Region], whole: Shape, starts: Sequence[int], out: bool) -> list[Piece] | None:
    """Copies between a tensor of shape `whole` and a buffer in which its regions lie at `starts`.

    From the buffer into the tensor with `out`, else the other way.
    """
    moves = []
    for region, start in zip(regions, starts):
        part = region_shape(region)
        ends = _Side(region, whole), _Side(tuple([((0, n),) for n in part]), part, start)
        moves.append(ends[::-1] if out else ends)
    return pieces(moves)


def paired(regions: Sequence[Region]) -> list[Region]:
    """Regions of a tensor of complex numbers, in the same tensor as pairs of reals along a new last dim."""
    return [(*region, ((0, 2),)) for region in regions]


def copier(found: Sequence[Piece]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """From the first tensor into the second, both contiguous; the second begins at its storage's first element."""
    known = tuple(found)

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        first = x.storage_offset()
        for size, of, at, to, there in known:
            y.as_strided(size, to, there).copy_(x.as_strided(size, of, first + at))

    return run


def in_order(found: Sequence[Piece]) -> int | None:
    """How far before the second tensor's places those of the first are, all alike; None where it is not so."""
    first = found[0].at - found[0].there
    same = all(p.of == p.to and p.at - p.there == first for p in found)
    return first if same else None


def maker(found: Sequence[Piece], shape: Shape, gaps: Sequence[tuple[int, int]] = ()) -> Local:
    """From a contiguous tensor a new one of `shape`, contiguous, that the copies fill.

    `gaps`, start and length, are not filled and of no use, but are sent: they have the value of some element, or 0.
    """
    total = math.prod(shape)
    if len(found) == 1 and not found[0].there and found[0].to == contiguous_stride(found[0].size):
        (size, of, at, _, _), copy = found[0], torch.as_strided_copy
        if total == math.prod(size) and (total > SMALL or size == shape):
            if size == shape:
                return lambda x: copy(x, size, of, x.storage_offset() + at)
            return lambda x: copy(x, size, of, x.storage_offset() + at).view(shape)
    put = copier(found)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(shape)
        put(x, out)
        for start, n in gaps:
            out.as_strided((n,), (1,), start).zero_()
        return out

    return run if total > SMALL else _picker(found, shape, run)


def _picker(found: Sequence[Piece], shape: Shape, elsewhere: Local) -> Local:
    """One copy by an index, which is made when first used; `elsewhere` than on the CPU others are better."""
    index: torch.Tensor | None = None
    few = math.prod(shape) <= _FEW
    known = tuple(found)

    def made() -> torch.Tensor:
        with torch.inference_mode(False):
            places = torch.zeros(shape if few else math.prod(shape), dtype=torch.int64, device="cpu")
            for size, of, at, to, there in known:
                place = torch.full((), at, device="cpu")
                for n, s in zip(size, of):
                    place = place.unsqueeze(-1) + torch.arange(n, device="cpu") * s
                places.as_strided(size, to, there).copy_(place)
        return places

    def run(x: torch.Tensor) -> torch.Tensor:
        nonlocal index
        if not x.is_cpu:
            return elsewhere(x)
        if index is None:
            index = made()
        return x.take(index) if few else x.view(-1).index_select(0, index).view(shape)

    return run


def packer(regions: Sequence[Region], whole: Shape) -> Local | None:
    """Regions of a contiguous tensor one after the other, 1-D: a view where they lie so, else one buffer.

    None where that takes too many copies.
    """
    sizes, numel = [*map(region_size, regions)], math.prod(whole)
    total = sum(sizes)
    if not total:
        return lambda x: x.new_empty(0)
    found = lies(regions, whole, [0, *accumulate(sizes)], False)
    if found is None:
        return None
    start = in_order(found)
    if start is None:
        return maker(found, (total,))
    if total == numel:
        return lambda x: x.view(-1)
    return lambda x: x.as_strided((total,), (1,), x.storage_offset() + start)
