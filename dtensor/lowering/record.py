"""Writing down what a program does to local tensors: the graph behind `dtensor.lower`.

A `Recorder` is a dispatch mode. The program runs under it as ever, through autograd and the engine, on DTensors whose
local tensors are fake ones (shapes and dtypes, no values). Every op on local tensors that results becomes a node of an
fx graph, in the order in which it ran: those that the engine calls, those of backward, those of the optimizer. So
the graph holds no layouts to be decided and no autograd; what the engine decided is in the nodes.

    program            torch.mm(x, w)         x: f32[8@dp,16]   w: f32[16,32@tp]
    node               aten.mm(x, w)          f32[4,16]         f32[16,16]            meta["call"]: the op on DTensors

Collectives of process groups are functional ops by the name of their group, and are recorded as such. Those of
simulated and fake ranks are methods of a communicator, and become one call of it each.

Random numbers are drawn at every call. What the engine does to generators around a draw, so that ranks agree where they
must, becomes two calls, one before the draw and one after it.

As no values exist, nothing can depend on them: a program that reads one (`item()`, an `if` on a tensor) is refused, as
is one that uses a plain tensor that the recorder does not know, or a generator of its own.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dtensor.comm.communicator import Communicator
from dtensor.comm.fake import FakeCommunicator
from dtensor.comm.observers import received
from dtensor.comm.pending import Pending
from dtensor.debug.collectives import Collective, classify
from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch import random as rng
from dtensor.dispatch.call import layouts
from dtensor.errors import LayoutError, explain_error
from dtensor.simulation.communicator import SimulatedCommunicator

__all__ = ["LowerError", "Recorder", "recording", "refuse", "tensors_in"]

aten = torch.ops.aten
_SAME = frozenset({"aten::detach", "aten::alias", "aten::detach_", "aten::lift_fresh"})
"""Ops that give their input again, as far as values go."""
_ZEROS = frozenset(
    f"aten::{n}"
    for n in "zeros expand view _unsafe_view clone cat stack t transpose unsqueeze slice select unbind".split()
)
"""Zeros, and ops that make zeros of zeros."""


class LowerError(LayoutError):
    """A program that cannot be lowered."""


def refuse(call: str, got: str, rule: str, fix: str) -> LowerError:
    """The four-part error."""
    return LowerError(explain_error(f"dtensor.lower: {call}", got, rule, fix))


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among `values`, lists taken apart."""
    for v in values:
        if isinstance(v, torch.Tensor):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from tensors_in(v)


class Recorder(TorchDispatchMode):
    """Records the ops on local tensors. `fake` is the mode of the fake tensors; `graph` what was recorded.

    `constants` are tensors that the program makes of Python values, by the name of their node; `storages` tell what
    memory was written to, `varied` what memory with more than constants. `stand_ins`: by the id of a real tensor that
    is an input, the fake one that ops get for it.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.graph = fx.Graph()
        self.nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.stand_ins: dict[int, torch.Tensor] = {}
        self.storages: set[int] = set()
        self.varied: set[int] = set()
        self.call: str | None = None
        self.depth = 0
        self.reads: dict[Any, Any] = {}
        """What is read of modules; see `dtensor.lowering.reach`."""

    # ------------------------------------------------------------ tensors and nodes
    def know(self, t: torch.Tensor, node: fx.Node) -> None:
        """`node` computes `t`."""
        self.nodes[id(t)] = (t, node)

    def node_of(self, t: torch.Tensor) -> fx.Node:
        """The node that computes `t`; LowerError for a tensor of elsewhere."""
        known = self.nodes.get(id(t))
        if known is not None:
            return known[1]
        if not isinstance(t, FakeTensor) and self.depth:
            return self._constant(t)  # something that the engine keeps for its own use
        raise refuse(
            "a tensor that is neither an argument nor reachable from one", f"{t.dtype}{list(t.shape)}",
            "its values would be baked in as constants",
            "pass it as an argument, keep it in a list, a dict or an attribute, or make it inside the function",
        )  # fmt: skip

    def _constant(self, t: torch.Tensor) -> fx.Node:
        name = f"constant_{len(self.constants)}"
        with _disable_current_modes():
            self.constants[name] = t.detach().clone()
        node = self.graph.get_attr(name)
        node.meta["val"] = t
        self.know(t, node)
        return node

    def argument(self, a: Any) -> Any:
        """`a` as an argument of a node."""
        if isinstance(a, torch.Tensor):
            return self.node_of(a)
        if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
            return type(a)(self.argument(x) for x in a) if type(a) in (list, tuple) else [self.argument(x) for x in a]
        if isinstance(a, dict):
            return {k: self.argument(v) for k, v in a.items()}
        return tuple(a) if isinstance(a, torch.Size) else a

    def add(self, target: Callable[..., Any], args: Any, kwargs: dict[str, Any], out: Any) -> fx.Node:
        """A node that calls `target`, and that computes `out`."""
        node = self.graph.call_function(target, self.argument(tuple(args)), self.argument(kwargs))
        node.meta["call"], node.meta["val"] = self.call, out
        if isinstance(out, torch.Tensor):
            self.know(out, node)
        elif isinstance(out, (list, tuple)):
            for i, t in enumerate(out):
                if isinstance(t, torch.Tensor):
                    item = self.graph.call_function(operator.getitem, (node, i))
                    item.meta["call"], item.meta["val"] = self.call, t
                    self.know(t, item)
        return node

    def is_zero(self, t: torch.Tensor) -> bool:
        """True for zeros made as such, rearranged perhaps, and never written to: the same on all ranks."""
        return self._made_of(t, lambda op: op._schema.name in _ZEROS, self.storages)

    def is_constant(self, t: torch.Tensor) -> bool:
        """True for what is computed of shapes and numbers alone: of no input, of nothing drawn or sent."""
        return self._made_of(t, lambda op: torch.Tag.nondeterministic_seeded not in op.tags, self.varied)

    def _made_of(self, t: torch.Tensor, good: Callable[[torch._ops.OpOverload], bool], written: set[int]) -> bool:
        """Whether `t` comes of good ops alone, on memory that is not among the `written`."""
        known = self.nodes.get(id(t))
        left = [] if known is None else [known[1]]
        seen = set(left)
        while left:
            node = left.pop()
            at = {x.untyped_storage()._cdata for x in tensors_in([node.meta.get("val")])}
            if at & written or "moved" in node.meta:
                return False
            if node.target is not operator.getitem:
                if not isinstance(node.target, torch._ops.OpOverload) or not good(node.target):
                    return False
            new = set(node.all_input_nodes) - seen
            seen |= new
            left += new
        return known is not None

    # ------------------------------------------------------------ what runs
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t is late.DTensor for t in types):
            return self._on_dtensors(func, args, kwargs)
        if any(t is not torch.Tensor and not issubclass(t, FakeTensor) for t in types):
            return NotImplemented
        name = func._schema.name
        if name.startswith("profiler::"):
            return None if not func._schema.returns else func(*args, **kwargs)
        known = list(tensors_in((*args, *kwargs.values())))
        if _is_meta(known, kwargs):  # the engine asks for shapes
            with _disable_current_modes():
                return func(*args, **kwargs)
        self._check(func, args, kwargs)
        given_args, given_kwargs = args, kwargs
        foreign = [t for t in known if not isinstance(t, FakeTensor)]
        if foreign and name != "aten::lift_fresh":
            given = {id(t): self._as_fake(t, self.node_of(t)) for t in foreign}
            args, kwargs = _map(lambda a: given.get(id(a), a), args), _map(lambda a: given.get(id(a), a), kwargs)
        out = func(*args, **kwargs)
        if name in _SAME and known:
            constant = bool(foreign) and id(known[0]) not in self.nodes
            node = self._constant(known[0]) if constant else self.node_of(known[0])
            if constant:
                node.meta["val"] = out
            self.know(out, node)
            return out
        written = func._schema.is_mutable
        if written and func._schema.returns and func._schema.returns[0].alias_info is not None:
            out = _written(func, given_args, given_kwargs, out)
        made = list(tensors_in([out]))
        checks = not func._schema.returns  # an assertion
        if made or written or checks:
            if written or checks:
                to = {t.untyped_storage()._cdata for t in _targets(func, args, kwargs)}
                self.storages |= to
                if not all(map(self.is_constant, known)) or torch.Tag.nondeterministic_seeded in func.tags:
                    self.varied |= to
                node = self.graph.call_function(func, self.argument(tuple(args)), self.argument(kwargs))
                node.meta["call"], node.meta["val"] = self.call, out
            else:
                node = self.add(func, args, kwargs, out)
            moved = classify(func, args, kwargs, out)
            if moved is not None:
                node.meta["moved"] = moved
        return out

    def _as_fake(self, t: torch.Tensor, node: fx.Node) -> torch.Tensor:
        if id(t) in self.stand_ins:
            return self.stand_ins[id(t)]
        made = self.fake.from_tensor(t, static_shapes=True)
        self.know(made, node)
        return made

    def _on_dtensors(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = [t for t in tensors_in((*args, *kwargs.values())) if isinstance(t, late.DTensor)]
        for t in given:
            if not isinstance(t._local_tensor, FakeTensor) and type(t._local_tensor) is torch.Tensor:
                raise refuse(
                    f"{func} on a DTensor that is neither an argument nor reachable from one", str(t._spec),
                    "its values would be baked in as constants", "pass it, or the module that holds it",
                )  # fmt: skip
        self._check(func, args, kwargs)
        outer, self.call = self.call, f"{func}: {layouts(args, kwargs)}"
        self.depth += 1
        try:
            with self:
                return hot.dispatch(func, args, kwargs)
        finally:
            self.call = outer
            self.depth -= 1

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            raise refuse(
                str(func), layouts(args, kwargs), "a program has no place for a generator",
                "leave it out: the default generator is used, at every call",
            )  # fmt: skip

    # ------------------------------------------------------------ what is no op
    @contextlib.contextmanager
    def bracket(self, name: str, make: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
        """Record that the context manager `make(*args)` is entered, and left after what is recorded inside."""
        open_ones: list[Any] = []

        def enter() -> None:
            context = make(*args)
            context.__enter__()
            open_ones.append(context)

        def leave() -> None:
            open_ones.pop().__exit__(None, None, None)

        for target, side in ((enter, "begin"), (leave, "end")):
            target.__name__ = target.__qualname__ = f"{name}_{side}"
            target.__module__ = "random"
        self.add(enter, (), {}, None).meta["kept"] = True
        yield
        self.add(leave, (), {}, None).meta["kept"] = True

    def collective(self, name: str, run: Callable[..., Any], args: Sequence[Any], out: Any, moved: Collective) -> Any:
        """Record `run(*args)`, a communicator's method; `out` is what it gives."""

        def target(*given: Any) -> Any:
            return run(*given)

        target.__name__ = target.__qualname__ = name
        target.__module__ = "communicator"
        self.add(target, args, {}, out).meta["moved"] = moved
        return out


def _is_meta(tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """True for a call on tensors of the meta device, or one that makes such a tensor."""
    if tensors:
        return all(t.device.type == "meta" and not isinstance(t, FakeTensor) for t in tensors)
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _map(f: Callable[[Any], Any], a: Any) -> Any:
    if isinstance(a, (list, tuple)):
        return [_map(f, x) for x in a] if isinstance(a, list) else tuple(_map(f, x) for x in a)
    return {k: _map(f, v) for k, v in a.items()} if isinstance(a, dict) else f(a)


def _written(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """What an op that writes returns: the very arguments that it wrote."""
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    back = {
        next(iter(a.alias_info.before_set)): given.get(a.name) for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    }  # fmt: skip
    many = list(out) if isinstance(out, (list, tuple)) else [out]
    found = [
        back.get(next(iter(r.alias_info.before_set)), t) if r.alias_info is not None and r.alias_info.before_set else t
        for r, t in zip(func._schema.returns, many, strict=False)
    ]
    return tuple(found) if isinstance(out, tuple) else found if isinstance(out, list) else found[0]


def _targets(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to."""
    params = func._schema.arguments
    given = dict(zip((a.name for a in params), args, strict=False)) | kwargs
    yield from tensors_in(given.get(a.name) for a in params if a.alias_info is not None and a.alias_info.is_write)


# ------------------------------------------------------------ what is called outside of the dispatcher
_active = threading.local()
_patched = 0
_originals: list[tuple[Any, str, Any]] = []
_lock = threading.RLock()


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside, in this thread, what is called outside of torch's dispatcher is recorded, or done for `recorder` alone.

    Communicators of simulated and fake ranks give fake results of the right shapes; what `dtensor.dispatch.random` does
    to generators is a call before the draw and one after it; states of generators that are read and set, as activation
    checkpointing does, are calls too. Plans are not kept, as they may hold tensors of the trace.
    """
    global _patched
    with _lock:
        _patched += 1
        if _patched == 1:
            _patch()
    outer, _active.recorder = getattr(_active, "recorder", None), recorder
    try:
        yield
    finally:
        _active.recorder = outer
        with _lock:
            _patched -= 1
            if _patched == 0:
                for owner, name, original in _originals:
                    setattr(owner, name, original)
                _originals.clear()


def _patch() -> None:
    _replace(hot, "store", lambda recorder, original, *args: None)
    _replace(late, "is_constant", _is_constant)
    for name in ("_common_stream", "_seeded"):
        _replace(rng, name, lambda recorder, original, *args, name=name: recorder.bracket(name[1:], original, args))
    for module in (torch, torch.random, torch.cuda):
        for name in ("get_rng_state", "set_rng_state", "manual_seed"):
            _replace(module, name, _generator_state)
    for cls in (SimulatedCommunicator, FakeCommunicator):
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter"):
            _replace(cls, f"_{name}", lambda recorder, original, comm, *args, name=name: Pending(
                _collective(recorder, comm, original, name, args)
            ))  # fmt: skip


def _replace(owner: Any, name: str, recorded: Callable[..., Any]) -> None:
    """In threads that record, `recorded(recorder, original, ...)` runs in place of `owner.name`."""
    original = getattr(owner, name)
    _originals.append((owner, name, original))

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder: Recorder | None = getattr(_active, "recorder", None)
        return original(*args, **kwargs) if recorder is None else recorded(recorder, original, *args, **kwargs)

    setattr(owner, name, call)


def _generator_state(recorder: Recorder, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The state of a generator is read or set at every call."""
    out = None
    if original.__name__ == "get_rng_state":
        with _disable_current_modes():
            size = original(*args, **kwargs).shape
            with recorder.fake:
                out = torch.empty(size, dtype=torch.uint8)
    recorder.add(original, args, kwargs, out).meta["kept"] = True
    return out


def _is_constant(recorder: Recorder, original: Any, t: torch.Tensor, formula: bool) -> bool:
    """Zeros are the same on all ranks; so is what a formula of autograd meets and no input of the program is in."""
    return recorder.is_zero(t) or (formula and recorder.is_constant(t))


def _collective(recorder: Recorder, comm: Communicator, original: Any, kind: str, args: tuple[Any, ...]) -> Any:
    """Record one call of a communicator's method, and give fake results of the right shapes."""
    tensors = [a for a in args if isinstance(a, torch.Tensor) or (isinstance(a, (list, tuple)) and list(tensors_in(a)))]
    places = [i for i, a in enumerate(args) if any(a is t for t in tensors)]

    def run(*given: Any) -> Any:
        call = list(args)
        for i, value in zip(places, given, strict=True):
            call[i] = value
        return original(comm, *call).wait()

    first = next(tensors_in(tensors))
    new = lambda shape: torch.empty(tuple(shape), dtype=first.dtype, device=first.device)  # noqa: E731
    with _disable_current_modes(), recorder.fake:
        out: Any
        count = first.numel()
        if kind in ("all_gather", "all_to_all"):
            out = [new(s) for s in args[1]]
            count = received(kind, comm.size, comm.rank, args[1])
        elif kind == "reduce_scatter":
            out = new(args[0][comm.rank].shape)
            count = received(kind, comm.size, comm.rank, [p.shape for p in args[0]])
        elif kind == "scatter":
            out = new(args[1].shape)
        else:
            out = new(first.shape)
            count = received(kind, comm.size, comm.rank, first.numel()) if kind == "all_reduce" else count
    fx_args = [list(a) if isinstance(a, tuple) else a for a in tensors]
    return recorder.collective(kind, run, fx_args, out, Collective(kind, comm.size, float(count), first.itemsize))
