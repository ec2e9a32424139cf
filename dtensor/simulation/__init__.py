"""Many ranks in one process: threads that take turns, with random streams and process groups of their own.

Unmodified programs run on them, and ranks that disagree end with an error instead of a hang.
"""

from __future__ import annotations

from dtensor.simulation.simulate import CollectiveMismatch, RankError, fake_world

__all__ = ["CollectiveMismatch", "RankError", "fake_world"]
