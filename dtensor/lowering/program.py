"""A traced program: what it computes, what it gives, and what it does to the tensors and containers it was given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dtensor.dispatch import hit as hot
from dtensor.dispatch.materialized import note_written
from dtensor.lowering.record import LowerError
from dtensor.spec import Spec

__all__ = ["Known", "Made", "Program", "Template", "Value"]


@dataclass(frozen=True, slots=True)
class Made:
    """A DTensor that the program makes: number `at` of `Program.wrapped`."""

    at: int


@dataclass(frozen=True, slots=True)
class Value:
    """A plain tensor: number `at` of the graph's outputs."""

    at: int


@dataclass(frozen=True, slots=True)
class Known:
    """A DTensor that is there already: number `at` of the program's objects."""

    at: int


@dataclass
class Template:
    """A value with `Made`, `Value` and `Known` in the tensors' places, flattened."""

    leaves: list[Any]
    spec: Any

    def fill(self, made: Sequence[Any], values: Sequence[Any], objects: Sequence[Any]) -> Any:
        """The value, with tensors."""
        out = []
        for leaf in self.leaves:
            kind = type(leaf)
            out.append(
                made[leaf.at] if kind is Made else values[leaf.at] if kind is Value
                else objects[leaf.at] if kind is Known else leaf
            )  # fmt: skip
        return out[0] if self.spec is None else pytree.tree_unflatten(out, self.spec)


_TAKE: dict[str, Callable[[Any], Any]] = {
    "local": operator.attrgetter("_local_tensor"),
    "own": lambda x: x,
    "grad": operator.attrgetter("grad._local_tensor"),
    "own grad": operator.attrgetter("grad"),
}
"""From an object to an input of the graph, by kind."""


class Program:
    """What one trace found. `run(objects, plain)` runs it: see `dtensor.lowering`.

    Attributes:
        graph: the fx graph, over local tensors.
        inputs: what its placeholders take: ("local" | "own" | "grad" | "own grad", object) or
            ("plain", argument or place).
    """

    def __init__(self) -> None:
        self.inputs: list[tuple[str, Any]] = []
        self.used: list[tuple[str, Any]] = []
        self.layouts: dict[str, str] = {}
        self.wrapped: list[tuple[int, Spec]] = []
        self.result: Template = Template([], None)
        self.boxes: list[tuple[Any, Any, Template | None]] = []
        self.grads: list[tuple[int, Template | None]] = []
        self.locals: list[tuple[int, int]] = []
        self.written: list[int] = []
        self.plain_written: list[int] = []
        self.function: Callable[..., tuple[Any, ...]]
        self.graph: torch.fx.Graph
        self.constants: dict[str, torch.Tensor] = {}
        self.checked = False

    def _check(self, values: Sequence[torch.Tensor]) -> None:
        """At the first run: the results are what the trace said. The error says that a kernel does otherwise."""
        nodes = next(n for n in self.graph.nodes if n.op == "output").args[0]
        for value, node in zip(values, nodes, strict=True):
            told = node.meta["val"]
            if value.shape != told.shape or value.dtype != told.dtype:
                raise LowerError(
                    f"dtensor.lower: {node.name} is a {value.dtype} of {list(value.shape)}, the trace said "
                    f"{told.dtype} of {list(told.shape)}: torch's shape function and its kernel disagree"
                )
        self.checked = True

    def run(self, objects: Sequence[Any], plain: Sequence[torch.Tensor]) -> Any:
        """Run on these DTensors and plain tensors, and do to them what the program does."""
        return self.settle(objects, plain, self.compute(self.given(objects, plain)))

    def given(self, objects: Sequence[Any], plain: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the graph takes, of these DTensors and plain tensors: one for each of `used`."""
        return [_TAKE[kind](objects[at]) if kind != "plain" else plain[at] for kind, at in self.used]

    def compute(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What the graph computes, and what it writes in place; nothing of what the program does besides."""
        with torch._C._AutoDispatchBelowAutograd():
            values = self.function(*given)
        if not self.checked:
            self._check(values)
        return values

    def settle(self, objects: Sequence[Any], plain: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Any:
        """Do to these DTensors and plain tensors what the program does, with what it computed; its result."""
        new, D = hot._new, hot._DTensor
        made = [new(D, values[at], spec, requires_grad=False) for at, spec in self.wrapped]
        if self.written or self.plain_written:  # autograd must know, and views that had to move data
            written = [objects[at] for at in self.written]
            note_written(objects, self.written)
            torch.autograd.graph.increment_version(
                [
                    *written,
                    *[x._local_tensor for x in written if isinstance(x, D)],
                    *[plain[at] for at in self.plain_written],
                ]
            )
        for at, value in self.locals:
            objects[at]._local_tensor = values[value]
        for at, grad in self.grads:
            objects[at].grad = None if grad is None else grad.fill(made, values, objects)
        for box, key, template in self.boxes:
            if template is None:
                del box[key]
            else:
                box[key] = template.fill(made, values, objects)
        return self.result.fill(made, values, objects)
