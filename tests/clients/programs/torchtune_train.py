"""torchtune's recipe for full fine-tuning on several processes, with its Llama 3 and its plan for tensor parallelism.

The recipe is the file that the package installs; only what it reads is made here: weights, a dataset, a tokenizer of
which it asks for the padding, and a logger. Steps see the same rows on every number of processes.
"""

import importlib.util
import os
from pathlib import Path

import torch
import torch.distributed as dist
from record import Program
from torch.distributed.tensor import DTensor

SCRATCH = Path(os.environ.get("CLIENT_SCRATCH", "/tmp"))
VOCABULARY, ROWS, BATCH, LENGTH = 64, 16, 4, 12
SIZES = {
    "vocab_size": VOCABULARY, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "embed_dim": 32,
    "max_seq_len": 32, "intermediate_dim": 48,
}  # fmt: skip
program = Program()
PARALLEL = program.parallel
logged: list[dict] = []


class Tokenizer:
    """What the recipe asks of a tokenizer."""

    pad_id = 0


class Rows(torch.utils.data.Dataset):
    """Rows of unlike lengths, the first tokens of each not learned."""

    def __init__(self, tokenizer):
        generator = torch.Generator().manual_seed(3)
        self.rows = [torch.randint(1, VOCABULARY, (LENGTH - i % 4,), generator=generator).tolist() for i in range(ROWS)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return {"tokens": row, "labels": [-100] * (1 + i % 3) + row[1 + i % 3 :]}


class Logger:
    """Keeps what is logged."""

    def log_config(self, config):
        pass

    def log_dict(self, values, step):
        logged.append(values)

    def close(self):
        pass


def recipe_class():
    """The recipe, out of the folder that is installed beside the package."""
    folder = Path(importlib.util.find_spec("torchtune").origin).parent.parent / "recipes"
    spec = importlib.util.spec_from_file_location("full_finetune", folder / "full_finetune_distributed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.init_process_group = lambda backend: None  # one group serves all cases
    # These ask for memory statistics of an accelerator.
    module.training.cleanup_before_training = lambda: None
    module.training.get_memory_stats = lambda device: {}
    module.training.log_memory_stats = lambda stats: None
    return module.FullFinetuneRecipeDistributed


def weights():
    """The same weights for every case, in a file."""
    from torchtune.models.llama3 import llama3

    folder = SCRATCH / "weights"
    if program.rank == 0 and not folder.exists():
        torch.manual_seed(0)
        folder.mkdir()
        torch.save(llama3(**SIZES).state_dict(), folder / "model.pt")
    dist.barrier()
    return folder


def configured(name, tp, epochs=1, resume=None, **options):
    """The recipe's configuration; `tp` ranks share a layer."""
    from omegaconf import OmegaConf

    tp = tp if PARALLEL else 1
    dp = program.world // tp
    given = {
        "output_dir": str(SCRATCH / f"out {name}"),
        "device": "cpu", "dtype": "fp32", "seed": 5, "shuffle": False, "epochs": epochs, "max_steps_per_epoch": None,
        "batch_size": BATCH // dp, "gradient_accumulation_steps": 1, "resume_from_checkpoint": resume is not None,
        "model": {"_component_": "torchtune.models.llama3.llama3", **SIZES},
        "tokenizer": {"_component_": "torchtune_train.Tokenizer"},
        "dataset": {"_component_": "torchtune_train.Rows"},
        "metric_logger": {"_component_": "torchtune_train.Logger"},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.0003},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(resume or weights()),
            "checkpoint_files": ["model.pt"],
            "recipe_checkpoint": None,
            "output_dir": str(SCRATCH / f"out {name}"),
            "model_type": "LLAMA3",
        },
    }  # fmt: skip
    if tp > 1:
        given |= {
            "tensor_parallel_dim": tp,
            "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
        }
    return OmegaConf.create(given | options)


def trained(name, tp, **options):
    """Losses, norms, weights and the state of the optimizer after the recipe has run."""
    import torchtune_train

    torchtune_train.logged.clear()
    config = configured(name, tp, **options)
    recipe = recipe_class()(cfg=config)
    recipe.setup(cfg=config)
    recipe.train()
    steps = [torchtune_train.logged]
    dist.broadcast_object_list(steps)
    values = {}
    for number, step in enumerate(steps[0]):
        values |= {f"{key} {number}": torch.as_tensor(step[key]) for key in ("loss", "grad_norm") if key in step}
    values |= {f"weight {key}": p for key, p in recipe._model.named_parameters()}
    if recipe._optimizer is not None:
        for key, p in recipe._model.named_parameters():
            values |= {f"state {key} {word}": x for word, x in recipe._optimizer.state[p].items()}
    return {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in values.items()}


def add(name, **options):
    """A case; `tp` is a number, or "all" ranks."""

    def run():
        tp = options.get("tp", 1)
        rest = {key: x for key, x in options.items() if key != "tp"}
        return trained(name, program.world if tp == "all" else tp, **rest)

    program.add(name, run)


add("tp", tp="all")
add("fsdp")
add("fsdp_tp", tp=2)
add("clipped", clip_grad_norm=0.5)
add("accumulated", tp=2, gradient_accumulation_steps=2, loss={"_component_": "torch.nn.CrossEntropyLoss"})
add("checkpointed", tp=2, enable_activation_checkpointing=True)
add("in_backward", tp=2, optimizer_in_bwd=True)

if __name__ == "__main__":
    if not PARALLEL:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    program.main()
