"""When a traced program is the one for a call: the facts that it was traced for, compared with those of the call.

`Variant` is one trace with its facts, which `dtensor.lowering` lists. Tensors that the program reaches by
itself are the same objects at every call, those among the arguments are put into their places for the time of a call.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.lowering.program import Made, Program, Value, written_out
from dtensor.lowering.reach import VALUES, Reach, Read, equal, reach, reading
from dtensor.lowering.record import LowerError, refuse
from dtensor.lowering.trace import local_of, trace
from dtensor.redistribute.cost_model import current_cost_model

__all__ = ["Variant", "flatten", "surroundings", "traced"]

MAX_TRACES = 10
"""How often a function is traced until it reads nothing that was not watched from the start."""

Reads = dict[tuple[int, str], Read]


def traced(fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Variant:
    """`fn` traced for these arguments, with all that it reads of modules watched from the start of the trace."""
    reads: Reads = {}
    for _ in range(MAX_TRACES):
        found: Reads = {}
        try:
            made = Variant(fn, args, kwargs, reads, found)
        except LowerError:
            if found.keys() <= reads.keys():
                raise
        else:
            if all(made.watches(read) for read in found.values()):
                return made
        reads |= found
    raise refuse(
        "a function that reads other modules at every trace", f"{MAX_TRACES} traces, {len(reads)} names",
        "what it reads must be watched from the start of a trace", "import what it needs outside, by name",
    )  # fmt: skip


# ------------------------------------------------------------ arguments
def flatten(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The arguments in order, and how they were put together."""
    leaves: list[Any] = []

    def take(x: Any) -> Any:
        if type(x) is tuple or type(x) is list:
            return (type(x), *map(take, x))
        if type(x) is dict:
            return (dict, *((type(k), k, take(v)) for k, v in x.items()))
        leaves.append(x)
        return None

    structure: Any = tuple(map(take, args))
    if kwargs:
        structure = (structure, *((k, take(v)) for k, v in kwargs.items()))
    return leaves, structure


def surroundings() -> tuple[Any, ...]:
    """What a trace depends on besides arguments."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), hot.replicates_implicitly(),
        torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"), current_cost_model(),
    )  # fmt: skip


def _meta(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device, _in_memory(t)


def _in_memory(t: torch.Tensor) -> tuple[Any, ...]:
    """How a local tensor lies in memory, as far as ops may depend on it."""
    return t.stride(), t.storage_offset(), t.is_conj(), t.is_neg()


class Variant:
    """One trace and the facts that it holds for."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], reads: Reads, found: Reads) -> None:
        """`reads`: what earlier traces have read of modules; `found` is given what this one reads."""
        leaves, self._structure = flatten(args, kwargs)
        self._surroundings = surroundings()
        opaque = [x for x in leaves if not isinstance(x, (torch.Tensor, *VALUES))]
        self._reach: Reach = reach((fn, *opaque), reads.values())
        self._kept = [fn, *opaque]
        objects: list[Any] = [*self._reach.dtensors, *(t for _, t in self._reach.plain if t.requires_grad)]
        plain: list[tuple[Any, torch.Tensor]] = [(p, t) for p, t in self._reach.plain if not t.requires_grad]
        place, held = {id(x): i for i, x in enumerate(objects)}, {id(t): i for i, (_, t) in enumerate(plain)}
        names = _names(fn, self._reach, objects)
        plain_names = [str(p[1]) for p, _ in plain]
        self._leaves: list[tuple[str, Any]] = []
        self._object_leaves: list[tuple[int, int]] = []
        self._plain_leaves: list[tuple[int, int]] = []
        n_objects, n_plain = len(objects), len(plain)
        called = _argument_names(fn, args, kwargs, len(leaves))
        for i, x in enumerate(leaves):
            if isinstance(x, late.DTensor) or (isinstance(x, torch.Tensor) and x.requires_grad):
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
        self._facts = [(_kind(x), x.requires_grad, _in_memory(local_of(x)), _of_leaf(x)) for x in objects]
        self._plain_facts = [_meta(t) for _, t in plain]
        with reading(self._reach.modules, found):
            self.program: Program = trace(fn, args, kwargs, self._reach, objects, plain, names, plain_names, found)
        if not self._reach.holds():
            raise refuse(
                "a program that changes what it looks at", self._reach.first_change(),
                "only tensors change inside a lowered program", "change it outside, or make it a tensor",
            )  # fmt: skip

    def watches(self, read: Read) -> bool:
        """Whether what was read of a module was watched from the start of the trace."""
        return self._reach.has(*read)

    # ------------------------------------------------------------ guards
    def suits(self, leaves: Sequence[Any], structure: Any, now: tuple[Any, ...]) -> bool:
        """True where the program is the one for this call."""
        if now != self._surroundings or structure != self._structure or not self._reach.holds():
            return False
        objects, plain = self._placed(leaves)
        D = late.DTensor
        for x, (kind, known) in zip(leaves, self._leaves, strict=True):
            if kind == "object":
                if x is not objects[known] or not isinstance(x, torch.Tensor):
                    return False
            elif kind == "plain":
                if x is not plain[known] or not isinstance(x, torch.Tensor) or isinstance(x, D) or x.requires_grad:
                    return False
            elif kind == "value":
                if x is not known and not equal(x, known):
                    return False
            elif x is not known:
                return False
        seen = self._seen
        for i, (x, (spec, requires, stride, grad)) in enumerate(zip(objects, self._facts, strict=True)):
            if type(x) is D:
                if x._spec is not spec:
                    return False
                local = x._local_tensor
            else:
                if _kind(x) != spec:
                    return False
                local = x
            if _requires(x) != requires:
                return False
            if requires and (_of_leaf(x) != grad or not (x.is_leaf or not now[0])):
                return False
            if local is not seen[i]:
                if type(local) is not torch.Tensor and type(x) is D:
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

    def _placed(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The tensors that the program runs on, DTensors and leaves and plain ones, those of this call among them."""
        objects, plain = self._objects, self._plain
        for at, i in self._object_leaves:
            objects[at] = leaves[i]
        for at, i in self._plain_leaves:
            plain[at] = leaves[i]
        return objects, plain

    def difference(self, leaves: Sequence[Any], structure: Any) -> str:
        """What is another now than in the trace, in a few words."""
        if not self._reach.holds():
            return self._reach.first_change()
        for x, (kind, known) in zip(leaves, self._leaves, strict=False):
            if kind == "value" and not equal(x, known):
                return f"the argument {known!r} is {x!r}"
            if kind == "same" and x is not known:
                return f"an argument is another {type(x).__name__}"
        return "layouts, shapes, gradients or modes of the tensors"

    # ------------------------------------------------------------ running and printing
    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the program on the tensors among the arguments."""
        objects, plain = self._placed(leaves)
        try:
            return self.program.run(objects, plain)
        finally:
            self._forget()

    def _forget(self) -> None:
        for at, _ in self._object_leaves:
            self._objects[at] = None
        for at, _ in self._plain_leaves:
            self._plain[at] = None

    @contextlib.contextmanager
    def placed(self, leaves: Sequence[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
        """Inside, the tensors that the program runs on for these arguments: DTensors and leaves, and plain ones."""
        try:
            yield self._placed(leaves)
        finally:
            self._forget()

    @property
    def arguments(self) -> tuple[frozenset[int], frozenset[int]]:
        """Which of the tensors that the program runs on are arguments: DTensors and leaves, and plain ones."""
        return frozenset(at for at, _ in self._object_leaves), frozenset(at for at, _ in self._plain_leaves)

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


def _kind(x: Any) -> Any:
    """The spec of a DTensor; shape, dtype and device of a plain leaf."""
    return x._spec if isinstance(x, late.DTensor) else (x.shape, x.dtype, x.device)


def _waited(x: Any) -> torch.Tensor:
    local: Any = local_of(x)
    if type(local).__name__ == "AsyncCollectiveTensor":
        x._local_tensor = local = local.wait()
    made: torch.Tensor = local
    return made


_requires = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]


def _of_leaf(x: Any) -> Any:
    """What a leaf that requires grad has besides its value: the layout of its gradient, and its hooks."""
    if not _requires(x) or not x.is_leaf:
        return None
    grad, hooks, after = x.grad, x._backward_hooks, x._post_accumulate_grad_hooks
    layout = None if grad is None else getattr(grad, "_spec", None) or _meta(grad)
    return layout, tuple(hooks or ()), tuple(after or ())


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
        names += [name] * len(flatten((a,), {})[0])
    for k, v in kwargs.items():
        names += [k] * len(flatten((v,), {})[0])
    return names
