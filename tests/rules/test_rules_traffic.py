"""What the rules of reductions, norms and numbers promise about communication."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from helpers.laws import make, rand

import dtensor
from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, StridedShard, init_device_mesh
from dtensor.debug import CommDebugMode

R = Replicate()


def on_four_ranks(fn: Callable[[DeviceMesh], None], *shape: int) -> None:
    """Run `fn` on four simulated ranks with a mesh of `shape`, (4,) unless given."""

    def body() -> None:
        fn(init_device_mesh("cpu", shape or (4,)))

    dtensor.simulate(4)(body)


def free(fn: Callable[[], DTensor], *layout: Placement) -> DTensor:
    """The result of `fn`, which must send nothing and leave this layout."""
    with CommDebugMode() as comm:
        out = fn()
    assert comm.get_total_counts() == 0, comm.get_comm_counts()
    assert out.placements == layout, out.placements
    return out


def test_total_norm_is_reduced_once() -> None:
    def body(mesh: DeviceMesh) -> None:
        full = [rand(5, 3, seed=i) for i in range(10)]
        parameters = [torch.nn.Parameter(make(t, mesh, (Shard(i % 2),))) for i, t in enumerate(full)]
        for p in parameters:
            p.grad = p.detach() * 2
        with CommDebugMode() as comm:
            total = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert comm.get_total_counts() <= 2, comm.get_comm_counts()
        assert isinstance(total, DTensor)
        torch.testing.assert_close(total.full_tensor(), torch.stack([(t * 2).norm() for t in full]).norm())

    on_four_ranks(body)


def test_numbers_in_pending_sums_send_nothing() -> None:
    def body(mesh: DeviceMesh) -> None:
        for op in ("sum", "avg", "max", "min"):
            x = make(rand(4, 3), mesh, (Partial(op),))
            torch.testing.assert_close(free(lambda x=x: x + 1, Partial(op)).full_tensor(), rand(4, 3) + 1)
            torch.testing.assert_close(free(lambda x=x: x.add_(2), Partial(op)).full_tensor(), rand(4, 3) + 2)
            torch.testing.assert_close(free(lambda x=x: x.fill_(3), Partial(op)).full_tensor(), torch.full((4, 3), 3.0))

    on_four_ranks(body)


def test_reductions_follow_split_factor_shards() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = make(rand(16, 3), mesh, (StridedShard(0, split_factor=2),))
        torch.testing.assert_close(free(lambda: x.mean(), Partial()).full_tensor(), rand(16, 3).mean())
        torch.testing.assert_close(free(lambda: x.amax(0), Partial("max")).full_tensor(), rand(16, 3).amax(0))
        free(lambda: x.mean(1), StridedShard(0, split_factor=2))

    on_four_ranks(body)


def test_uneven_means_stay_pending() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = make(rand(5, 3), mesh, (Shard(0), Shard(0)))
        y = make(rand(5, 3, seed=1), mesh, (Shard(0), Shard(0)))
        free(lambda: x.mean(), Partial(), Partial())
        free(lambda: F.mse_loss(x, y), Partial(), Partial())

    on_four_ranks(body, 2, 2)


def test_rows_spread_over_ranks_stay_there() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = make(rand(6, 8), mesh, (R, Shard(1)))
        for fn in (lambda t: t.softmax(1), lambda t: F.layer_norm(t, (8,)), lambda t: t.cumsum(1)):
            with CommDebugMode() as comm:
                out = fn(x)
            assert comm.get_total_counts() == 1, comm.get_comm_counts()
            assert out.placements == (R, Shard(1)), out.placements

    on_four_ranks(body, 2, 2)
