"""`dtensor.dispatch_call`: another name for `dtensor.dispatch.call`."""

from __future__ import annotations

import sys

from dtensor.dispatch import call

sys.modules[__name__] = call
