"""The laws, for pointwise ops and elementwise losses."""

from __future__ import annotations

import pytest
from helpers.laws import HELD, Sample, check_layouts, check_strategies, in_turn, named
from helpers.samples.pointwise import SAMPLES


@pytest.mark.parametrize(("sample", "mesh"), in_turn(SAMPLES), ids=named)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    """Every layout of the inputs gives the plain result, forward and backward."""
    check_layouts(sample, mesh, limit=16).must_hold()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    """Every derived strategy gives the plain result."""
    report = check_strategies(sample, (2, 3), limit=20, held=HELD)
    assert not report.wrong, "\n".join(report.wrong[:10])
