"""Names of `torch.distributed.tensor.experimental`: local functions, custom rules, plain tensors among DTensors."""

from __future__ import annotations

from dtensor.dispatch.hit import implicit_replication
from dtensor.experimental.local_map import local_map
from dtensor.experimental.register import register_sharding

__all__ = ["implicit_replication", "local_map", "register_sharding"]
