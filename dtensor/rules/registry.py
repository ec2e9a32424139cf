"""The table from op to rule, and the call a rule is built from.

A rule is registered under `aten.mm` (all overloads) or `aten.mm.default` (one), as a *builder*: a function
from a `Call` to a `Rule` (or None: this call has no rule). In-place forms (`add_`), out forms (`add.out`) and
foreach forms (`_foreach_add`) derive from the functional entry by name and schema. What a program registers is looked
up before the engine's own rules, whichever of the two was registered first.

Example:
    >>> from dtensor.rules.registry import override, pattern
    >>> with override("aten.mm", pattern("m k, k n -> m n", linear="0|1")):
    ...     torch.mm(a, b)
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtensor.comm.world import forget
from dtensor.errors import RuleError, explain_error
from dtensor.per_thread import PerThread
from dtensor.rules.call import Call, is_inplace, op_name, tensor_names
from dtensor.rules.faults import check_reduction, checked_rule, overloads, place_of, unknown_values
from dtensor.rules.patterns import factor_names, parse_pattern
from dtensor.rules.rule import Builder, Entry, Linear, Rule, antitone, linear, monotone, passes

__all__ = [
    "Builder", "Call", "Entry", "built_in", "clear_plans", "entries", "find", "is_inplace", "linear_groups", "lookup",
    "override", "pattern", "present_groups", "printed", "register", "rule_of", "rules_are_loaded", "tensor_names",
    "unregister",
]  # fmt: skip

_own: dict[str, Entry] = {}
"""The engine's rules."""
_programs: dict[str, Entry] = {}
"""The rules of programs, which are looked up first."""
_loaded = False
_built_in = PerThread(False)


def built_in() -> contextlib.AbstractContextManager[None]:
    """Inside, this thread registers rules of the engine's own: they may be for ops that this torch does not have."""
    return _built_in.set_to(True)


def register(
    names: str | Iterable[str], build: Builder, *, values: str | Iterable[str] = (), random: bool = False
) -> None:
    """Register `build` for one name or several (`aten.mm`, or `aten.mm.default` for one overload).

    `values` and `random` as in `Entry`. An entry of the same name is replaced and cached plans are dropped. A rule that
    cannot be meant is refused before anything is registered: ValueError for an op that does not exist, for `values`
    that are no arguments of it, for a pattern that does not fit it; TypeError for a builder that is no function.
    """
    many = names.split() if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    numbers = frozenset(values.split() if isinstance(values, str) else values)
    text = _text_of(build)
    own = _built_in.value
    for name in () if own else many:
        _check(name, build, numbers, text)
    where = "" if own else place_of(build)
    for name in many:
        (_own if own else _programs)[name] = Entry(name, build, numbers, random, text, where)
    if _loaded:
        clear_plans()


def _check(name: object, build: object, values: frozenset[str], text: str) -> None:
    """Refuse what cannot be meant as a rule of `name`."""
    fix = "register('library.op', pattern('m k, k n -> m n', linear='0|1'), values='scale')"

    def refusal(what: str) -> str:
        got = f"rule {text[:300]!r}, values {sorted(map(str, values))}"
        return explain_error(f"register({name!r})", got, what, fix)

    if not isinstance(name, str) or name.count(".") not in (1, 2):
        raise (ValueError if isinstance(name, str) else TypeError)(
            refusal("a name is 'namespace.op' or 'namespace.op.overload', a string")
        )
    if not callable(build):
        raise TypeError(refusal(f"the builder must be a function from a Call to a Rule, or a pattern, not {build!r}"))
    try:
        ops = overloads(name)
        wrong = unknown_values(values, ops) or (build.misfit(ops) if isinstance(build, pattern) else "")
    except ValueError as error:
        raise RuleError(refusal(str(error))) from None
    if wrong:
        raise RuleError(refusal(wrong))
    if all(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd") for op in ops):
        warnings.warn(
            f"register({name!r}): autograd takes this op apart before rules are looked up, except under "
            "torch.inference_mode; register rules for the ops that it is made of",
            stacklevel=3,
        )


def _text_of(build: object) -> str:
    """A builder's own text, else its name and the first sentence of its docstring."""
    if isinstance(build, str):
        return build
    name = str(getattr(build, "__name__", type(build).__name__))
    first = " ".join((inspect.getdoc(build) or "").partition("\n\n")[0].split())
    first = first.partition(". ")[0].removesuffix(".") + "." if first else ""
    return str(getattr(build, "text_form", "")) or (f"{name}: {first}" if first and name != "<lambda>" else name)


def unregister(name: str) -> None:
    """Remove the entry `name`, a program's before the engine's own; KeyError when there is none."""
    load()
    del (_programs if name in _programs else _own)[name]
    clear_plans()


@contextlib.contextmanager
def override(names: str | Iterable[str], build: Builder, **options: Any) -> Iterator[None]:
    """Register `build` inside a `with`; afterwards the entries are as before, whatever happened."""
    many = names.split() if isinstance(names, str) else list(names)
    before = {n: _programs.get(n) for n in many}
    register(many, build, **options)
    try:
        yield
    finally:
        for n, old in before.items():
            if old is None:
                _programs.pop(n, None)
            else:
                _programs[n] = old
        clear_plans()


def clear_plans() -> None:
    """Drop every cached plan, as after a change of rules."""
    forget()


def load() -> None:
    """Load the rule families, once. Other threads wait until all are there: Python's own lock of the import."""
    if not _loaded:
        importlib.import_module("dtensor.propagation_rules")


def rules_are_loaded() -> None:
    """Told by `propagation_rules` when all families are registered."""
    global _loaded
    _loaded = True


def entries() -> Mapping[str, Entry]:
    """All entries by name, alphabetically."""
    load()
    return dict(sorted({**_own, **_programs}.items()))


def printed() -> str:
    """All rules, one a line, alphabetically."""
    lines = []
    for name, e in entries().items():
        notes = ("   values=" + ",".join(sorted(e.values)) if e.values else "") + ("   random" if e.random else "")
        lines.append(f"{name:48s} {e.text}{notes}")
    return "\n".join(lines) + "\n"


def find(name: str) -> Entry | None:
    """The entry of `aten.op.overload`, else of `aten.op`, else None; a program's before the engine's own."""
    load()
    return _find(_programs, name) or _find(_own, name)


def _find(table: Mapping[str, Entry], name: str) -> Entry | None:
    return table.get(name) or table.get(name.rpartition(".")[0])


def rule_of(entry: Entry | None, call: Call) -> Rule | None:
    """The rule that an entry builds for a call. RuleError where a program's builder fails, or its rule does not fit."""
    if entry is None:
        return None
    return checked_rule(entry, call) if entry.where else entry.build(call)


_UNTAGGED = frozenset({"aten.leaky_relu.default"})
"""Pointwise ops that torch 2.11 does not tag as such."""


def lookup(op: torch._ops.OpOverload) -> Entry | None:
    """The entry that an overload uses: its own, or that of the functional form it derives from."""
    load()
    return _lookup(_programs, op) or _lookup(_own, op)


def _lookup(table: Mapping[str, Entry], op: torch._ops.OpOverload) -> Entry | None:
    name = op_name(op)
    own = _find(table, name)
    if own is not None:
        return own
    ns, packet, overload = name.split(".")
    if is_inplace(op):
        derived = _find(table, f"{ns}.{packet[:-1]}.{overload}")
        if derived is not None:
            return derived
        op = getattr(getattr(getattr(torch.ops, ns), packet[:-1], None), overload, op)
    if op._schema.name.endswith("_functional"):
        return _find(table, f"{ns}.{packet.removesuffix('_functional')}.{overload}")
    if ns in ("aten", "prims") and (torch.Tag.pointwise in op.tags or op_name(op) in _UNTAGGED):
        return table.get("aten.<pointwise>")
    return None


# ------------------------------------------------------------ builders from text
_KINDS: dict[str, Callable[..., Linear]] = {"any": passes, "max": monotone, "neg": antitone, "sum": linear}


_GROUP = re.compile(r"\s*(?:(any|max|neg|sum)\s*:)?\s*(\d+(?:\s*\+\s*\d+)*)\s*")


def linear_groups(text: str) -> tuple[Linear, ...]:
    """Linear groups from text: groups parted by `|`, inputs by `+`, an optional kind before a colon.

    `0|1` (mul), `0+1` (add), `any:0` (a view), `max:0` (monotone), `neg:0` (antitone). ValueError for other text.
    """
    out = []
    for group in filter(None, text.split("|")) if isinstance(text, str) else [text]:
        found = _GROUP.fullmatch(group) if isinstance(group, str) else None
        if found is None:
            raise ValueError(f"linear={text!r}: a group is positions parted by +, after any:, max:, neg: or nothing")
        out.append(_KINDS[found[1] or "sum"](*(int(i) for i in found[2].split("+"))))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class pattern:  # noqa: N801 - used as a function
    """Builder from a pattern over the op's tensor arguments, in schema order; absent ones are dropped.

    Args:
        text: e.g. `m k, k n -> m n`; see `dtensor.rules.patterns`.
        linear: linear groups in terms of the tensor arguments' positions, e.g. `0|1`.
        addends: positions of tensor arguments that are added to the reduced result.
        reduce: reduction of factors that outputs lack.
        nonempty: every sharded factor must leave no shard empty.
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

    def misfit(self, ops: Sequence[torch._ops.OpOverload]) -> str:
        """Why this cannot be meant for any of these overloads, in a few words; empty where it can."""
        ins, outs, whole = factor_names(self.text)
        takes = max(len(tensor_names(op)) for op in ops)
        if len(ins) > takes:
            return f"the pattern has {len(ins)} inputs, the op takes {takes} tensors"
        gives = {len(op._schema.returns) for op in ops if not any("[]" in str(r) for r in op._schema.returns)}
        if gives and 0 not in gives and len(outs) not in gives:
            return f"the pattern has {len(outs)} outputs, the op gives {' or '.join(map(str, sorted(gives)))}"
        new = {f for out in outs for f in out} - {f for dims in ins for f in dims} - whole
        if new and self.also is None:
            return f"no input has {', '.join(sorted(new))} of the outputs; a dim that the op makes is marked: [z]"
        for i, dims in enumerate((*ins, *outs)):
            twice = sorted({f for f in dims if dims.count(f) > 1} - whole)
            if twice:
                return f"tensor {i} has {twice[0]} in two dims, so it cannot be sharded: mark it, [{twice[0]}]"
        named = {"linear": [i for g in linear_groups(self.linear) for i in g.inputs], "addends": list(self.addends)}
        for name, at in named.items():
            if not all(0 <= i < len(ins) for i in at):
                return f"{name}={getattr(self, name)!r}, but its inputs are 0 to {len(ins) - 1}"
        check_reduction(self.reduce)
        return ""

    @property
    def text_form(self) -> str:
        """Printed form."""
        more = f"   linear {self.linear}" if self.linear else ""
        more += f"   addends {self.addends}" if self.addends else ""
        more += f"   reduce={self.reduce}" if self.reduce != "sum" else ""
        return f"{self.text}{more}"


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
