"""`dtensor.reshard_beside`: another name for `dtensor.redistribute.executor.side_streams`."""

from __future__ import annotations

import sys

from dtensor.redistribute.executor import side_streams

sys.modules[__name__] = side_streams
