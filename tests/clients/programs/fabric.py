"""Lightning Fabric: a model under its ModelParallelStrategy, written as its tensor-parallel example is.

A Llama with sequence parallelism on the axis "tensor_parallel", FSDP2 with activation checkpointing over
"data_parallel", `loss_parallel`, Fabric's loaders, accumulation without sync, clipping, and its checkpoints: one folder
of shards or one whole file, loaded into a model that was made on the meta device.
"""

import os
import re
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from record import Program
from torch import nn
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed._tensor import Replicate, Shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

SCRATCH = Path(os.environ.get("CLIENT_SCRATCH", "/tmp"))
VOCAB, WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 96, 32, 8, 2, 16, 8, 4
program = Program()


def turned(x, angles):
    """Rotary position embedding; x: batch, length, heads, size."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[: x.shape[1], None]).flatten(-2).type_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, angles):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (y.transpose(1, 2) for y in (turned(q, angles), turned(k, angles), v))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH, eps=1e-5), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(WIDTH, eps=1e-5), FeedForward()

    def forward(self, x, angles):
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("angles", self.made_angles())

    @staticmethod
    def made_angles():
        rates = 1e4 ** (-torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        turns = torch.outer(torch.arange(LENGTH), rates)
        return torch.polar(torch.ones_like(turns), turns)

    def reset_parameters(self):
        """Asked of every module with tensors of its own that was made on the meta device."""
        self.angles = self.made_angles()

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x))


def parallelize(model, mesh, low=False):
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    if tensor.size() > 1:
        plan = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            "norm": SequenceParallel(),
            "layers.0": PrepareModuleInput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Shard(1), None), use_local_output=True
            ),
        }
        parallelize_module(model, tensor, plan)
        for block in model.layers:
            block.attention.heads //= tensor.size()
            plan = {
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                **{f"attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")},
                **{f"feed_forward.{w}": ColwiseParallel() for w in ("w1", "w3")},
                **{w: RowwiseParallel(output_layouts=Shard(1)) for w in ("attention.wo", "feed_forward.w2")},
                "attention_norm": SequenceParallel(),
                "ffn_norm": SequenceParallel(),
            }
            parallelize_module(block, tensor, plan)
    if data.size() > 1:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None
        more = {"mesh": data} | ({"mp_policy": policy} if policy else {})
        for i, block in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(block)
            fully_shard(model.layers[i], **more, reshard_after_forward=i < LAYERS - 1)
        fully_shard(model, **more)
    return model


def fabric_of(dp, tp, low, whole):
    if not program.parallel:
        return Fabric(accelerator="cpu", devices=1)
    strategy = ModelParallelStrategy(
        parallelize_fn=lambda model, mesh: parallelize(model, mesh, low),
        data_parallel_size=dp,
        tensor_parallel_size=tp,
        save_distributed_checkpoint=not whole,
    )
    return Fabric(accelerator="cpu", devices=dp * tp, strategy=strategy)


def set_up(fabric, file):
    """A model with the weights of `file`, and its optimizer."""
    with fabric.init_module(empty_init=program.parallel):
        model = Transformer()
    model = fabric.setup(model)
    fabric.load_raw(file, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=True)
    return model, fabric.setup_optimizers(optimizer)


def step(fabric, model, optimizer, batches):
    """One step of the optimizer on the mean loss over `batches`; the loss and the gradients' norm."""
    total = torch.zeros(())
    for i, (tokens,) in enumerate(batches):
        with fabric.no_backward_sync(model, enabled=program.parallel and i < len(batches) - 1):
            logits = model(tokens[:, :-1])
            with loss_parallel():
                loss = F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1)) / len(batches)
            fabric.backward(loss)
        total += loss.detach()
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return fabric.all_reduce(total), norm


def named(key, dp):
    """The name of a weight in the model that is set up: checkpointed layers have one more module."""
    return re.sub(r"^(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", key) if dp > 1 else key


def run(case, dp=1, tp=1, low=False, accumulate=1, save=None):
    if not program.parallel:
        dp = tp = 1
    fabric = fabric_of(dp, tp, low, save == "whole")
    fabric.launch()
    file, saved = SCRATCH / f"{case}.start", SCRATCH / f"{case}.saved"
    if program.rank == 0:
        shutil.rmtree(saved, ignore_errors=True)
        torch.manual_seed(1)
        torch.save({named(key, dp): value for key, value in Transformer().state_dict().items()}, file)
    fabric.barrier()
    model, optimizer = set_up(fabric, file)
    tokens = torch.randint(VOCAB, (BATCH * STEPS, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(tokens), batch_size=BATCH // dp // accumulate))
    batches, values = list(loader), {}
    for i in range(STEPS):
        loss, norm = step(fabric, model, optimizer, batches[i * accumulate : (i + 1) * accumulate])
        values |= {f"loss {i}": loss, f"norm {i}": norm}
        if save and i == 1:
            fabric.save(saved, {"model": model, "optimizer": optimizer, "step": i})
            model, optimizer = set_up(fabric, file)
            state = {"model": model, "optimizer": optimizer, "step": -1}
            fabric.load(saved, state)
            assert state["step"] == i
    whole = StateDictOptions(full_state_dict=True)
    values |= {k: v for k, v in get_model_state_dict(model, options=whole).items() if k != "angles"}
    if program.parallel:
        assert any(type(p).__name__ == "DTensor" for p in model.parameters())
    moments = get_optimizer_state_dict(model.module, optimizer.optimizer, options=whole)["state"]
    values |= {f"second moment of {name}": state["exp_avg_sq"] for name, state in moments.items()}
    return values


def add(case, pair, four, **rest):
    program.add(case, lambda: run(case, *(pair if program.world <= 2 else four), **rest))


add("tp", (1, 2), (1, 4))
add("fsdp", (2, 1), (4, 1))
add("fsdp_tp", (1, 2), (2, 2))
add("fsdp_tp_bfloat16", (2, 1), (2, 2), low=True)
add("accumulated", (2, 1), (2, 2), accumulate=2)
add("saved_in_shards", (1, 2), (2, 2), save="shards")
add("saved_whole", (1, 2), (1, 4), save="whole")

if __name__ == "__main__":
    program.main()
