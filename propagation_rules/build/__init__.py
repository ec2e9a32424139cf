"""What rules and kernels are made of: rules by labels, dtypes, statistics of shards, exchanges along a dim, halos.

Families import from the modules here, and no module here from a family.
"""

from __future__ import annotations
