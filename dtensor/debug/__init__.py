"""Looking at what an engine does: collectives by kind and module, and how a tensor is cut."""

from __future__ import annotations

from dtensor.debug.comm_mode import CommDebugMode
from dtensor.debug.visualize import visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding"]
