"""A traced program: what it computes, what it gives, and what it does to the tensors and containers it was given.

The recorded graph is simplified, and written as Python source twice: as text for people, and as a function for the
machine. The function calls the operators' own callables by local names, one line a node, and lets go of every tensor
after its last use. `fx.GraphModule.forward` does the same with a few attribute look-ups more per node.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from dtensor.dispatch import late
from dtensor.dispatch.materialized import note_written
from dtensor.lowering.record import LowerError
from dtensor.spec import SHORT_DTYPES, Spec

__all__ = [
    "Known", "Made", "Program", "Template", "Value", "as_function", "drop_unused", "simplify", "totals", "written_out",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """A DTensor that the program makes: number `at` of `Program.wrapped`."""

    at: int


@dataclass(frozen=True, slots=True)
class Value:
    """A plain tensor: number `at` of the graph's outputs."""

    at: int


@dataclass(frozen=True, slots=True)
class Known:
    """A DTensor that is there already: number `at` of the program's objects."""

    at: int


@dataclass
class Template:
    """A value with `Made`, `Value` and `Known` in the tensors' places, flattened."""

    leaves: list[Any]
    spec: Any

    def fill(self, made: Sequence[Any], values: Sequence[Any], objects: Sequence[Any]) -> Any:
        """The value, with tensors."""
        out = []
        for leaf in self.leaves:
            kind = type(leaf)
            out.append(
                made[leaf.at] if kind is Made else values[leaf.at] if kind is Value
                else objects[leaf.at] if kind is Known else leaf
            )  # fmt: skip
        return out[0] if self.spec is None else pytree.tree_unflatten(out, self.spec)


_TAKE: dict[str, Callable[[Any], Any]] = {
    "local": operator.attrgetter("_local_tensor"),
    "own": lambda x: x,
    "grad": operator.attrgetter("grad._local_tensor"),
    "own grad": operator.attrgetter("grad"),
}
"""From an object to an input of the graph, by kind."""


class Program:
    """What one trace found. `run(objects, plain)` runs it: see `dtensor.lowering`.

    Attributes:
        graph: the fx graph, over local tensors.
        inputs: what its placeholders take: ("local" | "own" | "grad" | "own grad", object) or
            ("plain", argument or place).
    """

    def __init__(self) -> None:
        self.inputs: list[tuple[str, Any]] = []
        self.used: list[tuple[str, Any]] = []
        self.layouts: dict[str, str] = {}
        self.wrapped: list[tuple[int, Spec]] = []
        self.result: Template = Template([], None)
        self.boxes: list[tuple[Any, Any, Template | None]] = []
        self.grads: list[tuple[int, Template | None]] = []
        self.locals: list[tuple[int, int]] = []
        self.written: list[int] = []
        self.plain_written: list[int] = []
        self.function: Callable[..., tuple[Any, ...]]
        self.graph: torch.fx.Graph
        self.constants: dict[str, torch.Tensor] = {}
        self.checked = False

    def _check(self, values: Sequence[torch.Tensor]) -> None:
        """At the first run: the results are what the trace said. The error says that a kernel does otherwise."""
        nodes = next(n for n in self.graph.nodes if n.op == "output").args[0]
        for value, node in zip(values, nodes, strict=True):
            told = node.meta["val"]
            if value.shape != told.shape or value.dtype != told.dtype:
                raise LowerError(
                    f"dtensor.lower: {node.name} is a {value.dtype} of {list(value.shape)}, the trace said "
                    f"{told.dtype} of {list(told.shape)}: torch's shape function and its kernel disagree"
                )
        self.checked = True

    def run(self, objects: Sequence[Any], plain: Sequence[torch.Tensor]) -> Any:
        """Run on these DTensors and plain tensors, and do to them what the program does."""
        return self.settle(objects, plain, self.compute(self.given(objects, plain)))

    def given(self, objects: Sequence[Any], plain: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the graph takes, of these DTensors and plain tensors: one for each of `used`."""
        return [_TAKE[kind](objects[at]) if kind != "plain" else plain[at] for kind, at in self.used]

    def compute(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What the graph computes, and what it writes in place; nothing of what the program does besides."""
        with torch._C._AutoDispatchBelowAutograd():
            values = self.function(*given)
        if not self.checked:
            self._check(values)
        return values

    def settle(self, objects: Sequence[Any], plain: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Any:
        """Do to these DTensors and plain tensors what the program does, with what it computed; its result."""
        new, D = late.new, late.DTensor
        made = [new(D, values[at], spec, requires_grad=False) for at, spec in self.wrapped]
        if self.written or self.plain_written:  # autograd must know, and views that had to move data
            written = [objects[at] for at in self.written]
            note_written(objects, self.written)
            torch.autograd.graph.increment_version(
                [
                    *written,
                    *[x._local_tensor for x in written if isinstance(x, D)],
                    *[plain[at] for at in self.plain_written],
                ]
            )
        for at, value in self.locals:
            objects[at]._local_tensor = values[value]
        for at, grad in self.grads:
            objects[at].grad = None if grad is None else grad.fill(made, values, objects)
        for box, key, template in self.boxes:
            if template is None:
                del box[key]
            else:
                box[key] = template.fill(made, values, objects)
        return self.result.fill(made, values, objects)


# ------------------------------------------------------------ the graph
def drop_unused(graph: fx.Graph) -> None:
    """Remove nodes that nobody uses and that write and send nothing; inputs stay."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output") or "moved" in node.meta or "kept" in node.meta:
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):  # the generator goes on
            continue
        if isinstance(node.target, torch._ops.OpOverload) and (
            node.target._schema.is_mutable
            or not node.target._schema.returns
            or "wait_tensor" in node.target._schema.name
        ):
            continue
        graph.erase_node(node)


_A = torch.ops.aten
_RESHAPES = frozenset({_A.view.default, _A._unsafe_view.default})
_VIEWS = _RESHAPES | {
    _A.t.default, _A.transpose.int, _A.permute.default, _A.expand.default, _A.unsqueeze.default, _A.squeeze.dim,
    _A.squeeze.dims, _A.slice.Tensor, _A.select.int, _A.as_strided.default, _A.split.Tensor,
    _A.split_with_sizes.default,
}  # fmt: skip
_RESHAPERS = frozenset({_A.resize_.default, _A.resize_as_.default, *(getattr(_A.set_, o) for o in _A.set_.overloads())})
"""Ops after which the same view of the same tensor is another."""
_SWAPS = frozenset({_A.t.default, _A.transpose.int})


def simplify(graph: fx.Graph) -> None:
    """Take out views that need not be taken: the same one twice, there and back, a view of a view, of the same shape.

    Views share memory, so which of them an op gets makes no difference to it. Lists that are taken apart only to be
    put together again are handed on whole.
    """
    if any(torch.Tag.inplace_view in getattr(n.target, "tags", ()) or n.target in _RESHAPERS for n in graph.nodes):
        return
    taken: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target not in _VIEWS:
            _whole_lists(node)
            continue
        source = node.args[0]
        if node.target in _RESHAPES:
            while source.target in _RESHAPES and source.args[0].meta["val"].is_contiguous():
                source = source.args[0]
            node.args = (source, *node.args[1:])
        same = _same_tensor(source, node)
        if node.target in _SWAPS and source.target is node.target and source.args[1:] == node.args[1:]:
            same = source.args[0]
        key = (node.target, source, str(node.args[1:]), str(node.kwargs))
        found = same if same is not None else taken.setdefault(key, node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _same_tensor(source: fx.Node, node: fx.Node) -> fx.Node | None:
    """`source` where `node`, a view of it, has its shape and strides and starts where it does."""
    a, b = source.meta["val"], node.meta["val"]
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.stride() != b.stride():
        return None
    return source if a.storage_offset() == b.storage_offset() and a.dtype == b.dtype else None


def _whole_lists(node: fx.Node) -> None:
    """Arguments that are all parts of one list, in order: the list itself."""

    def whole(a: Any) -> Any:
        if not isinstance(a, (list, tuple)) or not a or not all(
            isinstance(x, fx.Node) and x.target is operator.getitem for x in a
        ):  # fmt: skip
            return a
        parts = [x.args for x in a]
        source = parts[0][0]
        n = len(source.meta["val"])
        return source if n == len(a) and all(p == (source, i) for i, p in enumerate(parts)) else a

    if isinstance(node.target, torch._ops.OpOverload):
        node.args = tuple(map(whole, node.args))


# ------------------------------------------------------------ for the machine
def as_function(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> Callable[..., tuple[Any, ...]]:
    """The graph as a function of its placeholders that are used, which gives the tuple of its outputs."""
    scope: dict[str, Any] = {}
    names: dict[fx.Node, str] = {}
    named: dict[Any, str] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for used, user in last.items():
        dying.setdefault(user, []).append(used)

    def bound(value: Any, key: Any) -> str:
        if key not in named:
            named[key] = f"c{len(named)}"
            scope[named[key]] = value
        return named[key]

    def text(a: Any) -> str:
        if isinstance(a, fx.Node):
            return names[a]
        if isinstance(a, (list, fx.immutable_collections.immutable_list)):
            return "[" + ", ".join(map(text, a)) + "]"
        if isinstance(a, tuple):
            return "(" + "".join(text(x) + ", " for x in a) + ")"
        if a is None or type(a) in (int, bool, str) or (type(a) is float and math.isfinite(a)):
            return repr(a)
        return bound(a, ("value", id(a)))

    lines, inputs = [], []
    for i, node in enumerate(graph.nodes):
        names[node] = f"v{i}"
        if node.op == "placeholder":
            if node.users:
                inputs.append(f"v{i}")
            continue
        if node.op == "get_attr":
            lines.append(f"v{i} = {bound(constants[node.target], ('constant', node.target))}")
            continue
        if node.op == "output":
            lines.append(f"return {text(tuple(node.args[0]))}")
            continue
        target = node.target
        if target is operator.getitem:
            lines.append(f"v{i} = {text(node.args[0])}[{node.args[1]}]")
        else:
            run = target._op if isinstance(target, torch._ops.OpOverload) else target
            given = [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
            call = f"{bound(run, ('op', target))}({', '.join(given)})"
            lines.append(f"v{i} = {call}" if node.users else call)
        gone = [names[d] for d in dying.get(node, ()) if d.op != "get_attr"]
        if gone:
            lines.append(" = ".join(gone) + " = None")
    body = "\n    ".join(lines)
    exec(compile(f"def run({', '.join(inputs)}):\n    {body}\n", "<lowered>", "exec"), scope)
    made: Callable[..., tuple[Any, ...]] = scope["run"]
    return made


# ------------------------------------------------------------ for people
def short(t: Any) -> str:
    """dtype, shape and bytes of one local tensor, or of several."""
    if isinstance(t, torch.Tensor):
        name = SHORT_DTYPES.get(t.dtype, str(t.dtype).removeprefix("torch."))
        return f"{name}[{','.join(map(str, t.shape))}] {size(t.numel() * t.element_size())}"
    if isinstance(t, (list, tuple)):
        return "(" + ", ".join(short(x) for x in t) + ")"
    return "" if t is None else repr(t)


def size(nbytes: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def _call(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target).removesuffix(".default")
    else:
        inner = "rng" if "kept" in node.meta else "comm"
        name = "getitem" if target is operator.getitem else f"{inner}.{target.__name__}"
    given = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{name}({', '.join(given)})"


def _argument(a: Any) -> str:
    if isinstance(a, fx.Node):
        return a.name
    if isinstance(a, (list, tuple)):
        return "[" + ", ".join(map(_argument, a)) + "]"
    return str(a)


def totals(graph: fx.Graph) -> dict[str, tuple[int, int]]:
    """Kind of collective -> how many, and the bytes that this rank receives in them."""
    found: dict[str, tuple[int, int]] = {}
    for node in graph.nodes:
        moved = node.meta.get("moved")
        if moved is not None:
            n, b = found.get(moved.kind, (0, 0))
            found[moved.kind] = (n + 1, b + moved.nbytes)
    return found


def written_out(graph: fx.Graph, title: str, layouts: Mapping[str, str], results: Sequence[str]) -> str:
    """The whole program: inputs with their layouts, the ops under the op on DTensors that they carry out, results."""
    lines, call = [f"{title}:"], None
    ops = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.users:
                lines.append(f"  {node.name}: {layouts.get(node.name, 'plain')}  here {short(node.meta.get('val'))}")
        elif node.op == "call_function":
            if node.meta.get("call") != call:
                call = node.meta.get("call")
                lines.append(f"  # {call or 'plain tensors'}")
            ops += node.target is not operator.getitem
            moved = node.meta.get("moved")
            more = f"  receives {size(moved.nbytes)} from {moved.size - 1} ranks" if moved is not None else ""
            lines.append(f"  {node.name} = {_call(node)}  {short(node.meta.get('val'))}{more}")
    lines += [f"  {r}" for r in results]
    sent = ", ".join(f"{n} {kind} ({size(b)})" for kind, (n, b) in totals(graph).items()) or "none"
    lines.append(f"  {ops} local ops and collectives; collectives: {sent}")
    return "\n".join(lines)
