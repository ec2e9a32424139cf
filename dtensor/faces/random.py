"""`dtensor.random`: another name for `dtensor.dispatch.random`."""

from __future__ import annotations

import sys

from dtensor.dispatch import random

sys.modules[__name__] = random
