"""Looking at what an engine does: collectives by kind and module, those that hang, and how a tensor is sharded."""

from __future__ import annotations

from dtensor.debug.comm_mode import CommDebugMode
from dtensor.debug.visualize import visualize_sharding
from dtensor.debug.watch import watch_collectives

__all__ = ["CommDebugMode", "visualize_sharding", "watch_collectives"]
