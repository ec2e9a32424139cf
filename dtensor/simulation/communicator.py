"""Communicators of simulated ranks: the definitions, executed.

All ranks live in one process, so a collective is a function from the list of all positions' arguments to the list
of all positions' results. Those functions are `SPECIFICATION`; the last rank to arrive evaluates one of them and
everybody takes its own result. The other communicators are tested against the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from dtensor.comm.communicator import Communicator, Shape
from dtensor.comm.observers import observers, received
from dtensor.comm.pending import Pending
from dtensor.comm.reduce_ops import check_reduction, reduce_tensors
from dtensor.comm.wire import traced
from dtensor.comm.world import World, check_own
from dtensor.simulation.rank_threads import CollectiveMismatch, RankThreads, Signature

__all__ = ["SPECIFICATION", "SimulatedCommunicator", "SimulatedWorld"]

Tensors = Sequence[torch.Tensor]


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def spec_all_reduce(xs: Tensors, op: str) -> list[torch.Tensor]:
    """xs[i] at position i -> the reduction, everywhere."""
    total = reduce_tensors(xs, op)
    return [total, *(total.clone() for _ in xs[1:])]


def spec_all_gather(xs: Tensors) -> list[list[torch.Tensor]]:
    """xs[i] at position i -> all of them, everywhere."""
    return [[_copy(x) for x in xs] for _ in xs]


def spec_reduce_scatter(parts: Sequence[Tensors], op: str) -> list[torch.Tensor]:
    """parts[i][j] at position i -> at j the reduction of parts[:][j]."""
    return [reduce_tensors([p[j] for p in parts], op) for j in range(len(parts))]


def spec_all_to_all(parts: Sequence[Tensors]) -> list[list[torch.Tensor]]:
    """parts[i][j] at position i -> at j the list of parts[:][j]."""
    return [[_copy(p[j]) for p in parts] for j in range(len(parts))]


def spec_broadcast(xs: Tensors, src: int) -> list[torch.Tensor]:
    """xs[i] at position i -> xs[src], everywhere."""
    return [_copy(xs[src]) for _ in xs]


def spec_scatter(parts: Sequence[Tensors | None], src: int) -> list[torch.Tensor]:
    """parts[src] at position src -> at j parts[src][j]. Raises ValueError where the source has none."""
    given = parts[src]
    if given is None:
        raise ValueError(f"scatter: position {src} is the source and must give parts, got None")
    return [_copy(p) for p in given]


SPECIFICATION: dict[str, Callable[..., Any]] = {
    "all_reduce": spec_all_reduce,
    "all_gather": spec_all_gather,
    "reduce_scatter": spec_reduce_scatter,
    "all_to_all": spec_all_to_all,
    "broadcast": spec_broadcast,
    "scatter": spec_scatter,
}


class SimulatedWorld(World):
    """One simulated rank's world. `threads` is the run it belongs to, `c10d` what `torch.distributed` sees of it."""

    __slots__ = ("c10d", "make_group", "threads")

    def __init__(self, threads: RankThreads, rank: int) -> None:
        super().__init__("simulated", rank, threads.size, threads.identity)
        self.threads = threads
        self.c10d: Any = None
        self.make_group: Callable[[tuple[int, ...]], dist.ProcessGroup] | None = None

    def communicator(self, ranks: tuple[int, ...], position: int) -> SimulatedCommunicator:
        """The communicator of `ranks` (mesh order), in which this rank has `position`."""
        return SimulatedCommunicator(self, ranks, position)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A process group of `ranks`, the same one for the same set. Raises RuntimeError where there are none."""
        if self.make_group is None:
            raise RuntimeError(f"{self!r} was made without process groups; run the function with dtensor.simulate")
        return self.make_group(ranks)


def run_local(work: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """`work`, outside autograd and unseen by the dispatch modes of the rank that happens to run it."""

    def run(payloads: list[Any]) -> Sequence[Any]:
        with torch.no_grad():
            if not torch._C._len_torch_dispatch_stack():
                return work(payloads)
            from torch.utils._python_dispatch import _disable_current_modes

            with _disable_current_modes():
                return work(payloads)

    return run


def _has_traced(payload: Any) -> bool:
    """True where a tensor of a trace is among what a rank gives."""
    if isinstance(payload, torch.Tensor):
        return traced(payload)
    return isinstance(payload, (list, tuple)) and any(map(_has_traced, payload))


class SimulatedCommunicator(Communicator):
    """The collectives of simulated ranks. `async_op` changes nothing: the result is there when the call returns."""

    __slots__ = ("_world",)

    def __init__(self, world: SimulatedWorld, ranks: Sequence[int], rank: int) -> None:
        super().__init__(ranks, rank)
        self._world = world

    def _meet(
        self,
        kind: str,
        signature: Signature,
        payload: Any,
        work: Callable[[list[Any]], Sequence[Any]],
        elements: int,
        itemsize: int,
    ) -> Any:
        if len(observers):
            observers.report(kind, self.ranks, elements, itemsize)
        world = self._world
        check_own(world, "this mesh")
        if torch._C._len_torch_dispatch_stack() and _has_traced(payload):
            raise RuntimeError(
                f"{kind} of simulated ranks inside torch.compile: a rank cannot wait for the others while it "
                "compiles; use dtensor.lower, or torch.compile on process groups (gloo, nccl, fake)"
            )
        return world.threads.meet(world.rank, self.ranks, self.rank, (kind, *signature), payload, run_local(work))

    def _all_reduce(self, x: torch.Tensor, op: str, async_op: bool) -> Pending[torch.Tensor]:
        check_reduction(op, x.dtype)
        elements = received("all_reduce", self.size, self.rank, x.numel())
        signature = ("shape", tuple(x.shape), "dtype", x.dtype, "op", op)
        got = self._meet("all_reduce", signature, x, lambda xs: spec_all_reduce(xs, op), elements, x.itemsize)
        return Pending(got)

    def _all_gather(self, x: torch.Tensor, shapes: Sequence[Shape], async_op: bool) -> Pending[list[torch.Tensor]]:
        elements = received("all_gather", self.size, self.rank, shapes)
        signature = ("shapes", tuple(tuple(s) for s in shapes), "dtype", x.dtype)
        return Pending(self._meet("all_gather", signature, x, spec_all_gather, elements, x.itemsize))

    def _reduce_scatter(self, parts: Sequence[torch.Tensor], op: str, async_op: bool) -> Pending[torch.Tensor]:
        own = parts[self.rank]
        check_reduction(op, own.dtype)
        elements = received("reduce_scatter", self.size, self.rank, [p.shape for p in parts])
        signature = ("shapes", tuple(tuple(p.shape) for p in parts), "dtype", own.dtype, "op", op)
        got = self._meet(
            "reduce_scatter", signature, parts, lambda ps: spec_reduce_scatter(ps, op), elements, own.itemsize
        )
        return Pending(got)

    def _all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], async_op: bool
    ) -> Pending[list[torch.Tensor]]:
        elements = received("all_to_all", self.size, self.rank, shapes)
        itemsize = parts[0].itemsize
        signature = ("dtype", parts[0].dtype)
        payload = (parts, [tuple(s) for s in shapes])

        def work(payloads: list[tuple[Tensors, list[tuple[int, ...]]]]) -> Sequence[Any]:
            for j, (_, expected) in enumerate(payloads):
                for i, (sent, _) in enumerate(payloads):
                    if not self._as_flat(expected[i], sent[j].shape):
                        self._agree("all_to_all", j, expected[i], i, sent[j].shape)
            arrived = spec_all_to_all([sent for sent, _ in payloads])
            return [[p.view(s) for p, s in zip(got, expected)] for got, (_, expected) in zip(arrived, payloads)]

        return Pending(self._meet("all_to_all", signature, payload, work, elements, itemsize))

    @staticmethod
    def _as_flat(expected: Shape, sent: Shape) -> bool:
        """True for as many elements, where one side speaks of them as of a 1-D tensor: what travels is the same."""
        return 1 in (len(expected), len(sent)) and prod(expected) == prod(sent)

    def _agree(self, kind: str, receiver: int, expected: Shape, sender: int, sent: Shape) -> None:
        """Raise CollectiveMismatch where a position expects another shape than it is sent."""
        if tuple(expected) != tuple(sent):
            raise CollectiveMismatch(
                f"{kind}: rank {self.ranks[receiver]} expects shape {tuple(expected)} from rank "
                f"{self.ranks[sender]}, which sends {tuple(sent)}"
            )

    def _broadcast(self, x: torch.Tensor, src: int, async_op: bool) -> Pending[torch.Tensor]:
        elements = 0 if src == self.rank else x.numel()
        signature = ("shape", tuple(x.shape), "dtype", x.dtype, "src", src)
        got = self._meet("broadcast", signature, x, lambda xs: spec_broadcast(xs, src), elements, x.itemsize)
        return Pending(got)

    def _scatter(
        self,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int,
        shapes: Sequence[Shape] | None,
        async_op: bool,
    ) -> Pending[torch.Tensor]:
        elements = 0 if src == self.rank else like.numel()
        signature = ("dtype", like.dtype, "src", src)

        def work(payloads: list[tuple[Tensors | None, Shape]]) -> Sequence[Any]:
            out = spec_scatter([given for given, _ in payloads], src)
            for j, (_, expected) in enumerate(payloads):
                self._agree("scatter", j, expected, src, out[j].shape)
            return out

        return Pending(self._meet("scatter", signature, (parts, like.shape), work, elements, like.itemsize))
