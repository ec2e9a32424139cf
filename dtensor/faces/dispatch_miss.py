"""`dtensor.dispatch_miss`: another name for `dtensor.dispatch.miss`."""

from __future__ import annotations

import sys

from dtensor.dispatch import miss

sys.modules[__name__] = miss
