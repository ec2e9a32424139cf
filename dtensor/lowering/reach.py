"""What a program can read besides its arguments, and whether it still is what it was.

Before a trace, `reach(roots)` follows functions (closures, defaults, attributes, the globals that their code names),
methods, properties and class attributes, partials, modules, optimizers and schedulers, containers, weak references,
context variables, the environment where code names it, and objects of the user's own classes, and finds

    dtensors, plain    DTensors, each once, and plain tensors with the place that holds them
    same, equal        (container, key, value): places that must hold the same object, or an equal number, for a program
                       that was traced to be the right one still; lengths: containers that must be as long;
                       functions: what they are made of
    boxes              dicts and lists, so that what a trace did to them can be undone, and done again with real tensors
                       at every call

A place is a container and a key. Cells, attributes, and what a weak reference or a context variable leads to are made
to look like one.

Namespaces of modules are too large to be watched in full. What is read of them (`config.scale`, `from lib import f`,
`getattr(lib, f"layer{i}")`, `vars(lib)`) is noted while the program is traced (`reading`): for that time the modules of
the program get a class that notes it. Where a trace has read what was not watched, it is made again with that watched
from the start; names that code has for attributes of a global module are watched at once, which spares that.

Not followed is the code of torch, Python's library and this project. Iterators, and arrays of other libraries that are
too large to be compared at every call, are refused. Beyond reach are files, the clock, and what code in C keeps to
itself (a `functools` cache that is cleared).
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import functools
import inspect
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from dtensor.dispatch import late
from dtensor.lowering.record import LowerError, Recorder, refuse

__all__ = ["VALUES", "Place", "Reach", "Read", "equal", "read", "reach", "reading"]

Place = tuple[Any, Any]
"""A container and the key in it."""

Read = tuple[types.ModuleType, str]
"""A module and the name that was read of it."""

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

_KNOWN = frozenset({"torch", "dtensor", "numpy", *sys.stdlib_module_names})
"""Packages whose code is not followed: it depends on nothing that a user changes."""
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "expandvars"})
"""Names with which code reads the environment."""
_NAMESPACE = frozenset({"globals", "eval", "exec"})
"""Names with which code reads globals that it does not name."""
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
"""What functions are made of."""


def read(place: Place) -> Any:
    """What a place holds."""
    box, key = place
    return box[key]


# ------------------------------------------------------------ places
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


# ------------------------------------------------------------ following
@dataclass
class Reach(Watched):
    """What was found; see the module's text."""

    dtensors: list[Any] = field(default_factory=list)
    plain: list[tuple[Place, torch.Tensor]] = field(default_factory=list)
    boxes: list[Any] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    modules: list[types.ModuleType] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)
    _taken: set[tuple[int, str]] = field(default_factory=set)

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
        if isinstance(obj, late.DTensor):
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
            if isinstance(x, torch.Tensor) and not isinstance(x, late.DTensor):
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
            if not from_known(obj):
                self.modules.append(obj)
                cls = _noting.get(id(obj), (obj, type(obj)))[1]
                if not known(cls):
                    self.follow(cls)
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

    def _code_of(self, f: types.FunctionType) -> None:
        """The globals that the code of `f` names, and what it seems to name of the modules among them."""
        names, space = names_of(f.__code__), f.__globals__
        for name in names & space.keys():
            self._name(space, name)
            self._guess(space[name], names)
        if names & _NAMESPACE:
            self._everything(space)
        if names & _ENVIRONMENT:
            self.follow(os.environ)

    def _guess(self, module: Any, names: frozenset[str]) -> None:
        if isinstance(module, types.ModuleType) and not from_known(module):
            space = vars(module)
            for name in names & space.keys():
                if (id(space), name) not in self._taken:
                    self._name(space, name)
                    self._guess(space[name], names)

    def _name(self, space: dict[str, Any], name: str) -> None:
        if (id(space), name) not in self._taken:
            self._taken.add((id(space), name))
            self._place(space, name)

    def _everything(self, space: dict[str, Any]) -> None:
        self.equal.append((Content(space, _public), 0, _public(space)))
        for name in _public(space):
            self._name(space, name)

    def take(self, module: types.ModuleType, name: str) -> None:
        """Watch what a trace has read of a module."""
        space = vars(module)
        if name == "__dict__":
            self._everything(space)
        elif name in space:
            self._name(space, name)
        elif name:
            self.equal.append((Content(space, functools.partial(_lacks, name)), 0, True))
            self.follow(module)
            if "__getattr__" in space:
                self._name(space, "__getattr__")
        self._taken.add((id(space), name))

    def has(self, module: types.ModuleType, name: str) -> bool:
        """Whether what was read of a module is watched."""
        return (id(vars(module)), name) in self._taken

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
        if isinstance(value, torch.Tensor) and not isinstance(value, late.DTensor):
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

# ------------------------------------------------------------ modules
@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in `code` and in the functions inside it."""
    return frozenset(code.co_names).union(*(names_of(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _package(space: dict[str, Any]) -> str:
    return str(space.get("__name__")).partition(".")[0]


def from_known(module: types.ModuleType) -> bool:
    """True for a module of a package whose code is not followed."""
    return _package(vars(module)) in _KNOWN


def known(obj: Any) -> bool:
    """True for a class or function of a package whose code is not followed."""
    module: str = getattr(obj, "__module__", None) or ""
    return module.partition(".")[0] in _KNOWN


def _lacks(name: str, space: dict[str, Any]) -> bool:
    return name not in space


def _public(space: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name in space if not name.startswith("__"))


_reads = threading.local()
_lock = threading.RLock()
_traces = 0
_classes: dict[type, type] = {}
"""Class of modules -> the subclass that notes what is read."""
_noting: dict[int, tuple[types.ModuleType, type]] = {}
"""Modules that have such a class now, and the class that they had."""


@contextlib.contextmanager
def reading(modules: Iterable[types.ModuleType], found: dict[tuple[int, str], Read]) -> Iterator[None]:
    """Inside, what a program reads of its modules is put into `found`: those that are imported, and `modules`.

    Modules that were first imported inside are there under the name "": nobody could say what was read of them.
    """
    global _traces
    before = set(sys.modules)
    with _lock:
        _traces += 1
        for module in [*sys.modules.values(), *modules]:
            if isinstance(module, types.ModuleType) and id(module) not in _noting and not from_known(module):
                cls = type(module)
                with contextlib.suppress(TypeError):
                    module.__class__ = _class_that_notes(cls)
                    _noting[id(module)] = module, cls
    outer, _reads.found = getattr(_reads, "found", None), found
    try:
        yield
    finally:
        _reads.found = outer
        for name in set(sys.modules) - before:
            module = sys.modules[name]
            if isinstance(module, types.ModuleType) and not from_known(module):
                found[id(module), ""] = module, ""
        with _lock:
            _traces -= 1
            if _traces == 0:
                for module, cls in _noting.values():
                    module.__class__ = cls
                _noting.clear()


def _class_that_notes(cls: type) -> type:
    attribute: Any = cls.__getattribute__

    def get(self: Any, name: str) -> Any:
        found = _found_here()
        if found is not None and name not in ("__spec__", "__class__") and _is_programs(sys._getframe(1)):
            found[id(self), name] = self, name
        return attribute(self, name)

    if cls not in _classes:
        _classes[cls] = type(cls.__name__, (cls,), {"__slots__": (), "__getattribute__": get})
    return _classes[cls]


def _found_here() -> dict[tuple[int, str], Read] | None:
    """Where reads are noted in this thread; one in which autograd runs backward has the modes of the trace only."""
    found: dict[tuple[int, str], Read] | None = getattr(_reads, "found", None)
    if found is None:
        modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
        found = next((m.reads for m in modes if isinstance(m, Recorder)), None)
    return found


def _is_programs(frame: types.FrameType | None) -> bool:
    """Whether `frame` runs the program's code, or Python's library for it, and not torch's or ours."""
    while frame is not None and _package(frame.f_globals) in sys.stdlib_module_names:
        frame = frame.f_back
    return frame is not None and _package(frame.f_globals) not in _KNOWN


def reach(roots: Iterable[Any], reads: Iterable[Read] = ()) -> Reach:
    """What the roots lead to, and what earlier traces have read of modules."""
    found = Reach()
    for r in roots:
        found.follow(r)
    for module, name in reads:
        found.take(module, name)
    return found
