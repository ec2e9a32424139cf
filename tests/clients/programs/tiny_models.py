"""Tiny checkpoints of transformers' models, and the parts of a training step that the programs share."""

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from record import whole
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)
from transformers.utils import logging

warnings.simplefilter("ignore")
logging.set_verbosity_error()
logging.disable_progress_bar()
SCRATCH = Path(os.environ.get("CLIENT_SCRATCH", "/tmp"))
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama_uneven_mlp": lambda: LlamaConfig(**{**SIZES, "intermediate_size": 21}),
    "llama_biases_tied": lambda: LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=6),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 8}, moe_intermediate_size=16, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    ),
}  # fmt: skip


def checkpoint(name):
    """The folder of a model's weights: rank 0 makes it, all wait for it."""
    folder = SCRATCH / name
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        for module in model.modules():
            for x in module.parameters(recurse=False):
                torch.nn.init.normal_(x, 1.0 if x.dim() == 1 and "Norm" in type(module).__name__ else 0.0, 0.1)
        model.save_pretrained(folder)
    barrier()
    return folder


def barrier():
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def loaded(folder, **arguments):
    """The model, in one piece on one process; `arguments` say how it is cut on several."""
    cut = arguments if dist.is_initialized() else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **cut)


def tokens_of(config, rows=2, columns=10, seed=3):
    """Token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (rows, columns), generator=generator)


def by_mesh(model):
    """Parameters of a kind together, as transformers' own trainer does: DTensors of each mesh, and plain ones."""
    groups = {}
    for p in model.parameters():
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return list(groups.values())


def optimizer_of(model):
    """AdamW, those groups as its parameter groups."""
    return torch.optim.AdamW([{"params": group} for group in by_mesh(model)], lr=1e-2, eps=1e-3, weight_decay=0.1)


def clip(model):
    """Scale the gradients so that all of them together have norm 1 at most; their norm before."""
    groups = by_mesh(model)
    norm = torch.stack(
        [whole(get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups]
    ).norm()
    for group in groups:
        clip_grads_with_norm_(group, 1.0, norm)
    return norm


def trained(model, batch, steps=3, mean=lambda loss: loss):
    """The loss and all gradients, then the loss and the norm of each step, and the parameters after the last.

    `mean` makes the loss of all rows out of that of this rank's.
    """
    values = {}
    optimizer = optimizer_of(model)
    for step in range(steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        if step == 0:
            values |= {f"grad {name}": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        values |= {f"loss {step}": mean(loss.detach()), f"norm {step}": clip(model)}
        optimizer.step()
        optimizer.zero_grad()
    return values | {f"trained {name}": whole(p) for name, p in model.named_parameters()}
