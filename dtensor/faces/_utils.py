"""`dtensor._utils`: another name for `dtensor.tensor_methods.offsets`."""

from __future__ import annotations

import sys

from dtensor.tensor_methods import offsets

sys.modules[__name__] = offsets
