"""The harness can fail: its comparison, its rules, a program that is not there."""

from __future__ import annotations

import pytest
import torch
from harness import Client, difference, differences, summary, version


def test_difference() -> None:
    a = torch.tensor([1.0, -10.0, 0.0])
    assert difference(a, a) == 0.0
    assert difference(a, a + torch.tensor([0.0, 0.0, 0.1])) == pytest.approx(0.01)
    for other in (a[:2], a.double(), torch.tensor([1.0, float("nan"), 0.0]), torch.tensor([1.0, float("inf"), 0.0])):
        assert difference(a, other) == float("inf")
        assert difference(other, a) == float("inf") or other.shape != a.shape
    assert differences({"x": a, "y": a}, {"x": a, "y": a * 2}) == (0.5, "y")
    assert differences({"x": a}, {})[0] == float("inf")
    assert summary({"x": a[0], "y 1": a, "y 2": a}) == {"x": 1.0, "norm of y": pytest.approx(202**0.5)}


ONE, OFF = {"loss": torch.tensor([1.0, 2.0])}, {"loss": torch.tensor([1.0, 2.5])}


@pytest.mark.parametrize(
    "torchs, ours, lists, fails",
    [
        (ONE, ONE, {}, False),
        (ONE, OFF, {}, True),
        (OFF, ONE, {}, False),
        (OFF, OFF, {}, True),
        (OFF, OFF, {"deviates": {"a": "why"}}, False),
        (OFF, {"loss": torch.tensor([1.0, 3.0])}, {"deviates": {"a": "why"}}, True),
        (ONE, "ValueError: no", {}, True),
        ("ValueError: no", ONE, {}, True),
        ("ValueError: no", ONE, {"torch_fails": {"a@2": "no"}}, False),
        ("ValueError: no", ONE, {"torch_fails": {"a@4": "no"}}, True),
        ("ValueError: no", ONE, {"torch_fails": {"a": "yes"}}, True),
        ("ValueError: no", OFF, {"torch_fails": {"a": "no"}}, True),
        (ONE, ONE, {"torch_fails": {"a": "no"}}, True),
    ],
)
def test_judgement(torchs: object, ours: object, lists: dict, fails: bool) -> None:
    client = Client("x", (), ("a",), **lists)
    assert bool(client._judged(2, "a", ONE, torchs, ours)[1]) == fails


def test_what_is_not_installed_is_skipped() -> None:
    assert version("torch") and not version("no-such-distribution")
    marks = Client("x", ("torch", "no-such-distribution"), ()).mark()
    assert "not installed: no-such-distribution" in marks[-1].kwargs["reason"] and marks[-1].args == (True,)
    assert Client("x", ("torch",), ()).mark()[-1].args == (False,)
