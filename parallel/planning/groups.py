"""Groups of layers that may be sharded together: columns whose outputs meet in one row layer and go nowhere else.

    q, k, v -> o        q -> q_norm, k -> k_norm, v -> o        gate, up -> down

Layers with parameters of their own may stand between (a norm of each head). Groups that differ only in the numbers in
their paths are alike: they get one style a layer, under one pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .plan import find
from .trace import INPUT, Layer, Trace

__all__ = ["Group", "alike", "groups_of", "names_of", "pattern"]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers `columns` that feed the layer `row` and nothing else, perhaps by way of the layers `between`."""

    columns: tuple[Layer, ...]
    between: tuple[Layer, ...]
    row: Layer

    def layers(self) -> tuple[Layer, ...]:
        """Columns, what is between, and the row, in this order."""
        return (*self.columns, *self.between, self.row)


def groups_of(trace: Trace) -> Iterator[Group]:
    """The groups in a trace, in the order of their rows. No layer is in two."""
    feeds: dict[str, set[str]] = {path: set() for path in trace.layers}
    for layer in trace.layers.values():
        for origin in layer.origins & feeds.keys():
            feeds[origin].add(layer.path)
    used: set[str] = set()
    for row in trace.layers.values():
        group = _behind(trace, row) if row.role == "linear" and row.path not in used else None
        if group is None:
            continue
        mine = {layer.path for layer in group.layers()}
        inner = mine - {row.path}
        if all(feeds[p] <= mine for p in inner) and not inner & trace.outputs and not used & mine:
            used |= mine
            yield group


def _behind(trace: Trace, row: Layer) -> Group | None:
    """What feeds `row`: linear layers, directly or through others. None where it is anything else."""
    columns: dict[str, Layer] = {}
    between: dict[str, Layer] = {}
    queue = sorted(row.origins - {INPUT})
    while queue:
        path = queue.pop()
        layer = trace.layers.get(path)
        if layer is None or layer.role == "lookup" or path == row.path:
            return None
        if layer.role == "linear":
            columns[path] = layer
        elif path not in between:
            between[path] = layer
            queue += sorted(layer.origins)
    if not columns or any(INPUT in x.origins for x in between.values()):
        return None
    order = list(trace.layers)
    first, second = (sorted(found.values(), key=lambda x: order.index(x.path)) for found in (columns, between))
    return Group(tuple(first), tuple(second), row)


def pattern(path: str) -> str:
    """`path` with every number in it as `*`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def alike(groups: Iterator[Group]) -> Iterator[list[Group]]:
    """Lists of groups that differ in the numbers in their paths only."""
    found: dict[object, list[Group]] = {}
    for g in groups:
        key = tuple((pattern(x.path), x.ins, x.outs, x.sizes, x.unit, x.weight_dims) for x in g.layers())
        found.setdefault(key, []).append(g)
    yield from found.values()


def names_of(model: nn.Module, groups: list[Group]) -> list[list[str]]:
    """For groups alike, what to name in a plan, in the order of `Group.layers`: patterns, or each group's own paths.

    Patterns do where each names modules of one kind and size only; some of them may not have run.
    """
    ran = {x.path for g in groups for x in g.layers()}
    names = []
    for i, layer in enumerate(groups[0].layers()):
        mine, name = {g.layers()[i].path for g in groups}, pattern(layer.path)
        matched = list(find(model, name.split("."), ""))
        first = model.get_submodule(layer.path)
        same = all(_size(m) == _size(first) for _, m in matched)
        if not same or ({p for p, _ in matched} - mine) & ran:
            return [[x.path for x in g.layers()] for g in groups]
        names.append(name if len(matched) > 1 else layer.path)
    return [names]


def _size(module: nn.Module) -> object:
    return type(module), [p.shape for p in module.parameters()]
