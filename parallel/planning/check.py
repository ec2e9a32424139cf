"""check_plan: what a plan would do to a model: which layouts meet, what is sent, which names match nothing.

    print(check_plan(net, {"up": ColwiseParallel(), "down": RowwiseParallel()}, mesh["tp"], torch.zeros(8, 16)))

    "up": ColwiseParallel()
        input     float32[8, 16] -> f32[8,16]
        output    f32[8,32@tp] -> float32[8, 8]
    "down": RowwiseParallel()
        input     float32[8, 8] -> f32[8,32@tp]
        output    f32[8,16]{P:tp} -> float32[8, 16]     all_reduce 1 (768 bytes)
    ...

A line with no collective behind it is a place where layouts meet. Plain tensors are written dtype[shape of this rank's
piece], DTensors by their layout string.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from dtensor.errors import expect
from dtensor.mesh import DeviceMesh
from dtensor.mesh.device_mesh import as_mesh

from ..styles.axis import Others
from ..styles.style import ParallelStyle
from .plan import Plan, entries, find, parallelize_module
from .rehearsal import Call, Example, Rehearsal, Sent, Stage, needs_values, rehearse
from .trial import other_meaning

__all__ = ["PlanCheck", "Row", "check_plan", "try_plan"]

PHASES = ("input", "inside", "output", "backward")


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of the plan, or one module outside of it, and what its calls did.

    Attributes:
        name, style: the entry; style is None for modules that the plan does not name.
        modules: the paths that it names and that behaved alike.
        layouts: "came", "prepared", "gave", "handed" -> the tensors' layouts.
        sent: "input", "inside", "output", "backward" -> collectives, of one of the modules.
    """

    name: str
    style: ParallelStyle | None
    modules: tuple[str, ...]
    layouts: Mapping[str, tuple[str, ...]]
    sent: Mapping[str, tuple[Sent, ...]]

    def __str__(self) -> str:
        more = f"     {len(self.modules)} modules" if len(self.modules) > 1 else ""
        told_style = ", not in the plan" if self.style is None else f": {self.style!r}"
        head = f'"{self.name}"{told_style}{more}'
        lines = [head]
        for title, a, b, phase in (("input", "came", "prepared", "input"), ("output", "gave", "handed", "output")):
            if self.layouts and self.style is not None:
                moved = _arrow(self.layouts.get(a, ()), self.layouts.get(b, ()))
                lines.append(f"    {title:9} {moved}" + _behind(self.sent.get(phase, ())))
        for phase in ("inside", "backward") if self.style is not None else PHASES:
            if self.sent.get(phase):
                lines.append(f"    {phase:9} {told(self.sent[phase])}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """What `check_plan` found. `str()` is the report; true where every name matches and the model runs.

    Attributes:
        rows: see `Row`.
        missing: entries of the plan that name no module.
        idle: entries whose modules did not run with this example.
        error: what went wrong, with the path of the module, or what would mean something else on the pieces of
            column-wise layers than on their whole outputs; "" where nothing did.
        forward, backward: all collectives.
        pending: parameters whose gradients stay pending sums until an optimizer or a reader needs them.
    """

    rows: tuple[Row, ...]
    missing: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    error: str = ""
    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = ()
    pending: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        return not self.missing and not self.error

    def __str__(self) -> str:
        lines = [str(row) for row in self.rows]
        lines += [f"matches nothing: {name!r}" for name in self.missing]
        lines += [f"did not run with this example: {name!r}" for name in self.idle]
        lines += [f"fails: {self.error}"] if self.error else []
        lines += [f"forward sends {told(self.forward)}", f"backward sends {told(self.backward)}"]
        if self.pending:
            lines.append(f"gradients left as pending sums for the optimizer: {', '.join(self.pending)}")
        return "\n".join([*lines, *self.notes])


def check_plan(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    example: Example,
    *,
    axis: str | int | None = None,
    others: Others = None,
) -> PlanCheck:
    """Rehearse `plan` on a copy of `model` without values, as one rank of `mesh`; nothing is changed and nothing sent.

    Args:
        example: what this rank would pass: a tensor, a tuple of positional inputs, or a mapping of keyword inputs.
            Inputs that require a gradient get one in the rehearsal.
        axis, others: as for `parallelize_module`.

    Gives a `PlanCheck`. Bytes are those that the first rank receives; an all-reduce of n bytes over k ranks counts as
    2 n (k-1)/k. Raises ValueError where the model is parallelized already, TypeError for something that is no plan.
    """
    expect("check_plan", "model", model, nn.Module, "a module", "check_plan(net, plan, mesh, inputs)")
    styles = entries(plan, "check_plan")
    found = {name: [p for p, _ in find(model, name.split(".") if name else [], "")] for name in styles}
    missing = tuple(name for name, paths in found.items() if not paths)
    there = {name: style for name, style in styles.items() if found[name]}
    done = try_plan(model, there, as_mesh(mesh), example, axis=axis, others=others)
    if isinstance(done, str):
        return PlanCheck((), missing, error=done)
    run, notes = done
    ran = {call.path for call in run.calls}
    idle = tuple(name for name in there if not ran & set(found[name]))
    error = "" if run.error is None else f"{run.error[0] or 'the model'}: {type(run.error[1]).__name__}: {run.error[1]}"
    if not error:
        error = other_meaning(model, there, as_mesh(mesh), example, axis, others)
    return PlanCheck(
        tuple(_rows(run.calls, there, found)), missing, idle, error,
        tuple(s for c in run.calls for phase in PHASES[:3] for s in c.sent.get(phase, ())),
        (*(s for c in run.calls for s in c.sent.get("backward", ())), *run.other),
        tuple(run.pending), notes,
    )  # fmt: skip


def try_plan(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, example: Example, *, axis: str | int | None = None,
    others: Others = None, backward: bool = True,
) -> tuple[Rehearsal, tuple[str, ...]] | str:  # fmt: skip
    """Rehearse without values, or with them where forward reads them. A text says why the plan cannot be applied."""
    for stage in (Stage(values=False), Stage(values=True)):
        net = stage.copy(model)
        with stage.entered(mesh) as fake:
            try:
                if plan:
                    net = parallelize_module(net, fake, plan, src_data_rank=None, axis=axis, others=others)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                return f"{type(error).__name__}: {error}"
            run = rehearse(net, example, stage, backward)
        if run.error is None or stage.values or not needs_values(model, run.error[1]):
            break
    return run, ("forward reads values: it was run on CPU, with zeros for what others would send",) * stage.values


# ------------------------------------------------------------ rows
def _rows(calls: Sequence[Call], plan: Mapping[str, ParallelStyle], found: Mapping[str, list[str]]) -> Iterable[Row]:
    named = {path for paths in found.values() for path in paths}
    for name, style in plan.items():
        yield from _alike([c for c in calls if c.path in set(found[name])], name, style)
    others = [c for c in calls if c.path not in named and any(c.sent.values())]
    for path in dict.fromkeys(c.path for c in others):
        yield from _alike([c for c in others if c.path == path], path, None)


def _alike(calls: Sequence[Call], name: str, style: ParallelStyle | None) -> Iterable[Row]:
    groups: dict[object, list[Call]] = {}
    for c in calls:
        sent = {phase: tuple(c.sent.get(phase, ())) for phase in PHASES}
        groups.setdefault((tuple(c.seen.items()), tuple(sent.items())), []).append(c)
    for same in groups.values():
        paths = tuple(dict.fromkeys(c.path for c in same))
        sent = {phase: tuple(same[0].sent.get(phase, ())) for phase in PHASES}
        yield Row(name or "", style, paths, dict(same[0].seen), sent)


def told(sent: Sequence[Sent]) -> str:
    """`all_reduce 2 (96 bytes), all_gather 1 (32 bytes)`, or `nothing`."""
    counts, nbytes = Counter(s.kind for s in sent), Counter[str]()
    for s in sent:
        nbytes[s.kind] += s.nbytes
    return ", ".join(f"{kind} {n} ({nbytes[kind]:,} bytes)" for kind, n in sorted(counts.items())) or "nothing"


def _behind(sent: Sequence[Sent]) -> str:
    return f"     {told(sent)}" if sent else ""


def _arrow(before: Sequence[str], after: Sequence[str]) -> str:
    """The tensors that changed, `a -> b`; all where none did."""
    if len(before) != len(after) or tuple(before) == tuple(after):
        return " ; ".join(after)
    return " ; ".join(f"{a} -> {b}" for a, b in zip(before, after, strict=True) if a != b)
