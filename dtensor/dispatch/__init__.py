"""One operation on DTensors: the hot path and, on a miss, all that it takes to get there.

`hit` runs cached plans, `miss` finds them; the other files hold what differs from one kind of op to the next.
"""

from __future__ import annotations

from dtensor.dispatch.hit import implicit_replication, special
from dtensor.dispatch.no_rule import strict_rules

__all__ = ["implicit_replication", "special", "strict_rules"]
