"""The styles against the same module in one process: values, gradients, layouts, collectives, errors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.laws import ints, rand
from helpers.modules import mlp
from helpers.parallel import STYLES, grads_match, kinds, on_ranks, same, seeded
from torch import nn

import dtensor
from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

R = Replicate()


@pytest.mark.parametrize("hidden", [16, 10, 5, 3, 1])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (6,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_colwise_to_rowwise_in_plain_tensors(hidden: int, shape: tuple[int, ...], bias: bool) -> None:
    """Any hidden size, handed over as plain tensors: one all-reduce each way."""

    def f(mesh: DeviceMesh) -> None:
        ref = mlp(6, hidden, 5, bias)
        net = parallelize_module(copy.deepcopy(ref), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x, y = rand(*shape).requires_grad_(), rand(*shape).requires_grad_()
        with CommDebugMode() as forward:
            out = net(x)
        with CommDebugMode() as backward:
            out.square().sum().backward()
        ref(y).square().sum().backward()
        assert not isinstance(out, DTensor)
        same(out, ref(y))
        assert x.grad is not None and y.grad is not None
        same(x.grad, y.grad)
        grads_match(ref, net)
        if hidden > 1:  # for one feature it is cheaper to gather it
            assert kinds(forward) == {"all_reduce": 1} and kinds(backward) == {"all_reduce": 1}

    on_ranks(f)


LAYOUTS: list[Placement] = [R, Shard(0), Shard(1), Shard(-1)]


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("given", LAYOUTS, ids=str)
@pytest.mark.parametrize("wanted", LAYOUTS, ids=str)
def test_linear_from_any_layout_to_any(
    style: type[ColwiseParallel] | type[RowwiseParallel], given: Placement, wanted: Placement
) -> None:
    """Each pair with sizes that divide under one style, and with sizes that do not under the other."""
    even = (LAYOUTS.index(given) + LAYOUTS.index(wanted) + (style is ColwiseParallel)) % 2 == 0

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: nn.Linear(8, 12) if even else nn.Linear(7, 5))
        made = style(input_layouts=given, output_layouts=wanted, use_local_output=False)
        net = parallelize_module(copy.deepcopy(ref), mesh, made)
        x = rand(4, 8, ref.in_features)  # type: ignore[arg-type]
        dx = distribute_tensor(x, mesh, [given]).requires_grad_()
        out = net(dx)
        want = Shard(2) if wanted == Shard(-1) else wanted
        assert out.placements == (want,) and out.shape == ref(x).shape
        same(out, ref(x))
        out.square().sum().backward()
        x.requires_grad_()
        ref(x).square().sum().backward()
        assert dx.grad is not None and x.grad is not None
        same(dx.grad, x.grad)
        grads_match(ref, net)

    on_ranks(f)


@pytest.mark.parametrize("rows", [8, 6, 3])
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_embedding(rows: int, style: type[ColwiseParallel] | type[RowwiseParallel]) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: nn.Embedding(rows, 5))
        made = style(input_layouts=R, use_local_output=False)
        net = parallelize_module(copy.deepcopy(ref), mesh, made)
        assert net.weight.placements == ((Shard(1),) if style is ColwiseParallel else (Shard(0),))
        i = ints(rows, 3, 4)
        out = net(i)
        same(out, ref(i))
        out.square().sum().backward()
        ref(i).square().sum().backward()
        grads_match(ref, net)

    on_ranks(f)


def test_more_inputs_and_keywords_survive() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor, by: int = 1, *, plus: int = 0) -> torch.Tensor:
            return super().forward(input) * by + plus

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(lambda: Scaled(4, 8))
        net = parallelize_module(copy.deepcopy(ref), mesh, ColwiseParallel(output_layouts=R))
        x = rand(3, 4)
        same(net(x, 3, plus=2), ref(x, 3, plus=2))
        same(net(input=x, by=3), ref(x, 3))

    on_ranks(f)


@pytest.mark.parametrize("given", [None, R, Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("length", [8, 6])
def test_sequence_parallel(given: object, length: int) -> None:
    """A plain input is a piece already; a DTensor is brought to it. Nothing is sent; gradients stay pending."""

    def f(mesh: DeviceMesh) -> None:
        ref = nn.LayerNorm(6)
        net = parallelize_module(nn.LayerNorm(6), mesh, SequenceParallel())
        x = rand(4, length, 6)
        if given is None:
            if length % 4:
                return
            piece = x.chunk(4, 1)[mesh.get_local_rank()]
            with CommDebugMode() as mode:
                out = net(piece)
        else:
            dx = distribute_tensor(x, mesh, [given])  # type: ignore[list-item]
            with CommDebugMode() as mode:
                out = net(dx)
        assert mode.get_total_counts() == (1 if given == Shard(0) else 0)
        assert out.placements == (Shard(1),) and out.shape == x.shape
        same(out, ref(x))
        out.square().sum().backward()
        ref(x).square().sum().backward()
        assert net.weight.placements == (R,) and net.weight.grad.placements == (Partial(),)
        grads_match(ref, net)

    on_ranks(f)


def test_prepare_inputs_and_outputs() -> None:
    class Sum(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, *, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.seen = (a, b, c)
            return a + c, b

    def f(mesh: DeviceMesh) -> None:
        style = PrepareModuleInputOutput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(R, None),
            input_kwarg_layouts={"c": Shard(1)},
            desired_input_kwarg_layouts={"c": R},
            use_local_input=True,
            output_layouts=(R, None),
            desired_output_layouts=(Shard(0), None),
        )
        net = parallelize_module(Sum(), mesh, style)
        a, c, rank = rand(8, 4), rand(8, 4, seed=1), mesh.get_local_rank()
        b = torch.ones(3)
        out, other = net(a.chunk(4)[rank], b, c=c.chunk(4, 1)[rank])
        assert other is b
        for got, want in zip(net.seen, (a, b, c), strict=True):
            assert not isinstance(got, DTensor)
            same(got, want)
        same(out, (a + c).chunk(4)[rank])

    on_ranks(f)


def test_prepare_looks_at_the_real_layout() -> None:
    """A DTensor that has the desired layout already is not moved, whatever input_layouts says."""

    def f(mesh: DeviceMesh) -> None:
        style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=R)
        net = parallelize_module(nn.Identity(), mesh, style)
        with CommDebugMode() as mode:
            out = net(distribute_tensor(rand(8, 2), mesh, [R], src_data_rank=None))
        assert out.placements == (R,) and mode.get_total_counts() == 0

    on_ranks(f)


def test_prepare_without_given_layouts_leaves_inputs_alone() -> None:
    """Desired layouts alone change nothing, as in torch: programs pass them where inputs come as they should."""

    def f(mesh: DeviceMesh) -> None:
        for style in (
            PrepareModuleInput(desired_input_layouts=R, use_local_output=True),
            PrepareModuleInput(desired_input_kwarg_layouts={"input": R}),
            PrepareModuleInputOutput(desired_input_layouts=(R, R), output_layouts=R, desired_output_layouts=R),
        ):
            net = parallelize_module(nn.Identity(), mesh, style)
            cut = distribute_tensor(rand(8, 2), mesh, [Shard(0)], src_data_rank=None)
            plain = rand(8, 2)
            same(net(plain), plain)
            if isinstance(style, PrepareModuleInput):
                assert net(cut) is cut

    on_ranks(f)


def _apply(style: ParallelStyle, module: nn.Module) -> Callable[[DeviceMesh], object]:
    return lambda mesh: parallelize_module(module, mesh, style)


BAD: list[tuple[str, type[Exception], str, Callable[[DeviceMesh], object]]] = [
    ("module", NotImplementedError, "knows Linear and Embedding only", _apply(ColwiseParallel(), nn.LayerNorm(4))),
    ("layouts", TypeError, "one placement", lambda m: ColwiseParallel(input_layouts=[R])),  # type: ignore[arg-type]
    ("unpaired", ValueError, "go together", lambda m: PrepareModuleInput(input_layouts=R)),
    ("lengths", ValueError, "go together",
     lambda m: PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=R)),
    ("keywords", ValueError, "same inputs", lambda m: PrepareModuleInput(input_kwarg_layouts={"a": R})),
    ("count", ValueError, "2 positional inputs for 1", lambda m: parallelize_module(
        nn.Identity(), m, PrepareModuleInput(input_layouts=R, desired_input_layouts=R))(rand(2), rand(2))),
    ("no tensor", ValueError, "no tensor", lambda m: parallelize_module(
        nn.Identity(), m, PrepareModuleInput(input_layouts=R, desired_input_layouts=R))(3)),
    ("outputs", ValueError, "returned 1 outputs", lambda m: parallelize_module(
        nn.Identity(), m, PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=(R, R)))(rand(2))),
    ("whole input", ValueError, "pass input_layouts=Replicate", lambda m: parallelize_module(
        nn.Linear(8, 4), m, RowwiseParallel())(rand(3, 8))),
    ("not a tensor", TypeError, "expected a tensor", lambda m: parallelize_module(
        nn.Linear(8, 4), m, ColwiseParallel())("x")),
    ("sequence", ValueError, "expected a tensor or a DTensor", lambda m: parallelize_module(
        nn.LayerNorm(4), m, SequenceParallel())(3)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "call"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_errors(error: type[Exception], text: str, call: Callable[[DeviceMesh], object]) -> None:
    def f(mesh: DeviceMesh) -> None:
        with pytest.raises(error, match=text):
            call(mesh)

    on_ranks(f)


@pytest.mark.parametrize("style", STYLES, ids=lambda s: type(s).__name__)
def test_a_mesh_of_two_axes_is_refused(style: ParallelStyle) -> None:
    def f() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = nn.Linear(4, 4)
        with pytest.raises(ValueError, match=r'one mesh axis(.|\n)*fix: mesh\["tp"\]'):
            parallelize_module(net, mesh, style)
        assert not isinstance(net.weight, DTensor) and not net._forward_hooks and not net._forward_pre_hooks

    dtensor.simulate(4)(f)


@pytest.mark.parametrize("style", STYLES, ids=lambda s: type(s).__name__)
def test_repr_names_the_arguments(style: ParallelStyle) -> None:
    names = {
        n: getattr(dtensor, n) for n in ("Shard", "Replicate", "Partial")
    } | {type(s).__name__: type(s) for s in STYLES}  # fmt: skip
    if not isinstance(style, PrepareModuleInputOutput):
        assert repr(eval(repr(style), names)) == repr(style)
    assert type(style).__name__ in repr(style)
