"""From layout to layout in at most one collective, where nothing is reduced: over which axes, of which kind.

[S(0), R]    -> [R, S(0)]       all-to-all over axis 0: half of the ranks hold what they want
[S(0), S(0)] -> [S(0), S(1)]    all-to-all over axis 1
[S(0), S(1)] -> [R, R]          all-gather over both
[S(0), R]    -> [R, S(1)]       slice, then all-gather over axis 0
"""

from __future__ import annotations

from dtensor.redistribute.planner.layout_space import Facts, Path, Space, is_sharded
from dtensor.redistribute.step import Step

__all__ = ["alike", "one_shot", "moving_axes"]


def moving_axes(space: Space, have_all: Facts, want_all: Facts) -> tuple[tuple[int, ...], bool]:
    """The axes over which data must move between layouts, and whether splits are only dropped, not added.

    Where an axis fixes the same digits of a dim's index in both (or, where shards are uneven, where the splits of a
    dim begin alike), it keeps apart what it kept apart; every other axis that shards the first has data that ranks
    elsewhere on it want. Axes that only split the second need none: each position takes its part.
    """
    key = have_all, want_all
    found = space.moving_axes.get(key)
    if found is not None:
        return found
    over: set[int] = set()
    pure = True
    for n, s, t in zip(space.shape, have_all.splits, want_all.splits):
        if s == t or not s:
            continue
        if not t:
            over.update([axis for axis, _ in s])
            continue
        have, want = space.digits(n, s), space.digits(n, t)
        if have is not None and want is not None:
            moved = [axis for axis, pieces in have.items() if want.get(axis) != pieces]
            over.update(moved)
            pure = pure and not (moved and any(have.get(axis) != pieces for axis, pieces in want.items()))
            continue
        same = 0
        for one, other in zip(s, t):
            if one != other:
                break
            same += 1
        if same < len(s):
            over.update([axis for axis, _ in s[same:]])
            pure = pure and same == len(t)
    found = space.moving_axes[key] = tuple(sorted(over)), pure
    return found


def alike(space: Space, have_all: Facts, want_all: Facts) -> bool:
    """True where every rank holds the same in both layouts."""
    for n, s, t in zip(space.shape, have_all.splits, want_all.splits):
        if s == t:
            continue
        if not s or not t:
            return False
        have = space.digits(n, s)
        if have is None or have != space.digits(n, t):
            return False
    return True


def one_shot(space: Space, have: Facts, want: Facts) -> Path:
    """At most one collective (and a slice) between layouts whose Partial axes agree.

    Within the ranks along the `moving_axes` the shards of the first are disjoint and together hold all that any of them
    wants, so each element has one source, and every rank receives just what it lacks.

        [S(0), R] -> [R, S(0)]       over = {0}: each takes its part of the axis-0 row
        [S(0), S(0)] -> [S(0), S(1)] over = {1}: axis 0 comes first in both
        [S(0), S(0)] -> [R, S(0)]    over = {0, 1}

    Input: layouts with the same Partial axes. Returns: no steps where the layouts sharded alike; a slice where
    none must talk; an all-gather (after a slice) where all ranks along `over` want all that they hold together;
    else an all-to-all with split sizes.
    """
    if have is want:
        return 0.0, ()
    axes, pure = moving_axes(space, have, want)
    src, dst = have.layout, want.layout
    if not axes:
        if alike(space, have, want):
            return 0.0, (Step("keep", (), src, dst),)
        return space.step("slice", tuple([a for a, p in enumerate(src) if p is not dst[a]]), have, want)
    if pure and not any(want.dim_of[a] >= 0 for a in axes):
        mid = space.facts(tuple([p if a in axes or is_sharded(p) else dst[a] for a, p in enumerate(src)]))
        if alike(space, mid, have):
            return space.step("all_gather", axes, have, want)
        cost, first = one_shot(space, have, mid)
        if first and (moving_axes(space, mid, want) != (axes, True) or first[0].is_collective):
            return space.step("all_to_all", axes, have, want)
        gather, second = space.step("all_gather", axes, mid if first else have, want)
        return cost + gather, first + second
    return space.step("all_to_all", axes, have, want)
