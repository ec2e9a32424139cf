"""The clients: a transformer block, tensor and sequence parallel, trained beside the same block on one device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from environment import Environment, close, rand
from torch import nn

from dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from dtensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

HEADS, WIDTH, LONG = 8, 64, 16


class Block(nn.Module):
    """Norm, attention, norm, MLP; the number of heads follows from what the projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _plain_plan() -> dict[str, object]:
    plan: dict[str, object] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    return plan | {name: RowwiseParallel() for name in ("o", "down")}


def _sequence_plan() -> dict[str, object]:
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    columns = ColwiseParallel(input_layouts=Replicate())
    plan: dict[str, object] = dict.fromkeys(("q", "k", "v", "up"), columns)
    gathered = {"": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))}
    norms = {name: SequenceParallel() for name in ("norm1", "norm2")}
    return gathered | norms | plan | {"o": rows, "down": rows}


def _train(env: Environment, prepare: Callable[[nn.Module], nn.Module], steps: int) -> tuple[list[float], nn.Module]:
    torch.manual_seed(4)
    net = prepare(Block().to(env.device))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)  # keys' biases have gradients of noise alone
    losses = []
    for i in range(steps):
        x, target = rand(env, 4, LONG, WIDTH, seed=i), rand(env, 4, LONG, WIDTH, seed=i + 50)
        out = net(x)
        out = out.full_tensor() if isinstance(out, DTensor) else out
        loss = (out - target).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net


def _compare(env: Environment, prepare: Callable[[nn.Module], nn.Module]) -> None:
    steps = 2 if env.quick else 5
    want, reference = _train(env, lambda net: net, steps)
    got, net = _train(env, prepare, steps)
    assert all(abs(a - b) < 2e-4 * max(1.0, abs(b)) for a, b in zip(got, want, strict=True)), (got, want)
    for (name, p), q in zip(net.named_parameters(), reference.parameters(), strict=True):
        close(p.full_tensor() if isinstance(p, DTensor) else p, q, 1e-3, 1e-3, name)


def case_tensor_parallel(env: Environment) -> None:
    """Columns then rows: losses and parameters after some steps are those of one device."""
    mesh = env.mesh(env.world)
    _compare(env, lambda net: parallelize_module(net, mesh, _plain_plan()))  # type: ignore[arg-type]


def case_sequence_parallel(env: Environment) -> None:
    """The same with activations sharded along the sequence between the layers."""
    mesh = env.mesh(env.world)
    _compare(env, lambda net: parallelize_module(net, mesh, _sequence_plan()))  # type: ignore[arg-type]


def case_two_axes(env: Environment) -> None:
    """Parameters sharded along one axis and replicated along the other, whole DTensor modules, by hand."""
    for mesh in env.meshes():
        if mesh.ndim != 2:
            continue

        def place(name: str, module: nn.Module, mesh: DeviceMesh = mesh) -> None:
            for key, p in list(module.named_parameters(recurse=False)):
                layout = [Shard(0), Replicate()] if p.ndim > 1 else [Replicate(), Shard(0)]
                module.register_parameter(key, nn.Parameter(distribute_tensor(p.detach(), mesh, layout)))

        def prepare(net: nn.Module, mesh: DeviceMesh = mesh) -> nn.Module:
            for name, module in net.named_modules():
                place(name, module)
            net.register_forward_pre_hook(
                lambda m, args: (distribute_tensor(args[0], mesh, [Replicate(), Replicate()]),)
            )
            return net

        _compare(env, prepare)
