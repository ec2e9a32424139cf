"""Layers of `torch.nn` and small networks on random layouts of inputs, parameters and buffers, against one process."""

from __future__ import annotations

import pytest
from helpers.laws import Sample, check_layouts
from helpers.samples.nn_modules import MODULES, NETS


@pytest.mark.parametrize("sample", MODULES, ids=lambda s: s.name)
def test_modules(sample: Sample) -> None:
    check_layouts(sample, (3,), limit=3, seed=len(sample.name)).must_hold()


@pytest.mark.parametrize("sample", NETS, ids=lambda s: s.name)
def test_nets(sample: Sample) -> None:
    check_layouts(sample, (2, 2), limit=3, seed=len(sample.name)).must_hold()
