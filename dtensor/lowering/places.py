"""Places that a trace has looked at, and whether they hold what they held.

A place is a container and a key. Those that are no entry of a dict or list are made to look like one: cells,
attributes, what a weak reference or a context variable leads to.
"""

from __future__ import annotations

import contextvars
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Attributes", "Cell", "Content", "Current", "Watched", "equal"]


_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
"""What functions are made of."""


@dataclass
class Watched:
    """Places and what they held; `lengths`: containers and how long they were; `functions`: of what they are made."""

    same: list[tuple[Any, Any, Any]] = field(default_factory=list)
    equal: list[tuple[Any, Any, Any]] = field(default_factory=list)
    lengths: list[tuple[Any, int]] = field(default_factory=list)
    functions: list[tuple[Callable[[Any], Any], list[Any], list[Any]]] = field(
        default_factory=lambda: [(operator.attrgetter(name), [], []) for name in _PARTS]
    )

    def holds(self) -> bool:
        """True while all places hold what they held."""
        try:
            for box, n in self.lengths:  # first, as a missing key may be made by asking for it
                if len(box) != n:
                    return False
            for box, key, value in self.same:
                if box[key] is not value:
                    return False
            for box, key, value in self.equal:
                now = box[key]
                if now is not value and not equal(now, value):
                    return False
            for get, functions, values in self.functions:
                if not all(map(operator.is_, map(get, functions), values)):
                    return False
        except (KeyError, IndexError, ValueError):
            return False
        return True

    def first_change(self) -> str:
        """Which watched value is another now, for a message."""
        for box, n in self.lengths:
            if len(box) != n:
                return f"a container had {n} entries and has {len(box)}"
        for places in (self.same, self.equal):
            for box, key, value in places:
                try:
                    now = box[key]
                except (KeyError, IndexError, ValueError):
                    return f"{key!r} is gone"
                if now is not value and (places is self.same or not equal(now, value)):
                    return f"{key!r} was {_short(value)} and is {_short(now)}"
        for get, functions, values in self.functions:
            for f, value in zip(functions, values, strict=True):
                if get(f) is not value:
                    return f"the function {f.__name__} has other code or defaults"
        return "nothing"


def equal(a: Any, b: Any) -> bool:
    """True for values that compute the same: of one type, equal, and zeros of one sign."""
    if type(a) is not type(b):
        return False
    return repr(a) == repr(b) if type(a) in (float, complex) else bool(a == b)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {list(value.shape)}"
    return repr(value)[:60]


class Cell:
    """A closure's cell as a container of one."""

    __slots__ = ("_cell",)

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, _: int) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, _: int, value: Any) -> None:
        self._cell.cell_contents = value


class Attributes:
    """An object's attributes as a container; `member`: the slot of its class, whose name may be another's too."""

    __slots__ = ("_member", "_of")

    def __init__(self, of: Any, member: Any = None) -> None:
        self._of, self._member = of, member

    def __getitem__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self._of, name) if self._member is None else self._member.__get__(self._of)
        except AttributeError:
            return None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._of, name, value) if self._member is None else self._member.__set__(self._of, value)


class Content:
    """What `read` gives of an object, as a container of one."""

    __slots__ = ("_of", "_read")

    def __init__(self, of: Any, read: Callable[[Any], Any]) -> None:
        self._of, self._read = of, read

    def __getitem__(self, _: int) -> Any:
        return self._read(self._of)


class Current:
    """The value of a context variable, as a container of one."""

    __slots__ = ("_of",)

    def __init__(self, of: contextvars.ContextVar[Any]) -> None:
        self._of = of

    def __getitem__(self, _: int) -> Any:
        return self._of.get(None)

    def __setitem__(self, _: int, value: Any) -> None:
        self._of.set(value)
