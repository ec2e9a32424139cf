"""Distances between the rows of two matrices, or of one.

    _cdist_forward     ... p [m], ... r [m] -> ... p r
    its backward       ... p r, ... p [m], ... r [m], ... p r -> ... p [m]        linear in the gradient

The distances within one matrix (`pdist`) pair every row with every other in one flat dim, so nothing of it is
free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtensor.rules.registry import Call, pattern, register
from dtensor.rules.rule import Rule

from .build.empty_shards import zeros_of


@dataclass(frozen=True, slots=True)
class _filled:  # noqa: N801 - used as a function
    """A pattern whose op gives zeros on empty shards."""

    of: pattern

    def __call__(self, call: Call) -> Rule:
        return replace(
            self.of(call), bind=lambda ins, outs: zeros_of(outs) if any(not s.local_numel for s in ins) else None
        )

    @property
    def text_form(self) -> str:
        """Printed form."""
        return self.of.text_form


register("aten._cdist_forward", _filled(pattern("... p [m], ... r [m] -> ... p r")), values="p")
register(
    "aten._cdist_backward",
    _filled(pattern("... p r, ... p [m], ... r [m], ... p r -> ... p [m]", linear="0")),
    values="p",
)
register("aten._pdist_forward", pattern("[n] [m] -> [k]"), values="p")
register("aten._pdist_backward", pattern("[k], [n] [m], [k] -> [n] [m]", linear="0"), values="p")
