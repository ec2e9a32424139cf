"""What each style sends, forward and backward, over 4 ranks with x = f32[2,8,16] and the sum of the local output."""

from __future__ import annotations

import pytest
from helpers.laws import ints, rand
from helpers.parallel import on_ranks, sent
from helpers.plan_rows import ROWS, Row

from dtensor import DeviceMesh, DTensor
from dtensor.debug import CommDebugMode
from dtensor.parallel import (
    parallelize_module,
)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_collectives(row: Row) -> None:
    def f(mesh: DeviceMesh) -> None:
        with CommDebugMode() as init:
            net = parallelize_module(row.make(), mesh, row.plan)
        x = ints(32, 2, 8) if "Embedding" in type(net).__name__ else rand(2, 8, 16)
        x = x if row.x is None else x.chunk(4, row.x)[mesh.get_local_rank()].contiguous()
        x = x.requires_grad_() if x.is_floating_point() else x
        with CommDebugMode() as forward:
            y = net(x)
        local = y.to_local() if isinstance(y, DTensor) else y
        with CommDebugMode() as backward:
            local.sum().backward()
        assert (sent(init), sent(forward), sent(backward)) == (row.init, row.forward, row.backward)
        assert tuple(local.shape) == row.out
        placed = [p.grad.placements[0] if isinstance(p.grad, DTensor) else None for p in net.parameters()]
        assert tuple(placed) == row.grads

    on_ranks(f)
