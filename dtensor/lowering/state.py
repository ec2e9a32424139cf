"""What a program can reach besides its arguments: parameters, buffers, optimizer state, and the values it looks at.

`reach(roots)` follows functions (closures, defaults, attributes, and what their code names: `dtensor.lowering.names`),
methods, properties and class attributes, partials, modules, optimizers and schedulers, containers, weak references,
context variables, the environment where code names it, and objects of the user's own classes, and finds

    dtensors, plain    DTensors, each once, and plain tensors with the place that holds them
    same, equal        (container, key, value): places that must hold the same object, or an equal number, for a program
                       that was traced to be the right one still; lengths: containers that must be as long;
                       functions: what they are made of (`dtensor.lowering.places`)
    boxes              dicts and lists, so that what a trace did to them can be undone, and done again with real tensors
                       at every call

Of a module's namespace (`import config`) what code names is watched; of modules that code hands on, or objects hold,
what any of the code names, or everything where some code makes up names (`getattr(module, name)`).

Not followed is the code of torch, Python's library and this project. Iterators, and arrays of other libraries that are
too large to be compared at every call, are refused. Beyond reach are files, the clock, a module that is found by a name
made up while a program runs, and what code in C keeps to itself (a `functools` cache that is cleared).
"""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import inspect
import operator
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from dtensor.dispatch import hit as hot
from dtensor.lowering.namespaces import Namespaces, from_known, known
from dtensor.lowering.places import Attributes, Cell, Content, Current, equal
from dtensor.lowering.record import LowerError, refuse

__all__ = ["VALUES", "Place", "Reach", "equal", "read", "reach"]

Place = tuple[Any, Any]
"""A container and the key in it."""

VALUES = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
FOLLOWED = (
    types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap,
    torch.optim.lr_scheduler.LRScheduler, threading.local, weakref.WeakKeyDictionary, weakref.WeakValueDictionary,
    weakref.WeakSet,
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
class Reach(Namespaces):
    """What was found; see the module's text."""

    dtensors: list[Any] = field(default_factory=list)
    plain: list[tuple[Place, torch.Tensor]] = field(default_factory=list)
    boxes: list[Any] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    # ------------------------------------------------------------ following
    def follow(self, obj: Any) -> None:
        """Find what `obj` leads to."""
        if type(obj) in weakref.ProxyTypes:
            obj = obj.__init__.__self__
        if isinstance(obj, VALUES) or id(obj) in self._seen:
            return
        if len(self._seen) > MAX_PLACES:
            raise refuse(
                "a function that can reach too much to be watched", f"{len(self._seen)} objects",
                f"{MAX_PLACES} at most", "keep data sets and the like out of the step's closure and arguments",
            )  # fmt: skip
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
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                self._watch(vars(obj)[hooks])
            self._subclass(obj, _OF_OPTIMIZERS)
        elif obj is os.environ:
            self.equal.append((Content(obj, _variables), 0, _variables(obj)))
        elif isinstance(obj, (dict, list)):
            self._box(obj)
            self._subclass(obj)
            if isinstance(obj, collections.defaultdict):
                self.follow(obj.default_factory)
        elif isinstance(obj, (collections.deque, types.MappingProxyType)):
            self._watch(obj)
            self._subclass(obj)
        elif isinstance(obj, (set, frozenset)):
            self.equal.append((Content(obj, frozenset), 0, frozenset(obj)))
            self._all(obj)
            self._subclass(obj)
        elif isinstance(obj, tuple):
            self._all(obj)
            self._subclass(obj)
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
        elif isinstance(obj, types.ModuleType):
            self._module_whole(obj)
        elif isinstance(obj, weakref.ref):
            self._target(obj)
        elif isinstance(obj, contextvars.ContextVar):
            self._place(Current(obj), 0)
        elif isinstance(obj, functools.singledispatchmethod):
            self.follow(obj.dispatcher)
        elif isinstance(obj, (property, staticmethod, classmethod, functools.cached_property)) or callable(
            inspect.getattr_static(obj, "__wrapped__", None)
        ):
            for name in ("fget", "func", "__func__", "__wrapped__"):
                if inspect.getattr_static(obj, name, None) is not None:
                    self.follow(getattr(obj, name))
        elif isinstance(obj, VIEWS):
            self.follow(obj.mapping)
        elif isinstance(obj, (numpy.ndarray, bytearray, array.array)):
            self._bytes(obj)
        elif isinstance(obj, Iterator):
            raise refuse_reached(obj, "an iterator goes on with every use", "pass what it gives as an argument")
        elif not known(type(obj)) or isinstance(obj, FOLLOWED):
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
        own = Attributes(obj)["__dict__"]
        if isinstance(obj, threading.local):  # every thread has another
            self.same.append((Content(obj, vars), 0, vars(obj)))
            self._box(vars(obj))
        elif isinstance(own, dict):
            self._box(own)
        for c in type(obj).__mro__:
            for name, member in vars(c).items():
                if isinstance(member, types.MemberDescriptorType) and not known(c):
                    self._place(Attributes(obj, member), name)

    def _subclass(self, obj: Any, without: frozenset[str] = frozenset()) -> None:
        """What an object of a class of the user's has besides what its base has: the class and attributes."""
        if known(type(obj)):
            return
        self.follow(type(obj))
        own = Attributes(obj)["__dict__"]
        for key in list(own) if isinstance(own, dict) else ():
            if key not in without:
                self._place(own, key)

    def _target(self, ref: weakref.ref[Any]) -> None:
        """What a weak reference leads to; tensors that only it leads to are not taken for the program's."""
        target = ref()
        self.same.append((Content(ref, operator.call), 0, target))
        if not isinstance(target, torch.Tensor):
            self.follow(target)

    def _class(self, cls: type) -> None:
        """The functions and values of a class of the user's and of those that it derives from."""
        for c in cls.__mro__:
            if not known(c):
                for name, value in vars(c).items():
                    if name not in _BORING and not isinstance(
                        value, (types.MemberDescriptorType, types.GetSetDescriptorType)
                    ):
                        self._place(vars(c), name)

    def _function(self, f: types.FunctionType) -> None:
        if known(f):
            inner = inspect.unwrap(f)
            if inner is f or known(inner):
                return
        if f.__code__.co_filename == functools.__file__ and "registry" in f.__dict__:  # singledispatch: has a cache
            self.follow(f.__dict__["registry"])
            return
        for cell in f.__closure__ or ():
            try:
                self._place(Cell(cell), 0)
            except ValueError:  # an empty cell
                continue
        for get, functions, values in self.functions:
            if get(f) is not None:
                functions.append(f)
                values.append(get(f))
        self._all((f.__defaults__, f.__kwdefaults__))
        if f.__dict__:
            self._box(f.__dict__)
        self._code_of(f)

    def _module(self, m: torch.nn.Module) -> None:
        self.follow(type(m))
        for hooks in _HOOKS:
            if id(hooks) not in self._seen:
                self._seen[id(hooks)] = hooks
                self._watch(hooks)
        own = m.__dict__
        self.boxes.append(own)
        self.lengths.append((own, len(own)))
        for key, value in list(own.items()):
            if key not in _OF_MODULES or isinstance(value, (dict, list, *VALUES)):
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
        elif not isinstance(value, types.ModuleType) or not from_known(value):
            self.same.append((box, key, value))
            self.follow(value)


_BORING = frozenset(
    "__module__ __doc__ __dict__ __weakref__ __slots__ __annotations__ __qualname__ __abstractmethods__ _abc_impl "
    "__dataclass_fields__ __dataclass_params__ __match_args__ __parameters__ __orig_bases__ __hash__ __eq__".split()
)
_HOOKS = [d for n, d in vars(torch.nn.modules.module).items() if n.startswith("_global_") and isinstance(d, dict)]
"""Hooks of all modules."""
_OF_MODULES = frozenset(torch.nn.Module().__dict__)
_OF_OPTIMIZERS = frozenset(torch.optim.SGD([torch.zeros(1)]).__dict__)
"""Attributes that torch gives to every module and optimizer."""


def _variables(environment: Any) -> dict[Any, Any]:
    """The variables of the environment, as it holds them."""
    return dict(environment._data)


def refuse_reached(obj: Any, rule: str, fix: str) -> LowerError:
    """The error for something reached whose changes would not be seen."""
    return refuse(f"{type(obj).__name__}, which the function can reach", repr(obj)[:80], rule, fix)


def reach(*roots: Any) -> Reach:
    """What the roots lead to."""
    found = Reach()
    for r in roots:
        found.follow(r)
    found.settle()
    return found
