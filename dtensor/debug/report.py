"""What CommDebugMode saw, as a text table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dtensor.debug.collectives import Collective
from dtensor.debug.module_tree import OUTSIDE, ModuleTree
from dtensor.tensor import DTensor

__all__ = ["Event", "as_json", "table"]

Parameters = Mapping[str, Mapping[str, nn.Parameter]]

TRIVIAL = frozenset({
    "aten.view.default", "aten._unsafe_view.default", "aten.detach.default", "aten.t.default", "aten.alias.default",
    "aten.transpose.int", "aten.expand.default", "aten.slice.Tensor", "aten.select.int", "aten.unsqueeze.default",
    "aten.squeeze.dim", "aten.permute.default", "aten.split.Tensor", "aten.view_as.default", "aten.reshape.default",
    "_c10d_functional.wait_tensor.default", "aten.empty.memory_format", "aten.new_empty.default",
    "aten.narrow.default", "aten.zeros_like.default", "aten.ones_like.default",
})  # fmt: skip
"""Operators that compute nothing: left out below noise level 3."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: an operator, and the collective that it was, if any.

    `layouts` holds the layouts of DTensor arguments, () for an operator on plain tensors.
    """

    name: str
    module: str
    backward: bool
    collective: Collective | None
    layouts: tuple[str, ...]


def _shown(event: Event, noise_level: int) -> bool:
    """Whether an event that is no collective is shown."""
    if event.layouts:
        return noise_level >= 1 and (noise_level >= 3 or event.name not in TRIVIAL)
    return noise_level >= 3 or (noise_level == 2 and event.name not in TRIVIAL)


def _check(noise_level: int) -> None:
    if noise_level not in (0, 1, 2, 3):
        raise ValueError(
            f"noise_level must be 0 (collectives), 1 (and DTensor operations), 2 (and local ones that compute) "
            f"or 3 (everything), got {noise_level!r}"
        )


def _order(tree: ModuleTree, events: Sequence[Event]) -> list[tuple[str, str, int]]:
    """(path, class, depth) of every module, as they first ran, and what ran outside of all."""
    rows = [(name, kind, depth) for name, (kind, depth) in tree.names.items()]
    return [(OUTSIDE, "", 0), *rows] if any(e.module == OUTSIDE for e in events) else rows


def table(tree: ModuleTree, events: Sequence[Event], parameters: Parameters, noise_level: int) -> str:
    """The tracing table. See `CommDebugMode.generate_comm_debug_tracing_table`."""
    _check(noise_level)
    total = Counter(e.collective.kind for e in events if e.collective)
    lines = [f"Collectives in all: {_counts(total)}"]
    for name, kind, depth in _order(tree, events):
        pad = "  " * depth
        block = []
        for p, value in parameters.get(name, {}).items():
            layout = str(value._spec) if isinstance(value, DTensor) else "plain"
            block.append(f"{pad}  parameter {p}: {layout}")
        for backward in (False, True):
            block += _phase(name, backward, events, noise_level, pad + "  ")
        if block or kind:
            lines += [f"{pad}{name}" + (f"  ({kind})" if kind else ""), *block]
    return "\n".join(lines)


def _phase(name: str, backward: bool, events: Sequence[Event], noise_level: int, pad: str) -> list[str]:
    own = [e for e in events if e.module == name and e.backward == backward]
    below = [
        e for e in events if e.backward == backward and (e.module == name or e.module.startswith(name + "."))
    ]
    counts = Counter(e.collective.kind for e in below if e.collective)
    shown = [e for e in own if e.collective or _shown(e, noise_level)]
    if not counts and not shown:
        return []
    lines = [f"{pad}{'BACKWARD' if backward else 'FORWARD'} PASS  {_counts(counts)}"]
    for e in shown:
        if e.collective is not None:
            c = e.collective
            lines.append(f"{pad}  {c.kind} over {c.size} ranks, {c.nbytes} bytes received  [{e.name}]")
        else:
            lines.append(f"{pad}  {e.name}" + (f"  {', '.join(e.layouts)}" if e.layouts else ""))
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"


def as_json(tree: ModuleTree, events: Sequence[Event], parameters: Parameters, noise_level: int) -> str:
    """The same as JSON: modules with their parameters, collectives and operations, nested."""
    _check(noise_level)
    roots: list[dict[str, object]] = []
    path: list[tuple[int, dict[str, object]]] = []
    for name, kind, depth in _order(tree, events):
        node = _node(name, kind, events, parameters, noise_level)
        while path and path[-1][0] >= depth:
            path.pop()
        if path:
            children = path[-1][1]["children"]
            assert isinstance(children, list)
            children.append(node)
        else:
            roots.append(node)
        path.append((depth, node))
    return json.dumps(roots, indent=2)


def _node(
    name: str, kind: str, events: Sequence[Event], parameters: Parameters, noise_level: int
) -> dict[str, object]:
    node: dict[str, object] = {"fqn": name, "module_type": kind}
    node["parameters"] = {
        p: {"shape": list(v.shape), "placements": [repr(q) for q in v.placements] if isinstance(v, DTensor) else None}
        for p, v in parameters.get(name, {}).items()
    }
    for phase, backward in (("forward", False), ("backward", True)):
        own = [e for e in events if e.module == name and e.backward == backward]
        node[phase] = {
            "collectives": dict(Counter(e.collective.kind for e in own if e.collective)),
            "bytes_received": sum(e.collective.nbytes for e in own if e.collective),
            "operations": [
                {"name": e.name, "layouts": list(e.layouts)}
                for e in own
                if e.collective is None and _shown(e, noise_level)
            ],
        }
    node["children"] = []
    return node
