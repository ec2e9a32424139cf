"""The laws, for convolutions, pools, resampling, distances, losses and whole layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import HELD, Sample, check_layouts, check_strategies, in_turn, named, rand
from helpers.samples import nn as samples_nn

from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from dtensor.comm.observers import observers

SAMPLES = [s for table in vars(samples_nn).values() if isinstance(table, list) for s in table if isinstance(s, Sample)]

# Bags are no rules; of CTC part of a result is not initialised; what evaluation saves has no elements.
COMPARED = [s for s in SAMPLES if s not in [*samples_nn.BAGS, *samples_nn.CTC, *samples_nn.EVALUATION]]
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):  # their ops have no shape function there: no strategies
    COMPARED = [s for s in COMPARED if s.name not in ("_convolution", "encoder layer")]


@pytest.mark.parametrize(("sample", "mesh"), in_turn(SAMPLES, ((3,), (2, 2))), ids=named)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    """Every layout of the inputs gives the plain result, forward and backward."""
    check_layouts(sample, mesh, limit=8).must_hold()


@pytest.mark.parametrize("sample", COMPARED, ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    """Every derived strategy gives the plain result."""
    mesh = (2, 3) if sample in samples_nn.CONV[:6] else (3,)
    check_strategies(sample, mesh, limit=16, held=HELD).must_hold()


@pytest.mark.parametrize("layer", ["conv", "pool"])
def test_a_cut_spatial_dim_sends_no_more_than_the_halo(layer: str) -> None:
    """A row to each neighbour, forward, and there and back in backward; without overlap nothing is sent."""

    def run() -> list[tuple[str, int]]:
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(rand(1, 2, 64, 512), mesh, [Shard(2)]).requires_grad_()
        w = distribute_tensor(rand(2, 2, 3, 3), mesh, [Replicate()])
        sent: list[tuple[str, int]] = []
        watch = lambda kind, ranks, elements, itemsize: sent.append((kind, elements))  # noqa: E731
        observers.append(watch)
        y = F.conv2d(x, w, padding=1) if layer == "conv" else F.max_pool2d(x, 2)
        y.backward(torch.ones_like(y))
        observers.remove(watch)
        assert y.placements == (Shard(2),) and x.grad is not None and x.grad.placements == (Shard(2),)
        return sent

    for rank, sent in enumerate(simulate(4)(run)):
        rows = 0 if layer == "pool" else 1 if rank in (0, 3) else 2
        assert sent == ([] if layer == "pool" else [("all_to_all", 2 * 512 * rows)] * 3), (rank, sent)
