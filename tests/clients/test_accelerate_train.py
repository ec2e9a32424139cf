"""accelerate's FSDP2 plugin, and transformers' `Trainer`, on this engine.

Not here, as it fails before any tensor is touched, whatever the engine: FSDP2 over tensor parallelism by accelerate's
`ParallelismConfig` (accelerate 1.15 imports `ReplicateParallel`, which transformers 5.24 has not), and transformers'
own `Adafactor` on DTensors (its states are plain tensors). transformers' own FSDP2 over tensor parallelism is here.
"""

from __future__ import annotations

import pytest
from harness import Client

client = Client(
    "accelerate_train",
    needs=("accelerate", "transformers"),
    ranks=(4,),
    cases=(
        "llama_fsdp2", "llama_fsdp2_loaded_on_rank_0", "llama_fsdp2_full_state", "llama_fsdp2_checkpointing",
        "qwen3_hsdp", "llama_fsdp2_accumulation", "trainer_llama_tp", "trainer_llama_fsdp", "trainer_llama_fsdp_tp",
        "trainer_mixtral_fsdp_tp", "trainer_qwen3_fsdp_tp_fused", "trainer_llama_fsdp2_resumed",
    ),
    tolerance=2e-5,
)  # fmt: skip
pytestmark = client.mark()


@pytest.mark.parametrize("ranks, case", client.pairs())
def test_as_torch_and_as_one_process(ranks: int, case: str) -> None:
    client.check(ranks, case)
