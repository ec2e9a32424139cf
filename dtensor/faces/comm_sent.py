"""`dtensor.comm_sent`: another name for `dtensor.comm.pending`."""

from __future__ import annotations

import sys

from dtensor.comm import pending

sys.modules[__name__] = pending
