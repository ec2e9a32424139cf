"""accelerate's training loop on 4 ranks: the FSDP2 plugin, with replicas, checkpointing and accumulation; transformers'
`Trainer` on models that are cut by tensor parallelism, FSDP2 or both.

accelerate turns FSDP on for accelerators only. On CPU its state is told that it has some; the device stays the CPU.
"""

import functools
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType, PartialState
from record import Program, whole
from tiny_models import SCRATCH, checkpoint, loaded, tokens_of
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

program = Program()
STEPS = 4


def rows(config, count=4 * STEPS):
    return [{"input_ids": t, "labels": t} for t in tokens_of(config, rows=count)]


def fsdp2(layer="LlamaDecoderLayer", **options):
    return {
        "fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": [layer],
        **options,
    }  # fmt: skip


def forget():
    """Nothing of the case before: neither accelerate's state nor what it writes into the environment."""
    AcceleratorState._reset_state(True)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def say_accelerators():
    """Start accelerate on the CPU's process group, and tell it of accelerators."""
    PartialState(cpu=True)
    if program.parallel:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def accelerator_of(plugin=None, **options):
    """A new one, on the process group that is there."""
    forget()
    say_accelerators()
    if plugin is not None and program.parallel:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(**plugin)
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True), **options)


def loop(accelerator, model, steps_before_loading=2, save=True):
    """Train, save in the middle, go on, go back to what was saved and train on again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    data = DataLoader(rows(model.config), batch_size=4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    model.train()
    batches, values = list(data), {}

    def step(name, batch):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                values[f"{name} norm"] = whole(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        values[f"{name} loss"] = accelerator.reduce(loss.detach().clone(), reduction="mean")

    for i, batch in enumerate(batches[:steps_before_loading]):
        step(f"step {i}", batch)
    if save:
        accelerator.save_state(str(SCRATCH / "state"))
    for i, batch in enumerate(batches[steps_before_loading:]):
        step(f"step {i + steps_before_loading}", batch)
    values |= {f"trained {k}": whole(p) for k, p in model.named_parameters()}
    assert not program.parallel or all(hasattr(p, "device_mesh") for p in model.parameters())
    if save:
        accelerator.load_state(str(SCRATCH / "state"))
        step("again", batches[steps_before_loading])
    full = accelerator.get_state_dict(model)
    held = [{k: v.clone() for k, v in full.items()} if full else None]
    if dist.is_initialized():
        dist.broadcast_object_list(held, src=0)
    return {k.replace("_checkpoint_wrapped_module.", ""): v for k, v in values.items()} | {
        f"state {k}": v for k, v in held[0].items()
    }


@program.case
def llama_fsdp2():
    return loop(accelerator_of(fsdp2()), loaded(checkpoint("llama")))


@program.case
def llama_fsdp2_loaded_on_rank_0():
    return loop(accelerator_of(fsdp2(cpu_ram_efficient_loading=True)), loaded(checkpoint("llama")))


@program.case
def llama_fsdp2_full_state():
    return loop(accelerator_of(fsdp2(state_dict_type="FULL_STATE_DICT")), loaded(checkpoint("llama")))


@program.case
def llama_fsdp2_checkpointing():
    plugin = fsdp2(activation_checkpointing=True)
    return loop(accelerator_of(plugin), loaded(checkpoint("llama_uneven_mlp")), save=False)


@program.case
def qwen3_hsdp():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if program.parallel else None
    return loop(accelerator_of(fsdp2("Qwen3DecoderLayer"), parallelism_config=config), loaded(checkpoint("qwen3")))


@program.case
def llama_fsdp2_accumulation():
    accelerator = accelerator_of(fsdp2(reshard_after_forward=False), gradient_accumulation_steps=2)
    return loop(accelerator, loaded(checkpoint("llama")), save=False)


def trainer(name, optim="adamw_torch", resumed=False, plugin=None, **sizes):
    """`Trainer.train()`, its log, the weights, and `evaluate()`.

    `resumed`: stopped half way, and begun again from the checkpoint. `plugin`: accelerate cuts the model, by FSDP2.
    """
    values = {}
    for stop in (STEPS // 2, STEPS) if resumed else (STEPS,):
        forget()
        cut = {} if plugin else {"distributed_config": DistributedConfig(**sizes)}
        model = loaded(checkpoint(name), **cut)
        arguments = TrainingArguments(
            output_dir=str(SCRATCH / f"trainer-{name}"), max_steps=stop, logging_steps=1, use_cpu=True, report_to=[],
            per_device_train_batch_size=4 // (sizes.get("fsdp_size", 1) if program.parallel else 1), optim=optim,
            per_device_eval_batch_size=4 // sizes.get("fsdp_size", 1), learning_rate=1e-2, adam_epsilon=1e-3,
            max_grad_norm=1.0, lr_scheduler_type="constant", seed=1, disable_tqdm=True,
            save_strategy="steps" if resumed else "no", save_steps=STEPS // 2,
            fsdp=plugin and program.parallel, fsdp_config=plugin if program.parallel else None,
        )  # fmt: skip
        assert arguments.device.type == "cpu"
        say_accelerators()
        data = rows(model.config)
        runs = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
        runs.train(resume_from_checkpoint=stop == STEPS if resumed else None)
        assert not program.parallel or any(hasattr(p, "device_mesh") for p in model.parameters())
        for entry in runs.state.log_history:
            if "loss" in entry:
                values |= {f"step {entry['step']} {k}": float(entry[k]) for k in ("loss", "grad_norm")}
    values |= {f"trained {k}": whole(p) for k, p in model.named_parameters()}
    return values | {"evaluated": runs.evaluate()["eval_loss"]}


for case, arguments in {
    "trainer_llama_tp": {"name": "llama", "tp_size": 4},
    "trainer_llama_fsdp": {"name": "llama", "fsdp_size": 4},
    "trainer_llama_fsdp_tp": {"name": "llama", "fsdp_size": 2, "tp_size": 2},
    "trainer_mixtral_fsdp_tp": {"name": "mixtral", "fsdp_size": 2, "tp_size": 2},
    "trainer_qwen3_fsdp_tp_fused": {"name": "qwen3", "optim": "adamw_torch_fused", "fsdp_size": 2, "tp_size": 2},
    "trainer_llama_fsdp2_resumed": {
        "name": "llama", "resumed": True, "fsdp_size": 4,
        "plugin": {"version": 2, "reshard_after_forward": True, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    },
}.items():
    program.add(case, functools.partial(trainer, **arguments))

if __name__ == "__main__":
    program.main()
