"""Which entries of which modules a program depends on: those that the code of its functions names.

Of a module that code names (`config.scale`) the names of that code are watched. Of a module that it hands on, keeps in
a variable, or that an object holds, the names of any code that was found, or all, where some code makes up names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from dtensor.lowering.names import Import, Names, names_of
from dtensor.lowering.places import Content, Watched

__all__ = ["Namespaces", "from_known", "known"]

_KNOWN = frozenset({"torch", "dtensor", "numpy", *sys.stdlib_module_names})
"""Packages whose code is not followed: it depends on nothing that a user changes."""
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "expandvars"})
"""Names with which code reads the environment."""


@dataclass
class Namespaces(Watched):
    """What is watched, and the modules among it."""

    late: set[str] = field(default_factory=set)
    """Modules that the code imports and that are not imported yet."""
    _seen: dict[int, Any] = field(default_factory=dict)
    _code: Names = field(default_factory=Names)
    _taken: set[tuple[int, str]] = field(default_factory=set)
    _whole: dict[int, tuple[dict[str, Any], bool]] = field(default_factory=dict)

    def follow(self, obj: Any) -> None:
        """Find what `obj` leads to."""
        raise NotImplementedError

    def _place(self, box: Any, key: Any) -> None:
        raise NotImplementedError

    def _code_of(self, f: types.FunctionType) -> None:
        """The globals of `f`, the attributes of modules, and the modules that it imports, which its code names."""
        code, space = names_of(f.__code__), f.__globals__
        self._code.add(code)
        names = code.names | code.strings
        for name in code.names & space.keys():
            value = space[name]
            if isinstance(value, types.ModuleType):
                self._rebound(space, name)
                self._names_of(value, names, code.asked)
            else:
                self._place(space, name)
        for path in code.whole:
            self._handed_on(space.get(path[0]), path[1:])
        for made in code.imports:
            for found in self._imported(made, space):
                self._names_of(found, names, code.asked)
        for made in code.whole_imports:
            for found in self._imported(made, space):
                self._handed_on(found, (made.attribute,) if made.attribute else ())
        if code.own:
            self._whole[id(space)] = space, True
        if code.by_name:
            for name in (*code.strings, str(space.get("__name__"))):
                if isinstance(sys.modules.get(name), types.ModuleType):
                    self._module_whole(sys.modules[name])
        if not code.names.isdisjoint(_ENVIRONMENT):
            self.follow(os.environ)

    def _handed_on(self, value: Any, attributes: Iterable[str]) -> None:
        """A module that code hands on, or keeps in a variable, may be read anywhere."""
        for name in attributes:
            if not isinstance(value, types.ModuleType):
                return
            value = vars(value).get(name)
        if isinstance(value, types.ModuleType):
            self._module_whole(value)

    def _imported(self, made: Import, space: dict[str, Any]) -> Iterator[types.ModuleType]:
        """The modules of an import inside of a function."""
        name = made.module
        if made.level:
            package = space.get("__package__") or str(space.get("__name__")).rpartition(".")[0]
            with contextlib.suppress(ImportError, ValueError):
                name = importlib.util.resolve_name("." * made.level + name, package)
        parts = name.split(".")
        for path in (".".join(parts[: n + 1]) for n in range(len(parts))):
            found = sys.modules.get(path)
            if isinstance(found, types.ModuleType):
                yield found
            elif path.partition(".")[0] not in _KNOWN:
                self.late.add(path)

    def _rebound(self, space: dict[str, Any], name: str) -> None:
        if not from_known(space[name]) and (id(space), name) not in self._taken:
            self._taken.add((id(space), name))
            self.same.append((space, name, space[name]))

    def _names_of(self, module: types.ModuleType, names: set[str], asked: set[str]) -> None:
        """What code that names `module` may read of it: attributes that have a name of the code's."""
        if not from_known(module):
            self._from(vars(module), names, asked)

    def _from(self, space: dict[str, Any], names: Set[str], asked: set[str], visited: set[int] | None = None) -> None:
        """Take what these names are in a namespace, and in the modules among that; and that the rest is not there."""
        inner = []
        for name in (names | {"__getattr__"}) & space.keys():
            value = space[name]
            if isinstance(value, types.ModuleType):
                self._rebound(space, name)
                inner.append(value)
            elif (id(space), name) not in self._taken:
                self._taken.add((id(space), name))
                self._place(space, name)
        for name in asked - space.keys():
            if (id(space), name) not in self._taken:
                self._taken.add((id(space), name))
                self.equal.append((Content(space, functools.partial(_has, name)), 0, False))
        visited = {id(space)} if visited is None else visited
        for value in inner:
            if not from_known(value) and id(vars(value)) not in visited:
                visited.add(id(vars(value)))
                self._from(vars(value), names, asked, visited)

    def _module_whole(self, module: types.ModuleType, everything: bool = True) -> None:
        space = vars(module)
        if not from_known(module) and not (id(space) in self._whole and self._whole[id(space)][1]):
            self._whole[id(space)] = space, everything

    def _wholes(self) -> list[tuple[int, bool]]:
        return [(key, everything) for key, (_, everything) in self._whole.items()]

    def settle(self) -> None:
        """Follow modules that are handed on: what any code that was found names, or all, if a name is made up.

        Of other packages' modules among what is found only by that, what is named.
        """
        before: Any = None
        while before != (now := (len(self._taken), len(self._seen), self._wholes(), self._code.size())):
            before = now
            for space, everything in list(self._whole.values()):
                everything = everything and self._code.made_up
                named = {n for n in space if not n.startswith("__")} if everything else set[str]()
                named |= (self._code.names | self._code.strings) & space.keys()
                here: set[str] = set()
                for name in named:
                    value = space[name]
                    if isinstance(value, types.ModuleType):
                        self._rebound(space, name)
                        self._module_whole(value, everything and _package(vars(value)) == _package(space))
                    else:
                        here.add(name)
                self._from(space, here, self._code.asked)


def _package(space: dict[str, Any]) -> str:
    return str(space.get("__name__")).partition(".")[0]


def _has(name: str, space: dict[str, Any]) -> bool:
    return name in space


def from_known(module: types.ModuleType) -> bool:
    """True for a module of a package whose code is not followed."""
    return _package(vars(module)) in _KNOWN


def known(obj: Any) -> bool:
    """True for a class or function of a package whose code is not followed."""
    module: str = getattr(obj, "__module__", None) or ""
    return module.partition(".")[0] in _KNOWN
