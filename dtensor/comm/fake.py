"""A world that does not exist: one rank of any number, shapes only, traffic counted.

Meshes made inside `dtensor.simulate.fake_world(n)` get these communicators. Every collective gives zeros of
the right shape and dtype at once, and is written down in `FakeWorld.traffic`. Nothing here grows with the number of
ranks but the list of ranks of the axes that are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtensor.comm.communicator import Communicator, Shape
from dtensor.comm.observers import observers, received
from dtensor.comm.pending import Pending
from dtensor.comm.reduce_ops import check_reduction
from dtensor.comm.world import World, fresh_identity
from dtensor.errors import expect

__all__ = ["FakeCommunicator", "FakeWorld", "Traffic"]


class Traffic(NamedTuple):
    """One collective: its `kind`, the size of the group, elements and bytes that this rank receives."""

    kind: str
    size: int
    elements: int
    bytes: int


class FakeWorld(World):
    """Rank `rank` of `size` ranks that are not there. `traffic`: the collectives issued so far, in order.

    Raises ValueError for a rank outside 0..size-1.
    """

    __slots__ = ("traffic",)

    def __init__(self, size: int, rank: int = 0) -> None:
        for name, value in (("world_size", size), ("rank", rank)):
            expect("fake_world", name, value, int, "an int", "fake_world(8, rank=0)")
        if not 0 <= rank < size:
            raise ValueError(
                f"fake_world({size}, rank={rank}): the rank must be in 0..{size - 1}\n  fix: fake_world(8, rank=0)"
            )
        super().__init__("fake", rank, size, fresh_identity("fake"))
        self.traffic: list[Traffic] = []

    def communicator(self, ranks: tuple[int, ...], position: int) -> FakeCommunicator:
        """The communicator of `ranks` (mesh order), in which this rank has `position`."""
        return FakeCommunicator(self, ranks, position)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Raises RuntimeError: there are no process groups here."""
        raise RuntimeError(
            "a fake world has no process groups, only communicators: use mesh.comm(axis), or run the function "
            "on simulated ranks, dtensor.simulate(n)(fn)"
        )


class FakeCommunicator(Communicator):
    """Zeros of the right shapes, and a line in the world's `traffic` for every collective."""

    __slots__ = ("_world",)

    def __init__(self, world: FakeWorld, ranks: Sequence[int], rank: int) -> None:
        super().__init__(ranks, rank)
        self._world = world

    def _report(self, kind: str, elements: int, itemsize: int) -> None:
        self._world.traffic.append(Traffic(kind, self.size, elements, elements * itemsize))
        if len(observers):
            observers.report(kind, self.ranks, elements, itemsize)

    def _all_reduce(self, x: torch.Tensor, op: str, async_op: bool) -> Pending[torch.Tensor]:
        check_reduction(op, x.dtype)
        self._report("all_reduce", received("all_reduce", self.size, self.rank, x.numel()), x.itemsize)
        return Pending(_zeros(x, x.shape))

    def _all_gather(self, x: torch.Tensor, shapes: Sequence[Shape], async_op: bool) -> Pending[list[torch.Tensor]]:
        self._report("all_gather", received("all_gather", self.size, self.rank, shapes), x.itemsize)
        return Pending([_zeros(x, s) for s in shapes])

    def _reduce_scatter(self, parts: Sequence[torch.Tensor], op: str, async_op: bool) -> Pending[torch.Tensor]:
        own = parts[self.rank]
        check_reduction(op, own.dtype)
        self._report(
            "reduce_scatter", received("reduce_scatter", self.size, self.rank, [p.shape for p in parts]), own.itemsize
        )
        return Pending(_zeros(own, own.shape))

    def _all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], async_op: bool
    ) -> Pending[list[torch.Tensor]]:
        self._report("all_to_all", received("all_to_all", self.size, self.rank, shapes), parts[0].itemsize)
        return Pending([_zeros(parts[0], s) for s in shapes])

    def _broadcast(self, x: torch.Tensor, src: int, async_op: bool) -> Pending[torch.Tensor]:
        self._report("broadcast", 0 if src == self.rank else x.numel(), x.itemsize)
        return Pending(x.clone(memory_format=torch.contiguous_format) if src == self.rank else _zeros(x, x.shape))

    def _scatter(
        self,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int,
        shapes: Sequence[Shape] | None,
        async_op: bool,
    ) -> Pending[torch.Tensor]:
        self._report("scatter", 0 if src == self.rank else like.numel(), like.itemsize)
        return Pending(_zeros(like, like.shape) if parts is None else parts[self.rank].clone())


def _zeros(like: torch.Tensor, shape: Shape) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)
