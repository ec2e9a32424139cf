"""A program on plain tensors, and on DTensors beside what it gave there."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import dtensor
from dtensor import DTensor, init_device_mesh
from dtensor.errors import LayoutError, NoRuleError
from fuzz.draw import Program
from fuzz.side import Side

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-22, torch.float64: 2.0**-48}


class Seen(NamedTuple):
    """One tensor, or Python value, at one time."""

    value: Any
    about: tuple[Any, ...] = ()


Moment = dict[str, Seen]


def look(t: torch.Tensor) -> Seen:
    """The whole of a tensor now, and what is said of it."""
    with torch.no_grad():
        whole = t.full_tensor() if isinstance(t, DTensor) else t
        about = (tuple(t.shape), t.dtype, t.requires_grad, t.is_leaf)
        if isinstance(t, DTensor) and t._local_tensor.shape != t._spec.local_shape:
            about = (*about, f"a part of {tuple(t._local_tensor.shape)}, not {tuple(t._spec.local_shape)}")
        return Seen(whole.detach().clone(), about)


def moment(side: Side, wanted: set[str] | None = None) -> Moment:
    """All that a program has, or what of it is wanted."""
    found: Moment = {}
    for name, v in list(side.names.items()):
        if re.fullmatch(r"v\d+", name) and (wanted is None or name in wanted):
            found[name] = Seen(v)
        elif re.fullmatch(r"t\d+", name):
            if wanted is None or name in wanted:
                found[name] = look(v)
            if v.is_leaf and v.grad is not None and (wanted is None or name + ".grad" in wanted):
                found[name + ".grad"] = look(v.grad)
    return found


# ------------------------------------------------------------ plain
@dataclass
class History:
    """What there is on plain tensors after each step, and in runs that were disturbed."""

    level: float
    moments: list[Moment] = field(default_factory=list)
    disturbed: list[list[Moment]] = field(default_factory=list)

    def changed(self, i: int) -> set[str]:
        """What step `i` made or changed."""
        before, after = self.moments[i - 1] if i else {}, self.moments[i]
        return {k for k, v in after.items() if k not in before or not _same(before[k], v)}


def _same(a: Seen, b: Seen) -> bool:
    if isinstance(a.value, torch.Tensor) and isinstance(b.value, torch.Tensor):
        return a.about == b.about and torch.equal(a.value, b.value)
    return bool(a.value == b.value)


def _record(program: Program, side: Side, moments: list[Moment]) -> str:
    """Fill `moments`; the error of the step that raised, or ''."""
    for line in program.lines:
        try:
            side.run(line)
            moments.append(moment(side))
        except Exception as e:
            return f"{type(e).__name__}: {e}"
    return ""


def runnable(program: Program) -> tuple[Program, History]:
    """The program without the steps that plain torch refuses, and its history."""
    while True:
        level = max(ROUNDING[d] for d in _dtypes(program))
        history = History(level)
        if not _record(program, Side(), history.moments):
            break
        program = program.without(len(history.moments))
    for seed in (1, 2):
        history.disturbed.append([])
        _record(program, Side(disturbed=level, seed=seed), history.disturbed[-1])
    return program, history


def _dtypes(program: Program) -> set[torch.dtype]:
    words = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "f32": torch.float32, "float": torch.float32}
    return {torch.float64} | {words[w] for w in re.findall(r"\w+", " ".join(program.lines)) if w in words}


# ------------------------------------------------------------ comparing
def unlike(history: History, i: int, name: str, got: Seen | None) -> str:
    """What of `name` differs from plain torch after step `i`, or ''. What rounding decides is left out."""
    want = history.moments[i].get(name)
    off = [d[i].get(name) for d in history.disturbed if i < len(d)]
    if want is None or got is None:
        return "" if want is got else f"{name} is there {'on DTensors' if want is None else 'on plain tensors'} only"
    if not isinstance(want.value, torch.Tensor):
        if isinstance(want.value, float) or isinstance(want.value, list):
            a, b = (torch.tensor(s.value, dtype=torch.float64) for s in (want, got))
            pairs = [torch.tensor(o.value, dtype=torch.float64) for o in off if o]
            return _far(name, history.level, a, b, pairs)
        steady = all(o is not None and o.value == want.value for o in off)
        return f"{name} is {got.value!r}, not {want.value!r}" if steady and got.value != want.value else ""
    if any(o is None or o.value.shape != want.value.shape for o in off):
        return ""
    if got.about != want.about:
        return f"{name}: (shape, dtype, requires_grad, is_leaf) is {got.about}, not {want.about}"
    if got.value.shape != want.value.shape or got.value.dtype != want.value.dtype:
        return f"{name}: the whole is {got.value.dtype} {list(got.value.shape)}, not {want.about[:2]}"
    return _far(name, history.level, want.value, got.value, [o.value for o in off if o])


def _far(name: str, level: float, want: torch.Tensor, got: torch.Tensor, off: list[torch.Tensor]) -> str:
    """What lies further off than rounding, as far as `off` shows it, may take it."""
    if want.shape != got.shape:
        return "" if any(o.shape != want.shape for o in off) else f"{name}: {got.tolist()}, not {want.tolist()}"
    if not want.numel() or any(o.shape != want.shape for o in off):
        return ""
    if want.is_floating_point():
        if not bool(want.isfinite().all()):
            return ""
        a, b = want.double(), got.double()
        reach = max([(o.double() - a).abs().nan_to_num(math.inf).max().item() for o in off], default=0.0)
        far = (a - b).abs().nan_to_num(math.inf) > 60 * reach + 16 * level * max(1.0, a.abs().max().item())
    else:
        far = want != got
        for o in off:
            far &= o == want
    if not bool(far.any()):
        return ""
    at = int(far.flatten().int().argmax())
    count = f"{int(far.sum())} of {far.numel()} elements"
    return f"{name}: {got.flatten()[at].item()} at {at}, not {want.flatten()[at].item()} ({count})"


# ------------------------------------------------------------ running
class Verdict(NamedTuple):
    """`kind` is right, refused or wrong; the step, if one is to blame; `text` says what, `key` what kind of thing."""

    kind: str
    step: int = -1
    text: str = ""
    key: str = ""


def _refusal(e: BaseException) -> bool:
    """Whether an error is one that the engine raises on purpose."""
    usual = (TypeError, ValueError, NotImplementedError, RuntimeError)
    return isinstance(e, (LayoutError, NoRuleError)) or (isinstance(e, usual) and "\n  fix: " in str(e))


def on_rank(program: Program, history: History) -> Verdict:
    """What this rank finds."""
    side = Side(init_device_mesh("cpu", program.mesh))
    last = len(program.steps) - 1
    for i, line in enumerate(program.lines):
        try:
            side.run(line)
        except Exception as e:
            text = f"{type(e).__name__}: {e}"
            if not _refusal(e):
                return Verdict("wrong", i, f"step {i} raises {text}", f"raises {type(e).__name__} {form(str(e))}")
            bad = _compare(history, i - 1, moment(side)) if i else ""
            if bad:
                return Verdict("wrong", i, f"step {i} is refused and has changed {bad}", "changed by a refusal")
            return Verdict("refused", i, text, f"{type(e).__name__}: {form(str(e))}")
        if program.each or i == last:
            wanted = history.changed(i) if i < last else None
            try:
                bad = _compare(history, i, moment(side, wanted), wanted)
            except Exception as e:
                kind = f"reading raises {type(e).__name__}"
                return Verdict("wrong", i, f"after step {i}: {kind}: {e}", kind)
            if bad:
                return Verdict("wrong", i, f"after step {i}: {bad}", re.sub(r"^\S+|[-\d.e]+", "", bad).strip()[:40])
    return Verdict("right")


def _compare(history: History, i: int, got: Moment, wanted: set[str] | None = None) -> str:
    names = set(history.moments[i]) | set(got) if wanted is None else wanted
    return next((bad for k in sorted(names) if (bad := unlike(history, i, k, got.get(k)))), "")


def form(text: str) -> str:
    """A message without its names and numbers."""
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)|\{[^}]*\}|'[^']*'", "..", text.split("\n")[0])
    return re.sub(r"\d+", "N", text)[:110]


Runner = Callable[[Program, History], list[Verdict]]


def simulated(program: Program, history: History) -> list[Verdict]:
    """Every rank's finding, in one process."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dtensor.simulate(math.prod(program.mesh))(on_rank, program, history)
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        return [Verdict("wrong", -1, f"the run ends with {text}", f"ends {type(e).__name__}")]


def verdict(found: list[Verdict]) -> Verdict:
    """What all ranks together found."""
    first = found[0]
    if len({(v.kind, v.step, v.key) for v in found}) == 1:
        return first
    wrong = [f"rank {r}: {v.kind} {v.text[:300]}" for r, v in enumerate(found)]
    bad = [v for v in found if v.kind != "right"]
    if len({v.key for v in bad}) == 1 and bad[0].kind == "wrong":
        return bad[0]
    return Verdict("wrong", bad[0].step, "ranks differ: " + "; ".join(wrong), "ranks differ")


@dataclass
class Judged:
    """A program as far as it was not refused, what became of it, and what was refused of it."""

    program: Program
    found: Verdict
    refused: list[tuple[str, str]] = field(default_factory=list)


def judge(program: Program, runner: Runner = simulated) -> Judged:
    """Run a program; where a step is refused, again without it."""
    refused: list[tuple[str, str]] = []
    while True:
        program, history = runnable(program)
        if not program.steps:
            return Judged(program, Verdict("right"), refused)
        found = verdict(runner(program, history))
        if found.kind != "refused":
            return Judged(program, found, refused)
        refused.append((program.steps[found.step].line, found.text))
        program = program.without(found.step)
