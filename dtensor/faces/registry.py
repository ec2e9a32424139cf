"""`dtensor.registry`: another name for `dtensor.rules.registry`."""

from __future__ import annotations

import sys

from dtensor.rules import registry

sys.modules[__name__] = registry
