"""`dtensor.reshard_run`: another name for `dtensor.redistribute.executor.run`."""

from __future__ import annotations

import sys

from dtensor.redistribute.executor import run

sys.modules[__name__] = run
