"""Cost model: the seconds that moving data takes, as plans and strategies are compared.

A collective over `k` positions costs

    latency + hops * hop + bytes received / bandwidth

where a ring passes `k - 1` hops (an all-reduce twice as many) and an all-to-all takes a little more to launch.
The numbers only have to order the alternatives rightly; they are global facts, the same on all
ranks, so that all ranks decide alike. Where a backend works in other ways (gloo sends the messages of an all-to-all
side by side, and reduces in full what it scatters), `kinds` says how many times the delay and the transfer are.

    >>> CostModel().all_gather(8, 1 << 20) < CostModel().all_reduce(8, 8 << 20)
    True
    >>> slow_outer = CostModel(axis_bandwidth={0: 12e9}, slack=math.inf)          # axis 0 crosses hosts
    >>> with use_cost_model(slow_outer):
    ...     plan = plan_reshard(src, dst)

Two ways to choose. With a finite `slack` a redistribution receives no more than `slack` times the fewest bytes,
in the fewest collectives that allow it: right without any measurement, because it needs no numbers. With
`slack=math.inf` the seconds alone decide between fewer bytes and fewer launches; then they should be measured
(`python -m dtensor.calibrate`).

A model also says in which dtype a redistribution adds up pending sums, where that is not the tensor's own:

    >>> with use_cost_model(CostModel(wire={torch.bfloat16: torch.float32})):   # exact to one rounding, twice the bytes
    ...     y = x.redistribute(placements=[Replicate()])                        # bf16, as x is

Between layouts of one mesh the same few groups of axes come again and again, so what does not depend on bytes is worked
out once for each, in the mesh's `Links`:

    axes (0, 1) of a mesh (2, 4)     8 positions, the launch and hops of a ring, of a reduction, of an all-to-all; bytes
                                     a second of the slower of the two

A model that replaces a method of `CostModel` is asked each time instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from dtensor.errors import expect

if TYPE_CHECKING:
    import torch

__all__ = ["CostModel", "Link", "Links", "current_cost_model", "links_of", "set_cost_model", "use_cost_model"]

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")
_ONCE = (1.0, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class CostModel:
    """Latency and bandwidth of the links, and what the collectives over them cost.

    Every method gives seconds. `size` is the number of positions that take part, `local_bytes` the bytes of
    the tensor that this rank puts in, `axes` the mesh axes that the collective runs over: the slowest of them
    counts. Subclasses may replace any method; costs must not be negative and may depend on nothing else.
    Models are compared by identity: change one by making another.

    Attributes:
        latency: seconds to launch one collective.
        hop: seconds each step of a ring adds.
        pairwise: share of a launch that an all-to-all takes more: it sends more messages than a ring.
        bandwidth: bytes per second that a rank receives.
        copy_bandwidth: bytes per second of a local copy.
        kernel: seconds to start a local op.
        axis_latency, axis_bandwidth: by mesh axis, where they differ.
        kinds: by name of a method below (all_reduce and so on): what its delay and its transfer are multiplied by.
        slack: plans that receive more than this many times the fewest bytes are left out, and of the others those
            with the fewest collectives are compared; inf: seconds alone decide.
        wire: by dtype of a tensor, the dtype in which its pending sums and averages travel and are added up; the
            result has the tensor's dtype again. {bfloat16: float32} rounds once, {float32: bfloat16} sends half.
    """

    latency: float = 6.6e-6
    hop: float = 0.6e-6
    pairwise: float = 0.125
    bandwidth: float = 80e9
    copy_bandwidth: float = 800e9
    kernel: float = 0.6e-6
    axis_latency: Mapping[int, float] = field(default_factory=dict)
    axis_bandwidth: Mapping[int, float] = field(default_factory=dict)
    kinds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    slack: float = 1.05
    wire: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        speeds = [self.bandwidth, self.copy_bandwidth, *self.axis_bandwidth.values()]
        delays = [self.latency, self.hop, self.pairwise, self.kernel, *self.axis_latency.values()]
        if min(speeds) <= 0 or min(delays) < 0:
            raise ValueError(f"CostModel: bandwidths must be positive and latencies not negative, got {self!r}")
        if any(kind not in COLLECTIVES for kind in self.kinds) or any(min(both) <= 0 for both in self.kinds.values()):
            raise ValueError(f"CostModel: kinds are of {', '.join(COLLECTIVES)} and must be positive, got {self.kinds}")
        if self.slack < 1:
            raise ValueError(f"CostModel: slack must be positive, at least 1, got {self.slack!r}")
        for own, other in self.wire.items():
            if not (own.is_floating_point and other.is_floating_point or own.is_complex and other.is_complex):
                raise ValueError(f"CostModel: wire is from float to float or complex to complex, got {own}: {other}")

    @property
    def by_seconds(self) -> bool:
        """True where seconds alone decide."""
        return self.slack == math.inf

    def launch(self, axes: Sequence[int] = ()) -> float:
        """Starting one collective over `axes`."""
        if not self.axis_latency:
            return self.latency
        return max([self.axis_latency.get(a, self.latency) for a in axes], default=self.latency)

    def transfer(self, nbytes: float, axes: Sequence[int] = ()) -> float:
        """Receiving `nbytes` over `axes`."""
        if not self.axis_bandwidth:
            return nbytes / self.bandwidth
        return nbytes / min([self.axis_bandwidth.get(a, self.bandwidth) for a in axes], default=self.bandwidth)

    def times(self, kind: str) -> tuple[float, float]:
        """What the delay and the transfer of a kind of collective are multiplied by."""
        return self.kinds.get(kind, _ONCE)

    def least_times(self) -> tuple[float, float]:
        """No kind's delay and transfer are multiplied by less."""
        every = [self.times(kind) for kind in COLLECTIVES]
        return min([delay for delay, _ in every]), min([pace for _, pace in every])

    def _takes(self, kind: str, delay: float, transfer: float) -> float:
        often, long = self.times(kind)
        return often * delay + long * transfer

    def all_gather(self, size: int, local_bytes: float, axes: Sequence[int] = ()) -> float:
        """Every position receives the others' `local_bytes`."""
        if size <= 1:
            return 0.0
        delay = self.launch(axes) + (size - 1) * self.hop
        return self._takes("all_gather", delay, self.transfer(local_bytes * (size - 1), axes))

    def reduce_scatter(self, size: int, local_bytes: float, axes: Sequence[int] = ()) -> float:
        """Every position keeps 1/size of the reduction of `local_bytes`."""
        if size <= 1:
            return 0.0
        delay = self.launch(axes) + (size - 1) * self.hop
        return self._takes("reduce_scatter", delay, self.transfer(local_bytes * (size - 1) / size, axes))

    def all_reduce(self, size: int, local_bytes: float, axes: Sequence[int] = ()) -> float:
        """Every position gets the reduction of `local_bytes`."""
        if size <= 1:
            return 0.0
        delay = self.launch(axes) + 2 * (size - 1) * self.hop
        return self._takes("all_reduce", delay, self.transfer(2 * local_bytes * (size - 1) / size, axes))

    def all_to_all(self, size: int, local_bytes: float, axes: Sequence[int] = ()) -> float:
        """Every position sends 1/size of its `local_bytes` to each of the others."""
        if size <= 1:
            return 0.0
        delay = self.launch(axes) * (1 + self.pairwise) + (size - 1) * self.hop
        return self._takes("all_to_all", delay, self.transfer(local_bytes * (size - 1) / size, axes))

    def broadcast(self, size: int, local_bytes: float, axes: Sequence[int] = ()) -> float:
        """Every position receives the `local_bytes` of one."""
        if size <= 1:
            return 0.0
        delay = self.launch(axes) + (size - 1) * self.hop
        return self._takes("broadcast", delay, self.transfer(local_bytes, axes))

    def local_copy(self, nbytes: float) -> float:
        """Copying `nbytes` in this rank's memory."""
        return nbytes / self.copy_bandwidth

    def floor(self, launches: int, nbytes: float) -> float:
        """No plan of `launches` collectives that receives `nbytes` costs less: lets a search stop. Linear in both."""
        delay, pace = self.least_times()
        latency = delay * min([self.latency, *self.axis_latency.values()])
        return launches * latency + pace * nbytes / max([self.bandwidth, *self.axis_bandwidth.values()])


_default = CostModel()
_current: ContextVar[CostModel | None] = ContextVar("cost_model", default=None)


def current_cost_model() -> CostModel:
    """The model in force: of the innermost `use_cost_model` of this thread, else the process's."""
    return _current.get() or _default


def set_cost_model(model: CostModel) -> CostModel:
    """Make `model` the process's (all ranks must set the same) and return the one it replaces."""
    global _default
    expect("set_cost_model", "model", model, CostModel, "a CostModel", "set_cost_model(CostModel())")
    before, _default = _default, model
    return before


@contextmanager
def use_cost_model(model: CostModel) -> Iterator[CostModel]:
    """Decide by `model` inside the `with`, on this thread. All ranks must use the same one."""
    expect("use_cost_model", "model", model, CostModel, "a CostModel", "with use_cost_model(CostModel()):")
    token = _current.set(model)
    try:
        yield model
    finally:
        _current.reset(token)


# ------------------------------------------------------------ the links of a mesh
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
        kinds_differ: True where kinds of collectives differ by more than their hops and bytes.
    """

    __slots__ = ("_groups", "_links", "_some", "_usual", "launch", "model", "pace", "sizes", "kinds_differ")

    def __init__(self, model: CostModel, sizes: tuple[int, ...]) -> None:
        self.model, self.sizes = model, sizes
        self._usual = all(getattr(type(model), name) is getattr(CostModel, name) for name in _METHODS)
        long = [a for a, k in enumerate(sizes) if k > 1]
        self._links: dict[tuple[int, ...], Link] = {}
        self._groups: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self._some: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self.kinds_differ = bool(model.kinds)
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
