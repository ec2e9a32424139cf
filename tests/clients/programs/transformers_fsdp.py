"""transformers: `from_pretrained(distributed_config=...)` with FSDP2, over tensor parallelism too, on 4 ranks.

Each rank of the data axis trains on its own rows of a batch; on one process the whole batch. Recorded are losses, all
gradients, norms, three steps of AdamW, greedy generation, and sharded checkpoints of weights and optimizer that go on
in another layout.
"""

import torch
import torch.distributed as dist
from record import Program, whole
from tiny_models import SCRATCH, barrier, checkpoint, clip, loaded, optimizer_of, tokens_of, trained
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

program = Program()


def place(model):
    """Which part of the batch this rank has, of how many, and the group of those parts."""
    if not dist.is_initialized():
        return 0, 1
    config = model.config.distributed_config
    return dist.get_rank() // config.tp_size, config.dp_size


def mean(loss):
    """The mean over all ranks: those of a tensor-parallel group have the same."""
    loss = whole(loss)
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss


def mine(model, batch):
    index, parts = place(model)
    return batch.chunk(parts)[index]


def everything(name, **sizes):
    """What is recorded of one model in one layout."""
    model = loaded(checkpoint(name), distributed_config=DistributedConfig(**sizes))
    batch = tokens_of(model.config, rows=4)
    model.train()
    values = trained(model, mine(model, batch), mean=mean)
    model.eval()
    with torch.no_grad():
        values["generated"] = model.generate(batch[:2, :4], max_new_tokens=5, do_sample=False)
    model.save_pretrained(SCRATCH / f"{name}-saved")
    barrier()
    again = loaded(SCRATCH / f"{name}-saved")
    return values | {f"saved {key}": x for key, x in again.state_dict().items()}


@program.case
def llama_fsdp():
    return everything("llama", fsdp_size=4)


@program.case
def llama_hsdp():
    return everything("llama", fsdp_size=2, dp_replicate_size=2)


@program.case
def llama_fsdp_tp():
    return everything("llama", fsdp_size=2, tp_size=2)


@program.case
def llama_uneven_mlp_fsdp_tp():
    return everything("llama_uneven_mlp", fsdp_size=2, tp_size=2)


@program.case
def qwen3_fsdp_tp():
    return everything("qwen3", fsdp_size=2, tp_size=2)


@program.case
def gemma3_tied_fsdp_tp():
    return everything("gemma3", fsdp_size=2, tp_size=2)


@program.case
def mixtral_fsdp_tp():
    return everything("mixtral", fsdp_size=2, tp_size=2)


@program.case
def gpt_oss_fsdp_tp():
    return everything("gpt_oss", fsdp_size=2, tp_size=2)


@program.case
def deepseek_v3_fsdp_tp():
    return everything("deepseek_v3", fsdp_size=2, tp_size=2)


@program.case
def mixtral_ep():
    return everything("mixtral", fsdp_size=2, tp_size=2, ep_size=4)


@program.case
def mixtral_fsdp_ep():
    return everything("mixtral", fsdp_size=4, ep_size=2)


def step(model, optimizer, batch):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    norm = clip(model)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": mean(loss.detach()), "norm": norm}


def resumed(name, before, after):
    """Two steps in one layout, sharded checkpoints, two more in another."""
    folder = SCRATCH / f"{name}-sharded"
    model = loaded(checkpoint(name), distributed_config=DistributedConfig(**before))
    batch = tokens_of(model.config, rows=4)
    optimizer = optimizer_of(model)
    values = {f"step {i} {k}": v for i in (0, 1) for k, v in step(model, optimizer, mine(model, batch)).items()}
    if dist.is_initialized():
        model.save_pretrained(folder, distributed_checkpoint=True)
        save_optimizer_distributed(model, optimizer, str(folder / "optimizer"))
        model = loaded(folder, distributed_config=DistributedConfig(**after))
        optimizer = optimizer_of(model)
        load_optimizer_distributed(model, optimizer, str(folder / "optimizer"))
    values |= {f"step {i} {k}": v for i in (2, 3) for k, v in step(model, optimizer, mine(model, batch)).items()}
    return values | {f"trained {key}": whole(p) for key, p in model.named_parameters()}


@program.case
def llama_resumed_in_another_layout():
    return resumed("llama", {"fsdp_size": 4}, {"fsdp_size": 2, "tp_size": 2})


@program.case
def mixtral_resumed_in_another_layout():
    return resumed("mixtral", {"fsdp_size": 2, "tp_size": 2}, {"fsdp_size": 4})


if __name__ == "__main__":
    program.main()
