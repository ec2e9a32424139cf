"""Bad input: a clear error, the same on every rank, before anything is changed or sent."""

import pytest
import torch
from helpers.laws import make, rand

import dtensor
from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.errors import LayoutError, MeshError, MixedTensorError

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _mixed(mesh, other):
    return make(rand(8, 3), mesh, [S0]) @ rand(3, 2)


def _meshes(mesh, other):
    return make(rand(8, 3), mesh, [S0]) + make(rand(8, 3), other, [S0, R])


CASES = {
    "too few placements": (lambda m, o: distribute_tensor(rand(4, 4), o, [S0]), ValueError, "1 placements for"),
    "too many placements": (lambda m, o: distribute_tensor(rand(4, 4), m, [S0, R]), ValueError, "2 placements"),
    "redistribute too many": (
        lambda m, o: make(rand(4, 4), m, [S0]).redistribute(placements=[R, R]), ValueError, "2 placements",
    ),
    "dim out of range": (lambda m, o: distribute_tensor(rand(4, 4), m, [Shard(2)]), IndexError, "names dim 2"),
    "dim of a 0-d tensor": (lambda m, o: distribute_tensor(torch.tensor(1.0), m, [S0]), IndexError, "nothing to shard"),
    "factory dim": (lambda m, o: dtensor.zeros(4, device_mesh=m, placements=[Shard(1)]), IndexError, "names dim 1"),
    "factory count": (lambda m, o: dtensor.ones(4, device_mesh=o, placements=[S0]), ValueError, "one placement per"),
    "sparse factory": (
        lambda m, o: dtensor.zeros(4, device_mesh=m, layout=torch.sparse_coo), ValueError, "strided",
    ),
    "mixed meshes": (_meshes, MeshError, "same mesh"),
    "plain among DTensors": (_mixed, MixedTensorError, "got mixed torch.Tensor and DTensor"),
    "to Partial": (lambda m, o: make(rand(4), m, [S0]).redistribute(placements=[P]), RuntimeError, "pending reduction"),
    "two reductions": (
        lambda m, o: distribute_tensor(rand(4), o, [P, Partial("max")]), ValueError, "one kind of reduction",
    ),
    "no placements": (lambda m, o: make(rand(4), m, [S0]).redistribute(), RuntimeError, "placements are needed"),
    "not a leaf": (lambda m, o: distribute_tensor(rand(4).requires_grad_() * 2, m, [R]), RuntimeError, "not a leaf"),
    "not a tensor": (lambda m, o: distribute_tensor([1.0], m, [R]), TypeError, "expected a torch.Tensor"),
    "relaid DTensor": (lambda m, o: distribute_tensor(make(rand(4), m, [S0]), m, [R]), ValueError, "redistribute"),
    "from_local of a DTensor": (lambda m, o: DTensor.from_local(make(rand(4), m, [R]), m, [R]), RuntimeError, "got a"),
    "from_local shape only": (lambda m, o: DTensor.from_local(rand(4), m, [R], shape=(4,)), RuntimeError, "both"),
    "from_local wrong shape": (
        lambda m, o: DTensor.from_local(rand(2), m, [S0], shape=(100,), stride=(1,)), RuntimeError, "gives this rank",
    ),
    "shape mistake": (lambda m, o: make(rand(4, 3), m, [S0]) + make(rand(4, 4), m, [S0]), RuntimeError, "[Ss]i"),
    "resize": (lambda m, o: make(rand(4), m, [S0]).resize_(8), LayoutError, "can grow"),
    "out of another shape": (
        lambda m, o: torch.add(make(rand(4), m, [S0]), 1, out=make(rand(3), m, [R])), LayoutError, "out=",
    ),
    "out of a dtype": (
        lambda m, o: torch.add(make(rand(4), m, [S0]), 1, out=make(rand(4).long(), m, [R])), RuntimeError, "be cast",
    ),
    "plain target": (lambda m, o: rand(4).add_(make(rand(4), m, [S0])), MixedTensorError, "written"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_alike_on_all_ranks(name: str) -> None:
    call, error, text = CASES[name]

    def run():
        mesh, other = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        with pytest.raises(error, match=text) as caught:
            call(mesh, other)
        # the ranks are still in step: a collective works
        assert make(torch.ones(3), mesh, [P]).full_tensor().sum() == 3
        return str(caught.value).replace(f"rank {mesh.get_rank()}", "rank r")

    texts = set(dtensor.simulate(4)(run))
    if name != "from_local wrong shape":
        assert len(texts) == 1, texts


def test_a_refused_write_changes_nothing() -> None:
    def check(mesh, placed):
        x = make(rand(4, 2), mesh, [placed])
        before, other = x.to_local().clone(), make(rand(3, 5), mesh, [S0])
        for call in (
            lambda: x.relu_().add_(other), lambda: x[1:3].add_(other), lambda: x.copy_(other),
            lambda: torch.add(other, 1, out=x[1:3]), lambda: torch._foreach_add_([x[1:3], x], [other, other]),
            lambda: x[1:].index_copy_(0, make(torch.tensor([7, 0]), mesh, [R]), make(rand(2, 2), mesh, [R])),
        ):  # fmt: skip
            with pytest.raises((RuntimeError, IndexError)):
                call()
        torch.testing.assert_close(x.full_tensor(), rand(4, 2).relu())
        if placed is not P:
            torch.testing.assert_close(x.to_local(), before.relu())
        assert x.placements == (placed,)

    def run():
        mesh = init_device_mesh("cpu", (2,))
        for placed in (P, S0, R):
            check(mesh, placed)

    dtensor.simulate(2)(run)


def test_the_fix_in_the_message_works() -> None:
    def run():
        mesh = init_device_mesh("cpu", (2,))
        x = make(rand(8, 3), mesh, [S0])
        with pytest.raises(MixedTensorError, match=r"distribute_tensor\(x, mesh, placements\)"):
            x @ rand(3, 2)
        torch.testing.assert_close(
            (x @ distribute_tensor(rand(3, 2), mesh, [R])).full_tensor(), rand(8, 3) @ rand(3, 2)
        )
        with dtensor.experimental.implicit_replication():
            torch.testing.assert_close((x @ rand(3, 2)).full_tensor(), rand(8, 3) @ rand(3, 2))

    from dtensor import experimental  # noqa: F401

    dtensor.simulate(2)(run)
