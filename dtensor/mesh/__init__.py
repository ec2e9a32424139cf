"""`DeviceMesh`: the ranks of a job as an array with named axes, and the process groups of its axes.

A mesh belongs to one rank and knows its coordinate; groups are made when they are first needed, alike on all ranks.
"""

from __future__ import annotations

from dtensor.mesh.device_mesh import DeviceMesh, as_mesh, init_device_mesh

__all__ = ["DeviceMesh", "as_mesh", "init_device_mesh"]
