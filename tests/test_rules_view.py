"""The laws for views, slices, joins, indexing and factories, and what these rules promise about communication."""

from __future__ import annotations

import pytest
from laws import Sample, check_layouts, check_strategies
from samples_view import SAMPLES

from propagation_rules.refinement import common_factors


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    """Every layout of the inputs gives the plain result, forward and backward."""
    check_layouts(sample, mesh, limit=24).must_hold()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(2,), (2, 3)], ids=str)
def test_strategies(sample: Sample, mesh: tuple[int, ...]) -> None:
    """Every derived strategy gives the plain result."""
    report = check_strategies(sample, mesh, limit=32)
    assert not report.wrong, "\n".join(report.wrong[:10])
