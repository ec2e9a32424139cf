"""Processes that a program spawns are swapped as well.

A spawned process imports torch and the program anew. What it is told first is a dict that its parent pickles, so one
more entry of it, whose unpickling installs the swap, comes before everything that the program does there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["preparation_data"]


class _Install:
    """Unpickling one installs the swap."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _install_in_child, ()


def _install_in_child() -> None:
    from dtensor.swap import install

    install()


def preparation_data(original: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """What a spawned process is told first, so that it begins with `install()`."""
    return {**original(name), "dtensor.swap": _Install()}
