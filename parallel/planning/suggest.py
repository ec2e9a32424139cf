"""suggest_plan: a tensor-parallel plan for a model that nobody wrote one for.

The model runs once on fake tensors (`trace`), which shows what feeds what; no names are looked at. Layers
whose outputs meet in one other layer, and go nowhere else, are sharded by columns and that one by rows (`groups`):

    q, k, v -> o        gate, up -> down        w1, w3 -> w2 of every expert        c_attn -> c_proj

Whether that is right depends on what is computed between them, so each such group is tried out (`trial`).
The token embedding is sharded by rows and the head by columns. Everything else is left alone, with a note that says
why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from dtensor.errors import expect
from dtensor.mesh import DeviceMesh
from dtensor.mesh.device_mesh import as_mesh
from dtensor.placement import Replicate

from ..styles.axis import Others, style_axis
from ..styles.linear import ColwiseParallel, RowwiseParallel
from ..styles.style import ParallelStyle
from .groups import alike, groups_of, names_of, pattern
from .plan import find
from .rehearsal import Example
from .trace import INPUT, Trace
from .trial import Trial

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
    expect("suggest_plan", "model", model, nn.Module, "a module", "suggest_plan(net, mesh, inputs)")
    trial = Trial(model, as_mesh(mesh), axis, others)
    trial.trace(_examples(model) if example is None else [example])
    entries: dict[str, ParallelStyle] = {}
    comments: dict[str, str] = {}
    notes: list[str] = []
    for groups in alike(groups_of(trial.plain)):
        styles, why = trial.choose(groups)
        if styles is None:
            notes.append(f"{', '.join(names_of(model, groups)[0])} left alone: {why}")
            continue
        entries.update(styles)
        comments[next(iter(styles))] = f"{why}; one all-reduce forward and one backward"
    entries = _with_ends(trial, entries, comments, notes)
    taken = {p for name in entries for p, _ in find(model, name.split("."), "")}
    notes += _left(model, trial.plain, taken, " ".join(notes))
    return SuggestedPlan(entries, comments, notes)


def _left(model: nn.Module, trace: Trace, taken: set[str], told: str) -> Iterator[str]:
    """A note for every layer with a matrix that is in no group and that nothing was said of."""
    seen: set[str] = set()
    for path, module in model.named_modules():
        name, layer = pattern(path), trace.layers.get(path)
        own = [n for n, p in module._parameters.items() if p is not None and p.ndim > 1]
        if not own or path in taken or isinstance(module, nn.Embedding) or name in told or path in told or name in seen:
            continue
        seen.add(name)
        into = [p for p, x in trace.layers.items() if path in x.origins and x.role != "linear"]
        if layer is None or layer.role != "linear":
            yield f"{name or 'the model'} left alone: nothing is known of how it uses {', '.join(own)}"
        elif into:
            yield f"{name} left alone: what it gives goes into {pattern(into[0])}"
        else:
            yield f"{name} left alone: nothing to pair it with"


def _examples(model: nn.Module) -> Iterator[Example]:
    yield torch.zeros(1, 16, dtype=torch.long)
    width = next((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), None)
    if width is not None:
        yield torch.zeros(1, 16, width)
        yield torch.zeros(16, width)


# ------------------------------------------------------------ both ends
def _with_ends(
    trial: Trial, entries: dict[str, ParallelStyle], comments: dict[str, str], notes: list[str]
) -> dict[str, ParallelStyle]:
    """`entries` with the token embedding before and the head behind, where they run and tied parameters agree."""
    ranks = style_axis(trial, trial.mesh, trial.axis, trial.others).size
    layers = trial.plain.layers
    taken = {p for name in entries for p, _ in find(trial.model, name.split("."), "")}
    feeding = {origin for x in layers.values() for origin in x.origins}
    first: dict[str, ParallelStyle] = {}
    last: dict[str, ParallelStyle] = {}
    for path, x in layers.items():
        is_end = path in trial.plain.outputs and path not in feeding | taken
        if x.role == "lookup" and x.origins == {INPUT} and x.ins >= 4 * ranks:
            first[path] = RowwiseParallel(input_layouts=Replicate())
            comments[path] = "rows over the ranks; one all-reduce forward"
        elif x.role == "linear" and is_end and x.outs > x.ins:
            last[path] = ColwiseParallel(output_layouts=Replicate(), weight_dims=x.weight_dims)
            comments[path] = "gathers its output; for loss_parallel: ColwiseParallel(use_local_output=False)"
    ends = {**first, **last}
    for path in [p for tie in _ties(trial.model) if not tie <= ends.keys() for p in tie & ends.keys()]:
        notes.append(f"{path} left alone: it shares its weight with a module that is not sharded")
        first.pop(path, None)
        last.pop(path, None)
    done = {**first, **entries, **last}
    why = trial.fails(done)
    if not why:
        return done
    notes.append(f"{', '.join(ends)} left alone: {why}")
    return entries


def _ties(model: nn.Module) -> Iterator[set[str]]:
    """Paths of modules that share a parameter."""
    owners: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), set()).add(path)
    yield from (paths for paths in owners.values() if len(paths) > 1)
