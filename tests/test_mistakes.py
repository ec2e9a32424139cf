"""Mistakes of a first hour: each is made, its message is read, and the fix that the message names works."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_parallel_styles import on_ranks
from torch import nn

import dtensor
from dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.parallel import (
    ColwiseParallel,
    PackedColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    check_plan,
    parallelize_module,
    unparallelize_module,
)  # fmt: skip
from dtensor.simulate import fake_world

R = Replicate()


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


# ------------------------------------------------------------ the optimizer comes too early
class Own(ParallelStyle):
    """A style of somebody else's, which says nothing of what it does to parameters."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def rows(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, p in list(part.named_parameters(recurse=False)):
                part.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))

        return distribute_module(module, device_mesh, rows)


def by_plan(net: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def one_by_one(net: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(net[0], mesh, ColwiseParallel())  # type: ignore[index]
    parallelize_module(net[2], mesh, RowwiseParallel())  # type: ignore[index]


CALLS: dict[str, Callable[[nn.Module, DeviceMesh], Any]] = {
    "plan": by_plan,
    "one by one": one_by_one,
    "own style": lambda net, mesh: parallelize_module(net, mesh, {"0": Own(), "2": Own()}),
    "distribute_module": distribute_module,
    "undone": lambda net, mesh: unparallelize_module(net),
    "another layout": by_plan,
}
HOLDERS: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": lambda net: torch.optim.AdamW(net.parameters()),
    "SGD": lambda net: torch.optim.SGD([{"params": [p]} for p in net.parameters()], lr=0.1),
    "LBFGS": lambda net: torch.optim.LBFGS(net.parameters()),
    "somebody else": lambda net: list(net.parameters()),
}


def warned(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in seen]


@pytest.mark.parametrize("call", CALLS)
def test_what_holds_parameters_that_are_replaced_is_named(call: str) -> None:
    """One rank, so that no other rank's warnings come among these."""

    def f(mesh: DeviceMesh) -> None:
        for name, make in HOLDERS.items():
            net = two_layers()
            if call == "undone":
                by_plan(net, mesh)
            if call == "another layout":
                distribute_module(net[0], mesh)
                distribute_module(net[2], mesh)
                for part in (net[0], net[2]):
                    del part._distribute_module_applied
            held = make(net)
            told = warned(lambda net=net: CALLS[call](net, mesh))  # type: ignore[misc]
            assert told and all(f": {name} holds parameters" in text for text in told), (name, told)
            # on one rank all layouts are alike, so that the meshes' axes alone tell
            assert "weight" in told[0] and "fix: make the optimizer" in told[0]
            del held
            for p in net.parameters():  # the fix
                p.grad = torch.ones_like(p)
            before = [p.detach().clone() for p in net.parameters()]
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            assert all((p.detach() != q).any() for p, q in zip(net.parameters(), before, strict=True))

    on_ranks(f, 1)


def test_only_what_would_be_lost_is_told() -> None:
    def f(mesh: DeviceMesh) -> None:
        net = two_layers()
        for p in net.parameters():
            p.requires_grad_()
        weight = net[0].weight
        assert not warned(lambda: by_plan(net, mesh))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        assert not warned(lambda: parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()))
        assert not warned(lambda: parallelize_module(nn.LSTM(4, 4), mesh, Own()))
        half = two_layers()
        rest = torch.optim.SGD(half[2].parameters(), lr=0.1)
        assert not warned(lambda: parallelize_module(half, mesh, {"0": ColwiseParallel()}))
        shared = nn.Linear(8, 8)
        outside = nn.Sequential(shared)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        net[1].weight = shared.weight
        told = warned(lambda: parallelize_module(net, mesh, {"1": ColwiseParallel()}))
        assert len(told) == 1 and "somebody else holds parameters that are replaced now: 1.weight\n" in told[0]
        del weight, optimizer, rest, outside

    on_ranks(f, 1)


# ------------------------------------------------------------ the world
def said(run: Callable[[], Any], kind: type[Exception], *words: str) -> str:
    """The text of the error of that kind that `run` raises, which has these words."""
    with pytest.raises(kind) as error:
        run()
    text = str(error.value)
    assert all(word in text for word in words) and len(text) < 2000, text
    return text


PROGRAM = """
import dtensor, torch
try:
    dtensor.init_device_mesh("cpu", (1,))
except ValueError as error:
    print(error)
f = lambda: dtensor.init_device_mesh("cpu", (2,)).size()
print(dtensor.simulate(2)(f))
with dtensor.simulate.fake_world(512):
    print(dtensor.init_device_mesh("cpu", (512,)).size())
import os
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")    # as torchrun does
print(dtensor.init_device_mesh("cpu", (1,)).size())
"""


def test_a_mesh_without_a_world() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, timeout=120)
    out = done.stdout
    named = "no RANK, WORLD_SIZE", "torchrun", "dtensor.simulate(4)(", "fake_world(512)"
    assert all(word in out for word in named), out
    assert out.splitlines()[-3:] == ["[2, 2]", "512", "1"], out + done.stderr


def test_a_result_of_a_simulation_that_has_ended() -> None:
    def f() -> Any:
        mesh = init_device_mesh("cpu", (2,))
        pending = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        return mesh, distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]), pending

    mesh, x, pending = dtensor.simulate(2)(f)[0]
    for use in (
        x.full_tensor,
        lambda: (x.sum() + 1).item(),
        pending.full_tensor,
        lambda: x.redistribute(placements=[Replicate()]),
        lambda: torch.distributed.all_reduce(torch.ones(1), group=mesh.get_group()),
        lambda: distribute_tensor(torch.ones(4), mesh, [Shard(0)]),
    ):
        said(use, RuntimeError, "simulation", "has ended", "gather inside the function")
    assert x.to_local().tolist() == [0, 1] and (x + 1).to_local().tolist() == [1, 2]
    assert dtensor.simulate(2)(lambda: f()[1].full_tensor())[0].tolist() == [0, 1, 2, 3]
    leaked: list[DTensor] = []

    def fails() -> None:
        x = f()[1]
        leaked.append(x)
        x.full_tensor()
        raise ValueError("mine")

    said(lambda: dtensor.simulate(2)(fails), ValueError, "mine")
    said(leaked[0].full_tensor, RuntimeError, "has ended")


def test_a_redistribution_to_pending() -> None:
    def f(mesh: DeviceMesh) -> None:
        x, placements = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]), [Partial()]
        text = said(lambda: x.redistribute(placements=placements), RuntimeError, "fix: ")
        summand = torch.ones(4)
        for code in (
            "DTensor.from_local(summand, mesh, placements)",
            "distribute_tensor(x.full_tensor(), mesh, placements)",
        ):
            assert code in text
            assert eval(code, globals(), locals()).placements == (Partial(),)

    on_ranks(f, 2)


# ------------------------------------------------------------ the plan
STYLES = [ColwiseParallel, RowwiseParallel, SequenceParallel, PackedColwiseParallel, PrepareModuleInput]


@pytest.mark.parametrize("style", STYLES)
def test_a_class_in_a_plan(style: Any) -> None:
    with fake_world(2):
        mesh, net = init_device_mesh("cpu", (2,)), two_layers()
        args = "..." if style is PackedColwiseParallel else ""
        x = torch.ones(4, 8)
        for plan in (style, {"0": style}):
            words = "this is its class", f"fix: {style.__name__}({args})"
            said(lambda plan=plan: check_plan(net, plan, mesh, x), TypeError, *words)  # type: ignore[misc]
            text = said(lambda plan=plan: parallelize_module(net, mesh, plan), TypeError, *words)  # type: ignore[misc]
            assert type(net[0].weight) is nn.Parameter
        fix = text.partition("fix: ")[2].replace("...", "(8, 8)")
        parallelize_module(net, mesh, {"0": eval(fix)}, src_data_rank=None)


def test_what_is_no_plan() -> None:
    with fake_world(2):
        mesh, net = init_device_mesh("cpu", (2,)), two_layers()
        wrong = (3, "colwise", [ColwiseParallel()], {"0": nn.Linear(2, 2)}, {0: ColwiseParallel()}, {"0": "x" * 9999})
        for plan in wrong:
            said(lambda plan=plan: parallelize_module(net, mesh, plan), TypeError, "ParallelStyle")  # type: ignore[misc]
