"""The laws, for convolutions."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from laws import Sample, check_layouts, check_strategies, rand

SUMS = ("sum",)
SAMPLES = [
    Sample("conv2d", F.conv2d, (rand(4, 3, 5, 6), rand(6, 3, 3, 3), rand(6)), pending=SUMS),
    Sample(
        "conv2d no bias", lambda x, w: F.conv2d(x, w, padding=1), (rand(4, 3, 5, 6), rand(6, 3, 3, 3)), pending=SUMS
    ),
    Sample(
        "conv2d few",
        lambda x, w: F.conv2d(x, w, stride=2, dilation=2),
        (rand(1, 2, 7, 7), rand(2, 2, 3, 3)),
        pending=(),
    ),
    Sample(
        "conv2d grouped",
        lambda x, w, b: F.conv2d(x, w, b, groups=2),
        (rand(4, 4, 4, 4), rand(6, 2, 2, 2), rand(6)),
        pending=SUMS,
    ),
    Sample("conv2d no batch", F.conv2d, (rand(3, 5, 6), rand(6, 3, 3, 3), rand(6)), pending=()),
    Sample("conv1d", F.conv1d, (rand(5, 3, 9), rand(4, 3, 2), rand(4)), pending=()),
    Sample(
        "conv_transpose2d",
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        (rand(4, 3, 3, 3), rand(3, 4, 2, 2), rand(4)),
        pending=SUMS,
    ),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_layouts(sample, mesh, limit=24).must_hold()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(2, 3)], ids=str)
def test_strategies(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_strategies(sample, mesh).must_hold()
