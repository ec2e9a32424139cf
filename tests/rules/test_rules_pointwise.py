"""The laws, for pointwise ops and elementwise losses."""

from __future__ import annotations

import pytest
from helpers.laws import HELD, Sample, check_layouts, check_strategies
from helpers.samples.pointwise import SAMPLES


@pytest.mark.parametrize("at", range(len(SAMPLES)), ids=lambda i: SAMPLES[i].name)
def test_layouts(at: int) -> None:
    """Layouts of the inputs, on one axis or on two in turn, give the plain result, forward and backward."""
    check_layouts(SAMPLES[at], ((4,), (2, 2))[at % 2], limit=16).must_hold()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    """Every derived strategy gives the plain result."""
    report = check_strategies(sample, (2, 3), limit=20, held=HELD)
    assert not report.wrong, "\n".join(report.wrong[:10])
