"""Communicators: the collectives of one mesh axis (or of several flattened into one).

Positions count along the axis in mesh order, whatever the rank numbers are. The base class checks the
arguments, answers for axes of size 1 without communicating, and leaves the rest to
three implementations: `dtensor.comm.c10d` (process groups), `dtensor.simulation.communicator` (ranks that are threads)
and `dtensor.comm.fake` (shapes only). Every call is at most one collective; results are new tensors, inputs are never
written to, and shapes may be uneven, empty or 0-d. None of it is differentiable: autograd is a layer above. What the
reductions mean is in `dtensor.comm.reduce_ops`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, overload

import torch

from dtensor.comm.pending import Pending
from dtensor.comm.reduce_ops import check_reduction
from dtensor.comm.wire import traced

__all__ = ["Communicator", "Shape", "padding_counts", "traced"]

Shape = Sequence[int]


class Communicator(ABC):
    """The collectives of this rank's group along one axis.

    `size` positions, this rank's own position `rank`, and the `ranks` (global, in mesh order) at them.
    All methods must be called by all ranks of the group, in one order.
    """

    __slots__ = ("rank", "ranks", "size")

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = rank

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if self.size > 8 else "")
        return f"{type(self).__name__}(ranks=({shown}), rank={self.rank})"

    @overload
    def all_reduce(self, x: torch.Tensor, op: str = ..., *, async_op: Literal[False] = ...) -> torch.Tensor: ...
    @overload
    def all_reduce(self, x: torch.Tensor, op: str = ..., *, async_op: bool) -> torch.Tensor | Pending[torch.Tensor]: ...

    def all_reduce(
        self, x: torch.Tensor, op: str = "sum", *, async_op: bool = False
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """Reduce `x` (one shape and dtype on all positions) with `op`: a new tensor, equal on all positions."""
        if self.size == 1:
            check_reduction(op, x.dtype)
            return _done(_copy(x), async_op)
        pending = self._all_reduce(x.detach() if x.requires_grad else x, op, async_op)
        return pending if async_op else pending.wait()

    @overload
    def all_gather(
        self,
        x: torch.Tensor,
        shapes: Sequence[Shape],
        *,
        async_op: Literal[False] = ...,
    ) -> list[torch.Tensor]: ...
    @overload
    def all_gather(
        self, x: torch.Tensor, shapes: Sequence[Shape], *, async_op: bool
    ) -> list[torch.Tensor] | Pending[list[torch.Tensor]]: ...

    def all_gather(
        self, x: torch.Tensor, shapes: Sequence[Shape], *, async_op: bool = False
    ) -> list[torch.Tensor] | Pending[list[torch.Tensor]]:
        """Every position's `x`, in order. `shapes[i]` is the shape of position i's, known to all positions."""
        self._count("all_gather", "shapes", shapes)
        self._own("all_gather", "x", x.shape, shapes[self.rank])
        if self.size == 1:
            return _done([_copy(x)], async_op)
        pending = self._all_gather(x.detach() if x.requires_grad else x, shapes, async_op)
        return pending if async_op else pending.wait()

    @overload
    def reduce_scatter(
        self, parts: Sequence[torch.Tensor], op: str = ..., *, async_op: Literal[False] = ...
    ) -> torch.Tensor: ...
    @overload
    def reduce_scatter(
        self, parts: Sequence[torch.Tensor], op: str = ..., *, async_op: bool
    ) -> torch.Tensor | Pending[torch.Tensor]: ...

    def reduce_scatter(
        self, parts: Sequence[torch.Tensor], op: str = "sum", *, async_op: bool = False
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """The reduction, over the positions, of their `parts[self.rank]`.

        `parts[i]` has one shape on all positions; shapes may differ between the i.
        """
        self._count("reduce_scatter", "parts", parts)
        if self.size == 1:
            check_reduction(op, parts[0].dtype)
            return _done(_copy(parts[self.rank]), async_op)
        pending = self._reduce_scatter(_plain(parts), op, async_op)
        return pending if async_op else pending.wait()

    @overload
    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], *, async_op: Literal[False] = ...
    ) -> list[torch.Tensor]: ...
    @overload
    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], *, async_op: bool
    ) -> list[torch.Tensor] | Pending[list[torch.Tensor]]: ...

    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], *, async_op: bool = False
    ) -> list[torch.Tensor] | Pending[list[torch.Tensor]]:
        """Send `parts[i]` to position i; `shapes[i]` is the shape of what comes from position i, in order."""
        self._count("all_to_all", "parts", parts)
        self._count("all_to_all", "shapes", shapes)
        self._own("all_to_all", "parts[rank]", parts[self.rank].shape, shapes[self.rank])
        if self.size == 1:
            return _done([_copy(parts[0])], async_op)
        pending = self._all_to_all(_plain(parts), shapes, async_op)
        return pending if async_op else pending.wait()

    @overload
    def broadcast(self, x: torch.Tensor, src: int = ..., *, async_op: Literal[False] = ...) -> torch.Tensor: ...
    @overload
    def broadcast(self, x: torch.Tensor, src: int = ..., *, async_op: bool) -> torch.Tensor | Pending[torch.Tensor]: ...

    def broadcast(
        self, x: torch.Tensor, src: int = 0, *, async_op: bool = False
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """A new tensor with position `src`'s `x`. Elsewhere `x` tells shape and dtype only."""
        self._position("broadcast", src)
        if self.size == 1:
            return _done(_copy(x), async_op)
        pending = self._broadcast(x.detach() if x.requires_grad else x, src, async_op)
        return pending if async_op else pending.wait()

    @overload
    def scatter(
        self,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int = ...,
        *,
        shapes: Sequence[Shape] | None = ...,
        async_op: Literal[False] = ...,
    ) -> torch.Tensor: ...
    @overload
    def scatter(
        self,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int = ...,
        *,
        shapes: Sequence[Shape] | None = ...,
        async_op: bool,
    ) -> torch.Tensor | Pending[torch.Tensor]: ...

    def scatter(
        self,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int = 0,
        *,
        shapes: Sequence[Shape] | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """Position `src`'s `parts[self.rank]`. `parts` is used on `src` only; `like` has my part's shape and dtype.

        With `shapes` (those of all parts, on all positions) process groups use one scatter, padded where the
        parts are uneven; without, an all-to-all in which only `src` sends, because no other position can know
        whether the parts are even.
        """
        self._position("scatter", src)
        if shapes is not None:
            self._count("scatter", "shapes", shapes)
            self._own("scatter", "like", like.shape, shapes[self.rank])
        if src == self.rank:
            if parts is None:
                raise ValueError(f"scatter: position {src} is the source and must give parts, got None")
            self._count("scatter", "parts", parts)
            self._own("scatter", "parts[rank]", parts[self.rank].shape, like.shape)
        if self.size == 1 and parts is not None:
            return _done(_copy(parts[0]), async_op)
        given = _plain(parts) if parts is not None and src == self.rank else None
        pending = self._scatter(given, like, src, shapes, async_op)
        return pending if async_op else pending.wait()

    def all_gather_flat(self, x: torch.Tensor, async_op: bool = False) -> torch.Tensor | Pending[torch.Tensor]:
        """Every position's `x`, which have one shape, one after the other: a 1-D tensor."""
        return _one_after_the_other(self.all_gather(x, [x.shape] * self.size, async_op=async_op))

    def all_to_all_flat(
        self, flat: torch.Tensor, leave: list[int], arrive: list[int], async_op: bool = False
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """Send the next `leave[i]` elements of `flat` (1-D, contiguous) to position i; `arrive[i]` come from there.

        What arrives is one 1-D tensor, in order.
        """
        parts, shapes = list(torch.split(flat, leave)), [(n,) for n in arrive]
        return _one_after_the_other(self.all_to_all(parts, shapes, async_op=async_op))

    def reduce_scatter_flat(
        self, flat: torch.Tensor, op: str, async_op: bool = False
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """The reduction of this position's part of `flat`: 1-D, contiguous, as many parts of one size as positions."""
        return self.reduce_scatter(list(flat.view(self.size, -1).unbind()), op, async_op=async_op)

    @abstractmethod
    def _all_reduce(self, x: torch.Tensor, op: str, async_op: bool) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _all_gather(self, x: torch.Tensor, shapes: Sequence[Shape], async_op: bool) -> Pending[list[torch.Tensor]]: ...

    @abstractmethod
    def _reduce_scatter(self, parts: Sequence[torch.Tensor], op: str, async_op: bool) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], async_op: bool
    ) -> Pending[list[torch.Tensor]]: ...

    @abstractmethod
    def _broadcast(self, x: torch.Tensor, src: int, async_op: bool) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _scatter(
        self,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int,
        shapes: Sequence[Shape] | None,
        async_op: bool,
    ) -> Pending[torch.Tensor]: ...

    def _count(self, call: str, name: str, values: Sequence[object]) -> None:
        if len(values) != self.size:
            raise ValueError(f"{call}: {name} must have one entry a position, {self.size}, got {len(values)}")

    def _own(self, call: str, name: str, got: Shape, expected: Shape) -> None:
        if tuple(got) != tuple(expected):
            raise ValueError(
                f"{call}: {name} at position {self.rank} has shape {tuple(got)}, but {tuple(expected)} was announced"
            )

    def _position(self, call: str, src: int) -> None:
        if not 0 <= src < self.size:
            raise ValueError(f"{call}: src is a position, 0 to {self.size - 1}, got {src}")


def padding_counts(padded: int, exact: int) -> bool:
    """True where parts of different sizes should travel as they are, as padding adds more than 5 % and 128 bytes.

    `padded`, `exact`: bytes that arrive at the position that receives most.
    """
    return padded > 1.05 * exact + 128


def _one_after_the_other(
    got: list[torch.Tensor] | Pending[list[torch.Tensor]],
) -> torch.Tensor | Pending[torch.Tensor]:
    join = lambda parts: torch.cat([p.reshape(-1) for p in parts])  # noqa: E731
    return Pending(finish=lambda: join(got.wait())) if isinstance(got, Pending) else join(got)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _plain(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [p.detach() for p in parts] if any(p.requires_grad for p in parts) else parts


@overload
def _done(value: torch.Tensor, async_op: bool) -> torch.Tensor | Pending[torch.Tensor]: ...
@overload
def _done(value: list[torch.Tensor], async_op: bool) -> list[torch.Tensor] | Pending[list[torch.Tensor]]: ...


def _done(value: object, async_op: bool) -> object:
    return Pending(value) if async_op else value
