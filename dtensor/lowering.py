"""`dtensor.lower`: a step as one program of local ops and collectives, with no per-op cost of the engine.

    step = dtensor.lower(train_step, model, optimizer, x, y)      # traces; computes, sends and changes nothing
    for x, y in batches:
        loss = step(model, optimizer, x, y)                       # runs
    print(step)                                                   # inputs with layouts, ops, collectives with bytes
    step.graph_module                                             # the same as an fx.GraphModule of local tensors

The function may do what a step does: forward, `backward()`, an optimizer's step, writes in place. It runs once, through
autograd and the engine, on tensors without values; the ops on local tensors that come of it are the program
(`dtensor.lower_record`). What the step changes is changed at every call: parameters and optimizer state in place, as
the step does it; `.grad` of leaves, and what an optimizer's first step puts into its state, as the trace left them
(`dtensor.lower_trace`). Results come without autograd history: a backward belongs inside.

**Never stale.** A call runs a program only if all this is as it was in the trace, and traces again where it is not:

- DTensors: layout, mesh, global shape, stride, dtype, local stride and offset, requires_grad, its `.grad`'s layout;
- plain tensors: shape, stride, dtype, device; equal tensors in equal places; other arguments: value and type;
- whatever the function can reach (`dtensor.lower_state`): every module, parameter, buffer, hook, optimizer, container
  and Python number in its arguments, closure, defaults and globals is the same object, or an equal number
  (`module.training`, `group["lr"]`, ...);
- grad mode, inference mode, autocast, the default dtype, `implicit_replication`.

All of it is the same on all ranks of a program that is, so all ranks trace again together. A function that cannot be
traced raises `LowerError`: one that looks at values, has a random generator of its own, uses a tensor from elsewhere,
or changes Python numbers. A function with more than `MAX_PROGRAMS` variants raises it too, and names what changes.

Optimizers count their steps in tensors here, as they do under `torch.compile`, so Adam's bias corrections are computed
in float32. A learning rate that changes at every step should be a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor import dispatch as hot
from dtensor.lower_code import totals, written_out
from dtensor.lower_record import LowerError, refuse
from dtensor.lower_state import VALUES, Reach, reach
from dtensor.lower_trace import Made, Program, Value, trace

__all__ = ["LowerError", "Lowered", "lower"]

MAX_PROGRAMS = 32
"""Variants of one function that are kept."""


def lower(fn: Callable[..., Any], /, *example_args: Any, **example_kwargs: Any) -> Lowered:
    """`fn` as a program of local ops and collectives, traced for these arguments; see the module's text.

    Args:
        fn: a function on DTensors, plain tensors, modules, optimizers, numbers and containers of them.
        example_args, example_kwargs: arguments of a call. Nothing is computed with them and nothing is changed.

    Returns:
        A callable with the arguments of `fn`. It traces again for arguments that need another program.

    Raises:
        LowerError: the function cannot be traced; the message says what stands in the way.
    """
    made = Lowered(fn)
    made._traced(example_args, example_kwargs)
    return made


class Lowered:
    """What `lower` gives: call it, print it, look at its `graph_module`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._variants: list[_Variant] = []
        self._name = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = _flatten(args, kwargs)
        now = _surroundings()
        for i, variant in enumerate(self._variants):
            if variant.suits(leaves, structure, now):
                if i:
                    self._variants.insert(0, self._variants.pop(i))
                return variant.run(leaves)
        return self._traced(args, kwargs).run(leaves)

    def _traced(self, args: Any, kwargs: dict[str, Any]) -> _Variant:
        if len(self._variants) >= MAX_PROGRAMS:
            raise refuse(
                f"{self._name} has {MAX_PROGRAMS} variants", self._variants[0].difference(*_flatten(args, kwargs)),
                "something that its programs depend on is new at every call",
                "make it a tensor, or take it out of the function",
            )  # fmt: skip
        made = _Variant(self._fn, args, kwargs)
        self._variants.insert(0, made)
        return made

    @property
    def programs(self) -> int:
        """How many variants were traced so far."""
        return len(self._variants)

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The last program as an `fx.GraphModule`: a function of the local tensors that it uses, to local tensors."""
        program = self._variants[0].program
        root = torch.nn.Module()
        for name, value in program.constants.items():
            root.register_buffer(name, value)
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(program.graph, {}))
        made = torch.fx.GraphModule(root, graph, class_name=f"Lowered_{self._name}")
        for node in list(made.graph.nodes):
            if node.op == "placeholder" and not node.users:
                made.graph.erase_node(node)
        made.recompile()
        return made

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """Kind -> number of collectives of the last program, and the bytes that this rank receives in them."""
        return totals(self._variants[0].program.graph)

    def __str__(self) -> str:
        return self._variants[0].text(self._name)

    def __repr__(self) -> str:
        return f"<lowered {self._name}: {self.programs} program{'s' * (self.programs != 1)}>"


# ------------------------------------------------------------ arguments
def _flatten(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The arguments in order, and how they were put together."""
    leaves: list[Any] = []

    def take(x: Any) -> Any:
        if type(x) is tuple or type(x) is list:
            return (type(x), *map(take, x))
        if type(x) is dict:
            return (dict, *((k, take(v)) for k, v in x.items()))
        leaves.append(x)
        return None

    structure: Any = tuple(map(take, args))
    if kwargs:
        structure = (structure, *((k, take(v)) for k, v in kwargs.items()))
    return leaves, structure


def _surroundings() -> tuple[Any, ...]:
    """What a trace depends on besides arguments."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), getattr(hot._flags, "implicit", False),
    )  # fmt: skip


def _meta(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device, _in_memory(t)


def _in_memory(t: torch.Tensor) -> tuple[Any, ...]:
    """How a local tensor lies in memory, as far as ops may depend on it."""
    return t.stride(), t.storage_offset(), t.is_conj(), t.is_neg()


class _Variant:
    """One trace and the facts that it holds for."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        leaves, self._structure = _flatten(args, kwargs)
        self._surroundings = _surroundings()
        opaque = [x for x in leaves if not isinstance(x, (torch.Tensor, *VALUES))]
        self._reach: Reach = reach(fn, *opaque)
        self._kept = [fn, *opaque]
        objects: list[Any] = list(self._reach.dtensors)
        plain: list[tuple[Any, torch.Tensor]] = list(self._reach.plain)
        place, held = {id(x): i for i, x in enumerate(objects)}, {id(t): i for i, (_, t) in enumerate(plain)}
        names = _names(fn, self._reach, objects)
        plain_names = [str(p[1]) for p, _ in plain]
        self._leaves: list[tuple[str, Any]] = []
        self._object_leaves: list[tuple[int, int]] = []
        self._plain_leaves: list[tuple[int, int]] = []
        n_objects, n_plain = len(objects), len(plain)
        called = _argument_names(fn, args, kwargs, len(leaves))
        for i, x in enumerate(leaves):
            if isinstance(x, hot._DTensor):
                at = place.setdefault(id(x), len(objects))
                if at == len(objects):
                    objects.append(x)
                    names.append(called[i])
                    self._object_leaves.append((at, i))
                self._leaves.append(("object", at))
            elif isinstance(x, torch.Tensor):
                at = held.setdefault(id(x), len(plain))
                if at == len(plain):
                    plain.append((None, x))
                    plain_names.append(called[i])
                    self._plain_leaves.append((at, i))
                self._leaves.append(("plain", at))
            elif isinstance(x, VALUES):
                self._leaves.append(("value", x))
            else:
                self._leaves.append(("same", x))
        for x in objects:
            _waited(x)
        self._objects: list[Any] = objects[:n_objects] + [None] * (len(objects) - n_objects)
        self._plain: list[Any] = [t for _, t in plain[:n_plain]] + [None] * (len(plain) - n_plain)
        self._n_reached = n_objects
        self._seen: list[Any] = [None] * len(objects)  # local tensors of reached objects, looked at already
        self._facts = [(x._spec, x.requires_grad, _in_memory(x._local_tensor), _grad_spec(x)) for x in objects]
        self._plain_facts = [_meta(t) for _, t in plain]
        self.program: Program = trace(fn, args, kwargs, self._reach, objects, plain, names, plain_names)

    # ------------------------------------------------------------ guards
    def suits(self, leaves: Sequence[Any], structure: Any, now: tuple[Any, ...]) -> bool:
        """True where the program is the one for this call."""
        if now != self._surroundings or structure != self._structure or not self._reach.holds():
            return False
        objects, plain = self._objects, self._plain
        for at, i in self._object_leaves:
            objects[at] = leaves[i]
        for at, i in self._plain_leaves:
            plain[at] = leaves[i]
        D = hot._DTensor
        for x, (kind, known) in zip(leaves, self._leaves, strict=True):
            if kind == "object":
                if x is not objects[known] or not isinstance(x, D):
                    return False
            elif kind == "plain":
                if x is not plain[known] or not isinstance(x, torch.Tensor) or isinstance(x, D) or x.requires_grad:
                    return False
            elif kind == "value":
                if type(x) is not type(known) or x != known:
                    return False
            elif x is not known:
                return False
        seen = self._seen
        for i, (x, (spec, requires, stride, grad)) in enumerate(zip(objects, self._facts, strict=True)):
            if x._spec is not spec or _requires(x) != requires:
                return False
            if requires and (_grad_spec(x) is not grad or not (x.is_leaf or not now[0])):
                return False
            local = x._local_tensor
            if local is not seen[i]:
                if type(local) is not torch.Tensor:
                    local = _waited(x)
                if _in_memory(local) != stride:
                    return False
                if i < self._n_reached:
                    seen[i] = local
        if self._object_leaves and len({id(x) for x in objects}) != len(objects):
            return False
        if self._plain_leaves and len({id(t) for t in plain}) != len(plain):
            return False
        return all(_meta(t) == facts for t, facts in zip(plain, self._plain_facts, strict=True))

    def difference(self, leaves: Sequence[Any], structure: Any) -> str:
        """What is another now than in the trace, in a few words."""
        if not self._reach.holds():
            return self._reach.first_change()
        for x, (kind, known) in zip(leaves, self._leaves, strict=False):
            if kind == "value" and (type(x) is not type(known) or x != known):
                return f"the argument {known!r} is {x!r}"
            if kind == "same" and x is not known:
                return f"an argument is another {type(x).__name__}"
        return "layouts, shapes, gradients or modes of the tensors"

    # ------------------------------------------------------------ running and printing
    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the program on the tensors among the arguments."""
        objects, plain = self._objects, self._plain
        for at, i in self._object_leaves:
            objects[at] = leaves[i]
        for at, i in self._plain_leaves:
            plain[at] = leaves[i]
        try:
            return self.program.run(objects, plain)
        finally:
            for at, _ in self._object_leaves:
                objects[at] = None
            for at, _ in self._plain_leaves:
                plain[at] = None

    def text(self, name: str) -> str:
        """The program, written out."""
        p = self.program
        values = list(next(n for n in p.graph.nodes if n.op == "output").args[0])
        shown = []
        for leaf in p.result.leaves:
            if isinstance(leaf, Made):
                at, spec = p.wrapped[leaf.at]
                shown.append(f"gives {spec} of {values[at].name}")
            elif isinstance(leaf, Value):
                shown.append(f"gives plain {values[leaf.at].name}")
        return written_out(p.graph, name, p.layouts, shown)


def _waited(x: Any) -> torch.Tensor:
    local = x._local_tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        x._local_tensor = local = local.wait()
    made: torch.Tensor = local
    return made


_requires = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]


def _grad_spec(x: Any) -> Any:
    if not _requires(x) or not x.is_leaf:
        return None
    grad = x.grad
    return None if grad is None else getattr(grad, "_spec", grad)


def _names(fn: Callable[..., Any], found: Reach, objects: Sequence[Any]) -> list[str]:
    by_id = {id(value): str(key) for box, key, value in reversed(found.same) if isinstance(key, str)}
    return [by_id.get(id(x), "captured") for x in objects]


def _argument_names(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], count: int) -> list[str]:
    """Names of the arguments' leaves."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return [f"arg{i}" for i in range(count)]
    names: list[str] = []
    for i, a in enumerate(args):
        name = next((n for n, v in bound.arguments.items() if v is a), f"arg{i}")
        names += [name] * len(_flatten((a,), {})[0])
    for k, v in kwargs.items():
        names += [k] * len(_flatten((v,), {})[0])
    return names
