"""How the steps of a plan are carried out on this rank's local tensors."""

from __future__ import annotations
