"""`dtensor.comm_sent`: another name for `dtensor.comm.issue`."""

from __future__ import annotations

import sys

from dtensor.comm import issue

sys.modules[__name__] = issue
