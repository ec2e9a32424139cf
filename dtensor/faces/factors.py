"""`dtensor.factors`: another name for `dtensor.rules.rule`."""

from __future__ import annotations

import sys

from dtensor.rules import rule

sys.modules[__name__] = rule
