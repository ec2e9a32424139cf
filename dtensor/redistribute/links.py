"""What collectives cost on one mesh by one cost model: tables that all its plans share.

A cost model gives seconds for (size, bytes, axes). Between layouts of one mesh the same few groups of axes come again
and again, so what does not depend on bytes is worked out once for each:

    axes (0, 1) of a mesh (2, 4)     8 positions, the launch and hops of a ring, of a reduction, of an all-to-all; bytes
                                     a second of the slower of the two

A model that replaces a method of `CostModel` is asked each time instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from dtensor.redistribute.cost_model import CostModel

__all__ = ["Link", "Links", "links_of"]

_ALIKE = 1.25
"""Links whose speeds differ by less are as fast as each other: a measurement is not more exact."""
_METHODS = (
    "launch", "transfer", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "local_copy", "floor", "times",
)  # fmt: skip


class Link:
    """Collectives over some axes of a mesh, of at least two positions. Every method gives seconds.

    Attributes:
        size: positions.
        ring, exchange: seconds that an all-gather and an all-to-all of nothing take.
        least: seconds that any collective over these axes, or over more, takes at least.
    """

    __slots__ = ("_gather", "_reduce", "_scatter", "_swap", "exchange", "least", "ring", "size")

    def __init__(self, model: CostModel, size: int, axes: tuple[int, ...]) -> None:
        launch, hops = model.launch(axes), (size - 1) * model.hop
        bandwidth = model.bandwidth
        if model.axis_bandwidth:
            bandwidth = min([model.axis_bandwidth.get(a, model.bandwidth) for a in axes])
        self.size = size
        delays = {
            "all_gather": launch + hops, "reduce_scatter": launch + hops, "all_reduce": launch + 2 * hops,
            "all_to_all": launch * (1 + model.pairwise) + hops,
        }  # fmt: skip
        times = {kind: model.times(kind) for kind in delays}
        took = {kind: (delay * times[kind][0], times[kind][1] / bandwidth) for kind, delay in delays.items()}
        self._gather, self._scatter = took["all_gather"], took["reduce_scatter"]
        self._reduce, self._swap = took["all_reduce"], took["all_to_all"]
        self.ring, self.exchange = self._gather[0], self._swap[0]
        self.least = min([delay for delay, _ in took.values()])

    def all_gather(self, received: float) -> float:
        """Every position receives so many bytes from the others together."""
        delay, pace = self._gather
        return delay + received * pace

    def reduce_scatter(self, nbytes: float) -> float:
        """Every position puts in so many bytes and keeps its share of the reduction."""
        delay, pace = self._scatter
        return delay + nbytes * (self.size - 1) / self.size * pace

    def all_reduce(self, nbytes: float) -> float:
        """Every position puts in so many bytes and gets the reduction."""
        delay, pace = self._reduce
        return delay + 2 * nbytes * (self.size - 1) / self.size * pace

    def all_to_all(self, received: float) -> float:
        """Every position receives so many bytes from the others together."""
        delay, pace = self._swap
        return delay + received * pace


class _Asked(Link):
    """Of a model that replaces methods."""

    __slots__ = ("_axes", "_model")

    def __init__(self, model: CostModel, size: int, axes: tuple[int, ...]) -> None:
        self._model, self._axes, self.size = model, axes, size
        self.ring, self.exchange = model.all_gather(size, 0, axes), model.all_to_all(size, 0, axes)
        self.least = model.floor(1, 0)

    def all_gather(self, received: float) -> float:
        return self._model.all_gather(self.size, received / (self.size - 1), self._axes)

    def reduce_scatter(self, nbytes: float) -> float:
        return self._model.reduce_scatter(self.size, nbytes, self._axes)

    def all_reduce(self, nbytes: float) -> float:
        return self._model.all_reduce(self.size, nbytes, self._axes)

    def all_to_all(self, received: float) -> float:
        return self._model.all_to_all(self.size, received * self.size / (self.size - 1), self._axes)


class Links:
    """The collectives of a mesh with axes of `sizes`, by `model`.

    Attributes:
        launch: seconds that any collective takes at least, its hops included.
        pace: seconds that receiving a byte takes at least.
        unlike: True where kinds of collectives differ by more than their hops and bytes.
    """

    __slots__ = ("_groups", "_links", "_some", "_usual", "launch", "model", "pace", "sizes", "unlike")

    def __init__(self, model: CostModel, sizes: tuple[int, ...]) -> None:
        self.model, self.sizes = model, sizes
        self._usual = all(getattr(type(model), name) is getattr(CostModel, name) for name in _METHODS)
        long = [a for a, k in enumerate(sizes) if k > 1]
        self._links: dict[tuple[int, ...], Link] = {}
        self._groups: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self._some: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self.unlike = bool(model.kinds)
        if self._usual and long:
            self.launch = min([self.over((a,)).least for a in long])
            self.pace = model.least_times()[1] * min([model.transfer(1.0, (a,)) for a in long])
        else:
            self.launch, self.pace = model.floor(1, 0), model.floor(0, 1 << 20) / (1 << 20)

    def over(self, axes: tuple[int, ...]) -> Link:
        """The collectives over `axes`."""
        found = self._links.get(axes)
        if found is None:
            size = math.prod([self.sizes[a] for a in axes])
            found = self._links[axes] = (Link if self._usual else _Asked)(self.model, size, axes)
        return found

    def least(self, axes: tuple[int, ...]) -> float:
        """Seconds that one or more collectives take at least, where each of `axes` must take part in some."""
        return self.launch if not axes else min(self.over(axes).least, 2 * self.launch)

    def by_speed(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Groups of axes whose links are about equally fast, the fastest first; axes of one position are left out."""
        found = self._groups.get(axes)
        if found is None:
            paces = sorted([(self.model.transfer(1.0, (a,)), a) for a in axes if self.sizes[a] > 1])
            groups: list[tuple[int, ...]] = []
            start = 0.0
            for pace, a in paces:
                if groups and pace <= start * _ALIKE:
                    groups[-1] = tuple(sorted((*groups[-1], a)))
                else:
                    groups.append((a,))
                    start = pace
            found = self._groups[axes] = tuple(groups)
        return found

    def some(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Subsets of `axes` worth trying: those of equal speed, single ones, all but one."""
        found = self._some.get(axes)
        if found is None:
            subsets = dict.fromkeys(self.by_speed(axes))
            subsets.update(dict.fromkeys(itertools.combinations(axes, 1)))
            subsets.update(dict.fromkeys(itertools.combinations(axes, len(axes) - 1)))
            found = self._some[axes] = tuple([some for some in subsets if 0 < len(some) < len(axes)])
        return found

    def splitting_saves(self, axes: Sequence[int]) -> float:
        """Seconds that a collective over `axes` takes longer than one after the other, besides bytes."""
        return 0.0 if len(axes) < 2 else self.over(tuple(axes)).ring - sum([self.over((a,)).ring for a in axes])


@lru_cache(maxsize=512)
def links_of(model: CostModel, sizes: tuple[int, ...]) -> Links:
    """One `Links` for a model and mesh."""
    return Links(model, sizes)
