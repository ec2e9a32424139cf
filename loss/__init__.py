"""Cross entropy over logits whose classes are sharded.

    with loss_parallel():
        F.cross_entropy(logits, target).backward()      # logits: f32[8,50257@tp], never gathered
"""

from __future__ import annotations

from loss.context import loss_parallel

__all__ = ["loss_parallel"]
