"""The laws, for matrix products."""

from __future__ import annotations

import pytest
import torch
from helpers.laws import HELD, Sample, check_layouts, check_strategies
from helpers.samples.matmul import INFERENCE, SAMPLES


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_layouts(sample, mesh, limit=24).must_hold()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    check_strategies(sample, (2, 3), limit=32, held=HELD).must_hold()


@pytest.mark.parametrize("sample", SAMPLES[::4], ids=lambda s: s.name)
def test_strategies_of_three_axes(sample: Sample) -> None:
    check_strategies(sample, (2, 2, 2), limit=16, held=HELD).must_hold()


@pytest.mark.parametrize("sample", INFERENCE, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_inference_mode(sample: Sample, mesh: tuple[int, ...]) -> None:
    with torch.inference_mode():
        check_layouts(sample, mesh, limit=24).must_hold()
