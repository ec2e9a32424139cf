"""`dtensor.calibrate`: another name for `dtensor.redistribute.calibrate`."""

from __future__ import annotations

import sys

from dtensor.redistribute import calibrate

sys.modules[__name__] = calibrate
