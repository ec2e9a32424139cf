"""The laws, for embedding tables; what a pending lookup can be used for; what is sharded and what is sent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import HELD, Sample, check_layouts, check_strategies, ints, rand
from helpers.samples.embedding import BAGS, RENORM, SAMPLES

from dtensor import DeviceMesh, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from dtensor.comm.observers import observers


@pytest.mark.parametrize("sample", [*SAMPLES, *RENORM, *BAGS], ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_layouts(sample: Sample, mesh: tuple[int, ...]) -> None:
    check_layouts(sample, mesh, limit=24).must_hold()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    check_strategies(sample, (2, 3), limit=32, held=HELD).must_hold()


@pytest.mark.parametrize("sample", SAMPLES[::4], ids=lambda s: s.name)
def test_strategies_of_three_axes(sample: Sample) -> None:
    check_strategies(sample, (2, 2, 2), limit=16, held=HELD).must_hold()


def _table(mesh: DeviceMesh, w: torch.Tensor, *p: Placement) -> torch.Tensor:
    return distribute_tensor(w.clone(), mesh, list(p)).requires_grad_()


def test_pending_lookups_live_side_by_side() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        a, b, i, j = rand(10, 6), rand(10, 6, seed=1), ints(10, 4), ints(10, 4, seed=1)
        di, dj = (distribute_tensor(t, mesh, [Replicate()]) for t in (i, j))
        x, y = F.embedding(di, _table(mesh, a, Shard(0))), F.embedding(dj, _table(mesh, b, Shard(0)))
        z = F.embedding(dj, _table(mesh, a, Shard(0)))
        assert x.placements == y.placements == (Partial(),)
        torch.testing.assert_close(y.full_tensor(), F.embedding(j, b))
        torch.testing.assert_close((x + z).full_tensor(), F.embedding(i, a) + F.embedding(j, a))
        torch.testing.assert_close(x.full_tensor() + x.full_tensor(), 2 * F.embedding(i, a))
        torch.testing.assert_close(x.redistribute(placements=[Shard(1)]).full_tensor(), F.embedding(i, a))

    simulate(4)(run)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("bags", [False, True], ids=["lookup", "bags"])
def test_lookup_and_gradient_send_nothing(placement: Placement, bags: bool) -> None:
    """Whatever lookups in tables of the same shape came before: what is decided depends on the call alone."""
    look = F.embedding_bag if bags else F.embedding

    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        i = distribute_tensor(ints(10, 4, 5), mesh, [Replicate()])
        for other in (Shard(0), Shard(1), Replicate(), placement):
            w = _table(mesh, rand(10, 8), other)
            out = look(i, w)
            out = out.redistribute(placements=[Replicate()]) if other == Shard(0) else out
            sent: list[str] = []
            watch = lambda kind, ranks, elements, itemsize: sent.append(kind)  # noqa: E731, B023
            observers.append(watch)
            out.backward(torch.ones_like(out))
            observers.remove(watch)
            assert w.grad is not None
            assert w.grad.placements == (other,)
            assert sent == ([] if other != Shard(1) else sent)

    simulate(4)(run)


def test_a_table_and_its_gradient_of_a_gradient() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        i, g = ints(10, 4, 5), rand(4, 5, 8, seed=3)
        for placement in (Shard(0), Shard(1), Replicate()):
            found = []
            for whole in (True, False):
                w = rand(10, 8).requires_grad_() if whole else _table(mesh, rand(10, 8), placement)
                at, by = (i, g) if whole else (distribute_tensor(t, mesh, [Replicate()]) for t in (i, g))
                (first,) = torch.autograd.grad((F.embedding(at, w).pow(3) * by).sum(), w, create_graph=True)
                (second,) = torch.autograd.grad(first.pow(2).sum(), w)
                found.append(second if whole else second.full_tensor())
            torch.testing.assert_close(found[1], found[0])

    simulate(4)(run)


def test_out_of_range_index_raises_everywhere() -> None:
    for bad in (10, -1):

        def run() -> int:
            mesh = init_device_mesh("cpu", (4,))
            w = _table(mesh, rand(10, 8), Shard(0))
            with pytest.raises(IndexError, match="out of range"):
                F.embedding(distribute_tensor(torch.tensor([1, bad]), mesh, [Replicate()]), w)  # noqa: B023
            return 1

        assert sum(simulate(4)(run)) == 4
