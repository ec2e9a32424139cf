"""Tensor-parallel plans for modules: the folder `parallel` beside this package, under a name that is always ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel import ColwiseParallel as ColwiseParallel
    from parallel import PackedColwiseParallel as PackedColwiseParallel
    from parallel import ParallelStyle as ParallelStyle
    from parallel import PrepareModuleInput as PrepareModuleInput
    from parallel import PrepareModuleInputOutput as PrepareModuleInputOutput
    from parallel import PrepareModuleOutput as PrepareModuleOutput
    from parallel import RowwiseParallel as RowwiseParallel
    from parallel import SequenceParallel as SequenceParallel
    from parallel import check_plan as check_plan
    from parallel import loss_parallel as loss_parallel
    from parallel import parallelize_module as parallelize_module
    from parallel import set_check_inputs as set_check_inputs
    from parallel import suggest_plan as suggest_plan
    from parallel import unparallelize_module as unparallelize_module
    from parallel.input_reshard import input_reshard as input_reshard
    from parallel.planning import plan as plan
else:
    from dtensor.folders import load_beside

    load_beside(__name__)
