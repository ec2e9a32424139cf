"""Mistakes of a first hour: each is made, its message is read, and the fix that the message names works."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.parallel import on_ranks
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
from dtensor.errors import LIMIT, CollectiveError, LayoutError, bounded, listed, short
from dtensor.experimental import implicit_replication
from dtensor.loss import loss_parallel
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
        for name in HOLDERS if call == "plan" else ("AdamW", "somebody else"):
            make, net = HOLDERS[name], two_layers()
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
def said(run: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...], *words: str) -> str:
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
import pickle
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


# ------------------------------------------------------------ columns alone or twice, modules outside of the plan
def net_of(*parts: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*parts)


Colwise, Rowwise = ColwiseParallel, RowwiseParallel
COLUMNS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Any, tuple[str, ...], list[dict[str, Any]]]] = {
    "twice": (
        lambda: net_of(nn.Linear(8, 16), nn.Linear(16, 6)),
        {"0": Colwise(), "1": Colwise()},
        (4, 8),
        ("ColwiseParallel of '1' (Linear)", "takes 16 (in_features)", "one rank's piece of 16"),
        [{"1": Rowwise()}, {"0": Colwise(output_layouts=R)}, {"1": Colwise(input_layouts=Shard(-1))}],
    ),
    "twice, uneven": (
        lambda: net_of(nn.Linear(8, 7), nn.Linear(7, 6)),
        {"0": Colwise(), "1": Colwise()},
        (4, 8),
        ("ColwiseParallel of '1' (Linear)", "takes 7 (in_features)", "one rank's piece of 7"),
        [{"1": Rowwise()}, {"0": Colwise(output_layouts=R)}],
    ),
    "twice, convolutions": (
        lambda: net_of(nn.Conv1d(2, 8, 3), nn.Conv1d(8, 4, 3)),
        {"0": Colwise(), "1": Colwise()},
        (2, 2, 9),
        ("ColwiseParallel of '1' (Conv1d)", "one rank's piece of 8"),
        [{"1": Rowwise()}, {"0": Colwise(output_layouts=R)}, {"1": Colwise(input_layouts=Shard(-2))}],
    ),
    "alone": (
        lambda: net_of(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6)),
        {"0": Colwise()},
        (4, 8),
        (
            "in: '2' (Linear), which the plan does not name",
            "\n  fix: name it in the plan, e.g. '2': Row",
        ),
        [{"2": Rowwise()}, {"0": Colwise(output_layouts=R)}],
    ),
    "alone, deep": (
        lambda: net_of(net_of(nn.Linear(8, 16)), net_of(nn.LayerNorm(16), nn.Linear(16, 6))),
        {"0.0": Colwise()},
        (4, 8),
        ("in: '1.0' (LayerNorm), which the plan does not name",),
        [{"0.0": Colwise(output_layouts=R)}],
    ),
    "a DTensor outside": (
        lambda: net_of(nn.Linear(8, 16), nn.Linear(16, 6)),
        {"0": Colwise(use_local_output=False)},
        (4, 8),
        (
            "it is 'bias' of '1' (Linear)",
            "in: '1' (Linear), which the plan does not name",
            "name that module in the plan",
        ),
        [{"1": Rowwise()}, {"0": Colwise(output_layouts=R)}],
    ),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_that_nobody_takes(case: str) -> None:
    make, plan, shape, words, fixes = COLUMNS[case]

    def f(mesh: DeviceMesh) -> None:
        x, net = torch.arange(prod(shape)).reshape(shape) / 10, make()
        want = net(x)
        parallelize_module(net, mesh, plan)
        for _ in range(2):
            said(lambda: net(x), (RuntimeError, ValueError), *words)
        report = check_plan(make(), plan, mesh, x)
        assert not report and all(word in str(report) for word in words)
        for fix in fixes:
            net = parallelize_module(make(), mesh, {**plan, **fix})
            y = net(x)
            if y.shape != want.shape:  # a piece, of the last of two column-wise layers
                y = DTensor.from_local(y, mesh, [Shard(1)]).full_tensor()
            y = y.full_tensor() if isinstance(y, DTensor) else y
            torch.testing.assert_close(y, want)

    on_ranks(f, 2)


class Heads(nn.Module):
    """Attention's bookkeeping without the attention."""

    def __init__(self, local: bool) -> None:
        super().__init__()
        self.q, self.o, self.local = nn.Linear(8, 16), nn.Linear(16, 8), local

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        q = q.view(*x.shape[:-1], -1, 4) if self.local else q.view(*x.shape[:-1], 4, 4)
        return self.o(q.softmax(-2).flatten(-2))  # type: ignore[no-any-return]


def test_whole_heads_of_a_piece() -> None:
    def f(mesh: DeviceMesh) -> None:
        plan: Any = {"0.q": ColwiseParallel(), "0.o": RowwiseParallel()}
        net = parallelize_module(net_of(Heads(False)), mesh, plan)
        words = "in: '0' (Heads), which the plan", "what q gives", "view(b, t, -1, head_dim)"
        said(lambda: net(torch.ones(2, 3, 8)), RuntimeError, *words)
        assert parallelize_module(net_of(Heads(True)), mesh, plan)(torch.ones(2, 3, 8)).shape == (2, 3, 8)

    on_ranks(f, 2)


def test_a_plain_module_without_a_plan_is_named() -> None:
    def f(mesh: DeviceMesh) -> None:
        net = net_of(nn.Linear(8, 4))
        x = distribute_tensor(torch.ones(2, 8), mesh, [Shard(0)])
        words = "it is 'bias' of '0' (Linear)", "distribute_module(module, mesh)"
        said(lambda: net(x), LayoutError, *words)
        with implicit_replication():
            assert net(x).shape == (2, 4)
        assert distribute_module(net, mesh)(x).shape == (2, 4)

    on_ranks(f, 2)


def test_errors_of_others_are_left_alone() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    def f(mesh: DeviceMesh) -> None:
        net = net_of(nn.Linear(8, 16), nn.Linear(16, 8), Raises())
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        with pytest.raises(KeyError, match="^'mine'$"):
            net(torch.ones(2, 8))
        try:
            raise RuntimeError("before")
        except RuntimeError as error:
            net[:2](torch.ones(2, 8))
            assert str(error) == "before"
        plain = unparallelize_module(net)
        assert not any(m._forward_hooks for m in plain.modules())

    on_ranks(f, 2)


# ------------------------------------------------------------ losses
def whole_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with loss_parallel():
        return F.cross_entropy(logits, target)


@pytest.mark.parametrize("way", ["as it is", "float", "flat", "spatial", "log_softmax", "no_grad"])
def test_plain_pieces_of_logits(way: str) -> None:
    def f(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        head, x, target = nn.Linear(4, 7), torch.randn(2, 3, 4), torch.tensor([0, 1, 2, 0, 1, 6])
        want = F.cross_entropy(head(x).flatten(0, 1), target)
        parallelize_module(head, mesh, ColwiseParallel())
        change: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "float": lambda y: y.flatten(0, 1).float() / 1.5, "spatial": lambda y: y.view(1, 6, -1).transpose(1, 2),
        }  # fmt: skip
        logits = change.get(way, lambda y: y.flatten(0, 1))(head(x))
        loss = F.nll_loss if way == "log_softmax" else F.cross_entropy
        logits = logits.log_softmax(-1) if way == "log_softmax" else logits
        logits = logits.detach() if way == "no_grad" else logits
        target = target[None] if way == "spatial" else target
        error = IndexError if way == "no_grad" else ValueError
        if way != "no_grad":  # targets that no rank finds out of bounds
            with loss_parallel():
                said(lambda: loss(logits, target.clamp(max=1)), error, "this rank's piece")
        with loss_parallel():
            words = "the logits are a plain tensor", "ColwiseParallel(use_local_output=False)", "[Shard(1)]"
            said(lambda: loss(logits, target), error, *words)
        logits = DTensor.from_local(head(x).flatten(0, 1), mesh, [Shard(1)], shape=(6, 7), stride=(7, 1))
        torch.testing.assert_close(whole_loss(logits, target.flatten()).full_tensor(), want)
        unparallelize_module(head)
        parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
        torch.testing.assert_close(whole_loss(head(x).flatten(0, 1), target.flatten()).full_tensor(), want)

    on_ranks(f, 2)


def test_whole_plain_logits_pass() -> None:
    def f(mesh: DeviceMesh) -> None:
        layer = parallelize_module(nn.Linear(4, 7), mesh, ColwiseParallel(output_layouts=R))
        for logits in (torch.randn(3, 5), layer(torch.randn(3, 4)), nn.Linear(4, 5)(torch.randn(3, 4))):
            target = torch.tensor([0, 1, 4])
            torch.testing.assert_close(whole_loss(logits, target), F.cross_entropy(logits, target))

    on_ranks(f, 2)


def test_class_sharded_logits_without_the_context() -> None:
    def f(mesh: DeviceMesh) -> None:
        plain, target = torch.arange(12.0).reshape(3, 4).sin(), torch.tensor([0, 1, 3])
        logits = distribute_tensor(plain, mesh, [Shard(1)])
        text = said(lambda: F.cross_entropy(logits, target), LayoutError, "'target'", "is plain")
        assert "fix: with dtensor.loss.loss_parallel():" in text
        torch.testing.assert_close(whole_loss(logits, target).full_tensor(), F.cross_entropy(plain, target))
        rows = distribute_tensor(plain, mesh, [Shard(0)])
        assert "loss_parallel" not in said(lambda: F.cross_entropy(rows, target), LayoutError, "fix: distribute_tensor")

    on_ranks(f, 2)


# ------------------------------------------------------------ torch's data parallelism
TOGETHER = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.fsdp import fully_shard
from dtensor import init_device_mesh
from dtensor.parallel import parallelize_module, ColwiseParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
try:
    torch.ops.fsdp.chunk_cat([net[0].weight], 0, 1, out=torch.empty(4, 4))
except Exception as error:
    print("fsdp.chunk_cat", "dtensor.swap.install()" in str(error), error)
fully_shard(net, mesh=mesh["dp"])
net(torch.ones(2, 4)).sum().backward()
print("RAN")
"""


def test_fully_shard_without_swap(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TOGETHER)
    out = []
    for way in ([], ["-m", "dtensor.swap"]):
        run = [sys.executable, *way, "program.py"]
        done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, timeout=200)
        out.append(done.stdout + done.stderr)
    assert "use dtensor.swap: python -m dtensor.swap program.py" in out[0] and "RAN" not in out[0], out[0]
    assert "fsdp.chunk_cat True" in out[0], out[0]
    assert "RAN" in out[1], out[1]


# ------------------------------------------------------------ state dicts
@pytest.mark.parametrize("call", ["plan", "one by one", "distribute_module"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_state_dict(call: str, assign: bool) -> None:
    def f(mesh: DeviceMesh) -> None:
        state = {name: torch.randn(t.shape) for name, t in two_layers().state_dict().items()}
        for t in state.values():
            torch.distributed.broadcast(t, 0)
        net = two_layers()
        before = net[0].weight.detach().clone()
        CALLS[call](net, mesh)
        text = said(
            lambda: net.load_state_dict(state, assign=assign), LayoutError, "0.weight", "load_state_dict(state)"
        )
        assert text.count("fix:") == 1
        assert torch.equal(net[0].weight.full_tensor(), before)
        with implicit_replication():
            net.load_state_dict(state)
        assert all(isinstance(p, DTensor) for p in net.parameters())
        assert all(torch.equal(t.full_tensor(), state[name]) for name, t in net.state_dict().items())
        net.load_state_dict(net.state_dict())
        plain = unparallelize_module(net)
        plain.load_state_dict(state)
        assert not any(m._load_state_dict_pre_hooks for m in plain.modules())

    on_ranks(f, 2)


# ------------------------------------------------------------ no text is long
LONG: dict[str, Callable[[DeviceMesh], Any]] = {
    "a mesh with a rank twice": lambda m: DeviceMesh("cpu", [*range(5000), 0]),
    "a mesh of ranks that are not there": lambda m: DeviceMesh("cpu", list(range(5, 5000))),
    "a plan's path": lambda m: parallelize_module(two_layers(), m, {"x" * 5000: ColwiseParallel()}),
    "many children": lambda m: parallelize_module(
        nn.Sequential(*map(nn.Linear, [2] * 900, [2] * 900)), m, {"x": Own()}),
    "a placement": lambda m: ColwiseParallel(input_layouts=list(range(5000))),  # type: ignore[arg-type]
    "many tensors": lambda m: torch.stack([distribute_tensor(torch.ones(2), m, [Shard(0)]), *[torch.ones(2)] * 900]),
    "many plain weights": lambda m: distribute_module(nn.Sequential(*map(nn.Linear, [2] * 300, [2] * 300)), m)
    .load_state_dict({f"{i}.weight": torch.ones(2, 2) for i in range(300)}),
    "a target": lambda m: loss_parallel_of(distribute_tensor(torch.ones(2, 4), m, [Shard(1)]), list(range(5000))),
}  # fmt: skip


def loss_parallel_of(logits: torch.Tensor, target: Any) -> Any:
    with loss_parallel():
        return F.cross_entropy(logits, target)


@pytest.mark.parametrize("case", LONG)
def test_no_text_is_long(case: str) -> None:
    def f(mesh: DeviceMesh) -> None:
        text = said(lambda: LONG[case](mesh), Exception)  # type: ignore[arg-type]
        assert 20 < len(text) < 2000

    on_ranks(f, 2)


def test_long_texts_lose_their_middles() -> None:
    for text in ("a\n  got: " + "x" * 9000 + "\n  fix: this", "\n".join(["line"] * 900) + "\n  fix: this", "y" * 9000):
        made = LayoutError(text)
        assert len(str(made)) <= LIMIT and str(made)[:1] == text[:1] and str(made)[-5:] == text[-5:]
        assert str(pickle.loads(pickle.dumps(made))) == str(made) and str(LayoutError("short")) == "short"
    error = CollectiveError("head\n  from: " + "x" * 1800)
    error.during("y" * 5000)
    assert len(str(error)) <= LIMIT and "\n  for: y" in str(error)
    assert short(list(range(9999)))[-5:] == "9998]" and listed(range(100), 3) == "0, 1, 2 and 97 more"
    assert bounded("z" * 5000, 100) == bounded(bounded("z" * 5000, 100)) and len(bounded("z" * 5000, 100)) <= 100
