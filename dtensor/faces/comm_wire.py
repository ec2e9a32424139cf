"""`dtensor.comm_wire`: another name for `dtensor.comm.wire`."""

from __future__ import annotations

import sys

from dtensor.comm import wire

sys.modules[__name__] = wire
