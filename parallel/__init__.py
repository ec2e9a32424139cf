"""Tensor-parallel plans for modules: styles say how one module is laid out, a plan says which module gets which.

    net = parallelize_module(net, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtensor.folders import also_called

also_called(__name__)

from dtensor.loss import loss_parallel

from .input_reshard import input_reshard
from .planning import parallelize_module, unparallelize_module
from .planning import plan as plan
from .styles import (
    ColwiseParallel,
    PackedColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from .styles.compare import set_check_inputs

if TYPE_CHECKING:
    from .planning.check import check_plan
    from .planning.suggest import suggest_plan

__all__ = [
    "ColwiseParallel", "PackedColwiseParallel", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput",
    "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel", "check_plan", "input_reshard", "loss_parallel",
    "parallelize_module", "set_check_inputs", "suggest_plan", "unparallelize_module",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """`check_plan` and `suggest_plan` load when first asked for."""
    if name == "check_plan":
        from .planning.check import check_plan

        return check_plan
    if name == "suggest_plan":
        from .planning.suggest import suggest_plan

        return suggest_plan
    raise AttributeError(f"module 'dtensor.parallel' has no attribute {name!r}")
