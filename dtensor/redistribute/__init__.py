"""From one layout to another: plans, which are pure values, what they cost, and how they are carried out.

`planner` chooses the collectives, `executor` runs them on local tensors; nothing is decided while a plan runs.
"""

from __future__ import annotations

from dtensor.redistribute.cost_model import CostModel, current_cost_model, set_cost_model, use_cost_model
from dtensor.redistribute.plan import plan_reshard

__all__ = ["CostModel", "current_cost_model", "plan_reshard", "set_cost_model", "use_cost_model"]
