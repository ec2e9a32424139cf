"""Steps and plans of a redistribution: frozen, printable values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dtensor.placement import Placement
from dtensor.spec import Spec

__all__ = ["COLLECTIVES", "Layout", "ReshardPlan", "Step", "bytes_text"]

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


@dataclass(frozen=True, slots=True, eq=False)
class ReshardPlan:
    """How to bring a tensor from the layout of `src` to that of `dst`; equal on all ranks of the mesh.

    Attributes:
        src, dst: specs of one tensor on one mesh.
        steps: what to do, in order; () where nothing is to be done.
        cost: seconds, by the cost model that chose the steps.
    """

    src: Spec
    dst: Spec
    steps: tuple[Step, ...]
    cost: float
    bound: list[Callable[[torch.Tensor, bool], torch.Tensor]] = field(default_factory=list, repr=False)
    """The executor's: the plan bound to this rank's coord, filled at the first run."""

    @property
    def collectives(self) -> tuple[str, ...]:
        """Kinds of the collectives, in order; a step that takes several is there several times."""
        return tuple(s.kind for s in self.steps for _ in range(s.launches))

    @property
    def received_elements(self) -> int:
        """Elements that this rank receives; 0 for a rank outside the mesh."""
        return 0 if self.src.mesh.coord is None else self.received_by(self.src.mesh.coord)

    def received_by(self, coord: Sequence[int]) -> int:
        """Elements that the rank at `coord` receives, by set arithmetic."""
        from dtensor.redistribute.geometry import received

        return sum(received(self.src, step, tuple(coord)) for step in self.steps)

    def __str__(self) -> str:
        names = [self.src.mesh.axis_name(a) for a in range(len(self.src.placements))]
        lines = [f"{self.src} -> {self.dst}: {len(self.collectives)} collectives, {self.cost * 1e6:.1f} us"]
        lines += [f"  {i}. {step.describe(names)}" for i, step in enumerate(self.steps, 1)]
        return "\n".join(lines)


def _layout(layout: Layout) -> str:
    return f"[{', '.join(map(str, layout))}]"


def bytes_text(n: int) -> str:
    """A number of bytes, in the unit that suits it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n} B"
