"""Lightning Fabric's model-parallel strategy, as its tensor-parallel example uses it."""

from __future__ import annotations

import pytest
from harness import Client

client = Client(
    "fabric",
    needs=("lightning-fabric",),
    cases=("tp", "fsdp", "fsdp_tp", "fsdp_tp_bfloat16", "accumulated", "saved_in_shards", "saved_whole"),
    ranks=(2, 4),
    deviates={"fsdp_tp_bfloat16": "parameters and activations are rounded to bfloat16"},
)
pytestmark = client.mark()


@pytest.mark.parametrize("ranks, case", client.pairs())
def test_trained_alike(ranks: int, case: str) -> None:
    client.check(ranks, case)
