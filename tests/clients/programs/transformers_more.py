"""transformers: `tp_plan="auto"` of many more kinds of models, each made tiny by the same table of sizes.

Logits, greedy generation, every gradient and two steps of AdamW. Left out are models whose plan does not run on
torch's engine either.
"""

import torch
from record import Program
from tiny_models import CONFIGS, SIZES, checkpoint, loaded, tokens_of, trained
from transformers import CONFIG_MAPPING

program = Program()
ALSO = {
    "head_dim": 8, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 16, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_layer_start_index": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "hidden_dropout": 0.0, "dropout": 0.0, "original_max_position_embeddings": 64,
}  # fmt: skip
NAMES = (
    "aria_text", "cohere2", "deepseek_v2", "diffllama", "dots1", "ernie4_5_moe", "exaone4", "falcon_h1", "flex_olmo",
    "gemma2", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_neox", "granitemoe", "hunyuan_v1_moe", "lfm2", "mimo_v2_flash",
    "minimax", "minimax_m2", "mistral", "nemotron", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2_moe",
    "qwen3_moe", "smollm3", "solar_open", "starcoder2", "youtu",
)  # fmt: skip


def config(name):
    kind = CONFIG_MAPPING[name]
    known = kind.__dataclass_fields__
    sizes = {key: value for key, value in {**SIZES, **ALSO}.items() if key in known}
    return kind(**sizes | ({"num_key_value_heads": 8} if "kv_lora_rank" in known else {}))


def everything(name):
    CONFIGS[name] = lambda: config(name)
    model = loaded(checkpoint(name), tp_plan="auto").eval()
    tokens = tokens_of(model.config)
    with torch.no_grad():
        values = {
            "logits": model(input_ids=tokens).logits,
            "generated": model.generate(tokens[:, :4], max_new_tokens=4, do_sample=False),
        }
    model.train()
    return values | trained(model, tokens, steps=2)


for name in NAMES:
    program.add(name, lambda name=name: everything(name))

if __name__ == "__main__":
    program.main()
