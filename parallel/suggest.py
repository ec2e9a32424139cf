"""suggest_plan: a tensor-parallel plan for a model that nobody wrote one for.

The model runs once on fake tensors (`parallel.trace`), which shows what feeds what; no names are looked at. Layers
whose outputs meet in one other layer, and go nowhere else, are cut by columns and that one by rows:

    q, k, v -> o        gate, up -> down        w1, w3 -> w2 of every expert        c_attn -> c_proj

Whether that is right depends on what is computed between them, so each such group is tried out in rehearsals:

    1. with DTensors from the columns to the rows: nothing may be sent on the way
    2. with plain local tensors: the model must run, and but for sizes compute what it computes in one process
    3. with DTensors and no help: the model must run

A group that passes 1 and 2 hands over plain tensors, one that passes 1 and 3 DTensors; others are left alone. So
are layers with parameters in between (a norm of queries), since each rank would see a part of their gradient.
The token embedding is cut by rows and the head by columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dtensor import DeviceMesh, Replicate
from dtensor.device_mesh import as_mesh
from dtensor.experimental import implicit_replication
from parallel.axis import Others, style_axis
from parallel.check import needs_values
from parallel.linear import ColwiseParallel, RowwiseParallel
from parallel.packed import PackedColwiseParallel
from parallel.plan import find, parallelize_module
from parallel.rehearsal import Example, Rehearsal, Stage, leaves, map_tensors, rehearse, split_example
from parallel.style import ParallelStyle
from parallel.trace import INPUT, Layer, Trace

__all__ = ["SuggestedPlan", "suggest_plan"]


class SuggestedPlan(dict[str, ParallelStyle]):
    """A plan to apply or to edit. Its `repr` is Python code, one entry a line, with comments.

    `notes`: what was left alone, and why.
    """

    def __init__(self, entries: dict[str, ParallelStyle], comments: dict[str, str], notes: Sequence[str]) -> None:
        super().__init__(entries)
        self.comments, self.notes = comments, tuple(notes)

    def __repr__(self) -> str:
        lines = []
        for name, style in self.items():
            lines += [f"    # {self.comments[name]}"] if name in self.comments else []
            lines.append(f'    "{name}": {style!r},')
        return "\n".join(["{", *lines, *(f"    # {note}" for note in self.notes), "}"])


@dataclass(frozen=True, slots=True)
class Group:
    """Layers `columns` that feed the layer `row` and nothing else."""

    columns: tuple[Layer, ...]
    row: Layer

    def paths(self) -> tuple[str, ...]:
        """The columns' and the row's."""
        return (*(c.path for c in self.columns), self.row.path)


def suggest_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    example: Example | None = None,
    *,
    axis: str | int | None = None,
    others: Others = None,
) -> SuggestedPlan:
    """A plan for `model` over `mesh`, for `parallelize_module`. Nothing is changed and nothing sent.

    Args:
        example: inputs, as for `check_plan`; only their shapes and dtypes count, unless forward reads values. By
            default 16 token numbers, or 16 vectors of the first Linear's width, whichever the model takes.
        axis, others: as for `parallelize_module`.

    Raises ValueError where the model does not run on the example. What `check_plan(model, plan, mesh, example)` says of
    the plan is worth reading before use.
    """
    trial = _Trial(model, as_mesh(mesh), axis, others)
    trial.trace(_examples(model) if example is None else [example])
    entries: dict[str, ParallelStyle] = {}
    comments: dict[str, str] = {}
    notes: list[str] = []
    for alike in _alike(_groups(trial.plain)):
        styles, why = trial.choose(alike)
        if styles is None:
            notes.append(f"{', '.join(dict.fromkeys(_names(model, alike)))} left alone: {why}")
            continue
        entries.update(styles)
        comments[next(iter(styles))] = f"{why}; one all-reduce forward and one backward"
    entries = trial.with_ends(entries, comments, notes)
    taken = {p for name in entries for p, _ in find(model, name.split("."), "")}
    notes += dict.fromkeys(_left(trial.plain, taken, " ".join(notes)))
    return SuggestedPlan(entries, comments, notes)


def _left(trace: Trace, taken: set[str], told: str) -> Iterator[str]:
    """A note for every linear layer that is in no group and that nothing was said of."""
    seen: set[str] = set()
    for path, layer in trace.layers.items():
        name = _pattern(path)
        if layer.role != "linear" or path in taken or name in told or path in told or name in seen:
            continue
        seen.add(name)
        into = [p for p, x in trace.layers.items() if path in x.origins and x.role != "linear"]
        why = f"what it gives goes into {_pattern(into[0])}" if into else "nothing to pair it with"
        yield f"{name} left alone: {why}"


def _examples(model: nn.Module) -> Iterator[Example]:
    yield torch.zeros(1, 16, dtype=torch.long)
    width = next((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), None)
    if width is not None:
        yield torch.zeros(1, 16, width)
        yield torch.zeros(16, width)


# ------------------------------------------------------------ groups
def _groups(trace: Trace) -> Iterator[Group]:
    feeds: dict[str, set[str]] = {path: set() for path in trace.layers}
    for layer in trace.layers.values():
        for origin in layer.origins & feeds.keys():
            feeds[origin].add(layer.path)
    used: set[str] = set()
    for row in trace.layers.values():
        columns = [trace.layers[p] for p in trace.layers if p in row.origins]
        known = all(o in feeds for o in row.origins - {INPUT}) and columns
        linear = all(c.role == "linear" and feeds[c.path] == {row.path} for c in columns) and row.role == "linear"
        ends = {c.path for c in columns} & trace.outputs
        if known and linear and not ends and not used & {row.path, *(c.path for c in columns)}:
            used |= {row.path, *(c.path for c in columns)}
            yield Group(tuple(columns), row)


def _pattern(path: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def _alike(groups: Iterator[Group]) -> Iterator[list[Group]]:
    """Groups that differ in the numbers in their paths only."""
    found: dict[object, list[Group]] = {}
    for g in groups:
        key = tuple((_pattern(x.path), x.ins, x.outs, x.sizes, x.unit, x.weight_dims) for x in (*g.columns, g.row))
        found.setdefault(key, []).append(g)
    yield from found.values()


def _names(model: nn.Module, alike: list[Group]) -> list[str]:
    """The entries that name the layers of all groups: patterns, where these name no other module."""
    names = []
    for i, path in enumerate(alike[0].paths()):
        mine, pattern = [g.paths()[i] for g in alike], _pattern(path)
        first = model.get_submodule(path)
        matched = list(find(model, pattern.split("."), ""))
        same = all(
            type(m) is type(first) and [p.shape for p in m.parameters()] == [p.shape for p in first.parameters()]
            for _, m in matched
        )
        others_ran = {p for p, _ in matched} - set(mine)
        names.append(pattern if same and len(matched) > 1 and not others_ran & _ran(alike) else path)
    if len(alike) > 1 and any("*" not in n for n in names):
        return [p for g in alike for p in g.paths()]
    return names


def _ran(alike: list[Group]) -> set[str]:
    return {p for g in alike for p in g.paths()}


# ------------------------------------------------------------ trials
class _Trial:
    """Runs of one model under candidate plans."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, axis: str | int | None, others: Others) -> None:
        self.model, self.mesh, self.axis, self.others = model, mesh, axis, others
        self.stage = Stage(values=False)
        self.plain = Trace()
        self.example: Example = ()
        self.shapes: list[torch.Size] = []

    def trace(self, examples: Iterator[Example] | list[Example]) -> None:
        """Run the plain model on the first example that it takes. ValueError where there is none."""
        error: tuple[str, Exception] | None = None
        for self.example in examples:
            for values in (False, True):
                self.stage = Stage(values)
                self.plain, run = self._run(None)
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

    def _run(self, plan: dict[str, ParallelStyle] | None) -> tuple[Trace, Rehearsal]:
        net, trace = self.stage.copy(self.model), Trace()
        with self.stage.entered(self.mesh) as fake:
            if plan:
                net = parallelize_module(net, fake, plan, src_data_rank=None, axis=self.axis, others=self.others)
            inputs = map_tensors(self.example, self.stage.tensor)
            with trace.following(net, split_example(inputs)):  # type: ignore[arg-type]
                run = rehearse(net, inputs, self.stage, backward=False, copied=True)  # type: ignore[arg-type]
            if run.error is None:
                trace.finish(run.output)
        return trace, run

    def choose(self, alike: list[Group]) -> tuple[dict[str, ParallelStyle] | None, str]:
        """Styles for these groups, and what they are; None and the reason where they are left alone."""
        names = _names(self.model, alike)
        shown = ", ".join(n.rpartition(".")[2] for n in names[: len(alike[0].columns)])
        what = f"{shown} by columns, {names[len(alike[0].columns)].rpartition('.')[2]} by rows"
        try:
            with implicit_replication():
                _, run = self._run(self._styles(alike, names, local=False))
        except (ValueError, NotImplementedError) as error:
            return None, str(error).partition("\n")[0]
        if run.error is not None:
            return None, f"on DTensors {run.error[0]} raises {type(run.error[1]).__name__}"
        paths = {p for name in names for p, _ in find(self.model, name.split("."), "")}
        rows = {p for i, name in enumerate(names) if (i + 1) % (len(alike[0].columns) + 1) == 0
                for p, _ in find(self.model, name.split("."), "")}  # fmt: skip
        sent = [c for c in run.calls for phase, s in c.sent.items() if s and (c.path not in rows or phase != "output")]
        moved = [c.path for c in run.calls if c.path in rows and c.seen.get("came") != c.seen.get("prepared")]
        if sent or moved:
            return None, f"what is computed between them does not stay cut (at {[*(c.path for c in sent), *moved][0]})"
        for local in (True, False):
            styles = self._styles(alike, names, local)
            trace, run = self._run(styles)
            if run.error is None and [y.shape for y in leaves(run.output)] == self.shapes:
                if not local or trace.ops <= self.plain.ops:
                    return styles, what
        return None, f"forward of {run.error[0] if run.error else _shared_parent(paths)} does not run on cut features"

    def _styles(self, alike: list[Group], names: list[str], local: bool) -> dict[str, ParallelStyle]:
        styles: dict[str, ParallelStyle] = {}
        group = alike[0]
        for i, name in enumerate(names):
            at = i % (len(group.columns) + 1)
            styles[name] = _column(group.columns[at], local) if at < len(group.columns) else _row(group.row)
        return styles

    # ------------------------------------------------------------ both ends
    def with_ends(
        self, entries: dict[str, ParallelStyle], comments: dict[str, str], notes: list[str]
    ) -> dict[str, ParallelStyle]:
        """`entries` with the token embedding before and the head behind, where they run and tied parameters agree."""
        ranks = style_axis(self, self.mesh, self.axis, self.others).size
        taken = {p for name in entries for p, _ in find(self.model, name.split("."), "")}
        first: dict[str, ParallelStyle] = {}
        last: dict[str, ParallelStyle] = {}
        feeding = {o for x in self.plain.layers.values() for o in x.origins}
        for x in self.plain.layers.values():
            is_end = x.path in self.plain.outputs and x.path not in feeding | taken
            if x.role == "lookup" and x.origins == {INPUT} and x.ins >= 4 * ranks:
                first[x.path] = RowwiseParallel(input_layouts=Replicate())
                comments[x.path] = "rows over the ranks; one all-reduce forward"
            elif x.role == "linear" and is_end and x.outs > x.ins:
                last[x.path] = ColwiseParallel(output_layouts=Replicate(), weight_dims=x.weight_dims)
                comments[x.path] = (
                    "gathers its output; for loss_parallel: ColwiseParallel(use_local_output=False)"
                )
        ends = {**first, **last}
        left = [p for tie in _ties(self.model) if not tie <= ends.keys() for p in tie & ends.keys()]
        notes += [f"{p} left alone: it shares its weight with a module that is not cut" for p in left]
        done = {**{k: v for k, v in first.items() if k not in left}, **entries,
                **{k: v for k, v in last.items() if k not in left}}  # fmt: skip
        try:
            _, run = self._run(done)
            if run.error is None and [y.shape for y in leaves(run.output)] == self.shapes:
                return done
            why = str(run.error)
        except (ValueError, NotImplementedError) as error:
            why = str(error).partition("\n")[0]
        notes.append(f"{', '.join(ends)} left alone: {why}")
        return entries


def _column(layer: Layer, local: bool) -> ParallelStyle:
    if layer.sizes:
        unit = layer.unit if all(n % layer.unit == 0 for n in layer.sizes) else 1
        return PackedColwiseParallel(
            layer.sizes, unit=unit, use_local_output=local, weight_dims=layer.weight_dims
        )
    return ColwiseParallel(use_local_output=local, weight_dims=layer.weight_dims)


def _row(layer: Layer) -> ParallelStyle:
    return RowwiseParallel(weight_dims=layer.weight_dims)


def _ties(model: nn.Module) -> Iterator[set[str]]:
    """Paths of modules that share a parameter."""
    owners: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), set()).add(path)
    yield from (paths for paths in owners.values() if len(paths) > 1)


def _shared_parent(paths: set[str]) -> str:
    return min(paths, default="").rpartition(".")[0] or "the model"
