"""What is written: through views that moved, where no strategy keeps the target, with autograd, by optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from helpers.laws import Sample, check_layouts, make, rand

import dtensor
from dtensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dtensor.dispatch import miss as dispatch_miss

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def on(n: int, f: Callable[..., Any], shape: tuple[int, ...] | None = None) -> list[Any]:
    """`f(mesh)` on simulated ranks."""
    return dtensor.simulate(n)(lambda: f(init_device_mesh("cpu", shape or (n,))))


def close(got: Any, want: torch.Tensor) -> None:
    """The whole of `got` is `want`."""
    torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------ gradients
def _body(fill: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[..., torch.Tensor]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 1
        fill(y, w)
        return y * y

    return fn


def _kept(y: torch.Tensor, w: torch.Tensor) -> None:
    part = y[1:4]
    y.mul_(2)
    part.mul_(w)
    part += y[2:5] * 1


WITH_GRADIENTS = {
    "slice =": lambda y, w: y.__setitem__(slice(2, 5), w), "column": lambda y, w: y[:, 0].mul_(2),
    "slice": lambda y, w: y[2:5].mul_(w), "row +=": lambda y, w: y.__setitem__(1, y[1] + w[0]),
    "reshape": lambda y, w: y.reshape(-1)[3:9].mul_(3), "t": lambda y, w: y.t()[1:].zero_(), "kept": _kept,
    "relu_": lambda y, w: y.relu_(), "slice relu_": lambda y, w: y[1:3].relu_(),
    "diagonal": lambda y, w: y.diagonal().mul_(w.sum()), "lerp_": lambda y, w: y[:3].lerp_(w, 0.3),
    "mask": lambda y, w: y.masked_fill_(y > 0, 3.0), "view": lambda y, w: y.view(-1)[5:17].copy_(w.reshape(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_of_writes(name: str) -> None:
    sample = Sample(name, _body(WITH_GRADIENTS[name]), (rand(6, 4), rand(3, 4, seed=3)), pending=("sum", "max"))
    check_layouts(sample, (3,), limit=8).must_hold()
    check_layouts(sample, (2, 2), limit=6, seed=1).must_hold()


# ------------------------------------------------------------ pending targets
PENDING = {
    "relu_": lambda x: x.relu_(), "exp_": lambda x: x.exp_(), "pow_": lambda x: x.pow_(2), "abs_": lambda x: x.abs_(),
    "mul_": lambda x: x.mul_(x.detach() + 1), "fill_diagonal_": lambda x: x.fill_diagonal_(2.0),
    "tril_": lambda x: x.tril_(), "floor_": lambda x: x.floor_(), "clamp_": lambda x: x.clamp_(-0.5, 0.5),
    "foreach": lambda x: torch._foreach_exp_([x]), "silu": lambda x: nn.functional.silu(x, inplace=True),
    "eq_": lambda x: x.eq_(x), "renorm_": lambda x: x.renorm_(2, 0, 1.0), "cumsum_": lambda x: x.cumsum_(0),
}  # fmt: skip


def test_pending_targets_stay_pending() -> None:
    def f(mesh):
        for name, write in PENDING.items():
            for op in ("sum", "avg", "max", "min", "product"):
                x, want = make(rand(6, 4), mesh, [Partial(op)]), rand(6, 4)
                other = x.detach()
                write(x)
                write(want)
                assert x.placements == (Partial(op),), name
                close(x, want)
                close(other, want)

    on(3, f)


def test_random_numbers_into_pending_tensors_are_those_of_one_device() -> None:
    def f(mesh):
        for op in ("sum", "max"):
            for draw in (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_, nn.init.orthogonal_):
                x, want = make(rand(6, 4), mesh, [Partial(op)]), rand(6, 4)
                for t in (x, want):
                    torch.manual_seed(7)
                    draw(t)
                close(x, want)
                assert x.placements == (Partial(op),)

    on(2, f)


def test_a_write_that_no_strategy_keeps_is_planned_once() -> None:
    def f(mesh):
        asked = []
        for _ in range(2):
            x = make(rand(6, 4), mesh, [P])
            with pytest.MonkeyPatch.context() as m:
                m.setattr(dispatch_miss, "decide", lambda *a, real=dispatch_miss.decide: asked.append(0) or real(*a))
                x.relu_()
            close(x, rand(6, 4).relu())
        assert len(asked) == 2  # for relu_ and relu, the first time

    on(1, f)


# ------------------------------------------------------------ out=, metadata
def test_out_forms() -> None:
    def f(mesh):
        x, a = make(rand(6, 4), mesh, [S0]), rand(6, 4)
        for placed in (R, S0, S1, P):
            new = lambda *size, dtype=None: make(torch.zeros(size, dtype=dtype), mesh, [placed])  # noqa: B023, E731
            value, index = new(6, 2), make(torch.zeros(6, 2, dtype=torch.int64), mesh, [R])
            torch.topk(x, 2, out=(value, index))
            close(value, a.topk(2)[0])
            close(index, a.topk(2)[1])
            close(torch.add(x, 1, out=new(6, 4, dtype=torch.float64)), a.double() + 1)
            target = new(8, 4)
            torch.mul(x[:3], 2, out=target[2:5])
            close(target[2:5], 2 * a[:3])
            pair = [new(6, 4), new(6, 4)]
            torch.ops.aten._foreach_add.List_out([x, x], [x, x], out=pair)
            close(pair[1], 2 * a)
            close(nn.init.eye_(new(6, 4)), torch.eye(6, 4))
            assert target.placements == (placed,)
        grown = make(torch.zeros(0), mesh, [R])
        torch.add(x, 1, out=grown)
        assert grown.shape == (6, 4) and grown.placements == (R,)
        close(grown, a + 1)
        close(torch.sum(x, 0, out=make(torch.zeros(4), mesh, [S0])), a.sum(0))
        torch.add(x, x, out=x)
        close(x, 2 * a)

    on(2, f)


_POSITIVE = rand(4, 4) @ rand(4, 4).T + 4 * torch.eye(4)
COMPOSITES = {
    "matmul 32": (torch.matmul, rand(6, 4, 8), rand(8, 3)), "matmul 31": (torch.matmul, rand(6, 4, 8), rand(8)),
    "matmul 13": (torch.matmul, rand(8), rand(6, 8, 4)), "inner": (torch.inner, rand(6, 4, 8), rand(3, 8)),
    "linalg.matmul": (torch.linalg.matmul, rand(2, 3, 4), rand(4, 2)),
    "multi_dot": (lambda *x, out: torch.linalg.multi_dot(x, out=out), rand(3, 4), rand(4, 5), rand(5, 2)),
    "det": (torch.linalg.det, _POSITIVE), "inv": (torch.linalg.inv, _POSITIVE), "inverse": (torch.inverse, _POSITIVE),
    "cholesky": (torch.linalg.cholesky, _POSITIVE), "svdvals": (torch.linalg.svdvals, rand(4, 3)),
    "msort": (torch.msort, rand(4, 3)), "pinv": (torch.linalg.pinv, rand(4, 3)),
    "eigvalsh": (torch.linalg.eigvalsh, _POSITIVE), "solve": (torch.linalg.solve, _POSITIVE, rand(4, 2)),
    "matrix_rank": (torch.linalg.matrix_rank, _POSITIVE), "cond": (torch.linalg.cond, _POSITIVE),
    "nll_loss": (torch._C._nn.nll_loss, rand(4, 3), torch.tensor([0, 1, 2, 0])),
    "vstack": (lambda *x, out: torch.vstack(x, out=out), rand(3, 4), rand(2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSITES)
def test_out_forms_of_composites(name: str) -> None:
    """Also where torch's C++ writes into a view of the target that it takes, or into tensors that it makes itself."""
    call, *inputs = COMPOSITES[name]
    want = call(*inputs, out=None) if name not in ("multi_dot", "vstack") else call(*inputs, out=torch.empty(0))

    def f(mesh):
        for placed in [R, *[S0] * (want.ndim > 0), *[P] * want.is_floating_point()]:
            target = make(torch.ones(want.shape, dtype=want.dtype), mesh, [placed])
            args = [make(x, mesh, [S0]) for x in inputs]
            assert call(*args, out=target) is target and target.placements == (placed,)
            close(target, want)
        if want.is_floating_point() and name not in ("inner", "cond"):  # plain torch lets those through
            args[0].requires_grad_()
            with pytest.raises(RuntimeError, match="out="):
                call(*args, out=target)
            with pytest.raises(RuntimeError, match="cast|dtype"), torch.no_grad():
                call(*args, out=make(torch.ones(want.shape, dtype=torch.int64), mesh, [R]))

    on(2, f)


def test_metadata_in_place() -> None:
    def f(mesh):
        for placed in (S0, S1, P, R):
            x, a = make(rand(6, 4), mesh, [placed]), rand(6, 4)
            for t in (x, a):
                t.detach().t_().unsqueeze_(0).squeeze_(0).swapaxes_(0, 1).mul_(2)
                part = t[1:4]
                part.t_().mul_(3)
                part.unsqueeze_(0).add_(1)
                t.resize_(6, 4)
                t.as_strided_((6, 4), (4, 1))
            close(x, a)
            row = make(rand(1, 4), mesh, [S0])
            alias = row.detach()
            row.squeeze_(0).mul_(2)
            close(alias, 2 * rand(1, 4))
            y = make(rand(3, 5), mesh, [placed])
            x.set_(y)
            x.add_(1)
            close(y, rand(3, 5) + 1)
            assert x.shape == (3, 5)
            x.resize_(2, 3)
            close(x, (rand(3, 5) + 1).flatten()[:6].view(2, 3))
        with pytest.raises(dtensor.errors.LayoutError, match="can grow"):
            make(rand(4), mesh, [S0]).resize_(9)

    on(3, f)


# ------------------------------------------------------------ clients
def test_writes_into_parameters() -> None:
    def f(mesh):
        for placed in ([S0, S1], [S0, R], [S1, S1]):
            w, a = nn.Parameter(make(rand(6, 4), mesh, placed)), nn.Parameter(rand(6, 4))
            with torch.no_grad():
                for t in (w, a):
                    t[2].fill_(0)
                    t[3:, 1] = 7
            close(w, a)
            vectors = [nn.utils.parameters_to_vector(ps) for ps in ([w, w], [a, a])]
            close(*vectors)
            for v, p in zip(vectors, (w, a), strict=True):
                nn.utils.vector_to_parameters(v[:24] * 2, [p])
            close(w, a)
            for p in (w, a):
                (p * p * p).sum().backward()
            nn.utils.clip_grad_value_([w], 0.3)
            nn.utils.clip_grad_value_([a], 0.3)
            close(w.grad, a.grad)

    on(4, f, (2, 2))


OPTIMIZERS = {
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01), "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "part": lambda p: torch.optim.Adam([{"params": [q.detach()[1:] for q in p]}], lr=0.1, foreach=True),
    "fused part": lambda p: torch.optim.Adam([{"params": [q.detach()[1:] for q in p]}], lr=0.1, fused=True),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_write_so(name: str) -> None:
    """Also one whose parameters are views that moved."""

    def f(mesh):
        for placed in ([S0], [S1]):
            plain = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
            ours = copy.deepcopy(plain)
            for layer in (ours[0], ours[2]):
                layer.weight = nn.Parameter(dtensor.distribute_tensor(layer.weight.detach(), mesh, placed))
            for net, x in ((plain, rand(5, 4)), (ours, make(rand(5, 4), mesh, [R]))):
                optimizer = OPTIMIZERS[name](list(net.parameters()))

                def closure(net=net, x=x, optimizer=optimizer) -> torch.Tensor:
                    optimizer.zero_grad()
                    for p in net.parameters():
                        p.grad = None
                    loss = net(x).square().mean()
                    loss.backward()
                    for group in optimizer.param_groups:
                        for q, p in zip(group["params"], net.parameters(), strict=True):
                            if q is not p:
                                q.grad = p.grad[1:]
                    return loss

                for _ in range(2):
                    optimizer.step(closure)
            for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
                close(q, p)

    torch.manual_seed(0)
    state = torch.get_rng_state()

    def seeded(mesh):
        torch.set_rng_state(state)
        f(mesh)

    on(3, seeded)


def test_a_row_of_a_parameters_data_is_written() -> None:
    """What initialization of an embedding does to its padding row, on an uneven shard."""

    def written(mesh: Any) -> None:
        for layout in (S0, S1):
            table = nn.Parameter(dtensor.distribute_tensor(torch.ones(5, 4), mesh, [layout]))
            nn.init.zeros_(table.data[3])
            assert table.full_tensor().sum(1).tolist() == [4.0, 4.0, 4.0, 0.0, 4.0]

    for n in (2, 3, 4):
        on(n, written)
