"""`dtensor.lower`: a training step as one program of local ops and collectives, traced once.

`step` is where to begin; the other files record a trace, hold what it depends on, and write it as code.
"""

from __future__ import annotations

from dtensor.lowering.step import Lowered, LowerError, lower

__all__ = ["LowerError", "Lowered", "lower"]
