"""Names and defaults of the documented arguments, and every conversion of inputs and outputs that they ask for."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from helpers.laws import rand
from helpers.parallel import on_ranks, same
from torch import nn

from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from dtensor.debug import CommDebugMode
from dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    input_reshard,
    parallelize_module,
    set_check_inputs,
)

R, P, S = Replicate(), Partial(), Shard
NEEDED = inspect.Parameter.empty
LINEAR = {"input_layouts": None, "output_layouts": None, "use_local_output": True}
INPUTS = {"input_layouts": None, "desired_input_layouts": None, "input_kwarg_layouts": None,
          "desired_input_kwarg_layouts": None}  # fmt: skip
OUTPUTS = {"output_layouts": NEEDED, "desired_output_layouts": NEEDED, "use_local_output": True}

DOCUMENTED: list[tuple[Any, dict[str, object], bool]] = [
    (ColwiseParallel, LINEAR, True),
    (RowwiseParallel, LINEAR, True),
    (SequenceParallel, {"sequence_dim": 1, "use_local_output": False}, True),
    (PrepareModuleInput, {**INPUTS, "use_local_output": False}, True),
    (PrepareModuleOutput, OUTPUTS, True),
    (PrepareModuleInputOutput, {**INPUTS, "use_local_input": False, **OUTPUTS}, True),
    (input_reshard, {"module": NEEDED, "tp_device_mesh": NEEDED, "input_reshard_dim": None}, False),
    (parallelize_module, {"module": NEEDED, "device_mesh": None, "parallelize_plan": None}, False),
]


@pytest.mark.parametrize(("call", "arguments", "by_name"), DOCUMENTED, ids=lambda x: getattr(x, "__name__", None))
def test_documented_arguments(call: Any, arguments: dict[str, object], by_name: bool) -> None:
    """They come first, in this order; what is ours alone comes after and has a default."""
    found = inspect.signature(call).parameters
    assert list(found)[: len(arguments)] == list(arguments)
    for i, (name, p) in enumerate(found.items()):
        if i < len(arguments):
            assert p.default is arguments[name] or p.default == arguments[name]
            assert (p.kind is p.KEYWORD_ONLY) == by_name
        else:
            assert p.kind is p.KEYWORD_ONLY and p.default in ((0,) if name == "src_data_rank" else (None, False))


LAYOUTS: list[Placement] = [R, S(0), S(1), S(-1), P]


def piece(x: torch.Tensor, layout: Placement, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's plain part of `x`."""
    if isinstance(layout, Shard):
        return x.chunk(mesh.size(), layout.dim)[mesh.get_local_rank()].clone()
    return x / mesh.size() if isinstance(layout, Partial) else x.clone()


@pytest.mark.parametrize("given", LAYOUTS, ids=str)
@pytest.mark.parametrize("desired", LAYOUTS[:4], ids=str)
@pytest.mark.parametrize("by_name", [True, False])
def test_inputs(given: Placement, desired: Placement, by_name: bool) -> None:
    """Plain and DTensor inputs, by place and by name, handed on as DTensors and as plain tensors, with gradients."""

    class Seen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x
            return x

    def f(mesh: DeviceMesh) -> None:
        whole, weight = rand(4, 8, 4), rand(4, 8, 4, seed=1)
        for local in (False, True):
            style = (
                PrepareModuleInput(input_kwarg_layouts={"x": given}, desired_input_kwarg_layouts={"x": desired},
                                   use_local_output=local)
                if by_name else
                PrepareModuleInput(input_layouts=given, desired_input_layouts=desired, use_local_output=local)
            )  # fmt: skip
            net = parallelize_module(Seen(), mesh, style)
            x = piece(whole, given, mesh).requires_grad_()
            out = net(x=x) if by_name else net(x)
            if local:
                assert not isinstance(net.seen, DTensor)
                same(net.seen, piece(whole, desired, mesh))  # type: ignore[arg-type]
                continue
            want = S(2) if desired == S(-1) else desired
            assert net.seen.placements == (want,)  # type: ignore[union-attr]
            same(out, whole)
            (out * distribute_tensor(weight, mesh, [want], src_data_rank=None)).sum().backward()
            same(x.grad, piece(weight, R if isinstance(given, Partial) else given, mesh))  # type: ignore[arg-type]
            dx = distribute_tensor(whole, mesh, [S(1)], src_data_rank=None)
            same(net(x=dx) if by_name else net(dx), whole)

    on_ranks(f)


@pytest.mark.parametrize("given", LAYOUTS, ids=str)
@pytest.mark.parametrize("desired", LAYOUTS[:4], ids=str)
def test_outputs(given: Placement, desired: Placement) -> None:
    def f(mesh: DeviceMesh) -> None:
        whole = rand(4, 8, 4)
        for local in (False, True):
            style = PrepareModuleOutput(output_layouts=given, desired_output_layouts=desired, use_local_output=local)
            out = parallelize_module(nn.Identity(), mesh, style)(piece(whole, given, mesh))
            assert isinstance(out, DTensor) != local
            same(out, piece(whole, desired, mesh) if local else whole)

    on_ranks(f)


class Pair(NamedTuple):
    a: torch.Tensor
    b: object


def test_containers_of_outputs_and_what_is_left_alone() -> None:
    class Give(nn.Module):
        def forward(self, x: object) -> object:
            return x

    def f(mesh: DeviceMesh) -> None:
        style = PrepareModuleOutput(output_layouts=(R, None), desired_output_layouts=(S(0), None))
        net = parallelize_module(Give(), mesh, style)
        x = rand(4, 2)
        for given in ((x, "b"), [x, "b"], Pair(x, "b")):
            out = net(given)
            assert type(out) is type(given) and out[1] == "b" and out[0].shape == (1, 2)
        nothing = parallelize_module(nn.Identity(), mesh, PrepareModuleInput())
        assert nothing(x) is x
        named = PrepareModuleInput(input_kwarg_layouts={"y": R}, desired_input_kwarg_layouts={"y": S(0)})
        assert parallelize_module(nn.Identity(), mesh, named)(x) is x

    on_ranks(f)


@pytest.mark.parametrize("make", [ColwiseParallel, RowwiseParallel])
def test_inputs_of_linear_styles_by_keyword_and_no_grad(make: Any) -> None:
    def f(mesh: DeviceMesh) -> None:
        ref = nn.Linear(8, 4)
        net = parallelize_module(nn.Linear(8, 4), mesh, make(input_layouts=R, output_layouts=R))
        net.load_state_dict({n: distribute_tensor(p.detach(), mesh, net.get_parameter(n).placements)  # type: ignore[attr-defined]
                             for n, p in ref.named_parameters()})  # fmt: skip
        x = rand(3, 8)
        want = net.weight.full_tensor() @ x.t()  # type: ignore[operator]
        with torch.no_grad():
            same(net(input=x), want.t() + net.bias.full_tensor())  # type: ignore[operator]
            same(net(x), net(input=x))
        with torch.inference_mode():
            assert net(x).shape == (3, 4)

    on_ranks(f)


def linear(style: Any) -> Any:
    return lambda m: parallelize_module(nn.Linear(8, 4), m, style, check_inputs=True)


WHOLE, ROWS = linear(ColwiseParallel()), linear(ColwiseParallel(input_layouts=S(0)))

MISTAKES: dict[str, tuple[Any, Any, str | None]] = {
    "equal replicas": (WHOLE, lambda r: torch.ones(2, 8), None),
    "replicas that differ": (WHOLE, lambda r: torch.full((2, 8), float(r == 3)), "ranks 0 and 3, tensors of different"),
    "even pieces": (ROWS, lambda r: torch.full((2, 8), float(r)), None),
    "uneven pieces": (ROWS, lambda r: torch.ones(1 if r == 2 else 2, 8), r"shapes \[2, 8\] and \[1, 8"),
    "an empty piece": (ROWS, lambda r: torch.ones(0 if r == 3 else 2, 8), "which may be sharded unevenly"),
    "uneven features": (
        lambda m: parallelize_module(nn.Linear(7, 4), m, RowwiseParallel(), check_inputs=True),
        lambda r: torch.ones(2, 1 if r == 3 else 2), None),
    "other shapes beside the features": (
        linear(RowwiseParallel()), lambda r: torch.ones(2 + (r == 1), 2), "ranks 0 and 1"),
    "complex, sequence": (
        lambda m: parallelize_module(nn.Dropout(0.0), m, SequenceParallel(), check_inputs=True),
        lambda r: torch.ones(2, 3, dtype=torch.complex64), None),
    "indices": (
        lambda m: parallelize_module(nn.Embedding(8, 4), m, RowwiseParallel(input_layouts=R), check_inputs=True),
        lambda r: torch.tensor([1, 2 + r]), "of different values"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "given", "text"), MISTAKES.values(), ids=MISTAKES)
def test_inputs_that_do_not_go_together(make: Any, given: Any, text: str | None) -> None:
    """With check_inputs they are an error on every rank, and what goes together passes."""

    def f(mesh: DeviceMesh) -> None:
        net = make(mesh)
        if text is None:
            net(given(mesh.get_local_rank()))
            return
        with pytest.raises(ValueError, match=text):
            net(given(mesh.get_local_rank()))

    on_ranks(f)


def test_inputs_are_compared_over_all_axes() -> None:
    def f() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        more: dict[str, Any] = {"axis": "tp", "others": S(0), "check_inputs": True}
        net = parallelize_module(nn.Linear(8, 4), mesh, ColwiseParallel(), **more)
        net(torch.full((2, 8), float(mesh.get_local_rank("dp"))))
        with pytest.raises(ValueError, match="ranks 2 and 3, tensors of different values"):
            net(torch.full((2, 8), float(mesh.get_rank() == 3)))

    simulate(4)(f)


HOW: dict[str, Any] = {"argument": "first", "switch": False, "environment": False}


@pytest.mark.parametrize("how", HOW)
def test_the_first_call_of_each_shape_is_compared(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one module, for all by a switch, for all by the environment: one gather a shape and dtype, and no more."""
    if how == "environment":
        monkeypatch.setenv("DTENSOR_CHECK_INPUTS", "first")

    def gathers(net: nn.Module, x: torch.Tensor) -> int:
        with CommDebugMode() as comm:
            net(x)
        return comm.get_total_counts()

    def f(mesh: DeviceMesh) -> None:
        r = mesh.get_local_rank()
        net = parallelize_module(nn.Linear(8, 4), mesh, ColwiseParallel(), check_inputs=HOW[how])
        other = parallelize_module(nn.Linear(8, 4), mesh, ColwiseParallel(), check_inputs=HOW[how])
        assert [gathers(net, torch.ones(n, 8)) for n in (2, 2, 3, 2, 3)] == [1, 0, 1, 0, 0]
        assert [gathers(other, torch.ones(n, 8)) for n in (2, 2)] == [1, 0]
        for x, text in (
            (torch.full((4, 8), float(r)), "of different values"), (torch.ones(4 + r, 8), r"of shapes \[4, 8\] and"),
            (torch.ones(5, 8, dtype=torch.float64 if r == 3 else torch.int64), "of different dtypes"),
        ):  # fmt: skip
            for _ in range(2):  # what did not go together is compared again
                with pytest.raises(ValueError, match=text):
                    net(x)

    set_check_inputs("first" if how == "switch" else None)
    try:
        on_ranks(f)
    finally:
        set_check_inputs(None)


def test_modes_of_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(mesh: DeviceMesh) -> None:
        for mode in ("always", 2, None):
            with pytest.raises(ValueError, match='True, False or "first"'):
                parallelize_module(nn.Linear(8, 4), mesh, ColwiseParallel(), check_inputs=mode)  # type: ignore[arg-type]
        net = parallelize_module(nn.Linear(8, 4), mesh, ColwiseParallel())
        with pytest.raises(ValueError, match="must be first, 1 or 0"):
            net(torch.ones(2, 8))

    with pytest.raises(ValueError, match="set_check_inputs"):
        set_check_inputs("second")  # type: ignore[arg-type]
    monkeypatch.setenv("DTENSOR_CHECK_INPUTS", "yes")
    on_ranks(f, 2)


def test_errors_that_may_come_from_inputs_say_how_to_see() -> None:
    def shapes() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        net = parallelize_module(nn.Linear(8, 4), mesh, RowwiseParallel(input_layouts=R))
        net(torch.ones(2 + mesh.get_rank(), 8))

    with pytest.raises(RuntimeError, match=r'DTENSOR_CHECK_INPUTS=first .* check_inputs="first"'):
        simulate(2)(shapes)
    set_check_inputs("first")
    try:
        with pytest.raises(ValueError, match=r"of shapes \[2, 8\] and \[3, 8\]"):
            simulate(2)(shapes)
    finally:
        set_check_inputs(None)
