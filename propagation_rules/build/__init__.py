"""What rules and kernels are made of: rules by labels, dtypes, statistics of shards, exchanges along a dim, halos.

Families import from the modules here, and no module here from a family. What clients use is named on this page.
"""

from __future__ import annotations

from .classes import check_targets, local_slots
from .dtypes import accumulation_dtype
from .gathered import finite_top, gather_stacked, local_max_and_sum, log_sum_exp, merged_sums

__all__ = [
    "accumulation_dtype", "check_targets", "finite_top", "gather_stacked", "local_max_and_sum", "local_slots",
    "log_sum_exp", "merged_sums",
]  # fmt: skip
