"""Cross entropy over logits whose classes are sharded.

    with loss_parallel():
        F.cross_entropy(logits, target).backward()      # logits: f32[8,50257@tp], never gathered

    linear_cross_entropy(hidden, weight, target)        # the logits are never made
"""

from __future__ import annotations

from dtensor.folders import also_called

also_called(__name__)

from .context import loss_parallel
from .linear import linear_cross_entropy

__all__ = ["linear_cross_entropy", "loss_parallel"]
