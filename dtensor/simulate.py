"""`dtensor.simulate(n)` runs a program on `n` simulated ranks; `dtensor.simulate.fake_world(n)` is one rank of `n`.

Another name for `dtensor.simulate`, which see.
"""

from __future__ import annotations

import sys

from dtensor.simulation import simulate as _module
from dtensor.simulation.simulate import fake_world as fake_world
from dtensor.simulation.simulate import simulate as simulate

sys.modules[__name__] = _module
