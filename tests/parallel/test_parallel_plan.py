"""parallelize_module: how a plan is read, what is checked before anything changes, what stays shared."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.laws import ints, rand
from helpers.modules import Stack, Tied, mlp
from helpers.parallel import grads_match, on_ranks, same, seeded
from torch import nn

import dtensor
from dtensor import DeviceMesh, DTensor, Replicate, Shard, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

R = Replicate()


def sharded(net: nn.Module) -> set[str]:
    return {n for n, m in net.named_modules() if isinstance(getattr(m, "weight", None), DTensor)}


PATTERNS = {
    "layers.*.up": {"layers.0.up", "layers.1.up", "layers.2.up"},
    "layers.?.up": {"layers.0.up", "layers.1.up", "layers.2.up"},
    "layers.[01].up": {"layers.0.up", "layers.1.up"},
    "*.2.u*": {"layers.2.up"},
    "layers.1.*": {"layers.1.up", "layers.1.down"},
    "layers.[!0].down": {"layers.1.down", "layers.2.down"},
}


@pytest.mark.parametrize(("pattern", "want"), PATTERNS.items(), ids=PATTERNS)
def test_patterns(pattern: str, want: set[str]) -> None:
    on_ranks(lambda m: _names(parallelize_module(Stack(), m, {pattern: ColwiseParallel()}), want))


def _names(net: nn.Module, want: set[str]) -> None:
    assert sharded(net) == want


def test_a_plan_trains_like_one_process() -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(Stack)
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        net = copy.deepcopy(ref)
        assert parallelize_module(net, mesh, plan) is net
        a, b = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ref, net))
        for step in range(2):
            x = rand(4, 6, seed=step)
            same(net(x), ref(x))
            for model, opt in ((ref, a), (net, b)):
                opt.zero_grad()
                model(x).square().mean().backward()
            grads_match(ref, net)
            a.step()
            b.step()
            for p, q in zip(ref.parameters(), net.parameters(), strict=True):
                same(q, p)

    on_ranks(f)


BAD: dict[str, tuple[object, type[Exception], str]] = {
    "typo": ({"0": ColwiseParallel(), "layers.up": RowwiseParallel()}, ValueError, "no module matches 'layers'"),
    "deep typo": ({"0": ColwiseParallel(), "0.x": RowwiseParallel()}, ValueError, "below '0' are \\(none\\)"),
    "twice": ({"0": ColwiseParallel(), "[0]": RowwiseParallel()}, RuntimeError, "lays out one Linear twice"),
    "unknown module": ({"0": ColwiseParallel(), "1": ColwiseParallel()}, NotImplementedError, "'1' .GELU"),
    "no style": ({"0": ColwiseParallel(), "2": "row"}, TypeError, "ParallelStyle"),
    "no path": ({"0": ColwiseParallel(), 2: ColwiseParallel()}, TypeError, "paths"),
    "no plan": (["0"], TypeError, "ParallelStyle or a mapping"),
}


def test_a_child_that_was_taken_out_is_passed_over() -> None:
    def f(mesh: DeviceMesh) -> None:
        net = nn.Sequential(mlp(6, 8, 5), nn.Linear(5, 2))
        net[1] = None  # type: ignore[assignment]
        plan = {"0.0": ColwiseParallel(), "0.2": RowwiseParallel(), "1": ColwiseParallel(), "1.*": ColwiseParallel()}
        parallelize_module(net, mesh, plan)
        assert sharded(net)
        with pytest.raises(ValueError, match="no module matches '2'"):
            parallelize_module(nn.Sequential(None), mesh, {"2": ColwiseParallel()})  # type: ignore[arg-type]

    on_ranks(f)


@pytest.mark.parametrize(("plan", "error", "text"), BAD.values(), ids=BAD)
def test_a_bad_plan_changes_nothing(plan: object, error: type[Exception], text: str) -> None:
    def f(mesh: DeviceMesh) -> None:
        net = mlp(6, 8, 5)
        with CommDebugMode() as mode, pytest.raises(error, match=text):
            parallelize_module(net, mesh, plan)  # type: ignore[arg-type]
        assert mode.get_total_counts() == 0 and not sharded(net)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    on_ranks(f)


def test_no_plan_warns_and_changes_nothing() -> None:
    def f(mesh: DeviceMesh) -> None:
        net = nn.Linear(2, 2)
        with pytest.warns(UserWarning, match="parallelize_plan is None"):
            assert parallelize_module(net, mesh) is net
        assert not sharded(net)

    on_ranks(f, 1)


def test_a_style_is_applied_once() -> None:
    def f(mesh: DeviceMesh) -> None:
        net = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
        with pytest.raises(RuntimeError, match="laid out once"):
            parallelize_module(net, mesh, ColwiseParallel())

    on_ranks(f)


def test_the_mesh_of_the_context() -> None:
    def f(mesh: DeviceMesh) -> None:
        with mesh:
            net = parallelize_module(nn.Linear(4, 4), parallelize_plan=ColwiseParallel())
        assert net.weight.placements == (Shard(0),)

    on_ranks(f)


@pytest.mark.parametrize("path", ["", "0", None])
def test_whose_values_count(path: str | None) -> None:
    """src_data_rank, for the empty path too; None shards each rank's own and sends nothing."""

    def f(mesh: DeviceMesh) -> None:
        for src in (0, 2, None):
            inner = nn.Linear(4, 4)
            rank = mesh.get_local_rank()
            nn.init.constant_(inner.weight, rank)
            net = nn.Sequential(inner) if path == "0" else inner
            plan = ColwiseParallel() if path is None else {path: ColwiseParallel()}
            with CommDebugMode() as mode:
                parallelize_module(net, mesh, plan, src_data_rank=src)
            want = float(rank if src is None else src)
            assert torch.equal(inner.weight.to_local(), torch.full((1, 4), want))  # type: ignore[operator]
            assert (mode.get_total_counts() == 0) == (src is None)

    on_ranks(f)


def test_a_shared_parameter_stays_shared() -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(Tied)
        plan = {"emb": RowwiseParallel(input_layouts=R), "head": ColwiseParallel(output_layouts=R)}
        net = parallelize_module(copy.deepcopy(ref), mesh, plan)
        assert net.emb.weight is net.head.weight and len(list(net.parameters())) == 1
        t = ints(8, 5)
        net(t).square().sum().backward()
        ref(t).square().sum().backward()
        grads_match(ref, net)

    on_ranks(f)


@pytest.mark.parametrize("plan", [
    {"emb": ColwiseParallel(), "head": ColwiseParallel()}, {"emb": RowwiseParallel()}
], ids=["two layouts", "one of two"])  # fmt: skip
def test_a_plan_that_would_untie_is_refused(plan: dict[str, ParallelStyle]) -> None:
    def f(mesh: DeviceMesh) -> None:
        net = Tied()
        with pytest.raises(ValueError, match="one shared parameter would get several layouts"):
            parallelize_module(net, mesh, plan)
        assert not sharded(net) and net.emb.weight is net.head.weight

    on_ranks(f)


def test_a_style_of_ones_own() -> None:
    class Doubled(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            fn: Callable[..., object] = lambda mod, i, mesh: DTensor.from_local(i[0] * 2, mesh, [R])  # noqa: E731
            return dtensor.distribute_module(module, device_mesh, input_fn=fn)

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: nn.Linear(4, 3))
        net = parallelize_module(copy.deepcopy(ref), mesh, {"": Doubled()})
        same(net(rand(2, 4)), ref(2 * rand(2, 4)))

    on_ranks(f)


def test_copies_and_state_dicts() -> None:
    def f(mesh: DeviceMesh) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        ref = mlp(6, 10, 5)
        net = parallelize_module(copy.deepcopy(ref), mesh, plan)
        assert list(net.state_dict()) == list(ref.state_dict())
        other = copy.deepcopy(net)
        with torch.no_grad():
            other[0].weight.mul_(0)
        same(net(rand(3, 6)), ref(rand(3, 6)))
        other.load_state_dict(net.state_dict())
        same(other(rand(3, 6)), ref(rand(3, 6)))

    on_ranks(f)


def test_rows_of_a_larger_mesh_have_their_own_data() -> None:
    def f() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ref = mlp(6, 7, 5)
        net = parallelize_module(copy.deepcopy(ref), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = rand(3, 6, seed=mesh.get_local_rank("dp"))
        same(net(x), ref(x))

    dtensor.simulate(4)(f)
