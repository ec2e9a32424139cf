"""Random numbers of the device's generator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from environment import Environment, close, placed

import dtensor
from dtensor import Replicate, Shard
from dtensor.dispatch import random as rng

R = Replicate()


def case_whole_draws(env: Environment) -> None:
    """With ranks seeded alike, what is drawn without reading values is what one device draws, in any layout."""
    for mesh in env.meshes():
        for layout in ([R] * mesh.ndim, [Shard(0)] * mesh.ndim, [Shard(1)] * mesh.ndim):
            x = torch.empty(12, 10, device=env.device)
            torch.manual_seed(7)
            want = [torch.rand_like(x), x.clone().normal_(1, 2), torch.randn(12, 10, device=env.device)]
            after = torch.rand(3, device=env.device)
            torch.manual_seed(7)
            d = placed(x, mesh, layout)
            got = [
                torch.rand_like(d),
                d.clone().normal_(1, 2),
                dtensor.randn(12, 10, device_mesh=mesh, placements=layout),
            ]
            for g, w in zip(got, want, strict=True):
                close(g.full_tensor(), w, 0, 0, layout)
            close(torch.rand(3, device=env.device), after, 0, 0, "the stream afterwards")


def case_agreement(env: Environment) -> None:
    """Ranks seeded differently: replicas agree all the same, shards differ, the same seed gives the same again."""
    for mesh in env.meshes():
        for layout in ([R] * mesh.ndim, [Shard(0)] * mesh.ndim):
            found = []
            for _ in range(2):
                torch.manual_seed(11 + env.rank)
                x = placed(torch.ones(16, 16, device=env.device), mesh, layout)
                found.append([
                    F.dropout(x, 0.5).full_tensor(), torch.bernoulli(x * 0.5).full_tensor(),
                    x.clone().uniform_().full_tensor(),
                ])  # fmt: skip
            for first, second in zip(*found, strict=True):
                env.same_everywhere(first)
                close(first, second, 0, 0, layout)
                if env.world > 1:
                    assert not torch.equal(first[: 16 // env.world], first[16 // env.world : 32 // env.world])


def case_equal_seeds(env: Environment) -> None:
    """Inside equal_seeds nothing is sent, and replicas agree."""
    from dtensor.debug import CommDebugMode

    mesh = env.mesh(env.world)
    torch.manual_seed(5)
    x = placed(torch.ones(64, device=env.device), mesh, [R])
    with rng.equal_seeds(), CommDebugMode() as seen:
        y = torch.bernoulli(x * 0.5)
    assert seen.get_total_counts() == 0
    env.same_everywhere(y.to_local())
