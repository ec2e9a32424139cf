"""What each aten op means: the folder `propagation_rules` beside this package, under a name that is always ours."""

from __future__ import annotations

from dtensor.folders import load_beside

load_beside(__name__)
