"""How one module is laid out: the styles, and what they share.

`style` is the base and what every style does to inputs and outputs; `linear`, `packed`, `prepare` and `sequence` are
the styles; `axis` says what the other axes of the mesh do, `shared_input` and `compare` look at inputs.
"""

from __future__ import annotations

from .linear import ColwiseParallel, RowwiseParallel
from .packed import PackedColwiseParallel
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .sequence import SequenceParallel
from .style import ParallelStyle

__all__ = [
    "ColwiseParallel", "PackedColwiseParallel", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput",
    "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel",
]  # fmt: skip
