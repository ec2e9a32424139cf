"""What a program can reach besides its arguments: parameters, buffers, optimizer state, and the values it looks at.

`reach(roots)` follows functions (closures, defaults, the globals and the attributes of modules that their code names),
methods, properties and class attributes, partials, modules, optimizers and schedulers, containers, and objects of the
user's own classes, and finds

    dtensors, plain    DTensors, each once, and plain tensors with the place that holds them
    same, equal        (container, key, value): places that must hold the same object, or an equal number, for a program
                       that was traced to be the right one still; lengths: containers that must be as long
    boxes              dicts and lists, so that what a trace did to them can be undone, and done again with real tensors
                       at every call

Not followed is the code of torch, Python's library and this project. Iterators, and arrays of other libraries that are
too large to be compared at every call, are refused. Beyond reach are names made up while a program runs (`getattr(x,
name)` on a module, `globals()[name]`), files, the environment and the clock.
"""

from __future__ import annotations

import array
import collections
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from dtensor import dispatch as hot
from dtensor.lower_record import LowerError, refuse

__all__ = ["Place", "Reach", "read", "reach"]

Place = tuple[Any, Any]
"""A container and the key in it."""

VALUES = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
FOLLOWED = (
    types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap,
    torch.optim.lr_scheduler.LRScheduler,
)  # fmt: skip
"""Classes of torch's and Python's whose objects are followed like the user's."""
MAX_PLACES = 200_000
MAX_BYTES = 1 << 16
"""Bytes of the largest array of another library that is compared at every call."""


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
    _modules: set[tuple[int, int]] = field(default_factory=set)

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
        return "nothing"

    # ------------------------------------------------------------ following
    def follow(self, obj: Any) -> None:
        """Find what `obj` leads to."""
        if isinstance(obj, VALUES) or id(obj) in self._seen or len(self._seen) > MAX_PLACES:
            return
        self._seen[id(obj)] = obj
        if isinstance(obj, hot._DTensor):
            self.dtensors.append(obj)
        elif isinstance(obj, torch.Tensor):
            return
        elif isinstance(obj, type):
            self._class(obj)
        elif isinstance(obj, torch.nn.Module):
            self._module(obj)
        elif isinstance(obj, torch.optim.Optimizer):
            self.optimizers.append(obj)
            self._box(obj.param_groups)
            self._box(obj.state)
        elif isinstance(obj, (dict, list)):
            self._box(obj)
        elif isinstance(obj, (collections.deque, types.MappingProxyType)):
            self._watch(obj)
        elif isinstance(obj, (set, frozenset)):
            self.equal.append((Content(obj, frozenset), 0, frozenset(obj)))
            self._all(obj)
        elif isinstance(obj, tuple):
            self._all(obj)
        else:
            self._other(obj)

    def _all(self, items: Iterable[Any]) -> None:
        for x in items:
            if isinstance(x, torch.Tensor) and not isinstance(x, hot._DTensor):
                self._place((x,), 0)
            else:
                self.follow(x)

    def _other(self, obj: Any) -> None:
        if isinstance(obj, functools.partial):
            self._all((obj.func, obj.args, obj.keywords))
        elif isinstance(obj, types.MethodType):
            self._all((obj.__self__, obj.__func__))
        elif isinstance(obj, types.FunctionType):
            self._function(obj)
        elif isinstance(obj, (property, staticmethod, classmethod, functools.cached_property)) or callable(
            getattr(obj, "__wrapped__", None)
        ):
            for name in ("fget", "func", "__func__", "__wrapped__"):
                self.follow(getattr(obj, name, None))
        elif isinstance(obj, VIEWS):
            self.follow(obj.mapping)
        elif isinstance(obj, (numpy.ndarray, bytearray, array.array)):
            self._bytes(obj)
        elif isinstance(obj, Iterator):
            raise refuse_reached(obj, "an iterator goes on with every use", "pass what it gives as an argument")
        elif not _known(type(obj)) or isinstance(obj, FOLLOWED):
            self._object(obj)

    def _bytes(self, obj: Any) -> None:
        """Arrays of other libraries: by their content, if it is small."""
        read: Callable[[Any], Any] = bytes if isinstance(obj, bytearray) else operator.methodcaller("tobytes")
        if len(read(obj)) > MAX_BYTES:
            raise refuse_reached(obj, "it is too large to be compared at every call", "pass it as a tensor")
        self.equal.append((Content(obj, read), 0, read(obj)))

    def _object(self, obj: Any) -> None:
        """An object of the user's: its class, its attributes, its slots."""
        self.follow(type(obj))
        if isinstance(getattr(obj, "__dict__", None), dict):
            self._box(obj.__dict__)
        for c in type(obj).__mro__:
            slots = vars(c).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                    self._place(Attributes(obj), name)

    def _class(self, cls: type) -> None:
        """The functions and values of a class of the user's and of those that it derives from."""
        for c in cls.__mro__:
            if not _known(c):
                for name, value in vars(c).items():
                    if name not in _BORING and not isinstance(
                        value, (types.MemberDescriptorType, types.GetSetDescriptorType)
                    ):
                        self._place(vars(c), name)

    def _function(self, f: types.FunctionType) -> None:
        if _known(f):
            inner = inspect.unwrap(f)
            if inner is f or _known(inner):
                return
        for cell in f.__closure__ or ():
            try:
                self._place(Cell(cell), 0)
            except ValueError:  # an empty cell
                continue
        self._all((*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()))
        names = set(_names(f.__code__))
        for name in names & f.__globals__.keys():
            value = f.__globals__[name]
            if isinstance(value, types.ModuleType):
                self._names_of(value, names)
            else:
                self._place(f.__globals__, name)

    def _names_of(self, module: types.ModuleType, names: set[str]) -> None:
        """What code that names `module` may read of it: attributes that have a name of the code's."""
        if module.__name__.partition(".")[0] in _KNOWN or (id(module), len(names)) in self._modules:
            return
        self._modules.add((id(module), len(names)))
        for name in names & vars(module).keys():
            value = vars(module)[name]
            if isinstance(value, types.ModuleType):
                self._names_of(value, names)
            else:
                self._place(vars(module), name)

    def _module(self, m: torch.nn.Module) -> None:
        self.follow(type(m))
        own = m.__dict__
        self.boxes.append(own)
        self.lengths.append((own, len(own)))
        for key, value in list(own.items()):
            if not key.startswith("_") or isinstance(value, (dict, list, *VALUES)):
                self._place(own, key)

    def _box(self, box: Any) -> None:
        self.boxes.append(box)
        self._watch(box)

    def _watch(self, box: Any) -> None:
        self.lengths.append((box, len(box)))
        for key in range(len(box)) if isinstance(box, (list, collections.deque)) else list(box):
            self._place(box, key)

    def _place(self, box: Any, key: Any) -> None:
        value = box[key]
        if isinstance(value, torch.Tensor) and not isinstance(value, hot._DTensor):
            fixed = isinstance(box, (tuple, types.MappingProxyType))  # not to be replaced for a trace: refused if used
            if id(value) not in self._seen and not fixed:
                self._seen[id(value)] = value
                self.plain.append(((box, key), value))
            self.same.append((box, key, value))
        elif isinstance(value, VALUES):
            self.equal.append((box, key, value))
        elif not isinstance(value, types.ModuleType):
            self.same.append((box, key, value))
            self.follow(value)


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
    """An object's attributes as a container."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getitem__(self, name: str) -> Any:
        return getattr(self._of, name, None)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._of, name, value)


class Content:
    """What `read` gives of an object, as a container of one."""

    __slots__ = ("_of", "_read")

    def __init__(self, of: Any, read: Callable[[Any], Any]) -> None:
        self._of, self._read = of, read

    def __getitem__(self, _: int) -> Any:
        return self._read(self._of)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from _names(c)


_KNOWN = frozenset({"torch", "dtensor", "propagation_rules", "parallel", "loss", "numpy", *sys.stdlib_module_names})
"""Packages whose code is not followed: it depends on nothing that a user changes."""
_BORING = frozenset(
    "__module__ __doc__ __dict__ __weakref__ __slots__ __annotations__ __qualname__ __abstractmethods__ _abc_impl "
    "__dataclass_fields__ __dataclass_params__ __match_args__ __parameters__ __orig_bases__ __hash__ __eq__".split()
)


def _known(obj: Any) -> bool:
    module: str = getattr(obj, "__module__", None) or ""
    return module.partition(".")[0] in _KNOWN


def equal(a: Any, b: Any) -> bool:
    """True for values that compute the same: of one type, equal, and zeros of one sign."""
    if type(a) is not type(b):
        return False
    return repr(a) == repr(b) if type(a) in (float, complex) else bool(a == b)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {list(value.shape)}"
    return repr(value)[:60]


def refuse_reached(obj: Any, rule: str, fix: str) -> LowerError:
    """The error for something reached whose changes would not be seen."""
    return refuse(f"{type(obj).__name__}, which the function can reach", repr(obj)[:80], rule, fix)


def reach(*roots: Any) -> Reach:
    """What the roots lead to."""
    found = Reach()
    for r in roots:
        found.follow(r)
    return found
