"""What is done to modules of torch when they are loaded: those of its engine get facades, a few others are patched.

A program pays for the modules that it imports, and `install` imports none but the engine's core: importing FSDP or
the distributed checkpoint loads torch's compiler. What is loaded by then is done at once, all else by a finder, which
finds modules where Python would, and has `loaded` called when one of those of interest has run.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from dtensor.swap.names import PATCHES

__all__ = ["Finder", "Patches", "at"]


class Finder:
    """The first in `sys.meta_path`: as Python's own, for the modules that are `wanted`; then `loaded` is told."""

    def __init__(self, wanted: Callable[[str], bool], loaded: Callable[[str, ModuleType], None]) -> None:
        self.wanted, self.loaded = wanted, loaded

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Python's spec, with a loader that tells. None, and so left to the other finders, for all else."""
        spec = PathFinder.find_spec(name, path, target) if path is not None and self.wanted(name) else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.loaded(name, module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


class Patches:
    """The attributes of `names.PATCHES`, replaced; each knows the original."""

    def __init__(self) -> None:
        self.put: list[tuple[Any, str, object, object]] = []

    def apply(self, name: str, module: ModuleType) -> None:
        """Those of one module. What this version of torch does not have is passed over."""
        for path, place in PATCHES.get(name, {}).items():
            inside, _, attribute = path.rpartition(".")
            holder = getattr(module, inside) if inside else module
            original = getattr(holder, attribute, None)
            if original is not None:
                new = _wrapped(original, at(f"dtensor.swap.{place}"))
                setattr(holder, attribute, new)
                self.put.append((holder, attribute, original, new))

    def undo(self) -> None:
        """Put the originals back, but for what somebody else has replaced since."""
        for holder, attribute, original, new in reversed(self.put):
            if getattr(holder, attribute) is new:
                setattr(holder, attribute, original)
        self.put.clear()


def _wrapped(original: Callable[..., object], function: Callable[..., object]) -> Callable[..., object]:
    """`function` with `original` as its first argument, under that one's name."""

    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> object:
        return function(original, *args, **kwargs)

    return call


def at(place: str) -> Any:
    """The object at `module:attribute`."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
