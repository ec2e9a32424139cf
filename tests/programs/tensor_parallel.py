"""A program as people have it, on torch's names alone: tensor parallelism, loss, checkpoint; 2 processes.

    python tests/programs/tensor_parallel.py                       on torch's engine
    python -m dtensor.swap tests/programs/tensor_parallel.py       on this one

Each process holds its results to the same model in one process. The first prints the module of the DTensor class.
"""

import os
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mlp(self.norm(x)))


def made():
    torch.manual_seed(0)
    return Model()


def parallel(mesh):
    return parallelize_module(
        made(),
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )


def train(model, tokens, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in (loss.detach(), norm)]
        losses += [x.item() for x in whole]
    return losses


def run(rank, world, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    model, plain = parallel(mesh), made()
    with loss_parallel():
        losses = train(model, tokens)
    torch.testing.assert_close(losses, train(plain, tokens), rtol=1e-4, atol=1e-5)

    x = distribute_tensor(torch.arange(30.0).reshape(5, 6), mesh["tp"], [Shard(0)])
    y = x.redistribute(placements=[Shard(1)])
    assert y.to_local().shape == (5, 3) and torch.equal(y.full_tensor(), torch.arange(30.0).reshape(5, 6))
    assert dist.all_gather_into_tensor and isinstance(model.mlp[0].weight, DTensor)

    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    other = parallel(mesh)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    full = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-4, atol=1e-5)
    if rank == 0:
        print("engine", DTensor.__module__)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (world, port, folder), nprocs=world)
    print("done", *sys.argv[1:])
