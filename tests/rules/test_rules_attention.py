"""The laws, for attention; what is sent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import HELD, Sample, check_layouts, check_strategies
from helpers.samples.attention import SAMPLES, qkv

from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from dtensor.comm.observers import observers

COMPARED = [s for s in SAMPLES if "learned" not in s.name]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_layouts(sample, mesh, limit=24).must_hold()


@pytest.mark.parametrize("sample", COMPARED, ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    check_strategies(sample, (2, 3), limit=24, held=HELD).must_hold()


@pytest.mark.parametrize("sample", COMPARED[::4], ids=lambda s: s.name)
def test_strategies_of_three_axes(sample: Sample) -> None:
    check_strategies(sample, (2, 2, 2), limit=16, held=HELD).must_hold()


@pytest.mark.parametrize("kv_heads", [8, 4], ids=str)
@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "heads"])
def test_batch_and_heads_send_nothing(dim: int, kv_heads: int) -> None:
    def run() -> list[str]:
        mesh = init_device_mesh("cpu", (4,))
        q, k, v = (distribute_tensor(t, mesh, [Shard(dim)]).requires_grad_() for t in qkv(4, 8, 3, 4, kv_heads))
        mask = distribute_tensor(torch.ones(3, 3).tril().bool(), mesh, [Replicate()])
        sent: list[str] = []
        watch = lambda kind, ranks, elements, itemsize: sent.append(kind)  # noqa: E731
        observers.append(watch)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=kv_heads != 8)
        out.backward(torch.ones_like(out))
        observers.remove(watch)
        assert q.grad is not None and q.grad.placements == out.placements == (Shard(dim),)
        return sent

    assert simulate(4)(run) == [[]] * 4
