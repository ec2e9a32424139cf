"""The table from op to rule, and the call a rule is built from.

A rule is registered under `aten.mm` (all overloads) or `aten.mm.default` (one), as a *builder*: a function
from a `Call` to a `Rule` (or None: this call has no rule). In-place forms (`add_`), out forms (`add.out`) and
foreach forms (`_foreach_add`) derive from the functional entry by name and schema.

Example:
    >>> from dtensor.registry import override, pattern
    >>> with override("aten.mm", pattern("m k, k n -> m n", linear="0|1")):
    ...     torch.mm(a, b)
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor.factors import Linear, Rule, antitone, linear, monotone, passes
from dtensor.pattern import parse_pattern
from dtensor.spec import Spec, TensorMeta

__all__ = [
    "Builder", "Call", "Entry", "clear_plans", "entries", "find", "linear_groups", "lookup", "override",
    "pattern", "present_groups", "printed", "register", "tensor_names", "unregister",
]  # fmt: skip

Builder = Callable[["Call"], "Rule | None"]


@dataclass(slots=True)
class Call:
    """One call of an op, tensors given as specs.

    Attributes:
        op: the overload called.
        arguments: every argument by name, defaults filled in; tensors as `Spec`, lists of them as tuples.
        inputs: the tensor arguments, flattened in schema order, absent ones left out.
        names: for each input the argument it is, `tensors` lists as `tensors.0`, `tensors.1`, ...
        outputs: global metadata of the tensor outputs, flattened; None for an output that is None.
    """

    op: torch._ops.OpOverload
    arguments: Mapping[str, Any]
    inputs: tuple[Spec, ...]
    names: tuple[str, ...]
    outputs: tuple[TensorMeta | None, ...]

    def __getitem__(self, name: str) -> Any:
        """Value of argument `name`."""
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Value of argument `name`, or `default` when the op has none of that name."""
        return self.arguments.get(name, default)

    def index(self, name: str) -> int | None:
        """Position of argument `name` among the inputs; None when it is absent or no tensor."""
        return self.names.index(name) if name in self.names else None

    def dim(self, name: str = "dim", of: int = 0) -> int:
        """Argument `name` as a non-negative dim of input `of`."""
        d, n = int(self.arguments[name]), self.inputs[of].ndim
        return d % n if n else 0

    def dims(self, name: str = "dim", of: int = 0) -> tuple[int, ...]:
        """Argument `name` (an int, a list, or None or [] for all) as sorted non-negative dims of input `of`."""
        given, n = self.arguments.get(name), self.inputs[of].ndim
        if given is None or (not isinstance(given, int) and len(given) == 0):
            return tuple(range(n))
        many = (given,) if isinstance(given, int) else given
        return tuple(sorted({int(d) % n if n else 0 for d in many})) if n else ()


@dataclass(slots=True)
class Entry:
    """A registered rule.

    Attributes:
        name: `aten.mm` or `aten.mm.default`.
        build: the builder.
        values: arguments whose value changes neither layouts nor metadata (`"*"`: every number); they are
            represented by their type in the cache key and passed on as they come.
        random: the op draws random numbers.
        text: printed form, for the list of all rules.
    """

    name: str
    build: Builder
    values: frozenset[str] = frozenset()
    random: bool = False
    text: str = ""


_entries: dict[str, Entry] = {}
_listeners: list[Callable[[], None]] = []
_loaded = False


def register(
    names: str | Iterable[str], build: Builder, *, values: str | Iterable[str] = (), random: bool = False
) -> None:
    """Register `build` for one name or several (`aten.mm`, or `aten.mm.default` for one overload).

    `values` and `random` as in `Entry`. An entry of the same name is replaced and cached plans are dropped.
    """
    many = names.split() if isinstance(names, str) else list(names)
    numbers = frozenset(values.split() if isinstance(values, str) else values)
    text = _text_of(build)
    for name in many:
        if name.count(".") not in (1, 2):
            raise ValueError(f"register({name!r}): a name is 'namespace.op' or 'namespace.op.overload'")
        _entries[name] = Entry(name, build, numbers, random, text)
    if _loaded:
        clear_plans()


def _text_of(build: Builder) -> str:
    """A builder's own text, else its name and the first sentence of its docstring."""
    name = getattr(build, "__name__", type(build).__name__)
    first = " ".join((inspect.getdoc(build) or "").partition("\n\n")[0].split())
    first = first.partition(". ")[0].removesuffix(".") + "." if first else ""
    return getattr(build, "text_form", "") or (f"{name}: {first}" if first and name != "<lambda>" else name)


def unregister(name: str) -> None:
    """Remove the entry `name`; KeyError when there is none."""
    del _entries[name]
    clear_plans()


@contextlib.contextmanager
def override(names: str | Iterable[str], build: Builder, **options: Any) -> Iterator[None]:
    """Register `build` inside a `with`; afterwards the entries are as before, whatever happened."""
    load()
    many = names.split() if isinstance(names, str) else list(names)
    before = {n: _entries.get(n) for n in many}
    register(many, build, **options)
    try:
        yield
    finally:
        for n, old in before.items():
            if old is None:
                _entries.pop(n, None)
            else:
                _entries[n] = old
        clear_plans()


def clear_plans() -> None:
    """Drop every cached plan, as after a change of rules."""
    for f in _listeners:
        f()


def load() -> None:
    """Load the rule families, once."""
    global _loaded
    if not _loaded:
        _loaded = True
        importlib.import_module("dtensor.propagation_rules")


def entries() -> Mapping[str, Entry]:
    """All entries by name, alphabetically."""
    load()
    return dict(sorted(_entries.items()))


def printed() -> str:
    """All rules, one a line, alphabetically."""
    lines = []
    for name, e in entries().items():
        notes = ("   values=" + ",".join(sorted(e.values)) if e.values else "") + ("   random" if e.random else "")
        lines.append(f"{name:48s} {e.text}{notes}")
    return "\n".join(lines) + "\n"


def find(name: str) -> Entry | None:
    """The entry of `aten.op.overload`, else of `aten.op`, else None."""
    load()
    return _entries.get(name) or _entries.get(name.rpartition(".")[0])


def op_name(op: torch._ops.OpOverload) -> str:
    """`aten.add.Tensor` for `torch.ops.aten.add.Tensor`."""
    return f"{op.namespace}.{op._schema.name.rpartition('::')[2]}.{op._overloadname}"


_UNTAGGED = frozenset({"aten.leaky_relu.default"})
"""Pointwise ops that torch 2.11 does not tag as such."""


def lookup(op: torch._ops.OpOverload) -> Entry | None:
    """The entry that an overload uses: its own, or that of the functional form it derives from."""
    name = op_name(op)
    own = find(name)
    if own is not None:
        return own
    ns, packet, overload = name.split(".")
    if packet.endswith("_") and not packet.endswith("__"):
        derived = find(f"{ns}.{packet[:-1]}.{overload}")
        if derived is not None:
            return derived
        op = getattr(getattr(getattr(torch.ops, ns), packet[:-1], None), overload, op)
    if op._schema.name.endswith("_functional"):
        return find(f"{ns}.{packet.removesuffix('_functional')}.{overload}")
    if ns in ("aten", "prims") and (torch.Tag.pointwise in op.tags or op_name(op) in _UNTAGGED):
        return _entries.get("aten.<pointwise>")
    return None


# ------------------------------------------------------------ builders from text
_KINDS: dict[str, Callable[..., Linear]] = {"any": passes, "max": monotone, "neg": antitone, "sum": linear}


def linear_groups(text: str) -> tuple[Linear, ...]:
    """Linear groups from text: groups parted by `|`, inputs by `+`, an optional kind before a colon.

    `0|1` (mul), `0+1` (add), `any:0` (a view), `max:0` (monotone), `neg:0` (antitone).
    """
    out = []
    for group in filter(None, text.split("|")):
        kind, _, inputs = group.rpartition(":")
        out.append(_KINDS[kind.strip() or "sum"](*(int(i) for i in inputs.split("+"))))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class pattern:  # noqa: N801 - used as a function
    """Builder from a pattern over the op's tensor arguments, in schema order; absent ones are dropped.

    Args:
        text: e.g. `m k, k n -> m n`; see `dtensor.pattern`.
        linear: linear groups in terms of the tensor arguments' positions, e.g. `0|1`.
        addends: positions of tensor arguments that are added to the reduced result.
        reduce: reduction of factors that outputs lack.
        nonempty: every cut factor must leave no shard empty.
    """

    text: str
    linear: str = ""
    addends: tuple[int, ...] = ()
    reduce: str = "sum"
    nonempty: bool = False
    also: Callable[[Call, Rule, Mapping[str, int]], Rule] | None = field(default=None)

    def __call__(self, call: Call) -> Rule:
        left, _, right = self.text.partition("->")
        want = tensor_names(call.op)
        given = [p.strip() for p in left.split(",")]
        if len(want) < len(given):
            raise ValueError(f"pattern {self.text!r} has {len(given)} inputs, {call.op} takes {len(want)} tensors")
        position = [call.index(n) for n in want[: len(given)]]
        kept = [text for text, at in zip(given, position, strict=True) if at is not None]
        ins, outputs, sizes, whole, names = parse_pattern(
            f"{','.join(kept)}->{right}",
            [s.shape for s in call.inputs],
            [None if m is None else m.shape for m in call.outputs],
        )
        addends = frozenset(at for at in (position[i] for i in self.addends) if at is not None)
        reduce = dict.fromkeys(names.values(), self.reduce) if self.reduce != "sum" else {}
        nonempty = frozenset(names.values()) if self.nonempty else frozenset()
        rule = Rule(
            ins, outputs, sizes, whole, linear=present_groups(self.linear, call), addends=addends, reduce=reduce,
            nonempty=nonempty,
        )  # fmt: skip
        return self.also(call, rule, names) if self.also else rule

    @property
    def text_form(self) -> str:
        """Printed form."""
        more = f"   linear {self.linear}" if self.linear else ""
        more += f"   addends {self.addends}" if self.addends else ""
        more += f"   reduce={self.reduce}" if self.reduce != "sum" else ""
        return self.text + more


def tensor_names(op: torch._ops.OpOverload) -> list[str]:
    """Names of the arguments of an op that may be tensors, in schema order."""
    return [a.name for a in op._schema.arguments if "Tensor" in str(a.type) and not a.is_out]


def present_groups(text: str, call: Call) -> tuple[Linear, ...]:
    """Linear groups of `text`, in terms of `call.inputs`.

    Numbers in `text` count the op's tensor arguments. A member that is None is left out; a group with a
    member that is a Python number is dropped (adding a number is not linear).
    """
    names = tensor_names(call.op)
    out = []
    for group in linear_groups(text):
        at, whole = [], True
        for i in sorted(group.inputs):
            if i >= len(names):  # a number in this overload, e.g. add.Scalar
                whole = False
                continue
            name = names[i]
            index = call.index(name)
            if index is not None:
                at.append(index)
            elif isinstance(call.get(name), (list, tuple)):
                at += [j for j, n in enumerate(call.names) if n.startswith(f"{name}.")]
            elif call.get(name) is not None:
                whole = False
        if whole and at:
            out.append(Linear(frozenset(at), group.ops))
    return tuple(out)


def on_clear(f: Callable[[], None]) -> None:
    """Call `f` whenever cached plans must be dropped."""
    _listeners.append(f)


def flat_inputs(arguments: Sequence[tuple[str, object]]) -> tuple[tuple[Spec, ...], tuple[str, ...]]:
    """Tensor inputs and their names, in order, from named arguments with specs in the tensors' places."""
    inputs: list[Spec] = []
    names: list[str] = []
    for name, value in arguments:
        if isinstance(value, Spec):
            inputs.append(value)
            names.append(name)
        elif isinstance(value, (list, tuple)):
            for j, item in enumerate(value):
                if isinstance(item, Spec):
                    inputs.append(item)
                    names.append(f"{name}.{j}")
    return tuple(inputs), tuple(names)
