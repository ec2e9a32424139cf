"""transformers' `tp_plan="auto"` for many more kinds of models."""

from __future__ import annotations

import pytest
from harness import Client

client = Client(
    "transformers_more",
    needs=("transformers",),
    ranks=(2,),
    cases=(
        "aria_text", "cohere2", "deepseek_v2", "diffllama", "dots1", "ernie4_5_moe", "exaone4", "falcon_h1",
        "flex_olmo", "gemma2", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_neox", "granitemoe", "hunyuan_v1_moe",
        "lfm2", "mimo_v2_flash", "minimax", "minimax_m2", "mistral", "nemotron", "olmo3", "olmoe", "phi", "phi3",
        "phimoe", "qwen2_moe", "qwen3_moe", "smollm3", "solar_open", "starcoder2", "youtu",
    ),
    tolerance=2e-5,
)  # fmt: skip
pytestmark = client.mark()


@pytest.mark.parametrize("ranks, case", client.pairs())
def test_as_torch_and_as_one_process(ranks: int, case: str) -> None:
    client.check(ranks, case)
