"""Every block of docs/coming-from-torch.md: each of its functions, on four simulated ranks."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest

import dtensor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from-torch.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def cases() -> list[object]:
    found = []
    for block in BLOCKS:
        names: dict[str, object] = {}
        exec(compile(block, str(PAGE), "exec"), names)
        found += [
            pytest.param(f, id=n)
            for n, f in names.items()
            if isinstance(f, types.FunctionType) and f"def {n}(" in block
        ]
    return found


def test_the_page_has_blocks() -> None:
    assert len(BLOCKS) > 6


@pytest.mark.parametrize("case", cases())
def test_case(case: types.FunctionType) -> None:
    dtensor.simulate(4)(case)
