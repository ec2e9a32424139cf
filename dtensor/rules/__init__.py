"""The algebra: what a sharding rule is, where rules are registered, and how one turns input layouts into a decision.

A decision is a pure value: a function of mesh, layouts, global shapes and static arguments, never of rank or values.
"""

from __future__ import annotations

from dtensor.rules.call import Call
from dtensor.rules.choice import all_decisions, decide
from dtensor.rules.decision import Decision
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import override, pattern, register, unregister
from dtensor.rules.rule import Kernel, Linear, Rule, linear

__all__ = [
    "Call", "Decision", "Kernel", "KernelContext", "Linear", "Rule", "all_decisions", "decide", "linear", "override",
    "pattern", "register", "unregister",
]  # fmt: skip
