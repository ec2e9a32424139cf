"""Steps of optimizers, loss scaling, and what measures and clips gradients, on one mesh and on several."""

from __future__ import annotations

from . import fused, lists, norms_over_meshes, pending_gradients

__all__ = ["fused", "lists", "norms_over_meshes", "pending_gradients"]
