"""The laws, for softmax and normalisations."""

from __future__ import annotations

import pytest
from helpers.laws import HELD, Sample, check_layouts, check_strategies, in_turn, named
from helpers.samples.norm import SAMPLES


@pytest.mark.parametrize(("sample", "mesh"), in_turn(SAMPLES), ids=named)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    """Every layout of the inputs gives the plain result, forward and backward."""
    check_layouts(sample, mesh, limit=16).must_hold()


# On CPU the saved statistics of an evaluating batch_norm have no elements, whatever its shape function says: they
# cannot be compared.
COMPARABLE = [s for s in SAMPLES if s.name != "batch_norm eval"]


@pytest.mark.parametrize("sample", COMPARABLE, ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    """Every derived strategy gives the plain result."""
    report = check_strategies(sample, (2, 3), limit=20, held=HELD)
    assert not report.wrong, "\n".join(report.wrong[:10])
