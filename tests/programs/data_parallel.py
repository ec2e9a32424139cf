"""A program as people have it, on torch's names alone: `fully_shard` and DDP, over tensor parallelism too; 2 processes.

    python -m dtensor.swap tests/programs/data_parallel.py        [number of processes]

Each process holds its results to the same model in one process, uneven sizes included.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def made(width, hidden):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.LayerNorm(width))
    return net.double()


def train(model, batches, optimizer):
    norms = []
    for x in batches:
        model(x).pow(2).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def case(dp, tp, width=10, hidden=12, low=False, **options):
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    plain, model = made(width, hidden), made(width, hidden)
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh["dp"], mp_policy=policy)
    assert isinstance(model[0].weight, DTensor) and model[0].weight.shape == (hidden, width)
    model[2].set_modules_to_forward_prefetch([model[0]])
    whole = torch.randn(3, 4 * dp, width, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine = whole.chunk(dp, 1)[mesh.get_local_rank("dp")]
    ours, its = (torch.optim.AdamW(m.parameters(), lr=0.01, **kw) for m, kw in ((model, options), (plain, {})))
    norms, expected = train(model, mine, ours), train(plain, whole, its)
    exact = {"rtol": 5e-2, "atol": 5e-2} if low else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(norms, expected, **exact)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = get_optimizer_state_dict(model, ours, options=StateDictOptions(full_state_dict=True))["state"]
    for i, (name, value) in enumerate(plain.named_parameters()):
        torch.testing.assert_close(full[name], value.detach(), **exact)
        if not low:
            torch.testing.assert_close(state[name]["exp_avg"], its.state_dict()["state"][i]["exp_avg"], **exact)


def replicated(dp, tp):
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    plain, model = made(10, 12), made(10, 12)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    whole = torch.randn(3, 4 * dp, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine = whole.chunk(dp, 1)[mesh.get_local_rank("dp")]
    ours, its = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    for x, y in zip(mine, whole):
        for net, batch, optimizer in ((model, x, ours), (plain, y, its)):
            net(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    torch.testing.assert_close(model(mine[0]), plain(mine[0]), rtol=1e-9, atol=1e-9)
    total = funcol.all_reduce(torch.ones(3), "sum", mesh["dp"])
    assert total.tolist() == [dp] * 3 == funcol.all_reduce(torch.ones(3), "sum", (mesh, 0)).tolist()


def run(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    half = world // 2
    case(world, 1, width=9, hidden=7, foreach=True)
    case(world, 1, fused=True)
    case(world, 1, low=True)
    case(half, 2, width=9, hidden=13)
    case(half, 2, foreach=False)
    replicated(half, 2)
    replicated(world, 1)
    if rank == 0:
        print("engine", DTensor.__module__)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    mp.spawn(run, (world, port), nprocs=world)
    print("done", *sys.argv[1:])
