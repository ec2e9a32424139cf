"""How much of aten the rules cover, and how many lines they cost.

A rule is registered for a functional op; its in-place, `out=` and list forms derive from it. So an overload is
covered when the engine finds a rule for it, its own or a derived one.

Lines of code: without blank lines, comments and docstrings; and those that compute in a kernel.

All rules as text: one entry a line, and under it how many overloads it covers.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import io
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dtensor import propagation_rules
from dtensor.dispatch import hit as hot
from dtensor.dispatch.in_place import functional_form
from dtensor.dispatch.lists import base_entry
from dtensor.rules.registry import Entry, entries, lookup, printed

from .recorded import Op

__all__ = [
    "Coverage",
    "KINDS",
    "aten_overloads",
    "code_lines",
    "coverage",
    "covering",
    "kernel_lines",
    "kind_of",
    "listing",
]

KINDS = ("functional", "in-place", "out", "foreach", "fused")


@functools.cache
def aten_overloads() -> tuple[Op, ...]:
    """Every overload of aten that takes or gives a tensor, by name."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        types = [*schema.arguments, *schema.returns]
        if space == "aten" and any("Tensor" in str(a.type) for a in types):
            found.append(getattr(getattr(torch.ops.aten, name), schema.overload_name or "default"))
    return tuple(sorted(set(found), key=str))


def kind_of(op: Op) -> str:
    """One of `KINDS`."""
    packet = op._schema.name.rpartition("::")[2]
    if packet.startswith(("_fused_", "_amp_foreach")):
        return "fused"
    if packet.startswith("_foreach_"):
        return "foreach"
    if any(a.is_out for a in op._schema.arguments):
        return "out"
    written = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
    return "in-place" if written else "functional"


def covering(op: Op) -> Entry | None:
    """The entry whose rule an overload uses, its own or a derived one."""
    kind = kind_of(op)
    if kind == "out":
        functional = functional_form(op)
        return None if functional is None else lookup(functional)
    if kind in ("foreach", "fused"):
        return base_entry(hot.OpInfo(op))
    return lookup(op)


@dataclass(frozen=True)
class Coverage:
    """What the rules cover and cost.

    Attributes:
        by_kind: overloads covered, by kind.
        by_entry: the same, for every entry by its name.
        data: overloads whose rule is a line of data (pattern text, a pointwise op, a reduction), no function.
        entries: rules registered for aten.
        lines, code, kernels: lines of the rule families; those that hold code; those of them that kernels compute in.
    """

    by_kind: Counter[str]
    by_entry: dict[str, Counter[str]]
    data: int
    entries: int
    lines: int
    code: int
    kernels: int

    @property
    def overloads(self) -> int:
        """Overloads with a rule."""
        return sum(self.by_kind.values())

    def __str__(self) -> str:
        kinds = ", ".join(f"{self.by_kind[k]} {k}" for k in KINDS)
        each = lambda n: f"{n / self.overloads:.1f}"  # noqa: E731
        return (
            f"{self.overloads} aten overloads have a rule: {kinds}\n"
            f"{self.data} of them by a line of data, the others by a function; {self.entries} rules are registered\n"
            f"{self.lines} lines ({each(self.lines)} an overload), {self.code} of them code ({each(self.code)}): "
            f"{self.code - self.kernels} say what ops mean ({each(self.code - self.kernels)}), "
            f"{self.kernels} compute in kernels ({each(self.kernels)})"
        )


def coverage() -> Coverage:
    """What the registered rules cover."""
    by_kind: Counter[str] = Counter()
    by_entry: dict[str, Counter[str]] = {}
    data = 0
    for op in aten_overloads():
        entry = covering(op)
        if entry is not None:
            by_kind[kind_of(op)] += 1
            by_entry.setdefault(entry.name, Counter())[kind_of(op)] += 1
            data += hasattr(entry.build, "text_form")
    files = [p for folder in propagation_rules.__path__ for p in sorted(Path(folder).glob("*.py"))]
    files = [p for p in files if not p.name.startswith("__")]
    ours = [n for n in entries() if n.startswith("aten.")]
    return Coverage(
        by_kind, by_entry, data, len(ours), sum(len(p.read_text().splitlines()) for p in files),
        sum(len(code_lines(p)) for p in files), sum(len(kernel_lines(p)) for p in files),
    )  # fmt: skip


_NOTHING = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines of a file that hold code."""
    text = path.read_text()
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOTHING:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            used.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return used


def kernel_lines(path: Path) -> set[int]:
    """Those of them inside functions that take a `KernelContext`: what a kernel computes, not what a rule says."""
    inside: set[int] = set()
    for node in _functions(ast.parse(path.read_text())):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if any(a.annotation is not None and "KernelContext" in ast.unparse(a.annotation) for a in arguments):
            inside.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return inside & code_lines(path)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def listing(pattern: str = "*", found: Coverage | None = None) -> str:
    """The rules of aten whose name, with or without `aten.`, fits `pattern` (as file names do), alphabetically."""
    found = coverage() if found is None else found
    lines: list[str] = []
    for line in printed().splitlines():
        name = line.split(maxsplit=1)[0]
        short = name.removeprefix("aten.")
        if name == short or not any(fnmatch.fnmatch(n, pattern) for n in (name, short, short.strip("_"))):
            continue
        kinds: Mapping[str, int] = found.by_entry.get(name, {})
        covers = ", ".join(f"{kinds[k]} {k}" for k in KINDS if kinds.get(k))
        lines += [line, f"{'':48s} covers {covers or 'nothing in this version of torch'}"]
    return "\n".join(lines) + "\n" if lines else ""
