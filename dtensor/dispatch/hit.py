"""The hot path: from an op on DTensors to local work, by way of a cached plan.

    key = (specs of the tensors, static arguments)  per op      hit ──▶ plan(local arguments)
                                                                miss ─▶ rule ▶ decision ▶ plan, cached

A hit walks the arguments once: it collects the key and the local arguments together, looks the plan up and
calls it. Everything that needs thought happens on a miss. A plan is bound to this rank: which inputs move and
how, which static arguments are replaced by local ones, which local function runs, the specs of the outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from dtensor.comm.world import kept
from dtensor.dispatch import late
from dtensor.per_thread import PerThread
from dtensor.rules.call import op_name
from dtensor.rules.registry import lookup
from dtensor.rules.rule import Entry

__all__ = [
    "Op", "OpInfo", "dispatch", "implicit_replication", "info_of", "ops", "replicates_implicitly",
    "special", "store",
]  # fmt: skip

MAX_PLANS = 65536
"""Plans kept over all ops; the oldest op tables are dropped beyond."""

Op = torch._ops.OpOverload


class OpInfo:
    """What dispatch knows about one overload, made at its first use."""

    __slots__ = (
        "entry", "func", "gives_target", "is_view", "kind", "name", "plans", "run", "special", "value_args",
        "value_names", "written", "written_at",
    )  # fmt: skip

    def __init__(self, func: Op) -> None:
        schema = func._schema
        self.func, self.name, self.run = func, op_name(func), func._op
        self.entry: Entry | None = lookup(func)
        self.plans: dict[tuple[Any, ...], Callable[..., Any]] = {}
        own = self.entry is not None and self.entry.where and self.name.startswith(self.entry.name)
        self.special = None if own else _specials.get(self.name)  # a program's rule for this op comes first
        args = schema.arguments
        self.written = tuple(a.name for a in args if a.alias_info is not None and a.alias_info.is_write)
        self.written_at = tuple(i for i, a in enumerate(args) if a.name in self.written)
        # Some write an argument and return something new (`rrelu_with_noise`): their results are wrapped as ever.
        self.gives_target = bool(self.written and schema.returns) and schema.returns[0].alias_info is not None
        self.is_view = not self.written and any(r.alias_info is not None for r in schema.returns)
        self.kind = _kind(func)
        values = self.entry.values if self.entry else frozenset()
        numbers = _NUMBERS if "*" in values else ()
        self.value_names = frozenset(a.name for a in args if a.name in values or str(a.type) in numbers)
        self.value_args = frozenset(i for i, a in enumerate(args) if a.name in self.value_names)


def _kind(func: Op) -> str:
    """What differs from one kind of op to the next, on a miss (`dtensor.dispatch.miss`).

    kind            its schema                                     what a miss does
    "ordinary"      anything else                                  one rule, one decision, one plan
    "lists"         lists first, one list or nothing as result     one decision for each element (`lists`)
    "out"           an argument `out=`                             the form without, then a copy (`in_place`)
    "inplace view"  changes its input's own shape (`squeeze_`)     takes over what the view gives (`in_place`)
    """
    if any(a.is_out for a in func._schema.arguments):
        return "out"
    if torch.Tag.inplace_view in func.tags:
        return "inplace view"
    return "lists" if _is_of_lists(func) else "ordinary"


def _is_of_lists(func: Op) -> bool:
    """True for an op of torch that does to every element of its lists what another op does to a tensor.

    Its schema: lists first, one list as the result or nothing but lists written. What joins a list gives a tensor;
    composites that take lists (`meshgrid`) are made of other ops.
    """
    lists = lambda a: str(a.type) == "List[Tensor]"  # noqa: E731
    args, returns = func._schema.arguments, func._schema.returns
    if func.namespace != "aten" or not args or not lists(args[0]):
        return False
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return False
    if not returns:
        return args[0].alias_info is not None
    return len(returns) == 1 and lists(returns[0])


_NUMBERS = ("number", "Optional[number]", "float", "Optional[float]", "Tensor", "Optional[Tensor]")
"""Types of arguments that may be a Python number; where a tensor is given, its spec is in the key."""

ops: dict[int, OpInfo] = kept({})
"""By the id of an overload what is known about it; overloads live as long as torch."""
_specials: dict[str, Callable[..., Any]] = {}
_n_plans = 0
_NOTHING: dict[str, Any] = {}
_implicit = PerThread(False)
_spec_of, _local_of = operator.attrgetter("_spec"), operator.attrgetter("_local_tensor")


def special(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that handles these ops as a whole: f(args, kwargs) -> result."""

    def deco(f: Callable[..., Any]) -> Callable[..., Any]:
        for n in names:
            _specials[n] = f
        return f

    return deco


def replicates_implicitly() -> bool:
    """Whether plain tensors count as replicated here: inside `implicit_replication`."""
    return _implicit.value


def implicit_replication() -> AbstractContextManager[None]:
    """Inside, plain tensors next to DTensors count as replicated on every axis. Nests; per thread."""
    return _implicit.set_to(True)


def info_of(func: Op) -> OpInfo:
    """What dispatch knows about an overload, made when it is first asked for."""
    info = ops.get(id(func))
    if info is None:
        info = ops[id(func)] = OpInfo(func)
    return info


# ------------------------------------------------------------ the hit
def dispatch(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Run `func` on arguments with at least one DTensor."""
    info = ops.get(id(func)) or info_of(func)
    if info.special is not None:
        return info.special(args, kwargs or {})
    D = late.DTensor
    key: list[Any] = []
    local: list[Any] = []
    for a in args:
        t = type(a)
        if t is D:
            key.append(a._spec)
            local.append(a._local_tensor)
        elif t is int:
            key.append(t if len(local) in info.value_args else a)
            local.append(a)
        elif t is list or t is tuple:
            key.append(len(a))
            if a and type(a[0]) is D and len(set(map(type, a))) == 1:
                key += map(_spec_of, a)
                local.append(list(map(_local_of, a)))
                continue
            part: list[Any] = []
            for x in a:
                if type(x) is D:
                    key.append(x._spec)
                    part.append(x._local_tensor)
                else:
                    if isinstance(x, torch.Tensor):
                        return late.with_plain(info, args, kwargs or {})
                    key.append(type(x) if len(local) in info.value_args else x)
                    if type(x) is not int:
                        key.append(type(x))
                    part.append(x)
            local.append(part)
        elif t is float or t is bool:
            key.append(t)
            if len(local) not in info.value_args:
                key.append(a)
            local.append(a)
        elif isinstance(a, torch.Tensor):
            return late.with_plain(info, args, kwargs or {})
        else:
            key.append(t if len(local) in info.value_args else a)
            local.append(a)
    named: dict[str, Any] = _NOTHING
    if kwargs:
        named = {}
        for name, a in kwargs.items():
            t = type(a)
            key.append(name)
            if t is D:
                key.append(a._spec)
                named[name] = a._local_tensor
            elif isinstance(a, torch.Tensor):
                return late.with_plain(info, args, kwargs)
            elif t is list or t is tuple:
                key.append(tuple(x._spec if type(x) is D else x for x in a))
                named[name] = [x._local_tensor if type(x) is D else x for x in a]
                if any(isinstance(x, torch.Tensor) and type(x) is not D for x in a):
                    return late.with_plain(info, args, kwargs)
            elif name == "generator":
                named[name] = a
            else:
                key.append(t)
                if name not in info.value_names:
                    key.append(a)
                named[name] = a
    where = tuple(key)
    execute = info.plans.get(where)
    if execute is not None:
        return execute(local, named, args)
    return late.miss(info, where, local, named, args, kwargs or {})


def store(info: OpInfo, key: tuple[Any, ...], execute: Callable[..., Any]) -> None:
    """Cache what a plan executes; the tables are dropped as a whole when they have grown too large."""
    global _n_plans
    if _n_plans >= MAX_PLANS:
        _n_plans = sum([len(other.plans) for other in ops.values()])  # fewer where `ops` was emptied
    if _n_plans >= MAX_PLANS:
        for other in ops.values():
            other.plans.clear()
        _n_plans = 0
    info.plans[key] = execute
    _n_plans += 1
