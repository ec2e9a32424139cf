"""Steps of a redistribution: frozen, printable values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dtensor.placement import Placement

__all__ = ["COLLECTIVES", "Layout", "Step", "bytes_text"]

Layout = tuple[Placement, ...]
COLLECTIVES = frozenset(
    {"all_gather", "all_reduce", "all_to_all", "all_to_all_reduce", "reduce_scatter", "spread_reduce"}
)


class Step(NamedTuple):
    """One move of a plan: from the layout `src` to the layout `dst`.

    Attributes:
        kind: all_gather, all_reduce, all_to_all, all_to_all_reduce (an all-to-all of pending parts, which the
            receivers reduce), reduce_scatter (each over `axes`, flattened row-major, one collective), spread_reduce
            (all-to-alls of pending parts to the ranks that reduce them, and of the results:
            `dtensor.redistribute.planner.balanced_reduction`), slice (keep a part of what this rank holds), scale
            (multiply by `factor`), embed (a shard among zeros), zero_fill or one_fill (keep the value at position 0 of
            `axes` only), keep (new label, same data), empty (the tensor has no elements).
        axes: the mesh axes concerned, ascending.
        src, dst: full layouts before and after.
        nbytes: bytes that a rank receives, or copies where nothing is received; of the largest shard.
        factor: of `scale`, else 1.
        wire: the dtype in which a reduction travels and adds up, where that is not the tensor's.
        passes: how many all-to-alls a spread_reduce takes at most, else 1; one that would carry nothing is left out.
    """

    kind: str
    axes: tuple[int, ...]
    src: Layout
    dst: Layout
    nbytes: int = 0
    factor: float = 1.0
    wire: torch.dtype | None = None
    passes: int = 1

    @property
    def launches(self) -> int:
        """Collectives of this step."""
        return self.passes if self.is_collective else 0

    @property
    def is_collective(self) -> bool:
        """True where ranks communicate."""
        return self.kind in COLLECTIVES

    def describe(self, names: Sequence[str]) -> str:
        """The step in one line; `names` are the mesh's axes."""
        over = f" over {'+'.join(names[a] for a in self.axes)}" if self.axes else ""
        by = f" by {self.factor:g}" if self.kind == "scale" else ""
        size = f", {'receives' if self.is_collective else 'copies'} {bytes_text(self.nbytes)}" if self.nbytes else ""
        kind = "" if self.wire is None else f", adds up in {str(self.wire).removeprefix('torch.')}"
        passes = f" in {self.passes}" if self.passes > 1 else ""
        return f"{self.kind}{over}{passes}{by}: {_layout(self.src)} -> {_layout(self.dst)}{size}{kind}"

    def __str__(self) -> str:
        return self.describe([str(a) for a in range(len(self.src))])


def _layout(layout: Layout) -> str:
    return f"[{', '.join(map(str, layout))}]"


def bytes_text(n: int) -> str:
    """A number of bytes, in the unit that suits it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n} B"
