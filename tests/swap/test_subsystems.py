"""Subsystems of torch on DTensors: FSDP2, checkpoints, clipping, optimizers, DDP, recomputation, compiling, pipelines.

Programs on torch's names alone (`tests/programs`), each run in the same gloo processes under torch's engine and under
`dtensor.swap`. Every case holds its numbers to one process; the two engines' are compared bit for bit, or within what
another order of summation makes. Where torch's engine cannot run a case, this says why, and one process is the measure.
"""

from __future__ import annotations

import pytest
import torch
from helpers.both_engines import OURS, TO_OURS, TO_TORCHS, BothEngines, Exchange, names
from helpers.gloo_ranks import run_ranks

UNEVEN = "uneven parts over tensor parallelism: a and b must have same reduction dim"
ALONE = {
    "case_over_tp_uneven_and_clipped": UNEVEN,
    "case_full_state_of_uneven_parts": UNEVEN,
    "case_the_older_fsdp_over_tp_goes_on": "frozen parameters are trained, optimizers are given wrong pieces",
    "case_clipping_over_meshes": "all operands must have the same mesh",
    "case_rprop": "index_put_ in place, and no strategy for _foreach_copy_",
    "case_adafactor": "pow_ in place on a pending norm",
    "case_optimizers_fused_more": "no strategy for _fused_sgd_",
    "case_ddp_over_tp_with_a_group_alone": "mixed torch.Tensor and DTensor in the constructor of DDP",
    "case_ddp_over_tp_with_buffers": "mixed torch.Tensor and DTensor in the constructor of DDP",
    "case_ddp_over_tp_with_state_dicts": "uneven parts; a state dict holds parts as if they were whole",
    "case_ddp_over_all_processes_is_refused": "another error: mixed torch.Tensor and DTensor",
    "case_compile_inductor": "it runs; it is left out for its time",
    "case_compile_ddp_over_tp": "unhashable type: non-nested SymInt",
    "case_averaged_model": "_foreach_lerp_ got mixed torch.Tensor and DTensor",
    "case_autocast_and_loss_scaling": "_amp_foreach_non_finite_check_and_unscale_ got mixed torch.Tensor and DTensor",
}
"""Cases that torch's engine cannot run, and its error."""

ROUNDING = 1e-9
TOLERANCE = {
    "case_mixed_precision_over_tp": 5e-3,  # bfloat16, whose sums of two parts round otherwise
    "case_autocast": 2e-2,
    "case_muon": 3e-3,
    **dict.fromkeys(
        (
            "case_parameters_on_the_whole_mesh", "case_pipeline_of_dtensors", "case_pipeline_of_four_stages",
            "case_over_tp", "case_from_meta_over_tp",
            "case_tied_over_tp", "case_replicate_shard_and_tp", "case_clipping", "case_ddp_over_tp_with_a_mesh",
            "case_ddp_over_tp_with_a_group", "case_ddp_over_tp_with_checkpointing", "case_activation_checkpointing",
            "case_activation_checkpointing_and_fsdp", "case_compile_aot_eager", "case_pipeline_gpipe",
            "case_pipeline_1f1b", "case_full_state", "case_optimizer_in_backward", "case_parts_of_the_state",
            "case_plain_state_dicts", "case_the_older_fsdp_over_tp",
            "case_saving_in_the_background", "case_to_one_file_and_back",
        ),
        ROUNDING,
    ),
}  # fmt: skip
"""How far the engines may differ; nothing where a case is not named."""

EXCHANGES = [
    Exchange("checkpoints", "app", (TO_OURS, TO_TORCHS, OURS)),
    Exchange("checkpoints", "uneven_app", (OURS,)),
    Exchange("checkpoints", "tensors", (TO_OURS, TO_TORCHS)),
    Exchange("checkpoints", "file", (TO_OURS, OURS)),
]
LATER = ("case_parameters_on_the_whole_mesh", "case_pipeline_of_dtensors") if torch.__version__ < "2.13" else ()
"""Cases that this version of torch does not know yet."""

PROGRAMS = ("training", "fsdp", "checkpoints")
CASES = [
    BothEngines(program, name, ALONE.get(name, ""), TOLERANCE.get(name, 0.0))
    for program in PROGRAMS
    for name in names(program)
    if name not in LATER
]


ON_TWO = {
    "fsdp": "prefetch reshard_after_forward offload shard_along_another_dim tied_ignored_and_frozen from_meta "
    "gradient_division mixed_precision_all_low replicate the_older_fsdp",
    "checkpoints": "parts_of_the_state plain_state_dicts saving_in_the_background to_one_file_and_back full_state",
    "training": "optimizers_in_a_loop optimizers_foreach muon autocast optimizer_in_backward compile_aot_eager "
    "clipping_that_is_not_finite a_module_distributed_whole pipeline_1f1b",
}
"""Cases that both engines run on two processes; on four, for the time of torch's, one process is the measure."""
FOUR = ("case_the_older_fsdp_over_tp", "case_the_older_fsdp_over_tp_goes_on")
"""Cases of more than one process on each axis of two."""


def on_two(case: BothEngines) -> bool:
    return case.__name__.removeprefix("case_") in ON_TWO[case.program].split()


@pytest.mark.processes
@pytest.mark.parametrize("program", PROGRAMS)
def test_on_two_processes(program: str) -> None:
    cases = [c for c in CASES if c.program == program and c.__name__ not in FOUR]
    run_ranks(2, [c for c in cases if on_two(c)], timeout=120).check()


@pytest.mark.processes
@pytest.mark.parametrize("program", PROGRAMS)
def test_on_four_processes(program: str) -> None:
    cases = [
        BothEngines(c.program, c.__name__, c.alone or "it did on two processes", c.tolerance) if on_two(c) else c
        for c in CASES
        if c.program == program
    ]
    run_ranks(4, [*cases, *(e for e in EXCHANGES if e.program == program)], timeout=120).check()
