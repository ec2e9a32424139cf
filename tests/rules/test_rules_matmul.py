"""The laws, for matrix products."""

from __future__ import annotations

import pytest
import torch
from helpers.laws import Sample, check_layouts, check_strategies
from helpers.samples.matmul import INFERENCE, SAMPLES


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_layouts(sample, mesh).must_hold()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(2, 3), (2, 2, 2)], ids=str)
def test_strategies(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_strategies(sample, mesh).must_hold()


@pytest.mark.parametrize("sample", INFERENCE, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_inference_mode(sample: Sample, mesh: tuple[int, ...]) -> None:
    with torch.inference_mode():
        check_layouts(sample, mesh).must_hold()
