"""Which collectives lead from one layout to another: the space of layouts, candidate plans and the search among
them.
"""

from __future__ import annotations
