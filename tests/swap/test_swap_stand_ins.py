"""What stands for private helpers of torch's engine, called as programs call it."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.laws import rand
from torch import nn

import dtensor
from dtensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, RowwiseParallel
from dtensor.swap.stand_ins import parallelize_module, shard_tensor


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_a_tied_model_laid_out_in_two_calls() -> None:
    net, tokens = Tied(), torch.arange(15).reshape(3, 5) % 8

    @dtensor.simulate(4)
    def run() -> None:
        mesh, ours, plain = init_device_mesh("cpu", (4,)), copy.deepcopy(net), copy.deepcopy(net)
        parallelize_module(ours, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
        assert isinstance(ours.head.weight, DTensor) and ours.head.weight is ours.embed.weight
        parallelize_module(ours.head, mesh, ColwiseParallel(output_layouts=Replicate()))
        assert ours.head.weight is ours.embed.weight  # such programs see to it themselves
        y, want = ours(tokens), plain(tokens)
        torch.testing.assert_close(y, want)
        y.sum().backward()
        want.sum().backward()
        assert isinstance(ours.embed.weight.grad, DTensor)
        torch.testing.assert_close(ours.embed.weight.grad.full_tensor(), plain.embed.weight.grad)

    assert len(run) == 4


def test_a_plan_that_fails_leaves_what_is_shared() -> None:
    @dtensor.simulate(2)
    def run() -> None:
        mesh, net = init_device_mesh("cpu", (2,)), Tied()
        with pytest.raises(NotImplementedError):
            parallelize_module(net, mesh, {"embed": ColwiseParallel(), "": RowwiseParallel()})
        assert net.head.weight is net.embed.weight and not isinstance(net.embed.weight, DTensor)

    assert len(run) == 2


def test_parts_of_a_tensor_that_all_ranks_have() -> None:
    whole = rand(5, 4)

    @dtensor.simulate(4)
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        with CommDebugMode() as mode:
            x = shard_tensor(whole, [Shard(0), Shard(1)], mesh)
        assert mode.get_total_counts() == 0 and x.placements == (Shard(0), Shard(1))
        assert torch.equal(x.full_tensor(), whole)

    assert len(run) == 4


@pytest.mark.parametrize("op", ["sum", "avg", "max", "norm2"])
def test_memory_like_a_pending_tensor_is_pending(op: str) -> None:
    @dtensor.simulate(2)
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = nn.Module()
        with torch.device("meta"):
            module.register_buffer("total", DTensor.from_local(torch.zeros(()), mesh, [Partial(op)]))
        module.to_empty(device="cpu")
        total = module.total
        assert isinstance(total, DTensor) and total.placements == (Partial(op),)
        total.fill_(3.0)
        assert total.full_tensor().item() == 3.0

    assert len(run) == 2
