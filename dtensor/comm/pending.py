"""The result of a collective that may still be under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

__all__ = ["Pending"]

T = TypeVar("T")


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
