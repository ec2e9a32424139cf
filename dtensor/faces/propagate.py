"""`dtensor.propagate`: another name for `dtensor.rules.decision`."""

from __future__ import annotations

import sys

from dtensor.rules import decision

sys.modules[__name__] = decision
