"""torchtitan's own trainer on CPU: its configuration, model, plans, FSDP, pipeline, optimizers, clipping, checkpoints.

What runs is `torchtitan.train.Trainer`, built from command-line options as `torchtitan.train.main` does, and its
`train()`. It looks for an accelerator and is told that there is a CPU; what it asks of a device module and `torch.cpu`
lacks is added there. Whole numbers, which `torch.histc` counts on an accelerator only, are counted as floats, and
`generate_permute_indices` is called with its own `use_cpu=True`. Gloo cannot scale while it reduces, so FSDP is told
to sum, by its own `set_force_sum_reduction_for_comms`. Nothing else is replaced. A tiny model, a tokenizer and texts
are written by rank 0, so that all numbers of ranks train on the same batches; each starts from the same checkpoint of
a plain model.
"""

import copy
import functools
import json
import os
import random
import shutil
from pathlib import Path

import torch
import torch._utils
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from record import Program
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
for name, stand_in in {
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: type("Properties", (), {"total_memory": 1 << 30}),
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
}.items():
    setattr(torch.cpu, name, stand_in)

count = torch.histc
torch.histc = lambda x, *sizes, **more: count(x.float(), *sizes, **more).to(x.dtype)

from torchtitan.components.metrics import BaseLogger  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models import deepseek_v3, llama3, llama4, qwen3  # noqa: E402
from torchtitan.models.moe import MoEArgs  # noqa: E402
from torchtitan.models.moe import utils as moe_utils  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

moe_utils.generate_permute_indices = functools.partial(moe_utils.generate_permute_indices, use_cpu=True)
SCRATCH = Path(os.environ.get("CLIENT_SCRATCH", "/tmp"))
SEQUENCE, BATCH, STEPS, VOCAB = 32, 8, 3, 250
program = Program()

llama = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "rope_theta": 10000}
experts = {"num_experts": 4, "top_k": 2, "use_grouped_mm": False, "load_balance_coeff": 1e-3}
llama3.llama3_args["tiny"] = llama3.TransformerModelArgs(vocab_size=VOCAB + 6, multiple_of=32, **llama)
llama3.llama3_args["uneven"] = llama3.TransformerModelArgs(vocab_size=VOCAB + 1, multiple_of=1, **llama)
llama4.llama4_args["tiny"] = llama4.TransformerModelArgs(
    vocab_size=VOCAB + 6, multiple_of=32, moe_args=MoEArgs(**experts), interleave_moe_layer_step=2, **llama
)
qwen3.qwen3_args["tiny"] = qwen3.Qwen3ModelArgs(
    vocab_size=VOCAB + 6, dim=64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=16, hidden_dim=96, qk_norm=True,
    max_seq_len=64, enable_weight_tying=True,
)  # fmt: skip
# Scores after the experts would make the router's gradient differ between ranks: its plan takes it for whole, and the
# experts' outputs are pending there. On torch's engine as on any other.
qwen3.qwen3_args["experts"] = qwen3.Qwen3ModelArgs(
    vocab_size=VOCAB + 6, dim=64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=16, hidden_dim=96, qk_norm=True,
    max_seq_len=64, moe_enabled=True, moe_inter_dim=48,
    moe_args=MoEArgs(num_shared_experts=0, score_func="softmax", route_norm=True, **experts),
)  # fmt: skip
deepseek_v3.deepseekv3_args["tiny"] = deepseek_v3.DeepSeekV3ModelArgs(
    vocab_size=VOCAB + 6, dim=64, inter_dim=96, moe_inter_dim=48, n_layers=3, n_dense_layers=1, n_heads=8,
    moe_args=MoEArgs(num_shared_experts=2, score_func="softmax", **experts),
    q_lora_rank=0, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, mscale=0.70,
)  # fmt: skip


class Kept(BaseLogger):
    """A logger of torchtitan's that keeps what is logged."""

    def __init__(self):
        self.values = {}

    def log(self, metrics, step):
        names = {"loss_metrics/global_avg_loss": "loss", "grad_norm": "norm", "validation_metrics/loss": "validation"}
        self.values |= {f"{what} {step}": metrics[key] for key, what in names.items() if key in metrics}


def texts(folder, copies):
    """Texts of one row of tokens each, in the order in which `copies` data-parallel ranks, each taking an equal run of
    them, read the same batches as one; and a tokenizer of whole words."""
    (folder / "data").mkdir(parents=True)
    words = ["[UNK]", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCAB))]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    special = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    draw = random.Random(0)
    rows = [" ".join(draw.choice(words[3:]) for _ in range(SEQUENCE - 1)) for _ in range(STEPS * BATCH)]
    each = BATCH // copies
    order = [s * BATCH + r * each + i for r in range(copies) for s in range(STEPS) for i in range(each)]
    (folder / "data" / "data.json").write_text("\n".join(json.dumps({"text": rows[i]}) for i in order))


def start(folder, config):
    """The checkpoint of a plain model that every run starts from."""
    spec = get_train_spec(config.model.name)
    sizes = copy.copy(spec.model_args[config.model.flavor])
    sizes.update_from_config(config)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = spec.model_cls(sizes)
        with torch.no_grad():
            made.init_weights(buffer_device=torch.device("cpu"))
    dcp.save(get_model_state_dict(made), checkpoint_id=folder, no_dist=True)


def train(case, model="llama3", flavor="tiny", options=(), steps=STEPS, again=False, **degrees):
    """Train and give back losses, gradient norms and weights.

    degrees: of tp, dp (sharded), rep (replicated), pp, ep, etp.
    again: go on from the checkpoint of the run before, with its optimizer, on the first batches.
    """
    if not program.parallel:
        degrees = dict.fromkeys(degrees, 1)
        os.environ.setdefault("LOCAL_RANK", "0")
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    folder = SCRATCH / case
    tp, dp, rep, pp, ep, etp = (degrees.get(name, 1) for name in ("tp", "dp", "rep", "pp", "ep", "etp"))
    os.environ["HF_HOME"] = str(folder / f"cache{program.rank}")
    arguments = {
        "model.name": model, "model.flavor": flavor, "model.hf_assets_path": folder / "in", "job.dump_folder": folder,
        "training.dataset_path": folder / "in" / "data", "validation.dataset": "c4_test",
        "validation.dataset_path": folder / "in" / "data", "validation.seq_len": SEQUENCE,
        "validation.local_batch_size": BATCH // (dp * rep), "training.seq_len": SEQUENCE, "training.steps": steps,
        "training.local_batch_size": BATCH // (dp * rep), "training.mixed_precision_param": "float32",
        "parallelism.tensor_parallel_degree": tp, "parallelism.data_parallel_shard_degree": dp,
        "parallelism.data_parallel_replicate_degree": rep, "parallelism.pipeline_parallel_degree": pp,
        "parallelism.expert_parallel_degree": ep, "parallelism.expert_tensor_parallel_degree": etp,
        "metrics.log_freq": 1, "comm.trace_buf_size": 0, "lr_scheduler.warmup_steps": 2, "optimizer.lr": 0.01,
        "optimizer.eps": 1e-3, "debug.seed": 0, "checkpoint.initial_load_path": folder / "start",
    }  # fmt: skip
    flat = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
    config = ConfigManager().parse_args([*flat, "--checkpoint.enable", *options])
    config.checkpoint.last_save_model_only = False
    if again:
        config.checkpoint.exclude_from_loading = ["dataloader"]
    if program.rank == 0:
        shutil.rmtree(folder / "in" if again else folder, ignore_errors=True)
        texts(folder / "in", dp * rep)
        if not again:
            start(folder / "start", config)
    dist.barrier()
    trainer = trained(config)
    values = dict(trainer.metrics_processor.logger.values)
    for part in trainer.model_parts:
        values |= get_model_state_dict(part, options=StateDictOptions(full_state_dict=True))
    trainer.close()
    return together(values) if pp > 1 else values


def trained(config):
    trainer = Trainer(config)
    trainer.metrics_processor.logger = Kept()
    for part in (module for model in trainer.model_parts for module in model.modules()):
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    trainer.train()
    return trainer


def together(values):
    """Those of all pipeline stages; the loss is known to the last one."""
    stages = [None] * dist.get_world_size()
    dist.all_gather_object(stages, values)
    return {name: value for stage in stages for name, value in stage.items()}


def resumed(before, after):
    """Two steps, and two more from the checkpoint, in another layout."""
    train("resumed", steps=2, **before)
    return train("resumed", steps=4, again=True, **after)


def add(case, pair, four, **rest):
    """A case with its degrees on two and on four ranks."""
    program.add(case, lambda: train(case, **(pair if program.world <= 2 else four), **rest))


AC, EVAL = "--activation_checkpoint.", "--validation."
SELECTIVE = (AC + "mode", "selective", AC + "selective_ac_option", "op")
add("tp", {"tp": 2}, {"tp": 4})
add("fsdp", {"dp": 2}, {"dp": 4})
add("fsdp_tp", {"tp": 2}, {"tp": 2, "dp": 2})
add("uneven", {"tp": 2}, {"tp": 2, "dp": 2}, flavor="uneven")
add("hsdp", {"rep": 2}, {"rep": 2, "dp": 2})
add("whole_logits", {"tp": 2}, {"tp": 4}, options=("--parallelism.disable_loss_parallel",))
add("checkpointed", {"tp": 2}, {"tp": 2, "dp": 2}, options=(AC + "mode", "full"))
add("checkpointed_ops", {"tp": 2}, {"tp": 2, "dp": 2}, options=SELECTIVE)
add("foreach", {"tp": 2}, {"tp": 2, "dp": 2}, options=("--optimizer.implementation", "foreach"))
add("for_loop", {"tp": 2}, {"tp": 2, "dp": 2}, options=("--optimizer.implementation", "for-loop"))
add("pipeline", {"pp": 2}, {"pp": 2, "tp": 2})
add("pipeline_fsdp", {"pp": 2}, {"pp": 2, "dp": 2})
add("qwen3", {"tp": 2}, {"tp": 4}, model="qwen3")
add("qwen3_experts", {"tp": 2}, {"tp": 2, "dp": 2}, model="qwen3", flavor="experts")
add("llama4", {"tp": 2}, {"tp": 2, "dp": 2}, model="llama4")
add("llama4_ep", {"dp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, model="llama4")
add("deepseek_v3_ep", {"dp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 4}, model="deepseek_v3")
add("bfloat16", {"dp": 2}, {"tp": 2, "dp": 2}, options=("--training.mixed_precision_param", "bfloat16"))
add("compiled", {"tp": 2}, {"tp": 2, "dp": 2}, options=("--compile.enable", "--compile.backend", "aot_eager"))
add("simple_fsdp", {"dp": 2}, {"tp": 2, "dp": 2}, model="simple_fsdp.llama3")
add("simple_fsdp_hybrid", {"rep": 2}, {"rep": 2, "dp": 2}, model="simple_fsdp.llama3", flavor="uneven")
add("in_backward", {"tp": 2}, {"tp": 4}, options=("--optimizer.early_step_in_backward",))
add("validated", {"tp": 2}, {"tp": 4}, options=(EVAL + "enable", EVAL + "freq", "1", EVAL + "steps", "2"))
add("deepseek_v3", {"tp": 2}, {"tp": 2, "dp": 2}, model="deepseek_v3")
program.add(
    "resumed", lambda: resumed({"tp": 2}, {"dp": 2}) if program.world <= 2 else resumed({"tp": 2, "dp": 2}, {"dp": 4})
)

if __name__ == "__main__":
    program.main()
