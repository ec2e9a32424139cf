"""A value of the running thread that holds inside a `with`: settings of the engine for a block of code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

__all__ = ["PerThread"]

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """`value` is the one of this thread: the default, or that of the innermost `with setting.set_to(value):`.

    Example:
        >>> implicit = PerThread(False)
        >>> with implicit.set_to(True):
        ...     assert implicit.value
    """

    def __init__(self, default: T) -> None:
        self.value = default

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """Inside, the value of this thread is `value`. Nests."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
