"""Globals of loaded modules that hold a name which is swapped: found, replaced and put back.

`from torch.distributed.tensor import DTensor` binds the class in the importing module, where no facade is asked any
more. In torch's own modules such globals are replaced. In a program's they are not: what the program has made of them
since (subclasses, plans, meshes) cannot be told, so `install` stops and names them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType

from dtensor.swap.names import ENGINE, HOLDERS_OF_TORCHS_OWN, is_under

__all__ = ["bound_early", "rebind", "replace", "restore"]

Table = Mapping[int, tuple[object, object]]
"""By identity: an object, and what stands for it."""

Change = tuple[ModuleType, str, object]
"""A module, a global of it, and the value that it had."""


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """Every loaded module once, under its first name."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and id(module) not in seen:
            seen.add(id(module))
            yield name, module


def _replaced(name: str) -> bool:
    return is_under(name, ("torch",)) and not is_under(name, HOLDERS_OF_TORCHS_OWN)


def _held(module: ModuleType, table: Table) -> list[tuple[str, object]]:
    """The globals of a module that the table has something for, and that."""
    return [(key, table[id(value)][1]) for key, value in list(vars(module).items()) if id(value) in table]


def bound_early(table: Table) -> list[str]:
    """`module.name` of globals outside of torch and this engine that hold something which is in the table."""
    found = []
    for name, module in _modules():
        if not is_under(name, ("torch", *ENGINE)):
            found += [f"{name}.{key}" for key, _ in _held(module, table)]
    return found


def rebind(table: Table) -> list[Change]:
    """Replace them in torch's modules; gives back what `restore` needs."""
    changes: list[Change] = []
    for name, module in _modules():
        if _replaced(name):
            for key, new in _held(module, table):
                replace(module, key, new, changes)
    return changes


def replace(module: ModuleType, key: str, new: object, changes: list[Change]) -> None:
    """Set one global and remember what it was."""
    changes.append((module, key, vars(module)[key]))
    setattr(module, key, new)


def restore(changes: list[Change]) -> None:
    """Undo `changes`, the last first."""
    for module, key, value in reversed(changes):
        setattr(module, key, value)
