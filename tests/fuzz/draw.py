"""Programs as data, drawn from a seed."""

from __future__ import annotations

import inspect
import math
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dtensor.propagation_rules.proof.parts import kinds_of
from fuzz import side
from fuzz.side import DTYPES, Side

LARGEST = 600  # elements of a tensor
BOUND = 1e4  # of a value
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# ------------------------------------------------------------ programs
@dataclass(frozen=True)
class Step:
    """One line, and the family that it is of; `LAYOUT` in the line stands for the words of `layout`."""

    text: str
    family: str
    layout: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return self.text.replace("LAYOUT", repr(" ".join(self.layout)))


@dataclass(frozen=True)
class Program:
    """Steps for a mesh. `each`: tensors are compared after every step, else at the end."""

    seed: int
    mesh: tuple[int, ...]
    steps: tuple[Step, ...]
    each: bool

    def without(self, *drop: int) -> Program:
        return replace(self, steps=tuple(s for i, s in enumerate(self.steps) if i not in drop))

    @property
    def lines(self) -> list[str]:
        return [s.line for s in self.steps]

    def script(self) -> str:
        """The program as a file that runs by itself, with nothing but the engine."""
        body = "\n".join(self.lines)
        return f'{inspect.getsource(side)}\n\nPROGRAM = """\n{body}\n"""\nshow(PROGRAM, {self.mesh})\n'


# ------------------------------------------------------------ the table
class Family(NamedTuple):
    """Calls of one kind; `writes`: they change what is there."""

    name: str
    weight: float
    writes: bool
    calls: list[str]


@cache
def families() -> list[Family]:
    """The table of calls."""
    found: list[Family] = []
    for line in (Path(__file__).parent / "calls.txt").read_text().splitlines():
        if line.startswith("= "):
            *name, weight = line[2:].removesuffix(" writes").split()
            found.append(Family(" ".join(name), float(weight), line.endswith(" writes"), []))
        elif line and line[0] != "#":
            found[-1].calls.append(line)
    return found


# ------------------------------------------------------------ layouts
def layout_words(
    rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype | None, mesh: tuple[int, ...]
) -> list[str]:
    """A layout: shards, also of one dim in another order of the axes, and one kind of pending reduction of a dtype."""
    kinds = ["sum", *(kinds_of(dtype) if dtype else ())]
    kind, words = rng.choice(kinds), list[str]()
    one = rng.random() < 0.15  # all axes shard one dim
    for axis in range(len(mesh)):
        chance = rng.random()
        if chance < 0.17 and len(kinds) > 1:
            words.append(f"P({kind})")
        elif not shape or (chance < 0.45 and not one):
            words.append("R")
        else:
            d = int(words[-1][1]) if one and words and words[-1][0] == "S" else rng.randrange(len(shape))
            strided = rng.random() < 0.15
            words.append(f"S{d}" + f"/{rng.choice([2, 3, math.prod(mesh[axis + 1 :])])}" * strided)
    return words


# ------------------------------------------------------------ drawing
class Skip(Exception):
    """There is no tensor for a field; another call is drawn."""


class Draw:
    """A program in the making: its steps so far and the plain tensors that they have made."""

    def __init__(self, seed: int, mesh: tuple[int, ...]) -> None:
        self.rng, self.mesh, self.seed = random.Random(seed), mesh, seed
        self.side, self.steps, self.count = Side(), list[Step](), 0
        self.fixed: set[str] = set()  # tensors that may share memory with others here and not there
        self.dtype = self.rng.choice(["f64"] * 6 + ["f32"] * 5 + ["bf16"])
        self.sizes = self.rng.sample([1, 2, 3, 4, 5, 6, 7, 8], 3) + [0] * (self.rng.random() < 0.12)

    def program(self) -> Program:
        length, tries = self.rng.randint(5, 30), 0
        while len(self.steps) < 3:
            self.leaf(self.shape())
        while sum(s.family != "leaf" for s in self.steps) < length and tries < 5 * length:
            tries += 1
            self.step()
        return Program(self.seed, self.mesh, tuple(self.steps), each=self.rng.random() < 0.6)

    def step(self) -> None:
        """Draw one call, with the leaves that it wants, and run it; leave it out where torch refuses it."""
        family = self.rng.choices(families(), [f.weight for f in families()])[0]
        call = re.sub(r"<<(.*?)>>", lambda m: self.rng.choice(m[1].split("|")), self.rng.choice(family.calls))
        steps, count, names = list(self.steps), self.count, set(self.names)
        try:
            self.emit(call, family)
        except Exception:
            self.steps, self.count = steps, count
            if family.writes:
                self.side = Side()
                for s in steps:
                    self.side.run(s.line)
            for name in set(self.names) - names:
                del self.names[name]

    def emit(self, call: str, family: Family) -> None:
        fields: dict[str, str] = {"distinct": "yes"} if call.endswith("?") else {}
        call = call.removesuffix("?")
        for _, name, _, _ in string.Formatter().parse(call):
            if name and name not in fields:
                fields[name] = self.field(name, fields, call)
        words = self.layout if "{layout}" in call else ()
        text = call.format(**fields)
        if family.writes and self.frozen(fields):
            raise Skip
        if not family.writes:
            value = eval(Step(text, "", tuple(words)).line, self.names)
            text = f"{self.results(value)} = {text}"
        elif re.match(r"\{[xun]\}\.\w+_\(.*\)$", call) and self.rng.random() < 0.3:
            text = f"v{self.new()} = {text} is {fields[call[1]]}"
        if self.rng.random() < 0.12 and family.name not in ("backward", "gradients", "values"):
            text = f"with torch.{self.rng.choice(['no_grad', 'no_grad', 'inference_mode'])}(): {text}"
        before = set(self.names)
        self.run(Step(text, family.name, tuple(words)))
        made = [self.names[k] for k in self.tensors() if k not in before]
        if "inference_mode" in text and any(t.requires_grad for t in made):  # of views there, where it has no effect
            raise Skip
        if family.name == "moves":
            self.fixed |= {fields[k] for k in fields if k in "axu"} | {text.split(" = ")[0].split()[-1]}

    layout: tuple[str, ...] = ()

    def frozen(self, fields: dict[str, str]) -> bool:
        memory = {self.names[k].untyped_storage()._cdata for k in self.fixed if k in self.names}
        used = re.findall(r"\bt\d+\b", " ".join(fields.values()))
        return any(self.names[k].untyped_storage()._cdata in memory for k in used)

    def results(self, value: Any) -> str:
        """The names that a call's results get."""
        if isinstance(value, torch.Tensor):
            return f"t{self.new()}"
        if isinstance(value, list | tuple) and value and all(isinstance(v, torch.Tensor) for v in value):
            if len(value) > 6:
                raise Skip
            return ", ".join(f"t{self.new()}" for _ in value) + ","
        return f"v{self.new()}"

    def run(self, step: Step) -> None:
        """Run a step; raise where it leaves something too large, or not finite."""
        writes = any(f.writes for f in families() if f.name == step.family)
        before = set() if writes else set(self.names)
        self.side.run(step.line)
        for t in (self.names[k] for k in self.tensors() if k not in before):
            for u in (t, t.grad if t.is_leaf else None):
                if u is not None and u.numel() and (u.numel() > LARGEST or not bool((u.detach().abs() <= BOUND).all())):
                    raise Skip
        self.steps.append(step)

    # -------------------------------------------------------- tensors
    @property
    def names(self) -> dict[str, Any]:
        return self.side.names

    def tensors(self) -> list[str]:
        return [k for k in self.names if k[0] == "t" and k[1:].isdigit()]

    def pick(self, fits: Callable[[torch.Tensor], bool]) -> str:
        found = [k for k in self.tensors() if fits(self.names[k])]
        if not found:
            raise Skip
        return self.rng.choice(found[-3:] if self.rng.random() < 0.3 else found)

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def size(self) -> int:
        return self.rng.choice(self.sizes if self.rng.random() < 0.85 else [0, 1, 2, 3, 4, 5, 6, 9])

    def shape(self) -> tuple[int, ...]:
        """A shape of up to a third of what a tensor may have."""
        shape = [self.size() for _ in range(self.rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4]))]
        while math.prod(shape) > LARGEST // 3:
            shape.pop()
        return tuple(shape)

    def leaf(self, shape: Any, kind: str = "normal", dtype: str = "", grad: bool | None = None) -> str:
        dtype = dtype or (self.dtype if self.rng.random() < 0.85 else self.rng.choice(["f32", "f64", "bf16"]))
        grad = DTYPES[dtype].is_floating_point and self.rng.random() < 0.5 if grad is None else grad
        name = f"t{self.new()}"
        text = f"{name} = leaf({kind!r}, {tuple(shape)}, {dtype!r}, {self.rng.randrange(10**4)}, LAYOUT, {grad})"
        self.run(Step(text, "leaf", tuple(layout_words(self.rng, tuple(shape), DTYPES[dtype], self.mesh))))
        return name

    # -------------------------------------------------------- fields
    def field(self, name: str, fields: dict[str, str], call: str) -> str:
        if name in SUBJECTS:
            return self.subject(name, fields)
        subject = next((self.names[v] for k, v in fields.items() if k in SUBJECTS), None)
        return str(getattr(self, f"field_{name}")(subject, fields, call))

    def subject(self, name: str, fields: dict[str, str]) -> str:
        distinct = "distinct" in fields

        def fits(t: torch.Tensor) -> bool:
            return SUBJECTS[name](t) and (not distinct or t.unique().numel() == t.numel())

        if self.rng.random() < 0.06 and name in "xuwmbn":
            shape = [self.size() for _ in range({"w": 2, "m": 2, "b": 3, "u": 1}.get(name, self.rng.randint(0, 3)))]
            return self.leaf(shape, "from -5", "i64", False) if name == "n" else self.leaf(shape)
        return self.pick(fits)

    def field_y(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        def fits(u: torch.Tensor) -> bool:
            try:
                return u.is_floating_point() and math.prod(torch.broadcast_shapes(t.shape, u.shape)) <= LARGEST
            except RuntimeError:
                return False

        if self.rng.random() < 0.7:
            return self.pick(fits)
        return self.field_z(t, fields, call, new=True)

    def field_z(self, t: torch.Tensor, fields: dict[str, str], call: str, new: bool = False) -> str:
        def fits(u: torch.Tensor) -> bool:
            try:
                return u.is_floating_point() and torch.broadcast_shapes(t.shape, u.shape) == t.shape
            except RuntimeError:
                return False

        if not new and self.rng.random() < 0.6:
            return self.pick(fits)
        shape = [1 if self.rng.random() < 0.2 else s for s in t.shape[self.rng.choice([0, 0, 0, 1]) :]]
        return self.leaf(shape)

    def field_like(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        return self.leaf(t.shape, dtype=_NAMES[t.dtype])

    def field_mask(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        ones = "[{mask}]" not in call and "select" not in call
        return self.leaf([1 if ones and self.rng.random() < 0.2 else s for s in t.shape], "mask", "flag")

    def field_dim(self, t: torch.Tensor, fields: dict[str, str], call: str) -> int:
        if not t.ndim:
            raise Skip
        d = self.rng.randrange(t.ndim)
        return d - t.ndim if self.rng.random() < 0.3 else d

    field_dim2 = field_dim

    def field_dims(self, t: torch.Tensor, fields: dict[str, str], call: str) -> tuple[int, ...]:
        return tuple(self.rng.sample(range(t.ndim), self.rng.randint(1, t.ndim)))

    def field_perm(self, t: torch.Tensor, fields: dict[str, str], call: str) -> tuple[int, ...]:
        return tuple(self.rng.sample(range(t.ndim), t.ndim))

    def along(self, t: torch.Tensor, fields: dict[str, str], call: str) -> int:
        """The dim that indices go along: drawn already, or now."""
        if "dim" not in fields:
            fields["dim"] = str(self.field_dim(t, fields, call) if "{dim}" in call or "{at}" in call else 0)
        return int(fields["dim"]) % max(t.ndim, 1)

    def field_start(self, t: torch.Tensor, fields: dict[str, str], call: str) -> int:
        return self.rng.randrange(t.shape[self.along(t, fields, call)])

    def field_cut(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        rng, parts = self.rng, []
        for n in t.shape[: rng.randint(1, max(t.ndim, 1))]:
            a, b = sorted((rng.randint(0, n), rng.randint(0, n)))
            few = [f"{a}:{b}", f"{a}:", f":{b}", f"::{rng.choice([2, 3])}", f"{-max(a, 1)}:", f"{a}::2", ":", ":"]
            parts.append(rng.choice(few + [str(rng.randrange(-n, n))] * 2 if n else few))
        return ", ".join([*parts, *["None"] * (rng.random() < 0.1)]) or "..."

    def field_at(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        return ":, " * self.along(t, fields, call)

    def field_index(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        n = t.shape[self.along(t, fields, call)]
        return self.leaf((self.rng.choice([1, 2, 3, 5]),), f"below {n}", "i64", False)

    def field_wide(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        d, shape = self.along(t, fields, call), list(t.shape)
        n, shape[d] = shape[d], self.rng.choice([1, 2, shape[d]])
        return self.leaf(shape, f"below {n}", "i64", False)

    def field_right(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        lead = [1 if self.rng.random() < 0.2 else s for s in t.shape[:-2]] if self.rng.random() < 0.5 else []
        return self.leaf((*lead, t.shape[-1], self.size()), dtype=_NAMES[t.dtype])

    def field_row(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        return self.leaf(t.shape[-1:], dtype=_NAMES[t.dtype])

    def field_weight(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        return self.leaf((self.rng.choice(self.sizes), t.shape[-1]), dtype=_NAMES[t.dtype])

    def field_bias(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        if "weight" not in fields:
            fields["weight"] = self.field_weight(t, fields, call)
        return self.leaf(self.names[fields["weight"]].shape[:1], dtype=_NAMES[t.dtype])

    def field_labels(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        return self.leaf(t.shape[:1], f"below {t.shape[1]}", "i64", False)

    def field_num(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        return self.rng.choice(["0.5", "2", "-0.3", "1", "0", "-1.5"])

    def field_dtype(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        return self.rng.choice(["f32", "f64", "bf16", "i64", "i32", "flag"])

    def field_small(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        return self.rng.choice(
            "mul_(2) add_(1) zero_() fill_(0.7) neg_() clamp_(-1,1) sigmoid_() relu_() sub_(0.5) abs_()".split()
        )

    def field_layout(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        self.layout = tuple(w for w in layout_words(self.rng, tuple(t.shape), None, self.mesh))
        return "LAYOUT"

    def field_pair(self, t: torch.Tensor, fields: dict[str, str], call: str) -> tuple[int, int]:
        n = t.shape[self.along(t, fields, call)]
        a = self.rng.choice([k for k in range(1, n + 1) if n % k == 0] or [1])
        return a, n // a

    def field_shape(self, t: torch.Tensor, fields: dict[str, str], call: str) -> tuple[int, ...]:
        left, found = t.numel(), []
        for _ in range(self.rng.randint(0, 3)):
            found.append(self.rng.choice([k for k in range(1, left + 1) if left % k == 0] or [1]))
            left //= found[-1]
        return (*found, left)

    def field_sizes(self, t: torch.Tensor, fields: dict[str, str], call: str) -> list[int]:
        n = t.shape[self.along(t, fields, call)]
        a = self.rng.randint(0, n)
        return [a, n - a]

    def field_xs(self, t: torch.Tensor | None, fields: dict[str, str], call: str) -> str:
        found: dict[int, str] = {}
        for k in self.tensors():
            v = self.names[k]
            if v.is_floating_point() and v.numel():
                found.setdefault(v.untyped_storage()._cdata, k)
        if not found:
            raise Skip
        return f"[{', '.join(self.rng.sample(list(found.values()), min(len(found), self.rng.randint(1, 3))))}]"

    def field_ys(self, t: torch.Tensor | None, fields: dict[str, str], call: str) -> str:
        names = re.findall(r"t\d+", fields["xs"])
        return f"[{', '.join(self.leaf(self.names[k].shape, dtype=_NAMES[self.names[k].dtype]) for k in names)}]"

    def field_out(self, t: torch.Tensor, fields: dict[str, str], call: str) -> str:
        value = eval(call.replace(", out={out}", "").format(**fields), self.names)
        many = value if isinstance(value, tuple) else (value,)
        made = [self.leaf(v.shape, "normal", _NAMES[v.dtype], False) for v in many]
        return made[0] if isinstance(value, torch.Tensor) else f"({', '.join(made)})"


SUBJECTS: dict[str, Callable[[torch.Tensor], bool]] = {
    "a": lambda t: True,
    "x": lambda t: t.is_floating_point(),
    "u": lambda t: t.is_floating_point() and t.ndim > 0,
    "w": lambda t: t.is_floating_point() and t.ndim > 1,
    "m": lambda t: t.is_floating_point() and t.ndim == 2,
    "b": lambda t: t.is_floating_point() and t.ndim == 3,
    "n": lambda t: t.dtype in (torch.int64, torch.int32),
    "p": lambda t: t.is_floating_point() and t.requires_grad and t.numel() > 0,
    "l": lambda t: t.is_floating_point() and t.requires_grad and t.is_leaf,
}


def draw(seed: int, mesh: tuple[int, ...]) -> Program:
    """The program of a seed."""
    return Draw(seed, mesh).program()
