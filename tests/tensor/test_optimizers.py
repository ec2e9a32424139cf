"""Training steps on DTensors beside one process: every form of the optimizers, clipping, scaling, checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers.laws import make, rand
from torch.utils.checkpoint import checkpoint

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
from dtensor.comm.observers import observers
from dtensor.dispatch import hit as hot
from dtensor.errors import MeshError, MixedTensorError

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

FORMS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, **kw),
    "sgd momentum": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **kw),
    "adam": lambda p, **kw: torch.optim.Adam(p, lr=0.01, **kw),
    "adam amsgrad": lambda p, **kw: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True, weight_decay=0.1, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=0.01, **kw),
    "adamw tensor lr": lambda p, **kw: torch.optim.AdamW(p, lr=torch.tensor(0.01), **kw),
    "adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=0.01, **kw),
}
CASES = [(o, f) for o in OPTIMIZERS for f in FORMS if not ("tensor lr" in o and f == "foreach")]
LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]]] = [
    ((4,), (Shard(0),), (Shard(0),)),
    ((4,), (Replicate(),), (Partial(),)),
    ((2, 2), (Replicate(), Shard(1)), (Partial(), Shard(1))),
    ((2, 2), (Replicate(), Replicate()), (Partial(), Partial("avg"))),
    ((2, 2), (Shard(1), Shard(1)), (Partial(), Replicate())),
]
SHAPES = ((7, 3), (5, 6), (1, 4))


def _params(seed: int) -> list[torch.Tensor]:
    return [rand(*s, seed=seed + i) for i, s in enumerate(SHAPES)]


def _steps(params: list[Any], optimizer: torch.optim.Optimizer, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for step in range(3):
        for p, g in zip(params, _params(10 * step), strict=True):
            p.grad = place(g)
        optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_steps_follow_one_process(
    name: str, form: str, layout: tuple[tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]]
) -> None:
    build = lambda p: OPTIMIZERS[name](p, **FORMS[form])  # noqa: E731
    want = [nn.Parameter(p) for p in _params(0)]
    _steps(want, build(want), lambda g: g)

    def run() -> None:
        mesh = init_device_mesh("cpu", layout[0])
        params = [nn.Parameter(make(p, mesh, layout[1])) for p in _params(0)]
        _steps(params, build(params), lambda g: make(g, mesh, layout[2]))
        for p, w in zip(params, want, strict=True):
            assert p.placements == layout[1]
            torch.testing.assert_close(p.full_tensor(), w.data, rtol=1e-4, atol=1e-5)

    simulate(4)(run)


RARE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "rprop": lambda p, **kw: torch.optim.Rprop(p, lr=0.01, **kw),
    "rmsprop": lambda p, **kw: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5, **kw),
    "nadam": lambda p, **kw: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, **kw),
    "radam": lambda p, **kw: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1, **kw),
    "asgd": lambda p, **kw: torch.optim.ASGD(p, lr=0.01, t0=1, weight_decay=0.1, **kw),
    "adadelta": lambda p, **kw: torch.optim.Adadelta(p, lr=0.1, weight_decay=0.1, **kw),
    "adamax": lambda p, **kw: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1, **kw),
    "adafactor": lambda p, **kw: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.1, **kw),
}


@pytest.mark.parametrize(("form", "layout"), [("loop", LAYOUTS[4]), ("foreach", LAYOUTS[0]), ("foreach", LAYOUTS[1])])
@pytest.mark.parametrize("name", RARE)
def test_rare_optimizers(
    name: str, form: str, layout: tuple[tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]]
) -> None:
    want = [nn.Parameter(p) for p in _params(0)]
    _steps(want, RARE[name](want, **FORMS[form]), lambda g: g)

    def run() -> None:
        mesh = init_device_mesh("cpu", layout[0])
        params = [nn.Parameter(make(p, mesh, layout[1])) for p in _params(0)]
        _steps(params, RARE[name](params, **FORMS[form]), lambda g: make(g, mesh, layout[2]))
        for p, w in zip(params, want, strict=True):
            torch.testing.assert_close(p.full_tensor(), w.data, rtol=1e-4, atol=1e-5)

    simulate(4)(run)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_on_uneven_shards(search: str | None) -> None:
    def descend(params: list[Any]) -> None:
        optimizer = torch.optim.LBFGS(params, lr=0.1, max_iter=3, line_search_fn=search)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(((p - 1) ** 4).sum() for p in params)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    want = [nn.Parameter(p) for p in _params(0)]
    descend(want)

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        params = [nn.Parameter(make(p, mesh, [Shard(0), Shard(0)])) for p in _params(0)]
        descend(params)
        for p, w in zip(params, want, strict=True):
            torch.testing.assert_close(p.full_tensor(), w.data, rtol=1e-3, atol=1e-4)

    simulate(4)(run)


def test_muon_within_its_rounding() -> None:
    """It makes updates orthogonal in bfloat16, where sums over shards round otherwise."""
    want = [nn.Parameter(p) for p in _params(0)]
    _steps(want, torch.optim.Muon(want, lr=0.01), lambda g: g)

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        params = [nn.Parameter(make(p, mesh, [Shard(0), Shard(1)])) for p in _params(0)]
        _steps(params, torch.optim.Muon(params, lr=0.01), lambda g: make(g, mesh, [Shard(0), Shard(1)]))
        for p, w in zip(params, want, strict=True):
            torch.testing.assert_close(p.full_tensor(), w.data, rtol=0, atol=2e-3)

    simulate(4)(run)


def _sent(f: Callable[[], object]) -> list[str]:
    kinds: list[str] = []
    watch = lambda kind, ranks, elements, itemsize: kinds.append(kind)  # noqa: E731
    observers.append(watch)
    try:
        f()
    finally:
        observers.remove(watch)
    return kinds


@pytest.mark.parametrize("form", FORMS)
def test_pending_gradients_are_settled_in_one_collective(form: str) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        params = [nn.Parameter(make(p, mesh, [Replicate()])) for p in _params(0)]
        optimizer = torch.optim.AdamW(params, lr=0.1, **FORMS[form])
        for p, g in zip(params, _params(5), strict=True):
            p.grad = make(g, mesh, [Partial()])
        assert _sent(optimizer.step) == ["all_reduce"]
        for p, g in zip(params, _params(5), strict=True):
            assert isinstance(p.grad, DTensor) and p.grad.placements == (Replicate(),)
            torch.testing.assert_close(p.grad.to_local(), g)
        assert _sent(optimizer.step) == []

    simulate(4)(run)


def test_fused_steps_take_several_meshes_and_refuse_other_layouts() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        plain = nn.Parameter(rand(6, 4))
        a = nn.Parameter(make(rand(6, 4), mesh, [Shard(0), Shard(1)]))
        b = nn.Parameter(make(rand(6, 4), mesh["b"], [Shard(0)]))
        optimizer = torch.optim.AdamW([plain, a, b], lr=0.1, fused=True)
        for _ in range(2):
            plain.grad = rand(6, 4, seed=1)
            a.grad, b.grad = make(plain.grad, mesh, [Replicate(), Shard(1)]), make(plain.grad, mesh["b"], [Shard(1)])
            optimizer.step()
        torch.testing.assert_close(a.full_tensor(), plain.data)
        torch.testing.assert_close(b.full_tensor(), plain.data)
        optimizer.state[a]["exp_avg"] = make(rand(6, 4), mesh, [Replicate(), Replicate()])
        before = a.to_local().clone()
        with pytest.raises(RuntimeError, match="laid out like its parameter"):
            optimizer.step()
        assert torch.equal(a.to_local(), before)

    simulate(4)(run)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(order: float, foreach: bool) -> None:
    grads = _params(3)
    plain = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(plain, grads, strict=True):
        p.grad = g.clone()
    want = nn.utils.clip_grad_norm_(plain, 0.7, norm_type=order, foreach=foreach)

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        layouts = ([Shard(0), Replicate()], [Partial(), Shard(1)], [Replicate(), Partial()])
        params = [nn.Parameter(make(torch.zeros_like(g), mesh, [Replicate()] * 2)) for g in grads]
        for p, g, layout in zip(params, grads, layouts, strict=True):
            p.grad = make(g, mesh, layout)
        got = nn.utils.clip_grad_norm_(params, 0.7, norm_type=order, foreach=foreach)
        torch.testing.assert_close(got.full_tensor(), want)
        for p, w in zip(params, plain, strict=True):
            assert isinstance(p.grad, DTensor) and w.grad is not None
            torch.testing.assert_close(p.grad.full_tensor(), w.grad, rtol=1e-4, atol=1e-5)

    simulate(4)(run)


def _pending(mesh: DeviceMesh, grads: list[torch.Tensor]) -> list[nn.Parameter]:
    """Replicated parameters with pending gradients, but for the first, which is sharded."""
    layouts: list[list[Placement]] = [[Shard(0)], *[[Replicate()]] * (len(grads) - 1)]
    params = [nn.Parameter(make(torch.zeros_like(g), mesh, p)) for g, p in zip(grads, layouts, strict=True)]
    for p, g in zip(params, grads, strict=True):
        p.grad = make(g, mesh, [Partial() if p.placements == (Replicate(),) else Shard(0)])
    return params


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clipping_settles_pending_gradients_once(order: float, finite: bool, foreach: bool | None) -> None:
    """Two collectives, one for all gradients and one for the total norm, and none in the step that follows."""
    grads = _params(3)
    plain = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(plain, grads, strict=True):
        p.grad = g.clone()
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.7, norm_type=order, error_if_nonfinite=finite, foreach=foreach)
    want = clip(plain)
    torch.optim.AdamW(plain, lr=0.1).step()

    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        params = _pending(mesh, grads)
        held = params[1].grad
        totals: list[Any] = []
        assert _sent(lambda: totals.append(clip(params))) == ["all_reduce", "all_reduce"]
        assert _sent(lambda: totals.append(totals[0].to_local())) == []
        torch.testing.assert_close(totals[1], want)
        optimizer = torch.optim.AdamW(params, lr=0.1, foreach=foreach)
        assert _sent(optimizer.step) == [] and params[1].grad is held
        for p, w in zip(params, plain, strict=True):
            assert isinstance(p.grad, DTensor) and w.grad is not None and p.grad.placements == p.placements
            torch.testing.assert_close(p.grad.full_tensor(), w.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(p.full_tensor(), w.data, rtol=1e-4, atol=1e-5)

    simulate(4)(run)


@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_by_value_settles_pending_gradients_once(foreach: bool | None) -> None:
    grads = _params(3)

    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        params = _pending(mesh, grads)
        assert _sent(lambda: nn.utils.clip_grad_value_(params, 0.5, foreach=foreach)) == ["all_reduce"]
        assert _sent(torch.optim.SGD(params, lr=1.0).step) == []
        for p, g in zip(params, grads, strict=True):
            torch.testing.assert_close(p.full_tensor(), -g.clamp(-0.5, 0.5))

    simulate(4)(run)


def test_total_norm_and_clipping_by_it_settle_once() -> None:
    grads = _params(3)
    want = torch.stack([g.norm() for g in grads]).norm()

    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        params = _pending(mesh, grads)
        totals: list[Any] = []
        total = lambda: totals.append(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]))  # noqa: E731
        assert _sent(total) == ["all_reduce", "all_reduce"]
        assert _sent(lambda: nn.utils.clip_grads_with_norm_(params, 0.5, totals[0])) == []
        assert _sent(torch.optim.SGD(params, lr=1.0).step) == []
        for p, g in zip(params, grads, strict=True):
            torch.testing.assert_close(p.full_tensor(), -g * 0.5 / (want + 1e-6))

    simulate(4)(run)


def test_settling_on_several_axes() -> None:
    """What is pending alike travels together, whatever the other axes do; averages are sums over a count."""

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        P, R, S0 = Partial(), Replicate(), Shard(0)
        layouts = [[P, R], [P, S0], [P, Shard(1)], [P, P], [Partial("avg"), P], [P, P], [R, Partial("max")], [R, S0]]
        values = [rand(5, 3, seed=i, dtype=torch.float32) for i in range(len(layouts))]
        params = [nn.Parameter(make(torch.zeros(5, 3), mesh, [q if q == S0 else R for q in p])) for p in layouts]
        for p, v, layout in zip(params, values, layouts, strict=True):
            p.grad = make(v, mesh, layout)
        assert len(_sent(torch.optim.SGD(params[:6], lr=1.0).step)) == 3 + 1  # [P, S(1)] then moves to its parameter
        torch.optim.SGD(params[6:], lr=1.0).step()
        for p, v in zip(params, values, strict=True):
            torch.testing.assert_close(p.full_tensor(), -v)

    simulate(4)(run)


def test_a_gradient_with_a_graph_keeps_it() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        w = nn.Parameter(make(rand(4, 3), mesh, [Replicate()]))
        x = make(rand(8, 4, seed=1), mesh, [Shard(0)])
        (grad,) = torch.autograd.grad((x @ w).pow(3).sum(), w, create_graph=True)
        assert isinstance(grad, DTensor) and grad.requires_grad and grad.placements == (Partial(),)
        w.grad = grad
        total = nn.utils.get_total_norm([grad])
        assert grad.placements == (Partial(),) and isinstance(total, DTensor)
        torch.testing.assert_close(total.full_tensor(), grad.detach().full_tensor().norm())
        torch.optim.SGD([w], lr=0.1).step()
        assert grad.placements == (Partial(),) and grad.grad_fn is not None

    simulate(4)(run)


def test_clip_grad_value() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        for layout in ([Shard(0)], [Replicate()]):
            p = nn.Parameter(make(torch.zeros(5, 4), mesh, layout))
            p.grad = make(rand(5, 4), mesh, layout)
            nn.utils.clip_grad_value_([p], 0.5)
            torch.testing.assert_close(p.grad.full_tensor(), rand(5, 4).clamp(-0.5, 0.5))

    simulate(4)(run)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "inf"])
@pytest.mark.parametrize("form", FORMS)
def test_loss_scaling(form: str, bad: bool) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        start = rand(6, 4)
        plain, p = nn.Parameter(start.clone()), nn.Parameter(make(start, mesh, [Shard(0)]))
        q, r = nn.Parameter(start.clone()), nn.Parameter(make(start, mesh, [Replicate()]))
        grad = rand(6, 4, seed=1) * 1024
        if bad:
            grad[5, 0] = float("inf")  # on one rank only
        for params, grads in (
            ([plain, q], [grad.clone(), grad.clone()]),
            ([p, r], [make(grad, mesh, [Shard(0)]), make(grad, mesh, [Partial()] if not bad else [Shard(0)])]),
        ):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(torch.ones(()))
            optimizer = torch.optim.AdamW(params, lr=0.1, **FORMS[form])
            for x, g in zip(params, grads, strict=True):
                x.grad = g
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (512.0 if bad else 1024.0)
        torch.testing.assert_close(p.full_tensor(), plain.data, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(r.full_tensor(), q.data, rtol=1e-4, atol=1e-5)
        assert torch.equal(plain.data, start) == bad

    simulate(4)(run)


# ------------------------------------------------------------ activation checkpointing
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.3, training=True))


def _distribute(block: Block, mesh: DeviceMesh) -> Block:
    layouts = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "down.bias": Replicate()}
    for name, placement in layouts.items():
        module, key = block.get_submodule(name.split(".")[0]), name.split(".")[1]
        setattr(module, key, nn.Parameter(make(getattr(module, key).detach(), mesh, [placement])))
    return block


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_with_dropout_follows_one_process(reentrant: bool) -> None:
    torch.manual_seed(0)
    ref = Block()

    def train(block: Block, x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(3)
        y = checkpoint(block, x, use_reentrant=reentrant)
        y.square().sum().backward()
        return [y, *(p.grad for p in block.parameters())]

    want = train(copy.deepcopy(ref), rand(4, 6).requires_grad_())

    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        x = make(rand(4, 6), mesh, [Replicate()], True)
        for got, w in zip(train(_distribute(copy.deepcopy(ref), mesh), x), want, strict=True):
            assert isinstance(got, DTensor)
            torch.testing.assert_close(got.full_tensor(), w, rtol=1e-4, atol=1e-5)

    simulate(4)(run)


@pytest.mark.parametrize(
    ("name", "form"), [("sgd momentum", "loop"), ("adamw", "foreach"), ("adamw tensor lr", "loop")]
)
def test_a_changing_learning_rate_makes_no_plans(name: str, form: str) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        params = [nn.Parameter(make(p, mesh, [Shard(0), Replicate()])) for p in _params(0)]
        optimizer = OPTIMIZERS[name](params, **FORMS[form])
        plans = []
        for step in range(5):
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.9
            for p, g in zip(params, _params(10 * step), strict=True):
                p.grad = make(g, mesh, [Shard(0), Replicate()])
            optimizer.step()
            plans.append(sum(len(info.plans) for info in hot.ops.values()))
        assert plans[2] == plans[3] == plans[4]

    simulate(4)(run)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf"), 0.0])
def test_clipping_over_several_meshes(order: float, foreach: bool | None) -> None:
    """As FSDP over tensor parallelism leaves them: some on both axes, some on one, a plain one; some are pending."""
    grads = [*_params(3), torch.zeros(4)]
    plain = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(plain, grads, strict=True):
        p.grad = g.clone()
    want = nn.utils.clip_grad_norm_(plain, 0.7, order, foreach=foreach)

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meshes: list[tuple[Any, Any]] = [
            (mesh, [Shard(0), Partial()]),
            (mesh["dp"], [Shard(0)]),
            (mesh["tp"], [Partial()]),
        ]
        params: list[torch.Tensor] = []
        for i, g in enumerate(grads[:-1]):
            over, layout = meshes[i % 3]
            params.append(distribute_tensor(torch.zeros_like(g), over, [Replicate()] * over.ndim).requires_grad_())
            params[-1].grad = distribute_tensor(g, over, layout)
        params.append(nn.Parameter(torch.zeros_like(grads[-1])))
        params[-1].grad = grads[-1].clone()
        measured = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], order, foreach=foreach)
        total = nn.utils.clip_grad_norm_(params, 0.7, order, foreach=foreach)
        assert type(total) is torch.Tensor
        torch.testing.assert_close((measured, total), (want, want))
        for p, w in zip(params, plain, strict=True):
            got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(got, w.grad, rtol=1e-4, atol=1e-5)

    simulate(4)(run)


def test_a_norm_over_meshes_of_other_ranks_is_refused() -> None:
    def run() -> None:
        tensors = [
            distribute_tensor(torch.ones(4), init_device_mesh("cpu", (n,)), [Shard(0)]).requires_grad_() for n in (2, 4)
        ]
        with pytest.raises(MeshError, match="no slices of one mesh"):
            nn.utils.get_total_norm(tensors)

    simulate(4)(run)


def test_a_step_on_plain_tensors_and_dtensors_is_a_write_into_both() -> None:
    @simulate(2)
    def ranks() -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain, ours = nn.Parameter(rand(4)), nn.Parameter(make(rand(4), mesh, [Shard(0)]))
        losses = [(p**2).sum() for p in (plain, ours)]
        plain.grad, ours.grad = torch.ones_like(plain), torch.ones_like(ours)
        torch.optim.SGD([plain, ours], lr=0.1, foreach=True).step()
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        with torch.inference_mode():
            some = [torch.ones(4), make(rand(4), mesh, [Shard(0)])]
            torch._foreach_add_(some, 1.0)
            assert some[0].tolist() == [2.0] * 4


@pytest.mark.parametrize("foreach", [False, True])
def test_plain_gradients_of_dtensors_are_refused(foreach: bool) -> None:
    @simulate(2)
    def ranks() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placements in ([Replicate()], [Shard(0)]):
            p = nn.Parameter(make(rand(1, 4), mesh, placements))
            p.grad = rand(1, 4)
            with pytest.raises(MixedTensorError):
                torch.optim.AdamW([p], lr=0.1, foreach=foreach).step()
