"""Who is told of collectives, what they stand for, and how many elements they bring.

Simulated and fake communicators report each collective to `observers`. Those of process groups pass torch's dispatcher,
where a mode sees them; `standing_for` says what such a call stands for where that is another kind of collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

__all__ = ["MESSAGE", "Observer", "observers", "purpose", "received", "standing_for"]

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


def received(kind: str, size: int, own: int, shapes: Sequence[Sequence[int]] | int) -> int:
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
