"""The random number streams of simulated ranks.

Ranks that are threads share the process's global generators: torch's (CPU and, once CUDA is in use, one a device),
Python's `random` and numpy's legacy one. A rank saves them when it hands over and puts its own back when it goes
on, so that each rank sees the stream that a process of its own would see, starting where the caller's stands.

numpy's state is expensive to read (25 us), so it is only read when the generator has moved: its first word and
its position tell.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

__all__ = ["RankStreams"]

_WORDS = 624  # of a Mersenne twister; its position follows


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())


class _Numpy:
    """numpy's global generator: `mark()` changes whenever bits were drawn or the generator was seeded."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._view: Any = None

    def mark(self) -> tuple[int, int] | None:
        """None where the global generator is no Mersenne twister; its state must then always be saved."""
        import numpy.random as npr

        generator = npr.mtrand._rand._bit_generator
        if generator is not self._generator:
            self._generator = generator
            self._view = None
            if type(generator).__name__ == "MT19937":
                self._view = (ctypes.c_uint32 * (_WORDS + 1)).from_address(generator.ctypes.state_address)
        view = self._view
        return None if view is None else (view[0], view[_WORDS])

    def read(self) -> Any:
        import numpy.random as npr

        return npr.mtrand._rand.get_state(legacy=False)

    def write(self, state: Any) -> None:
        import numpy.random as npr

        npr.mtrand._rand.set_state(state)


class RankStreams:
    """One rank's place in the global streams; made from where they stand now."""

    __slots__ = ("_cuda", "_mark", "_numpy", "_python", "_state", "_torch")

    def __init__(self) -> None:
        self._numpy = _Numpy() if "numpy" in sys.modules else None
        self._mark: tuple[int, int] | None = None
        self._state: Any = None
        self.save()

    def save(self) -> None:
        """Remember where the global streams stand."""
        self._torch = torch.default_generator.get_state()
        self._cuda = [g.get_state() for g in torch.cuda.default_generators] if _cuda_in_use() else []
        self._python = random.getstate()
        if self._numpy is not None:
            mark = self._numpy.mark()
            if mark is None or mark != self._mark or self._state is None or self._state["has_gauss"]:
                self._state = self._numpy.read()
                self._mark = mark

    def restore(self) -> None:
        """Put the global streams where they were at the last `save`."""
        torch.default_generator.set_state(self._torch)
        for generator, state in zip(torch.cuda.default_generators, self._cuda):
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy is not None:
            mark = self._numpy.mark()
            if mark is None or mark != self._mark or self._state["has_gauss"]:
                self._numpy.write(self._state)
                self._mark = self._numpy.mark()
