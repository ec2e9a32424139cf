"""`dtensor.reshard_plan`: another name for `dtensor.redistribute.plan`."""

from __future__ import annotations

import sys

from dtensor.redistribute import plan

sys.modules[__name__] = plan
