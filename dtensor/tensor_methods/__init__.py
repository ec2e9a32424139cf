"""Methods of `DTensor` that need more than its layout: checks, checkpoints, memory, compiled programs."""

from __future__ import annotations
