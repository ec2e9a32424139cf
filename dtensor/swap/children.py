"""Processes that a program spawns are swapped as well.

A spawned process imports torch and the program anew. What it is told first is a dict that its parent pickles, so one
more entry of it, whose unpickling installs the swap, comes before everything that the program does there.
"""

from __future__ import annotations

from multiprocessing import spawn
from typing import Any

__all__ = ["follow", "stop"]

_original = spawn.get_preparation_data


class _Install:
    """Unpickling one installs the swap."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _install_in_child, ()


def _install_in_child() -> None:
    from dtensor.swap import install

    install()


def _preparation_data(name: str) -> dict[str, Any]:
    return {**_original(name), "dtensor.swap": _Install()}


def follow() -> None:
    """From now on, spawned processes begin with `install()`."""
    spawn.get_preparation_data = _preparation_data


def stop() -> None:
    """No longer."""
    if spawn.get_preparation_data is _preparation_data:
        spawn.get_preparation_data = _original
