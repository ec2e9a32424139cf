"""The laws, for convolutions, pools, resampling, distances, losses and whole layers."""

from __future__ import annotations

import pytest
import samples_nn
from laws import Sample, check_layouts, check_strategies

SAMPLES = [s for table in vars(samples_nn).values() if isinstance(table, list) for s in table if isinstance(s, Sample)]


@pytest.mark.parametrize("at", range(len(SAMPLES)), ids=lambda i: SAMPLES[i].name)
def test_layouts(at: int) -> None:
    """Layouts of the inputs, on one axis or on two in turn, give the plain result, forward and backward."""
    check_layouts(SAMPLES[at], ((3,), (2, 2))[at % 2], limit=8).must_hold()


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s not in samples_nn.BAGS], ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    """Every derived strategy gives the plain result."""
    mesh = (2, 3) if sample in samples_nn.CONV[:6] else (3,)
    check_strategies(sample, mesh, limit=16).must_hold()
