"""Cross entropy over sharded classes: the folder `loss` beside this package, under a name that is always ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loss import linear_cross_entropy as linear_cross_entropy
    from loss import loss_parallel as loss_parallel
else:
    from dtensor.folders import load_beside

    load_beside(__name__)
