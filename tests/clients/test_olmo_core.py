"""OLMo-core's train module: tensor parallelism, FSDP2, replicas and both, accumulation, checkpointing."""

from __future__ import annotations

import pytest
from harness import Client

client = Client(
    "olmo_core_train",
    needs=("ai2-olmo-core", "cached-path"),
    apart="olmo_core",
    cases=("tp", "fsdp", "hsdp", "fsdp_tp", "accumulated", "checkpointed", "skip_step"),
    ranks=(2, 4),
    timeout=900,
)
pytestmark = client.mark()


@pytest.mark.parametrize("ranks, case", client.pairs())
def test_trained_alike(ranks: int, case: str) -> None:
    client.check(ranks, case)
