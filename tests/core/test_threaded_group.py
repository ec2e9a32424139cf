"""A process group that is written in Python: torch's own, whose ranks are threads of one process."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
import torch.distributed as dist
from helpers.laws import rand

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

SHARDS = (Shard(0), Shard(1))


def redistribute() -> None:
    for shape in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", shape)
        for n, (src, dst) in product((8, 5), product((*SHARDS, Replicate()), repeat=2)):
            whole = rand(n, 6)
            for _ in range(2):  # the second time what the first one bound is used
                x = distribute_tensor(whole, mesh, [src] * mesh.ndim)
                assert torch.equal(x.redistribute(placements=[dst] * mesh.ndim).full_tensor(), whole)
        pending = DTensor.from_local(rand(8, 6), mesh, [Partial()] * mesh.ndim)
        for dst in (*SHARDS, Replicate()):
            for _ in range(2):
                got = pending.redistribute(placements=[dst] * mesh.ndim).full_tensor()
                torch.testing.assert_close(got, 4 * rand(8, 6))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 takes such groups down with an error of its own")
def test_redistribution() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for packages of torch's own tests
        from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

        ranks: list[int] = []

        def run(_: object) -> None:
            redistribute()
            ranks.append(dist.get_rank())

        spawn_threads_and_init_comms(run, world_size=4)(None)
    assert sorted(ranks) == [0, 1, 2, 3]
