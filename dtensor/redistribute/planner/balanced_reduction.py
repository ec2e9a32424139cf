"""Reducing where there is room, then moving: pending sums whose results end up on other ranks than hold them.

A reduction of k parts of an element takes k - 1 arrivals, and every rank that wants the element and has not reduced it
takes one more. Where they arrive is free, so they can be spread until all ranks receive alike. On a mesh (2, 4):

    [P, S(0)] -> [S(0), S(0)]   eighth 1 of the rows is pending on (0,0) and (1,0) and wanted on (0,1). Were it reduced
                                where it is wanted, (0,1) would receive two eighths and (0,0), which has half of what it
                                wants, one. Three quarters of it are reduced on the holders: each rank receives 1.75.

The ranks along the axes that must talk or are pending are looked at together; in such a group each part of an element
has one holder. The elements fall into classes with the same holders H and the same wanting ranks W. With every wanting
rank receiving each of its elements once, what is left to spread is, for each element,

    H and W share a rank     k - 2 arrivals, on any of H. A rank of both that takes them receives the k - 1 other parts;
                             another first adds up all but the part of a rank of both, and sends it the sum
    they share none          k - 1 arrivals, on any of H or W

`dtensor.redistribute.planner.division` levels the ranks' loads and divides the classes into boxes, each with the rank
that reduces it. Two all-to-alls do it, parts to the reducer and results to the ranks that want them, or three where a
sum goes through a rank of both to others. In between no rank holds a shard, so all of it is one step of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtensor.placement import Partial
from dtensor.redistribute.planner.layout_space import Facts, Path, Space
from dtensor.spec import Spec

__all__ = ["in_stages", "spread"]

_MOST_RANKS, _MOST_CLASSES = 32, 512
"""Larger groups, and finer splits, reduce in other ways: the division takes time that grows with both."""
_IN_STAGES = frozenset({"sum", "avg", "product", "max", "min", "band", "bor", "bxor"})


def in_stages(spec: Spec) -> bool:
    """True where the pending parts of `spec` may be reduced some first and the others later, with the same meaning.

    Not norms, which take a root, nor dtypes that are added up in a wider one and rounded once.
    """
    kinds = {p.reduce_op for p in spec.placements if isinstance(p, Partial)}
    if not kinds <= _IN_STAGES or spec.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return False
    return not str(spec.dtype).startswith("torch.float8")


def spread(space: Space, src: Facts, dst: Facts, axes: tuple[int, ...], pending: Sequence[int]) -> Path | None:
    """The step from `src`, which is pending on `pending`, to `dst`, over `axes`: those, and those that must talk.

    None where the group is too large or too finely sharded, or the parts cannot be reduced in stages.
    """
    if not space.in_stages or not space.shape or space.ranks(axes) > _MOST_RANKS:
        return None
    classes = 1
    for layout in (src, dst):
        for splits in layout.splits:
            for a, factor in splits:
                classes *= space.sizes[a] * (factor or 1) if a in axes else 1
    if classes > _MOST_CLASSES:
        return None
    k = space.ranks(pending)
    launches = 2 if k == 2 or all(dst.dim_of[a] >= 0 or space.sizes[a] == 1 for a in axes) else 3
    return space.spread_step(axes, src, dst, int(level(space, src, dst, axes, k)), launches)


def level(space: Space, src: Facts, dst: Facts, axes: tuple[int, ...], k: int) -> float:
    """Bytes that each rank receives when a reduction of k parts is spread over the ranks along `axes`.

    Counted by the digits of the index that each axis fixes, as though all shards were even. For a share `both` of the
    elements there is a rank that holds a part and wants the result: along every axis that shards them before and after,
    the digits must be the same. Where only a circle of axes change digits, `room` is the share of the ranks that
    have to do with the other elements.
    """
    both, circles, links = 1.0, 0, 0
    known: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def root(digit: tuple[int, int, int]) -> tuple[int, int, int]:
        while digit in known:
            digit = known[digit]
        return digit

    have, want = _digits_of(space, src, axes), _digits_of(space, dst, axes)
    for a, digit in have.items():
        if a not in want or digit == want[a]:
            continue
        one, other = root(digit), root(want[a])
        links += 1
        if one == other:
            circles += 1
        else:
            known[one], both = other, both / space.sizes[a]
    copies = space.ranks([a for a in axes if a not in want])
    spare = (1 - both) * (k - 1) + both * (k - 2)
    room = 1 - both if k == 2 and circles and both < 1 and links == 2 * circles else 1.0
    apart = {a for layout in (src, dst) for splits in layout.splits for a, _ in splits if a not in axes}
    mean = space.nbytes_of_all / space.ranks([*apart, *axes])
    return max(dst.nbytes, mean * (copies + spare / room))


def _digits_of(space: Space, layout: Facts, axes: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    """The digit of an index that each of `axes` fixes: (dim, what is sharded before it, its size)."""
    found = {}
    for d, splits in enumerate(layout.splits):
        before = 1
        for a, factor in splits:
            before *= max(factor, 1)
            if a in axes:
                found[a] = (d, before, space.sizes[a])
            before *= space.sizes[a]
    return found
