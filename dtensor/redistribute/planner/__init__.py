"""Which steps lead from one layout to another: functions of mesh, shape, dtype, placements and the cost model alone.

`layout_space` knows layouts and what a step between two costs; `candidates` (with `single_collective` and
`balanced_reduction`) has the few good ways; `search` looks further where seconds decide.
"""

from __future__ import annotations
