"""Communicators: the collectives of one mesh axis (or of several flattened into one).

Positions count along the axis in mesh order, whatever the rank numbers are. The base class checks the
arguments, answers for axes of size 1 without communicating, and leaves the rest to
three implementations: `comm_c10d` (process groups), `comm_simulated` (ranks that are threads) and
`comm_fake` (shapes only). Every call is at most one collective; results are new tensors, inputs are never
written to, and shapes may be uneven, empty or 0-d. None of it is differentiable: autograd is a layer above. What the
reductions mean is in `dtensor.comm.reduce_ops`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, overload

import torch

from dtensor.comm.reduce_ops import Reducing, check_reduction

if TYPE_CHECKING:
    from dtensor.comm.messages import Direct

__all__ = [
    "MESSAGE", "Communicator", "Observer", "Pending", "observers", "padding_counts", "purpose", "standing_for",
    "traced",
]  # fmt: skip

T = TypeVar("T")
Shape = Sequence[int]
Observer = Callable[[str, tuple[int, ...], int, int], None]


class _Observers(threading.local):
    """A list of callables, one list a thread: `f(kind, ranks, received_elements, itemsize)`.

    Simulated and fake communicators call each of them once a collective; `kind` is all_reduce, all_gather,
    reduce_scatter, all_to_all, broadcast, scatter (or, for a user's own calls on a simulated group, reduce,
    gather or recv). Process groups do not call them: their collectives are seen by a TorchDispatchMode.
    """

    def __init__(self) -> None:
        self._list: list[Observer] = []

    def append(self, observer: Observer) -> None:
        """Add `observer`; added twice it is called twice."""
        self._list.append(observer)

    def remove(self, observer: Observer) -> None:
        """Take `observer` off, the last one added first. Raises ValueError where it is not there."""
        for i in range(len(self._list) - 1, -1, -1):
            if self._list[i] == observer:
                del self._list[i]
                return
        raise ValueError(f"{observer!r} is not among the observers of this thread")

    def __iter__(self) -> Iterator[Observer]:
        return iter(tuple(self._list))

    def __len__(self) -> int:
        return len(self._list)

    def report(self, kind: str, ranks: tuple[int, ...], received: int, itemsize: int) -> None:
        """Tell every observer of this thread of one collective."""
        for observer in tuple(self._list):
            observer(kind, ranks, received, itemsize)


observers = _Observers()


class Pending(Generic[T]):
    """A collective under way. `wait()` gives its result, the same object each time."""

    __slots__ = ("_finish", "_raw", "_value")

    def __init__(
        self, value: T | None = None, finish: Callable[[], T] | None = None, raw: torch.Tensor | None = None
    ) -> None:
        self._value = value
        self._finish = finish
        self._raw = raw

    def wait(self) -> T:
        """Wait for the collective and return its result."""
        if self._finish is not None:
            self._value = self._finish()
            self._finish = self._raw = None
        return self._value  # type: ignore[return-value]

    @property
    def unfinished(self) -> bool:
        """True where something is left to compute once the collective is over."""
        return self._finish is not None and self._raw is None

    @property
    def raw(self) -> torch.Tensor | None:
        """The tensor that the collective fills, where that is the result as it is."""
        return self._raw

    @property
    def tensor(self) -> torch.Tensor:
        """The result as a tensor that waits when it is first used.

        On process groups an `AsyncCollectiveTensor` where the collective's output is the result; the
        finished result where there is something left to compute, and in simulated and fake worlds.
        """
        if self._raw is not None:
            from torch.distributed._functional_collectives import AsyncCollectiveTensor

            raw, self._raw = self._raw, None
            self._value = AsyncCollectiveTensor(raw)  # type: ignore[assignment]
            self._finish = self._value.wait  # type: ignore[union-attr]
            return self._value  # type: ignore[return-value]
        if self._finish is not None and type(self._value).__name__ == "AsyncCollectiveTensor":
            return self._value  # type: ignore[return-value]
        value = self.wait()
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"this collective gives a {type(value).__name__} of tensors: use wait()")
        return value


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
        into: Sequence[torch.Tensor] | None = ...,
        async_op: Literal[False] = ...,
    ) -> list[torch.Tensor]: ...
    @overload
    def all_gather(
        self, x: torch.Tensor, shapes: Sequence[Shape], *, into: Sequence[torch.Tensor] | None = ..., async_op: bool
    ) -> list[torch.Tensor] | Pending[list[torch.Tensor]]: ...

    def all_gather(
        self,
        x: torch.Tensor,
        shapes: Sequence[Shape],
        *,
        into: Sequence[torch.Tensor] | None = None,
        async_op: bool = False,
    ) -> list[torch.Tensor] | Pending[list[torch.Tensor]]:
        """Every position's `x`, in order. `shapes[i]` is the shape of position i's, known to all positions.

        `into`: tensors of these shapes, perhaps views of one result, that are filled and returned.
        """
        self._count("all_gather", "shapes", shapes)
        self._own("all_gather", "x", x.shape, shapes[self.rank])
        if into is not None:
            self._count("all_gather", "into", into)
            self._own("all_gather", "into[rank]", into[self.rank].shape, shapes[self.rank])
        if self.size == 1:
            return _done([_copy(x) if into is None else into[0].copy_(x)], async_op)
        pending = self._all_gather(x.detach() if x.requires_grad else x, shapes, into, async_op)
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

    def all_gather_flat(self, x: torch.Tensor, *, async_op: bool = False) -> Pending[torch.Tensor]:
        """Every position's `x`, which have one shape, one after the other: a 1-D tensor."""
        return _one_after_the_other(self.all_gather(x, [x.shape] * self.size, async_op=async_op))

    def all_to_all_flat(
        self, flat: torch.Tensor, leave: list[int], arrive: list[int], *, async_op: bool = False
    ) -> Pending[torch.Tensor]:
        """Send the next `leave[i]` elements of `flat` (1-D, contiguous) to position i; `arrive[i]` come from there.

        What arrives is one 1-D tensor, in order.
        """
        parts, shapes = list(torch.split(flat, leave)), [(n,) for n in arrive]
        return _one_after_the_other(self.all_to_all(parts, shapes, async_op=async_op))

    def reduce_scatter_flat(self, flat: torch.Tensor, op: str, *, async_op: bool = False) -> Pending[torch.Tensor]:
        """The reduction of this position's part of `flat`: 1-D, contiguous, as many parts of one size as positions."""
        got = self.reduce_scatter(
            list(torch.split(flat, [flat.numel() // self.size] * self.size)), op, async_op=async_op
        )
        return got if isinstance(got, Pending) else Pending(got)

    def bind_all_gather(self, shape: Shape) -> Callable[[torch.Tensor], torch.Tensor]:
        """An all-gather of contiguous tensors of one shape along their dim 0, bound: the results have `shape`.

        What is bound is synchronous and takes tensors that need no look (`dtensor.comm.fast_path.ready`).
        """
        shape = tuple(shape)
        return lambda x: self.all_gather_flat(x).wait().view(shape)

    def bind_all_to_all(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """An all-to-all of even parts along dim 0 of contiguous tensors, bound as by `bind_all_gather`.

        The result has the shape of what is sent.
        """

        def run(x: torch.Tensor) -> torch.Tensor:
            sizes = [x.numel() // self.size] * self.size
            return self.all_to_all_flat(x.view(-1), sizes, sizes).wait().view(x.shape)

        return run

    def bind_reduce_scatter(
        self, pack: Callable[[torch.Tensor], torch.Tensor], shape: Shape, what: Reducing, most: int | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
        """The reduction of what `pack` makes of contiguous tensors, to `shape`, bound, where there is one.

        `pack` gives as many parts of one size as positions, one after the other; `most` is that size where there are
        smaller ones, which are padded. It is given what travels instead of the tensor: other numbers, and of complex
        ones pairs of reals along a new last dim, as `shape` and `most` are. The result is of the tensor's dtype.
        """
        return None

    def bind_all_reduce(self, what: Reducing) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
        """An all-reduce of contiguous tensors, bound, where there is one."""
        return None

    def bind_exchange(
        self, leave: Sequence[int], arrive: Sequence[int]
    ) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """`all_to_all_flat` of these sizes from a contiguous 1-D tensor into another, bound, where there is that."""
        return None

    def bind_gather_into(self) -> Callable[[torch.Tensor, list[torch.Tensor]], bool] | None:
        """An all-gather into tensors of one shape, bound, where there is one. It says False where it did nothing."""
        return None

    def bind_scatter_list(
        self, views: Callable[[torch.Tensor], list[torch.Tensor]], shape: Shape, what: Reducing
    ) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
        """As `bind_reduce_scatter`, of parts of unlike sizes that `views` gives. A result of None: nothing was done."""
        return None

    def pads_gather(self, sizes: Sequence[int], dtype: torch.dtype) -> bool | None:
        """Whether an all-gather of parts of these sizes, in elements, is one of padded parts; else an all-to-all.

        None where neither is bound for `dtype`.
        """
        return None

    def pads_scatter(self, sizes: Sequence[int], what: Reducing) -> bool:
        """Whether a reduce-scatter of parts of these sizes is one of padded parts; else of a list of them.

        `sizes` are in elements of what travels.
        """
        return True

    def reduces_here(self, what: Reducing) -> bool:
        """True where a reduce-scatter is an all-to-all of the parts, which are then reduced, and that is bound."""
        return False

    def direct(self, device_type: str) -> Direct | None:
        """What exchanges parts of large tensors on such devices with no buffer around it; None where nothing does.

        The same on all positions.
        """
        return None

    @abstractmethod
    def _all_reduce(self, x: torch.Tensor, op: str, async_op: bool) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _all_gather(
        self, x: torch.Tensor, shapes: Sequence[Shape], into: Sequence[torch.Tensor] | None, async_op: bool
    ) -> Pending[list[torch.Tensor]]: ...

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
    """True where parts of unlike sizes should travel as they are, as padding adds more than 5 % and 128 bytes.

    `padded`, `exact`: bytes that arrive at the position that receives most.
    """
    return padded > 1.05 * exact + 128


def traced(x: torch.Tensor) -> bool:
    """True for a tensor of a trace, which has no values and of which a graph is made."""
    return type(x).__name__ in ("FakeTensor", "FunctionalTensor")


class _Purpose(threading.local):
    """`kind`: what the collective that a process group is asked for stands for, where that is another kind.

    `MESSAGE`: it is a message of a collective that observers are told of.
    """

    kind: str | None = None


MESSAGE = "message"
purpose = _Purpose()


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """What a process group is asked for inside stands for a collective of `kind`, or is a `MESSAGE`."""
    before, purpose.kind = purpose.kind, kind
    try:
        yield
    finally:
        purpose.kind = before


def received(kind: str, size: int, own: int, shapes: Sequence[Shape] | int) -> int:
    """Elements that a position receives in one collective.

    `shapes`: for all_gather and all_to_all the shapes that arrive, of which `own` is this position's, for
    reduce_scatter those of all parts; otherwise the element count of the result. A ring all-reduce receives
    2n(k-1)/k, a reduce-scatter (k-1)/k of all parts, the source of a broadcast or scatter nothing.
    """
    if not isinstance(shapes, int):
        if kind == "reduce_scatter":
            return sum(prod(s) for s in shapes) * (size - 1) // size
        return sum(prod(s) for i, s in enumerate(shapes) if i != own)
    if kind == "all_reduce":
        return 2 * shapes * (size - 1) // size
    return shapes


def _one_after_the_other(got: list[torch.Tensor] | Pending[list[torch.Tensor]]) -> Pending[torch.Tensor]:
    join = lambda parts: torch.cat([p.reshape(-1) for p in parts])  # noqa: E731
    return Pending(finish=lambda: join(got.wait())) if isinstance(got, Pending) else Pending(join(got))


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
