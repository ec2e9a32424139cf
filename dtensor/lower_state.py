"""What a program can reach besides its arguments: parameters, buffers, optimizer state, and the values it looks at.

`reach(roots)` follows functions (their closures, defaults and the globals that they name), bound methods, partials,
modules, optimizers, lists, tuples, dicts and objects of the user's own classes, and finds

    tensors      DTensors, each once, and plain tensors with the place that holds them
    watches      (container, key, value): places that must hold the same object, or an equal number, for a program that
                 was traced to be the right one still
    boxes        the containers (dicts and lists) themselves, so that what a trace did to them can be undone, and
                 done again with real tensors at every call

Nothing of torch's own classes is followed but modules, optimizers and their parts; what is not followed and holds a
tensor is found out when the tensor is used (`dtensor.lower_record`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor import dispatch as hot

__all__ = ["Place", "Reach", "read", "reach"]

Place = tuple[Any, Any]
"""A container and the key in it."""

VALUES = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
MAX_PLACES = 200_000


def read(place: Place) -> Any:
    """What a place holds."""
    box, key = place
    return box[key]


@dataclass
class Reach:
    """What was found; see the module's text."""

    dtensors: list[Any] = field(default_factory=list)
    plain: list[tuple[Place, torch.Tensor]] = field(default_factory=list)
    same: list[tuple[Any, Any, Any]] = field(default_factory=list)
    equal: list[tuple[Any, Any, Any]] = field(default_factory=list)
    lengths: list[tuple[Any, int]] = field(default_factory=list)
    boxes: list[Any] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)

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
                if now is not value and (type(now) is not type(value) or now != value):
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
                if now is not value and (places is self.same or type(now) is not type(value) or now != value):
                    return f"{key!r} was {_short(value)} and is {_short(now)}"
        return "nothing"

    # ------------------------------------------------------------ following
    def follow(self, obj: Any) -> None:
        """Find what `obj` leads to."""
        if isinstance(obj, VALUES) or id(obj) in self._seen or len(self._seen) > MAX_PLACES:
            return
        self._seen[id(obj)] = obj
        if isinstance(obj, hot._DTensor):
            self.dtensors.append(obj)
        elif isinstance(obj, (torch.Tensor, type, types.ModuleType)):
            return
        elif isinstance(obj, torch.nn.Module):
            self._module(obj)
        elif isinstance(obj, torch.optim.Optimizer):
            self.optimizers.append(obj)
            self._box(obj.param_groups)
            self._box(obj.state)
        elif isinstance(obj, (dict, list)):
            self._box(obj)
        elif isinstance(obj, (tuple, set, frozenset)):
            for x in obj:
                self.follow(x)
        else:
            self._code(obj)

    def _code(self, obj: Any) -> None:
        if isinstance(obj, functools.partial):
            for part in (obj.func, obj.args, obj.keywords):
                self.follow(part)
        elif isinstance(obj, types.MethodType):
            self.follow(obj.__self__)
            self.follow(obj.__func__)
        elif isinstance(obj, types.FunctionType):
            self._function(obj)
        elif not _of_torch(type(obj)) and isinstance(getattr(obj, "__dict__", None), dict):
            self._box(obj.__dict__)

    def _function(self, f: types.FunctionType) -> None:
        if _of_torch(f):
            inner = inspect.unwrap(f)
            if inner is f or _of_torch(inner):
                return
        for cell in f.__closure__ or ():
            try:
                self._place(_Cell(cell), 0)
            except ValueError:  # an empty cell
                continue
        for default in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self.follow(default)
        for name in _names(f.__code__):
            if name in f.__globals__:
                self._place(f.__globals__, name)

    def _module(self, m: torch.nn.Module) -> None:
        own = m.__dict__
        self.boxes.append(own)
        self.lengths.append((own, len(own)))
        for key, value in list(own.items()):
            if not key.startswith("_") or isinstance(value, (dict, list)):
                self._place(own, key)

    def _box(self, box: Any) -> None:
        self.boxes.append(box)
        self.lengths.append((box, len(box)))
        for key in list(box) if isinstance(box, dict) else range(len(box)):
            self._place(box, key)

    def _place(self, box: Any, key: Any) -> None:
        value = box[key]
        if isinstance(value, torch.Tensor) and not isinstance(value, hot._DTensor):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self.plain.append(((box, key), value))
            self.same.append((box, key, value))
        elif isinstance(value, VALUES):
            self.equal.append((box, key, value))
        elif not isinstance(value, types.ModuleType):
            self.same.append((box, key, value))
            self.follow(value)


class _Cell:
    """A closure's cell as a container of one."""

    __slots__ = ("_cell",)

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, _: int) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, _: int, value: Any) -> None:
        self._cell.cell_contents = value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from _names(c)


_OWN = ("torch", "dtensor", "propagation_rules", "numpy", "builtins", "functools", "collections", "typing")


def _of_torch(obj: Any) -> bool:
    module: str = getattr(obj, "__module__", None) or ""
    return module.partition(".")[0] in _OWN


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {list(value.shape)}"
    return repr(value)[:60]


def reach(*roots: Any) -> Reach:
    """What the roots lead to."""
    found = Reach()
    for r in roots:
        found.follow(r)
    return found
