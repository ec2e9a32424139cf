"""`dtensor.reshard_beside`: another name for `dtensor.redistribute.executor.asynchronous`."""

from __future__ import annotations

import sys

from dtensor.redistribute.executor import asynchronous

sys.modules[__name__] = asynchronous
