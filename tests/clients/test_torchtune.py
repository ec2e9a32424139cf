"""torchtune's recipe for full fine-tuning: its plan for Llama 3 over tensor parallelism, FSDP2, both."""

from __future__ import annotations

import pytest
from harness import Client

client = Client(
    "torchtune_train",
    needs=("torchtune", "torchao", "omegaconf"),
    apart="torchtune",
    cases=("tp", "fsdp", "fsdp_tp", "clipped", "accumulated", "checkpointed", "in_backward"),
    ranks=(2, 4),
    timeout=900,
)
pytestmark = client.mark()


@pytest.mark.parametrize("ranks, case", client.pairs())
def test_trained_alike(ranks: int, case: str) -> None:
    client.check(ranks, case)
