"""All rules are printed to one text file, so that a change of rules is read as a diff; `make golden` rewrites it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dtensor.propagation_rules.__main__ import main
from dtensor.propagation_rules.proof.count import KINDS, code_lines, coverage, covering, kernel_lines, kind_of, listing
from dtensor.rules.registry import entries, override, pattern

DOCS = Path(__file__).resolve().parents[2] / "docs"
aten = torch.ops.aten


def pinned() -> str:
    """The version of torch that constraints.txt names."""
    found = re.search(r"^torch==(\S+)", (DOCS.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert found
    return found.group(1)


@pytest.mark.skipif(torch.__version__.split("+")[0] != pinned(), reason="another torch has other overloads to count")
def test_the_golden_file_is_current() -> None:
    want = (DOCS / "rules.txt").read_text().splitlines()
    got = listing().splitlines()
    lost, new = sorted(set(want) - set(got)), sorted(set(got) - set(want))
    assert got == want, (
        f"run `make golden` and read the diff: {len(lost)} lines gone {lost[:4]}, {len(new)} new {new[:4]}"
    )


def test_every_rule_says_what_it_is() -> None:
    for name, entry in entries().items():
        assert entry.text and not re.search(r"lambda|<locals>| object at ", entry.text), f"{name}: {entry.text}"


def test_a_builder_without_text_prints_its_docstring() -> None:
    def mine(call):
        """Splits nothing, by hand.

        More.
        """

    with override("aten.addmm", mine, values="alpha", random=True):
        assert entries()["aten.addmm"].text == "mine: Splits nothing, by hand."
    with override("aten.mm", pattern("m k, k n -> m n", linear="0|1")):
        assert entries()["aten.mm"].text == "m k, k n -> m n   linear 0|1"


@pytest.mark.parametrize(
    ("op", "kind", "entry"),
    [
        (aten.mm.default, "functional", "aten.mm"),
        (aten.mm.out, "out", "aten.mm"),
        (aten.relu_.default, "in-place", "aten.relu"),
        (aten._foreach_exp.default, "foreach", "aten._foreach_exp"),
        (aten._foreach_exp_.default, "foreach", "aten._foreach_exp"),
        (aten.special_airy_ai.default, "functional", "aten.<pointwise>"),
        (aten.cudnn_convolution.default, "functional", None),
    ],
    ids=str,
)
def test_derived_forms_are_counted(op, kind: str, entry: str | None) -> None:
    found = covering(op)
    assert kind_of(op) == kind and (found.name if found else None) == entry


def test_the_count_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = coverage()
    assert found.overloads == sum(sum(c.values()) for c in found.by_entry.values())
    assert all(found.by_kind[k] > 0 for k in KINDS)
    assert found.overloads > 1164, "fewer overloads with a rule than torch's own engine has"
    assert main(["list", "--count"]) == 0
    assert f"{found.overloads} aten overloads have a rule" in capsys.readouterr().out


def test_the_readme_claims_no_more_than_there_is() -> None:
    text = (DOCS.parent / "README.md").read_text().replace("\n", " ")
    claim = re.search(r"more than ([\d,]+) overloads of aten in ([\d,]+) lines of code, ([\d.]+) an overload", text)
    assert claim
    overloads, lines, each = (float(c.replace(",", "")) for c in claim.groups())
    found = coverage()
    assert found.overloads >= overloads
    assert found.code <= 1.1 * lines and found.code / found.overloads <= each + 0.3


def test_lines_of_code(tmp_path: Path) -> None:
    source = tmp_path / "rule.py"
    source.write_text('''"""Doc."""

# note
X = """a
b"""

def run(ctx: KernelContext):
    """What."""
    # why
    return (ctx,
            1)
''')
    assert code_lines(source) == {4, 5, 7, 10, 11} and kernel_lines(source) == {7, 10, 11}


def test_list_takes_a_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "softmax"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("aten._softmax ") and "covers" in out and "aten.mm" not in out
    assert main(["list", "no_such_rule"]) == 2
