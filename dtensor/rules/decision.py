"""What was decided of one call: the strategy of every mesh axis and the layouts that follow. A pure value."""

from __future__ import annotations

from dataclasses import dataclass

from dtensor.rules.rule import Kernel, Rule
from dtensor.spec import Spec

__all__ = ["Decision"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The strategy of every axis and what it means: pure and printable.

    Attributes:
        op: name of the op.
        choices: per axis the label of the strategy.
        inputs: layouts the inputs are brought into.
        outputs: layouts of the outputs, None for an output that is None.
        kernel: the kernel that runs the local part, if any; `kernel_axes` and `kernel_factors` say where.
        cost: seconds by the cost model.
    """

    op: str
    choices: tuple[str, ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec | None, ...]
    rule: Rule
    kernel: Kernel | None
    kernel_axes: tuple[int, ...]
    kernel_factors: tuple[int, ...]
    cost: float

    def __str__(self) -> str:
        ins, outs = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return f"{self.op}: {ins} -> {outs}   by {' / '.join(self.choices)}, {self.cost * 1e6:.1f} us to move"
