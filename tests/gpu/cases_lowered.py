"""Lowered steps: the numbers of eager ones, and what a CUDA graph makes of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from environment import Environment, Skip, close, placed, rand
from torch import nn

import dtensor
from dtensor import DTensor, Replicate, Shard, distribute_tensor

R = Replicate()


class Net(nn.Module):
    """Two layers, split by columns and by rows."""

    def __init__(self, env: Environment, mesh: Any) -> None:
        super().__init__()
        up, down = rand(env, 64, 32, seed=1) / 6, rand(env, 32, 64, seed=2) / 8
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(1)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


def _step(net: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = (net(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def _whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def case_step(env: Environment) -> None:
    """A lowered training step gives the losses and parameters of the eager one."""
    mesh = env.mesh(env.world)
    both = []
    for lowered in (False, True):
        net = Net(env, mesh)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        inputs = [placed(rand(env, 8, 32, seed=i), mesh, [R]) for i in range(4)]
        _step(net, optimizer, inputs[0])
        run: Any = dtensor.lower(_step, net, optimizer, inputs[0]) if lowered else _step
        losses = [_whole(run(net, optimizer, x)) for x in inputs[1:]]
        both.append([*losses, *(_whole(p) for p in net.parameters())])
    for eager, low in zip(*both, strict=True):
        close(low, eager, 1e-4, 1e-5)


def case_cuda_graph(env: Environment) -> None:
    """A lowered step captured as a CUDA graph: replays train as eager steps do, collectives included."""
    if not env.cuda:
        raise Skip("CUDA graphs need a GPU")
    mesh = env.mesh(env.world)
    net, other = Net(env, mesh), Net(env, mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    eager = torch.optim.SGD(other.parameters(), lr=0.1)
    inputs = [placed(rand(env, 8, 32, seed=i), mesh, [R]) for i in range(6)]
    for t, o in ((net, optimizer), (other, eager)):
        _step(t, o, inputs[0])
    step = dtensor.lower(_step, net, optimizer, inputs[0])
    captured = step.capture(net, optimizer, inputs[0].clone())
    for p, q in zip(net.parameters(), other.parameters(), strict=True):  # warming up was a step or more
        q.data.copy_(p.data)
    for x in inputs[1:]:
        got = captured(net, optimizer, x)
        want = _step(other, eager, x)
        close(_whole(got), _whole(want), 1e-4, 1e-5)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        close(_whole(p), _whole(q), 1e-4, 1e-5)
