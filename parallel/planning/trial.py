"""Runs of one model under candidate plans, on fake tensors: what a group of layers can be given, if anything.

A group is tried three times, on all layers that are alike at once:

    1. with DTensors from the columns to the row: nothing may be sent on the way
    2. with plain local tensors: the model must run, but for sizes compute what it computes in one process, and do so
       on the shapes that the DTensors had locally, operator by operator
    3. with DTensors and no help: the model must run

Layers with parameters between them (a norm of each head) get those replicated, and their gradients summed: they see
one sharded tensor, as a norm of a sharded sequence does. A group that passes 1 and 2 hands over plain
tensors, one that passes 1 and 3 DTensors; others are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy

import torch
from torch import nn

from dtensor.experimental import implicit_replication
from dtensor.mesh import DeviceMesh

from ..styles.axis import Others
from ..styles.linear import ColwiseParallel, RowwiseParallel
from ..styles.packed import PackedColwiseParallel
from ..styles.sequence import SequenceParallel
from ..styles.style import ParallelStyle
from .groups import Group, names_of, pattern
from .plan import find, parallelize_module
from .rehearsal import Example, Rehearsal, Stage, leaves, map_tensors, needs_values, rehearse, split_example
from .trace import Layer, Trace, called

__all__ = ["Trial", "other_meaning"]

Styles = dict[str, ParallelStyle]


class Trial:
    """Runs of `model` under plans. `plain` is the trace of the model without one, after `trace`."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, axis: str | int | None, others: Others) -> None:
        self.model, self.mesh, self.axis, self.others = model, mesh, axis, others
        self.stage = Stage(values=False)
        self.plain = Trace()
        self.example: Example = ()
        self.shapes: list[torch.Size] = []

    def trace(self, examples: Iterable[Example]) -> None:
        """Run the plain model on the first example that it takes. ValueError where there is none."""
        error: tuple[str, Exception] | None = None
        for self.example in examples:
            for values in (False, True):
                self.stage = Stage(values)
                self.plain, run = self._run({})
                error = run.error
                if error is None:
                    self.shapes = [y.shape for y in leaves(run.output)]
                    return
                if not needs_values(self.model, error[1]):
                    break
        told = "" if error is None else f"{error[0] or 'the model'}: {type(error[1]).__name__}: {error[1]}"
        raise ValueError(
            f"suggest_plan: the model does not run on the example\n  got: {told}\n"
            "  fix: example=, what this rank would pass: a tensor, a tuple, or a mapping of keyword inputs"
        )

    def fails(self, plan: Styles) -> str:
        """Why the model does not run under `plan` with outputs of the right shapes; "" where it does."""
        try:
            _, run = self._run(plan)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            return str(error).partition("\n")[0]
        if run.error is not None:
            return f"{run.error[0] or 'the model'} raises {type(run.error[1]).__name__}"
        return "" if self._same_shapes(run) else "its outputs would have other shapes"

    def choose(self, groups: list[Group]) -> tuple[Styles | None, str]:
        """Styles for groups that are alike, and what they are; None and the reason where they are left alone."""
        group, names = groups[0], names_of(self.model, groups)
        try:
            with implicit_replication():
                meant, run = self._run(_styles(group, names, local=False, sharded=None), frozen=True)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            return None, str(error).partition("\n")[0]
        if run.error is not None:
            return None, f"on DTensors {run.error[0] or 'the model'} raises {type(run.error[1]).__name__}"
        sharded, why = self._sharded_dims(run, group, names)
        if why:
            return None, why
        styles = _styles(group, names, True, sharded)
        unfit = self._unfit(styles, meant)
        if not unfit:
            return styles, _told(group)
        styles = _styles(group, names, False, sharded)
        _, run = self._run(styles)
        if run.error is None and self._same_shapes(run):
            return styles, f"{_told(group)}, with DTensors between them: on plain local tensors {unfit}"
        where, raised = run.error or ("", None)
        why = "gives other shapes" if raised is None else f"raises {type(raised).__name__}"
        return None, f"{where or 'the model'} {why} on DTensors; on plain local tensors {unfit}"

    def _unfit(self, styles: Styles, meant: Trace) -> str:
        """Why plain local tensors will not do, where DTensors ran as `meant`; "" where they will."""
        trace, run = self._run(styles)
        if run.error is not None:
            return f"{run.error[0] or 'the model'} raises {type(run.error[1]).__name__}"
        if not self._same_shapes(run):
            return "the outputs would have other shapes"
        if not trace.ops <= self.plain.ops:
            name = min(str(op[0]) for op in trace.ops - self.plain.ops)
            known = any(name == op[0] for op in self.plain.ops)
            return f"{called(name)} would {'take other numbers' if known else 'run, which it does not in one process'}"
        if meant.difference(trace):
            trace, _ = self._run(styles, frozen=True)  # as `meant` was: gradients change what some operators do
        return meant.difference(trace)

    # ------------------------------------------------------------ runs
    def _run(self, plan: Styles, frozen: bool = False) -> tuple[Trace, Rehearsal]:
        net, trace = self.stage.copy(self.model), Trace()
        if frozen:
            net.requires_grad_(False)
        with torch.random.fork_rng(devices=[]), self.stage.entered(self.mesh) as fake:
            torch.default_generator.manual_seed(0)
            if plan:
                net = parallelize_module(net, fake, plan, src_data_rank=None, axis=self.axis, others=self.others)
            inputs = map_tensors(self.example, self.stage.tensor)
            with trace.following(net, split_example(inputs)):  # type: ignore[arg-type]
                run = rehearse(net, inputs, self.stage, backward=False, copied=True)  # type: ignore[arg-type]
            if run.error is None:
                trace.finish(run.output)
        return trace, run

    def _same_shapes(self, run: Rehearsal) -> bool:
        return [y.shape for y in leaves(run.output)] == self.shapes

    def _sharded_dims(self, run: Rehearsal, group: Group, names: list[list[str]]) -> tuple[list[int], str]:
        """The dim that comes sharded to each layer between. Also why the group will not do, where something is sent."""
        rows = self._paths(each[-1] for each in names)
        sharded: list[set[int | None]] = [set() for _ in group.between]
        between = [self._paths(each[len(group.columns) + i] for each in names) for i in range(len(sharded))]
        for call in run.calls:
            sent = any(s and (call.path not in rows or phase != "output") for phase, s in call.sent.items())
            moved = call.path in rows and call.seen.get("came") != call.seen.get("prepared")
            if sent or moved:
                return [], f"what is computed between them does not stay sharded (at {call.path or 'the model'})"
            for dims, paths in zip(sharded, between, strict=True):
                dims |= {_sharded_dim(text) for text in call.seen.get("came", ())} if call.path in paths else set()
        found = [d for dims in sharded for d in dims if d is not None and len(dims) == 1]
        if len(found) == len(sharded):
            return found, ""
        return found, f"{pattern(group.between[0].path)} does not see one sharded tensor"

    def _paths(self, names: Iterable[str]) -> set[str]:
        return {p for name in names for p, _ in find(self.model, name.split("."), "")}


def _sharded_dim(layout: str) -> int | None:
    """The dim that is sharded in a layout string such as `f32[2,8@tp,16]`; None where none or several are."""
    dims = layout[layout.index("[") + 1 : layout.index("]")].split(",")
    sharded = [i for i, n in enumerate(dims) if "@" in n]
    return sharded[0] if len(sharded) == 1 and ":" not in dims[sharded[0]] else None


def other_meaning(
    model: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh, example: Example,
    axis: str | int | None, others: Others,
) -> str:  # fmt: skip
    """What code between the layers of `plan` makes of this rank's pieces that it would not make of whole tensors.

    The plan runs twice: with pieces, as it says, and with DTensors in their place, which mean the same as in one
    process. "" where nothing differs, where no layer gives pieces, and where the model does not run with DTensors, so
    that nothing can be said.
    """
    if not any(style.gives_pieces for style in plan.values()):
        return ""
    trial = Trial(model, mesh, axis, others)
    try:
        trial.trace([example])
        pieces, run = trial._run(dict(plan), frozen=True)
        with implicit_replication():
            meant, whole = trial._run({name: _whole(style) for name, style in plan.items()}, frozen=True)
    except (ValueError, RuntimeError, NotImplementedError):
        return ""
    if run.error is not None or whole.error is not None:
        return ""
    named = {p for name in plan for p, _ in find(model, name.split(".") if name else [], "")}
    sent = {c.path: told for c in run.calls if (told := c.sent.get("inside"))}
    sends = [c.path for c in whole.calls if c.path not in named and c.sent.get("inside") and c.path not in sent]
    numbers = sorted(str(op[0]) for op in pieces.ops - trial.plain.ops - meant.ops)
    what = meant.viewed_otherwise(pieces)
    if not what and sends:
        what = f"{sends[0] or 'the model'} computes something that takes all pieces"
    if not what and any(name in {op[0] for op in trial.plain.ops} for name in numbers):
        what = f"{called(numbers[0])} would take other numbers"
    return what and (
        f"on this rank's pieces code between the layers means something else than in one process: {what}\n"
        "  fix: sizes of pieces in the code, view(b, t, -1, head_dim) and not view(b, t, heads, -1); or "
        "use_local_output=False for the column-wise layers before, which then give DTensors"
    )


def _whole(style: ParallelStyle) -> ParallelStyle:
    """`style` with DTensors in the place of pieces."""
    if not style.gives_pieces:
        return style
    other = copy(style)
    other.use_local_output = False  # type: ignore[attr-defined]
    return other


# ------------------------------------------------------------ styles
def _styles(group: Group, names: list[list[str]], local: bool, sharded: list[int] | None) -> Styles:
    """A plan for the group's layers. `sharded`: the dims of what is between; None: that gets no style yet."""
    styles: Styles = {}
    for each in names:
        for name, layer in zip(each, group.columns, strict=False):
            styles[name] = _column(layer, local)
        for name, dim in zip(each[len(group.columns) :], sharded or (), strict=False):
            styles[name] = SequenceParallel(sequence_dim=dim, use_local_output=local)
        styles[each[-1]] = RowwiseParallel(weight_dims=group.row.weight_dims)
    return styles


def _column(layer: Layer, local: bool) -> ParallelStyle:
    if not layer.sizes:
        return ColwiseParallel(use_local_output=local, weight_dims=layer.weight_dims)
    unit = layer.unit if all(n % layer.unit == 0 for n in layer.sizes) else 1
    return PackedColwiseParallel(layer.sizes, unit=unit, use_local_output=local, weight_dims=layer.weight_dims)


def _told(group: Group) -> str:
    columns = ", ".join(x.path.rpartition(".")[2] for x in group.columns)
    return f"{columns} by columns, {group.row.path.rpartition('.')[2]} by rows"
