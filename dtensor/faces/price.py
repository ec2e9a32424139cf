"""`dtensor.price`: another name for `dtensor.rules.pricing`."""

from __future__ import annotations

import sys

from dtensor.rules import pricing

sys.modules[__name__] = pricing
