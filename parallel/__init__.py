"""Tensor-parallel plans for modules: styles say how one module is laid out, a plan says which module gets which.

    net = parallelize_module(net, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
"""

from __future__ import annotations

from loss import loss_parallel
from parallel.check import check_plan
from parallel.input_reshard import input_reshard
from parallel.linear import ColwiseParallel, RowwiseParallel
from parallel.packed import PackedColwiseParallel
from parallel.plan import parallelize_module
from parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from parallel.sequence import SequenceParallel
from parallel.style import ParallelStyle
from parallel.suggest import suggest_plan
from parallel.undo import unparallelize_module

__all__ = [
    "ColwiseParallel", "PackedColwiseParallel", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput",
    "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel", "check_plan", "input_reshard", "loss_parallel",
    "parallelize_module", "suggest_plan", "unparallelize_module",
]  # fmt: skip
