"""`dtensor.device_mesh`: another name for `dtensor.mesh.device_mesh`."""

from __future__ import annotations

import sys

from dtensor.mesh import device_mesh

sys.modules[__name__] = device_mesh
