"""Public names, docstrings and error texts use the field's words: those of the glossary in docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dtensor", "propagation_rules", "parallel", "loss")

INSTEAD = {
    r"(un)?cuts?": "sharded, shards, replicated",
    r"talkers?": "axes that move, ranks that send",
    r"landing": "receive region",
    r"unlike": "different",
    r"seen whole": "fused",
    r"(is|are|be|stays?|made|makes|kept|reduced|reduces) whole": "replicated, full, not sharded",
    r"no such": "there is no",
    r"puts? off": "deferred, defers",
    r"owes?": "is pending",
    r"dearer": "more expensive",
}
"""Words that this project used for itself: the field's words for them."""
PRIVATE = re.compile(r"(?<![A-Za-z])(" + "|".join(INSTEAD) + r")(?![A-Za-z])", re.IGNORECASE)
ERRORS = re.compile(r"Error$|Warning$|^explain_error$|^warn$|^expect$")


def strings(node: ast.AST) -> Iterator[ast.Constant]:
    yield from (n for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, texts of errors and warnings, and public names; with the line of each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if ERRORS.search(name):
                yield from ((s.lineno, s.value) for s in strings(node))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.lineno, re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", node.name)


def faults(code: str) -> list[str]:
    """The lines with a private word, and the word."""
    return [f"{line}: {found[0]}" for line, text in texts(ast.parse(code)) for found in PRIVATE.finditer(text)]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_fields_words(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}:{fault}" for path in files for fault in faults(path.read_text())]
    assert files and not found, "\n".join(found)


PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_fields_words_in_docs(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    assert not [found[0] for found in PRIVATE.finditer(prose)]


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ('"""The dim is cut."""', 1),
        ("def cut_runs(): pass", 1),
        ("class CutRuns: pass", 1),
        ('raise ValueError("no such axis")', 1),
        ("cuts = 1  # a private name", 0),
        ('"""The dim is sharded, the execution cutting edge."""', 0),
        ('"""The whole tensor."""', 0),
        ('"""A dim that stays whole."""', 1),
    ],
)
def test_the_list_can_fail(code: str, wrong: int) -> None:
    assert len(faults(code)) == wrong
