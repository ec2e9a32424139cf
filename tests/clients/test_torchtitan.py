"""torchtitan's trainer: llama3 with all its parallelisms but context parallelism, qwen3, llama4, deepseek_v3."""

from __future__ import annotations

import pytest
from harness import Client

NO_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy"
OF_SUMS = "a pipeline's losses are not divided by the number of tokens before they are clipped"
ROUNDED = "parameters and activations are rounded to bfloat16"
client = Client(
    "torchtitan_train",
    needs=("torchtitan", "datasets", "triton"),
    cases=(
        "tp", "fsdp", "fsdp_tp", "uneven", "hsdp", "whole_logits", "checkpointed", "checkpointed_ops", "foreach",
        "for_loop", "pipeline", "pipeline_fsdp", "qwen3", "qwen3_experts", "llama4", "llama4_ep", "deepseek_v3",
        "deepseek_v3_ep", "bfloat16", "compiled", "simple_fsdp", "simple_fsdp_hybrid", "in_backward", "validated",
        "resumed",
    ),
    ranks=(2, 4),
    deviates={
        "hsdp@2": "DDP averages gradients that are divided by the number of tokens already",
        "pipeline": OF_SUMS,
        "pipeline_fsdp": OF_SUMS,
        "bfloat16": ROUNDED,
        "deepseek_v3_ep@4": "the plan takes the router's output for whole, where each rank has tokens of its own",
    },
    torch_fails={
        "qwen3": NO_ATTENTION,
        "qwen3_experts": NO_ATTENTION,
        "compiled": "expected all tensors_saved_with_vc_check to be Tensors",
    },
    timeout=1200,
)  # fmt: skip
pytestmark = client.mark()


@pytest.mark.parametrize("ranks, case", client.pairs())
def test_trained_alike(ranks: int, case: str) -> None:
    client.check(ranks, case)
