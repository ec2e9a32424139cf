"""Every Python block of the README and of docs/ runs as it stands, each in an interpreter of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = ("coming-from-torch.md",)  # blocks of functions, run by a test of their own
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """(file:line, code) of every block marked as Python."""
    found = []
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text() if path.name not in ELSEWHERE else ""
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            found.append((f"{path.relative_to(ROOT)}:{line}", match.group(1)))
    return found


def test_readme_has_blocks() -> None:
    assert any(where.startswith("README.md") for where, _ in blocks())


@pytest.mark.parametrize("code", [pytest.param(code, id=where) for where, code in blocks()])
def test_block_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
