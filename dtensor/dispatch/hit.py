"""The hot path: from an op on DTensors to local work, by way of a cached plan.

    key = (specs of the tensors, static arguments)  per op      hit ──▶ plan(local arguments)
                                                                miss ─▶ rule ▶ decision ▶ plan, cached

A hit walks the arguments once: it collects the key and the local arguments together, looks the plan up and
calls it. Everything that needs thought happens on a miss. A plan is bound to this rank: which inputs move and
how, which static arguments are replaced by local ones, which local function runs, the specs of the outputs.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dtensor.comm.communicator import traced
from dtensor.comm.world import kept
from dtensor.dispatch import materialized as moved_views
from dtensor.dispatch import random as rng
from dtensor.dispatch.materialized import MovedSpec, ViewCall, note_written
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.call import Call, op_name
from dtensor.rules.decision import Decision
from dtensor.rules.deferred import PutOff
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import lookup
from dtensor.rules.rule import Entry, Kernel
from dtensor.spec import Spec
from dtensor.strides import in_order

__all__ = ["MovedSpec", "OpInfo", "dispatch", "implicit_replication", "replicates_implicitly", "special"]

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
        self.kind = "out" if any(a.is_out for a in args) else "foreach" if _is_of_lists(func) else "plain"
        values = self.entry.values if self.entry else frozenset()
        numbers = _NUMBERS if "*" in values else ()
        self.value_names = frozenset(a.name for a in args if a.name in values or str(a.type) in numbers)
        self.value_args = frozenset(i for i, a in enumerate(args) if a.name in self.value_names)


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

_ops: dict[int, OpInfo] = kept({})
_specials: dict[str, Callable[..., Any]] = {}
_n_plans = 0
_NOTHING: dict[str, Any] = {}
_flags = threading.local()
_DTensor: Any = None
_only: set[type] = set()
_new: Callable[..., Any]
_spec_of, _local_of = operator.attrgetter("_spec"), operator.attrgetter("_local_tensor")


def bind(cls: Any, new: Callable[..., Any]) -> None:
    """Told by `dtensor.tensor` which class wraps results, and how."""
    global _DTensor, _new, _only
    _DTensor, _new, _only = cls, new, {cls}


def special(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that handles these ops as a whole: f(args, kwargs) -> result."""

    def deco(f: Callable[..., Any]) -> Callable[..., Any]:
        for n in names:
            _specials[n] = f
        return f

    return deco


def replicates_implicitly() -> bool:
    """Whether plain tensors count as replicated here: inside `implicit_replication`."""
    return bool(getattr(_flags, "implicit", False))


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors next to DTensors count as replicated on every axis. Nests; per thread."""
    before = getattr(_flags, "implicit", False)
    _flags.implicit = True
    try:
        yield
    finally:
        _flags.implicit = before


# ------------------------------------------------------------ the hit
def dispatch(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Run `func` on arguments with at least one DTensor."""
    info = _ops.get(id(func))
    if info is None:
        info = _ops[id(func)] = OpInfo(func)
    if info.special is not None:
        return info.special(args, kwargs or {})
    D = _DTensor
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
            if a and type(a[0]) is D and set(map(type, a)) == _only:
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
                        return _with_plain(info, args, kwargs or {})
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
            return _with_plain(info, args, kwargs or {})
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
                return _with_plain(info, args, kwargs)
            elif t is list or t is tuple:
                key.append(tuple(x._spec if type(x) is D else x for x in a))
                named[name] = [x._local_tensor if type(x) is D else x for x in a]
                if any(isinstance(x, torch.Tensor) and type(x) is not D for x in a):
                    return _with_plain(info, args, kwargs)
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
    return _miss(info, where, local, named, args, kwargs or {})


# ------------------------------------------------------------ plans
class Plan:
    """A decision bound to this rank. `execute(local, kwargs, args)` runs it."""

    __slots__ = (
        "call",
        "decision",
        "execute",
        "inplace",
        "kernel",
        "moves",
        "out",
        "overrides",
        "places",
        "reorder",
        "run",
        "seed",
        "written",
    )

    def __init__(self, info: OpInfo, call: Call, decision: Decision, structure: str, arg_names: Sequence[str]) -> None:
        bound = decision.rule.bind(decision.inputs, decision.outputs) if decision.rule.bind else None
        self.call, self.decision, self.run = call, decision, bound or info.run
        self.kernel = decision.kernel
        if self.kernel is None and decision.rule.local is not None:
            part = decision.rule.local(decision.inputs, decision.outputs)
            self.kernel = None if part is None else Kernel("local", frozenset(), (), part)
        self.moves = tuple(
            (i, s, d) for i, (s, d) in enumerate(zip(call.inputs, decision.inputs, strict=True)) if s is not d
        )
        self.places = _places(call, arg_names)
        given = decision.rule.localize(decision.inputs, decision.outputs) if decision.rule.localize else {}
        self.overrides = tuple((_position(call.op, name), name, value) for name, value in given.items())
        outs = decision.outputs
        self.out: Any = outs[0] if structure == "one" else outs
        self.inplace = bool(info.written) and (info.gives_target or not info.func._schema.returns)
        self.written = info.written_at
        self.seed = info.entry is not None and info.entry.random and bound is None
        outside = call.inputs[0].mesh.coord is None
        simple = not (self.moves or self.overrides or self.kernel or self.written or self.seed or outside)
        # What was moved or made otherwise than by the op may lie in memory in another order than the spec says.
        own_order = bound is None or getattr(bound, "in_order", False)
        self.reorder = bool(self.moves or (not info.is_view and (self.kernel or not own_order)))
        simple = simple and not self.reorder
        if outside:
            self.execute = self._outside
        elif simple and structure == "one":
            self.execute = (
                _simple_view(self.run, outs[0], info.func) if info.is_view else _simple_one(self.run, outs[0])
            )
        elif simple and structure != "none":
            self.execute = _simple_many(self.run, outs, list if structure == "list" else tuple)
        elif self.inplace and not (self.moves or self.overrides or self.kernel or self.seed) and structure == "one":
            self.execute = _simple_inplace(self.run, self.written)
        else:
            self.execute = self._general(structure)
        if info.is_view:
            if not (simple and structure == "one"):
                self.execute = _as_base(self.execute, info.func)
        elif any(s is not None and s.dtype.is_complex for s in (*decision.inputs, *outs)):
            self.execute = _with_lazy_values(self.execute)

    def local_inputs(self, local: list[Any], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The local arguments after the moves and with static arguments made local."""
        if self.moves or self.overrides:
            local, named = [list(x) if isinstance(x, list) else x for x in local], dict(named)
            self.move(local, named)
            for at, name, value in self.overrides:
                if at < len(local):
                    local[at] = value
                else:
                    named[name] = value
        return local, named

    def move(self, local: list[Any], named: dict[str, Any]) -> None:
        """Put the moved tensors in their places."""
        for i, src, dst in self.moves:
            at, sub = self.places[i]
            box: Any = local if isinstance(at, int) else named
            if sub is None:
                box[at] = redistribute_local(box[at], src, dst)
            else:
                box[at][sub] = redistribute_local(box[at][sub], src, dst)

    def compute(self, local: list[Any], named: dict[str, Any]) -> Any:
        """Moves, then the local op or kernel: local results."""
        local, named = self.local_inputs(local, named)
        if self.kernel is not None:
            run: Callable[[], Any] = lambda: self.kernel.run(self._context(local, named))  # type: ignore[union-attr]  # noqa: E731
        else:
            run = lambda: self.run(*local, **named)  # noqa: E731
        if not self.seed:
            return run()
        spec = next((s for s in self.decision.outputs if s is not None), self.decision.inputs[0])
        at, sub = self.places[0]
        box: Any = local[at] if isinstance(at, int) else named[at]
        first = box if sub is None else box[sub]
        generator = named.get("generator")
        if isinstance(generator, torch.Generator):
            return rng.run_seeded(run, spec, generator, first.device)
        generator = next((a for a in local if isinstance(a, torch.Generator)), None)
        return rng.run_seeded(run, spec, generator, first.device)

    def _context(self, local: list[Any], named: dict[str, Any]) -> KernelContext:
        arguments: dict[str, Any] = {a.name: a.default_value for a in self.call.op._schema.arguments}
        arguments.update(zip((a.name for a in self.call.op._schema.arguments), local, strict=False))
        arguments.update(named)
        inputs = []
        for at, sub in self.places:
            box = local[at] if isinstance(at, int) else named[at]
            inputs.append(box if sub is None else box[sub])
        d = self.decision
        return KernelContext(self.call, d.kernel_axes, d.kernel_factors, inputs, d.inputs, d.outputs, arguments)

    def _general(self, structure: str) -> Callable[..., Any]:
        outs = self.decision.outputs
        view = _aliases(self.call.op)
        moved_view = view and bool(self.moves or self.kernel)  # a kernel's result is memory of its own

        def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
            got = self.compute(local, named)
            if self.written:
                note_written(args, self.written)
            if self.inplace:
                if self.kernel is not None and structure == "one":
                    args[0]._local_tensor.copy_(got)
                return args[0] if structure == "one" else None
            if structure == "none":
                return got
            if type(got) is PutOff:
                waiting = got.specs(outs, self.decision.kernel_axes)
                return tuple(_wrap(g, s) for g, s in zip(got.parts, waiting, strict=True))
            if self.reorder:
                got = _in_order(got, outs)
            if moved_view:
                return self._moved_view(got, structure, args, named)
            if structure == "one":
                return _wrap(got, outs[0])
            made = [_wrap(g, s) for g, s in zip(got, outs, strict=True)]
            return made if structure == "list" else tuple(made)

        return execute

    def _moved_view(self, got: Any, structure: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Views of `args[0]`, which had to move: each with the call that takes it again."""
        many = [got] if structure == "one" else got
        made = []
        for i, (t, spec) in enumerate(zip(many, self.decision.outputs, strict=True)):
            view = ViewCall(self.call.op, args[1:], dict(named), None if structure == "one" else i)
            made.append(_wrap(t, None if spec is None else MovedSpec.of(spec, t, args[0], view)))
        return made[0] if structure == "one" else made if structure == "list" else tuple(made)

    def _outside(self, local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        """A rank outside the mesh computes nothing and gets empty shards."""
        if self.inplace:
            return args[0]
        leaves = pytree.tree_leaves([local, named])
        device = named.get("device") or next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
        empty = lambda s: torch.zeros(s.local_shape, dtype=s.dtype, device=device)  # noqa: E731
        made = [None if s is None else _new(_DTensor, empty(s), s, requires_grad=False) for s in self.decision.outputs]
        return made[0] if isinstance(self.out, Spec) else made


def _simple_one(run: Callable[..., Any], spec: Spec | None) -> Callable[..., Any]:
    new, D = _new, _DTensor

    def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        return new(D, run(*local, **named) if named else run(*local), spec, requires_grad=False)

    return execute


def _simple_view(run: Callable[..., Any], spec: Spec | None, func: Op) -> Callable[..., Any]:
    """`_as_base` of `_simple_one`, in one call."""
    new, D, inference, plain = _new, _DTensor, torch.is_inference_mode_enabled, torch.Tensor

    def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        if inference() and not args[0].is_inference():
            with torch.inference_mode(False):
                return new(D, run(*local, **named), spec, requires_grad=False)
        made = new(D, run(*local, **named) if named else run(*local), spec, requires_grad=False)
        return made if type(local[0]) is plain else aliasing(made, args[0], func, args, named)

    return execute


def _as_base(execute: Callable[..., Any], func: Op) -> Callable[..., Any]:
    """In inference mode a view of an ordinary tensor is an ordinary tensor, as in torch."""
    inference, plain = torch.is_inference_mode_enabled, torch.Tensor

    def view(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        if inference() and not args[0].is_inference():
            with torch.inference_mode(False):
                return execute(local, named, args)
        made = execute(local, named, args)
        return made if type(local[0]) is plain else aliasing(made, args[0], func, args, named)

    return view


def aliasing(views: Any, base: Any, func: Op, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Views of `base`, one or several, as `func` gave them; in a trace a compiler has to see what they are views of."""
    if traced(base._local_tensor):
        several = isinstance(views, (list, tuple))
        for i, view in enumerate(views if several else (views,)):
            moved_views.note_view(view, base, ViewCall(func, args[1:], dict(named), i if several else None))
    return views


def _with_lazy_values(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Let local ops see conjugations and negations that torch keeps as a bit, and hides where it dispatches to us."""
    keys = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded

    def run(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        before = [excluded(k) for k in keys]
        for k in keys:
            exclude(k, False)
        try:
            return execute(local, named, args)
        finally:
            for k, was in zip(keys, before, strict=True):
                exclude(k, was)

    return run


def _simple_many(run: Callable[..., Any], specs: Sequence[Spec | None], kind: type) -> Callable[..., Any]:
    def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        got = run(*local, **named)
        return kind([
            _wrap(g, s) for g, s in zip(got, specs, strict=True)
        ])  # fmt: skip

    return execute


def _simple_inplace(run: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
    def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        run(*local, **named)
        if moved_views._alive:
            note_written(args, written)
        return args[0]

    return execute


def _in_order(got: Any, outs: Sequence[Spec | None]) -> Any:
    if isinstance(got, torch.Tensor):
        return got if outs[0] is None else in_order(got, outs[0].stride)
    return [
        in_order(g, s.stride) if s is not None and isinstance(g, torch.Tensor) else g
        for g, s in zip(got, outs, strict=True)
    ]


def _wrap(local: Any, spec: Spec | None) -> Any:
    """A result as a DTensor."""
    if spec is None or local is None:
        return None if isinstance(local, torch.Tensor) else local
    return _new(_DTensor, local, spec, requires_grad=False)


def _aliases(op: Op) -> bool:
    returns = op._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _position(op: Op, name: str) -> int:
    """Position of argument `name` in the schema; beyond all for one that is given by name only."""
    return next((i for i, a in enumerate(op._schema.arguments) if a.name == name and not a.kwarg_only), 1 << 30)


def _places(call: Call, arg_names: Sequence[str]) -> tuple[tuple[Any, int | None], ...]:
    """Per input where it sits among the arguments: position (or name) and position in a list."""
    out: list[tuple[Any, int | None]] = []
    for name in call.names:
        base, _, sub = name.partition(".")
        at: Any = arg_names.index(base) if base in arg_names else base
        out.append((at, int(sub) if sub else None))
    return tuple(out)


# ------------------------------------------------------------ the miss
def _unbound(*_: Any) -> Any:
    raise RuntimeError("dtensor.dispatch.hit is used before dtensor.tensor was imported")


_miss: Callable[..., Any] = _unbound
_with_plain: Callable[..., Any] = _unbound


def bind_miss(miss: Callable[..., Any], with_plain: Callable[..., Any]) -> None:
    """Told by `dtensor.dispatch.miss` what to do on a miss and with plain tensors among the arguments."""
    global _miss, _with_plain
    _miss, _with_plain = miss, with_plain


def store(info: OpInfo, key: tuple[Any, ...], execute: Callable[..., Any]) -> None:
    """Cache what a plan executes; the tables are dropped as a whole when they have grown too large."""
    global _n_plans
    if _n_plans >= MAX_PLANS:
        _n_plans = sum([len(other.plans) for other in _ops.values()])  # fewer where `_ops` was emptied
    if _n_plans >= MAX_PLANS:
        for other in _ops.values():
            other.plans.clear()
        _n_plans = 0
    info.plans[key] = execute
    _n_plans += 1
