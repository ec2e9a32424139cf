"""`dtensor.propagate`: another name for `dtensor.rules.choice`."""

from __future__ import annotations

import sys

from dtensor.rules import choice

sys.modules[__name__] = choice
