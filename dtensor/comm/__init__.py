"""How ranks communicate: one `Communicator` an axis of the mesh, in three worlds (process groups, simulated, fake).

Collectives are issued, waited for, counted and, where a group lacks a reduction, emulated here. Nothing below knows of
tensors with layouts.
"""

from __future__ import annotations

from dtensor.comm.communicator import Communicator
from dtensor.comm.fake import FakeWorld, Traffic
from dtensor.comm.world import World, current_world, kept

__all__ = ["Communicator", "FakeWorld", "Traffic", "World", "current_world", "kept"]
