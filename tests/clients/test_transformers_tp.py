"""transformers' `tp_plan="auto"` on this engine."""

from __future__ import annotations

import pytest
from harness import Client

client = Client(
    "transformers_tp",
    needs=("transformers",),
    ranks=(2, 4),
    cases=(
        "llama", "llama_uneven_mlp", "llama_biases_tied", "qwen3", "mixtral", "gpt_oss", "gemma3", "deepseek_v3",
    ),
    tolerance=2e-5,
)  # fmt: skip
pytestmark = client.mark()


@pytest.mark.parametrize("ranks, case", client.pairs())
def test_as_torch_and_as_one_process(ranks: int, case: str) -> None:
    client.check(ranks, case)
