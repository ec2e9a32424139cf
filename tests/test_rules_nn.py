"""The laws, for convolutions, pools, resampling, distances, losses and whole layers."""

from __future__ import annotations

import pytest
import samples_nn
from laws import Sample, check_layouts, check_strategies

SAMPLES = [s for table in vars(samples_nn).values() if isinstance(table, list) for s in table if isinstance(s, Sample)]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    """Every layout of the inputs gives the plain result, forward and backward."""
    check_layouts(sample, mesh, limit=16).must_hold()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    """Every derived strategy gives the plain result."""
    check_strategies(sample, (2, 3), limit=24).must_hold()
