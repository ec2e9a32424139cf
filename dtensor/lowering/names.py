"""What the code of a function can name: globals, attributes, imports, and modules that it hands on whole.

A trace is good as long as nothing that the function reads has changed (`dtensor.lowering.state`). Namespaces of modules
are too large to be watched whole, so the code says what of them matters: the names in it, its string constants (for
`getattr(module, "name")`), and, where it makes up names (`getattr(module, f"layer{i}")`, `vars(module)`), all of them.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Import", "Names", "names_of"]

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE")
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_MAKE_UP = frozenset({"vars", "attrgetter", "methodcaller", "dir", "__dict__", "__getattribute__", "getmembers"})
"""Names through which code reads attributes without naming them."""
_NAMESPACE = frozenset({"globals", "eval", "exec"})
_BY_NAME = frozenset({"modules", "import_module", "__import__"})
"""Names through which code gets at a module by its name."""


@dataclass(frozen=True)
class Import:
    """`import module`, or `from module import attribute`, inside of a function; `level`: the number of leading dots."""

    module: str
    level: int
    attribute: str | None = None


@dataclass
class Names:
    """What code names, with that of the functions inside it."""

    names: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    """Constant names of `getattr` and `hasattr`: that there is none may matter too."""
    imports: set[Import] = field(default_factory=set)
    whole: set[tuple[str, ...]] = field(default_factory=set)
    """Variables, with the attributes that follow them: `pkg.config.scale`, or `pkg` where it is handed on."""
    whole_imports: set[Import] = field(default_factory=set)
    made_up: bool = False
    """True where attributes are read by names that are made up at run time."""
    own: bool = False
    """True where it reads its own module's namespace, as `globals()` does."""
    by_name: bool = False
    """True where it looks modules up by name."""

    def add(self, other: Names) -> None:
        """Name what `other` names as well, but for imports and variables, which are one function's."""
        self.names |= other.names
        self.strings |= other.strings
        self.asked |= other.asked
        self.made_up |= other.made_up

    def size(self) -> tuple[int, bool]:
        """How much is named."""
        return len(self.names) + len(self.strings) + len(self.asked), self.made_up


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    """What `code` names."""
    found = Names()
    codes = [list(dis.get_instructions(c)) for c in _codes(code, found)]
    bound: dict[str, set[Import]] = {}
    for steps in codes:
        _imports(steps, found, bound)
    for steps in codes:
        for i, step in enumerate(steps):
            _look(steps, i, step, found, bound)
    if found.names & {"eval", "exec"}:
        found.strings.update(word for s in list(found.strings) for word in re.findall(r"\w+", s))
    found.own = not found.names.isdisjoint(_NAMESPACE)
    found.by_name = not found.names.isdisjoint(_BY_NAME)
    found.made_up |= not found.names.isdisjoint(_MAKE_UP)
    return found


def _codes(code: types.CodeType, found: Names) -> Iterator[types.CodeType]:
    found.names.update(code.co_names)
    yield code
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from _codes(c, found)
        else:
            several = c if isinstance(c, (tuple, frozenset)) else (c,)
            found.strings.update(s for s in several if isinstance(s, str) and len(s) < 200)


def _imports(steps: Sequence[dis.Instruction], found: Names, bound: dict[str, set[Import]]) -> None:
    """The imports among `steps`, and the variables they are bound to."""
    for i, step in enumerate(steps):
        if step.opname != "IMPORT_NAME":
            continue
        level, listed = steps[i - 2].argval, steps[i - 1].argval
        here = Import(step.argval, level)
        found.imports.add(here)
        attribute: str | None = None
        for after in steps[i + 1 :]:
            if after.opname == "IMPORT_FROM":
                attribute = after.argval if listed else None
            elif after.opname.startswith("STORE_"):
                name = after.argval[0] if isinstance(after.argval, tuple) else after.argval
                bound.setdefault(name, set()).add(Import(here.module, level, attribute))
            elif after.opname not in ("POP_TOP", "SWAP", "ROT_TWO"):
                break


def _look(
    steps: Sequence[dis.Instruction], i: int, step: dis.Instruction, found: Names, bound: dict[str, set[Import]]
) -> None:
    """One step of code: is a variable handed on, is a name made up?"""
    if step.opname in _VARIABLES or step.opname.startswith("LOAD_FAST"):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        end = i + 1
        while end < len(steps) and steps[end].opname in _ATTRIBUTES:
            end += 1
        if step.opname in _VARIABLES and step.opname != "LOAD_CLOSURE":
            found.whole.add((step.argval, *(s.argval for s in steps[i + 1 : end])))
        if step.opname != "LOAD_CLOSURE":
            for name in loaded if end == i + 1 else loaded[:-1]:
                found.whole_imports |= bound.get(name, set())
    if step.opname in _VARIABLES and step.argval in ("getattr", "hasattr"):
        name = _constant_name(steps, i)
        if name is None:
            found.made_up = True
        else:
            found.asked.add(name)
    elif step.opname in _VARIABLES and step.argval in _NAMESPACE:
        near = [s for s in steps[i + 1 : i + 5] if s.opname not in ("PRECALL", "CALL")][:2]
        subscript = len(near) == 2 and near[1].opname in ("BINARY_SUBSCR", "BINARY_OP")
        if step.argval != "globals" or not subscript or not isinstance(near[0].argval, str):
            found.made_up = True


def _constant_name(steps: Sequence[dis.Instruction], i: int) -> str | None:
    """The constant second argument of the call of what step `i` loads, or None: it follows the depth of the stack.

    Where there is a choice before it is loaded, None: the other branch may have a call of its own, with another name.
    """
    depth, name = 0, None
    for step in steps[i + 1 :]:
        if step.opname in ("PRECALL", "CALL") and depth == step.arg:
            return name if depth in (2, 3) else None
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth < 0 or (name is None and step.opcode in _JUMPS):
            return None
        if depth <= 2:
            constant = depth == 2 and step.opname == "LOAD_CONST" and isinstance(step.argval, str)
            name = step.argval if constant else None
    return None
