"""Errors of the engine: what was called, what it got, the rule that was broken, a fix to paste."""

from __future__ import annotations

__all__ = ["CollectiveError", "LayoutError", "MeshError", "MixedTensorError", "NoRuleError", "explain_error"]


class CollectiveError(RuntimeError):
    """A collective that its process group did not finish: a timeout, an abort, a rank that is gone."""

    def during(self, what: str) -> None:
        """Say what the collective was for. Said once, by whoever is nearest to it."""
        text = str(self.args[0]) if self.args else ""
        if "\n  for: " not in text:
            head, _, rest = text.partition("\n  from: ")
            what = what.replace("\n", "\n    ")
            self.args = (f"{head}\n  for: {what}" + (f"\n  from: {rest}" if rest else ""),)


class LayoutError(RuntimeError):
    """A layout that an operation cannot take, or an operation that a layout does not allow."""


class MixedTensorError(LayoutError):
    """A plain tensor among DTensors."""


class MeshError(LayoutError):
    """Tensors of different meshes in one operation."""


class NoRuleError(NotImplementedError):
    """An operator without a sharding rule that cannot be run another way."""


def explain_error(call: str, got: str, rule: str, fix: str) -> str:
    """The four-part message. `call` and `got` are facts, `rule` is one sentence, `fix` is code to paste."""
    return f"{call}: {rule}\n  got: {got}\n  fix: {fix}"
