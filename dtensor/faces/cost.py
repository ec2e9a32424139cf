"""`dtensor.cost`: another name for `dtensor.redistribute.cost_model`."""

from __future__ import annotations

import sys

from dtensor.redistribute import cost_model

sys.modules[__name__] = cost_model
