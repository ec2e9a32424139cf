"""Which module gets which style: a plan is applied and undone, checked before it costs anything, and suggested.

`plan` and `undo` change a model; `check` runs a plan on a copy without values (`rehearsal`); `suggest` makes one by
trials (`trace`, `groups`, `trial`).
"""

from __future__ import annotations

from .plan import parallelize_module
from .undo import unparallelize_module

__all__ = ["parallelize_module", "unparallelize_module"]
