"""`dtensor.kernel`: another name for `dtensor.rules.kernel`."""

from __future__ import annotations

import sys

from dtensor.rules import kernel

sys.modules[__name__] = kernel
