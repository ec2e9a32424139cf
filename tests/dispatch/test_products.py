"""Products that run whole: the same layouts, numbers and collectives as torch's chain of ops, in one step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import dtensor
import dtensor.errors
from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from dtensor import tensor as tensor_module
from dtensor.comm.observers import observers
from dtensor.dispatch import products

R, P = Replicate(), Partial()

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="products run whole from torch 2.13 on"
)


@pytest.fixture
def op_by_op() -> Iterator[Callable[[bool], None]]:
    """A switch: `op_by_op(True)` lets torch take products apart."""
    yield lambda on: products.see_whole(not on)
    products.see_whole(True)


def laid_out(full: torch.Tensor, mesh: Any, layout: Any) -> DTensor:
    """A leaf of this value in this layout; a pending sum has unequal shares."""
    if not any(isinstance(p, Partial) for p in layout):
        return distribute_tensor(full, mesh, layout).requires_grad_()

    settled = [R if isinstance(p, Partial) else p for p in layout]
    local = distribute_tensor(full, mesh, settled).to_local()
    for axis, p in enumerate(layout):
        if isinstance(p, Partial):
            k, r = mesh.shape[axis], mesh.get_coordinate()[axis]
            local = local * (1 - 0.25 * (k - 1) if r == 0 else 0.25)

    return DTensor.from_local(local, mesh, layout, shape=full.shape, stride=full.stride()).requires_grad_()


def ran(f: Callable[..., torch.Tensor], tensors: list[DTensor], weigh: torch.Tensor) -> tuple[Any, ...]:
    """Result, gradients and collectives of `f`; layouts with the values."""
    sent: list[Any] = []
    watch = lambda kind, ranks, elements, itemsize: sent.append((kind, tuple(ranks), elements))  # noqa: E731
    observers.append(watch)
    try:
        out = f(*tensors)
        pulled = distribute_tensor(weigh, out.device_mesh, [R if p.is_partial() else p for p in out.placements])
        grads = torch.autograd.grad((out.redistribute(placements=pulled.placements) * pulled).sum(), tensors)
    finally:
        observers.remove(watch)
    values = [(t._spec, t.to_local().clone()) for t in (out.detach(), *grads)]
    return values, sent, [t.full_tensor() for t in (out.detach(), *grads)]


CASES: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "linear of 3 dims": (F.linear, [(2, 4, 6), (5, 6)]),
    "linear of 3 dims and a bias": (F.linear, [(3, 4, 6), (5, 6), (5,)]),
    "linear of 2 dims": (F.linear, [(5, 6), (4, 6)]),
    "linear of 2 dims and a bias": (F.linear, [(4, 6), (5, 6), (5,)]),
    "matmul of 4 dims": (torch.matmul, [(2, 4, 3, 5), (2, 4, 5, 6)]),
    "matmul of 3 dims": (torch.matmul, [(4, 5, 3), (4, 3, 2)]),
    "matmul of 2 dims": (torch.matmul, [(4, 5), (5, 6)]),
    "matmul of 2 dims, both transposed": (lambda x, y: x.t() @ y.t(), [(4, 5), (6, 4)]),
    "matmul of 3 dims by 2": (torch.matmul, [(2, 4, 5), (5, 6)]),
    "matmul of 3 dims by a transposed matrix": (lambda x, y: x @ y.t(), [(2, 4, 5), (6, 5)]),
}


def layouts_of(shapes: list[tuple[int, ...]], axes: int) -> list[Any]:
    """Layouts of all tensors: every choice on one axis; on two, those that tensor and data parallelism make."""
    one = [[R, P, *(Shard(d) for d in range(len(shape) if len(shape) < 4 else 3))] for shape in shapes]
    if axes == 1:
        return [[[p] for p in ps] for ps in itertools.product(*one)]
    second = list(itertools.product(*one))[::2]
    return [[[a, b] for a, b in zip((Shard(0), *[R] * (len(shapes) - 1)), ps, strict=True)] for ps in second]


@pytest.mark.parametrize(
    ("name", "mesh_shape"),
    [*itertools.product(CASES, [(2,)]), ("linear of 3 dims and a bias", (3,)), ("linear of 3 dims", (2, 2))],
)
def test_whole_is_the_chain(name: str, mesh_shape: tuple[int, ...], op_by_op: Callable[[bool], None]) -> None:
    f, shapes = CASES[name]
    torch.manual_seed(0)
    full = [torch.randn(s) for s in shapes]
    leaves = [t.clone().requires_grad_() for t in full]
    weigh = torch.randn(f(*leaves).shape)
    plain = [f(*full), *torch.autograd.grad((f(*leaves) * weigh).sum(), leaves)]
    layouts = layouts_of(shapes, len(mesh_shape))

    def program() -> list[Any]:
        mesh = init_device_mesh("cpu", mesh_shape)
        found = []
        for ps in layouts:
            tensors = [laid_out(t, mesh, p) for t, p in zip(full, ps, strict=True)]
            found.append(ran(f, tensors, weigh))
        return found

    ranks = torch.Size(mesh_shape).numel()
    op_by_op(True)
    chain = simulate(ranks)(program)
    op_by_op(False)
    whole = simulate(ranks)(program)
    assert len(layouts) >= 8
    for a_rank, b_rank in zip(chain, whole, strict=True):
        for ps, (a_values, a_sent, _), (b_values, b_sent, b_full) in zip(layouts, a_rank, b_rank, strict=True):
            assert sorted(a_sent) == sorted(b_sent), ps
            for (a_spec, a), (b_spec, b) in zip(a_values, b_values, strict=True):
                assert (str(a_spec), a_spec.stride, a.stride()) == (str(b_spec), b_spec.stride, b.stride()), ps
                assert torch.equal(a, b), ps
            for got, want in zip(b_full, plain, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that came to dispatch."""
    names: list[str] = []
    run = tensor_module._run

    def counting(func: Any, args: Any, kwargs: Any = None) -> Any:
        names.append(str(func))
        return run(func, args, kwargs)

    monkeypatch.setattr(tensor_module, "_run", counting)
    return names


def block(rank_count: int = 2) -> tuple[DTensor, DTensor, DTensor, DTensor]:
    """Input, column-wise weight and bias, row-wise weight."""
    mesh = init_device_mesh("cpu", (rank_count,))
    torch.manual_seed(0)
    full = torch.randn(2, 4, 6), torch.randn(8, 6), torch.randn(8), torch.randn(6, 8)
    layouts = [R], [Shard(0)], [Shard(0)], [Shard(1)]
    x, w, b, v = (distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(full, layouts, strict=True))
    return x, w, b, v


def mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
    """A tensor-parallel MLP."""
    return F.linear(torch.tanh(F.linear(x, w, b)), v)


def test_products_do_not_come_to_dispatch(counted: list[str]) -> None:
    def program() -> list[str]:
        tensors = block()
        ones = DTensor.from_local(torch.ones(2, 4, 6), tensors[0].device_mesh, [R])
        for _ in range(2):
            counted.clear()
            out = mlp(*tensors).redistribute(placements=[R])
            torch.autograd.grad(out, tensors, ones)
        return list(counted)

    ops = simulate(2)(program)[0]
    assert {n.split(".")[1] for n in ops} <= {"tanh", "tanh_backward", "detach"}


def test_gradients_of_gradients() -> None:
    def program() -> None:
        tensors = block()
        grads = torch.autograd.grad(mlp(*tensors).square().sum(), tensors, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)
        full = [t.full_tensor().detach().requires_grad_() for t in tensors]
        want = torch.autograd.grad(mlp(*full).square().sum(), full, create_graph=True)
        want = torch.autograd.grad(sum(g.square().sum() for g in want), full)
        for got, value in zip(again, want, strict=True):
            torch.testing.assert_close(got.full_tensor(), value, rtol=1e-4, atol=1e-3)

    simulate(2)(program)


def test_checkpoint_with_a_mode_around_backward_alone() -> None:
    """What a mode looks at runs op by op, and saves the same tensors."""

    def program() -> None:
        tensors = block()
        want = torch.autograd.grad(mlp(*tensors).sum(), tensors)
        out = checkpoint(mlp, *tensors, use_reentrant=False)
        with FlopCounterMode(display=False) as flops:
            got = torch.autograd.grad(out.sum(), tensors)
        assert flops.get_total_flops() > 0
        for a, b in zip(got, want, strict=True):
            assert a.placements == b.placements
            torch.testing.assert_close(a.full_tensor(), b.full_tensor())

    simulate(2)(program)


def test_saved_tensors_are_offered_to_hooks_and_watched_for_writes() -> None:
    def program() -> None:
        x, w, b, _ = block()
        packed: list[Any] = []
        with saved_tensors_hooks(lambda t: packed.append(t) or t.detach().clone(), lambda t: t):
            out = F.linear(x, w, b)
        assert [type(t) for t in packed] == [DTensor, DTensor]
        torch.autograd.grad(out.sum(), (x, w, b))
        packed.clear()
        with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            F.linear(x, w.detach(), b)
            torch.matmul(x.transpose(1, 2), x.detach())
        assert [tuple(t.shape) for t in packed] == [(8, 6), (2, 4, 6)]  # what frozen factors need, no more
        y = x * 1.0
        out = F.linear(y, w, b)
        y.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), (x, w, b))

    simulate(2)(program)


FROZEN = [(False, True), (True, False)]


@pytest.mark.parametrize("name", ["linear of 3 dims", "matmul of 2 dims", "matmul of 3 dims by 2", "matmul of 3 dims"])
def test_gradients_cut_in_their_own_way(name: str) -> None:
    """What is not needed is not saved, and the gradient may be sharded in another way than it."""
    f, shapes = CASES[name]
    torch.manual_seed(0)
    full = [torch.randn(s) for s in shapes]
    weigh = torch.randn(f(*full).shape)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        cut = [[R, *map(Shard, range(t.ndim))] for t in (*full, weigh)]
        for needs, *layouts in itertools.product(FROZEN, *cut):
            x, y = (
                distribute_tensor(t, mesh, [p]).requires_grad_(need)
                for t, p, need in zip(full, layouts, needs, strict=False)
            )
            g = distribute_tensor(weigh, mesh, [layouts[2]])
            (got,) = torch.autograd.grad(f(x, y), x if needs[0] else y, g)
            plain = [t.clone().requires_grad_(need) for t, need in zip(full, needs, strict=True)]
            (want,) = torch.autograd.grad(f(*plain), plain[0] if needs[0] else plain[1], weigh)
            assert got.to_local().shape == got._spec.local_shape, (needs, layouts)
            torch.testing.assert_close(got.full_tensor(), want)

    simulate(2)(program)


@pytest.mark.parametrize("f", [F.linear, torch.matmul])
def test_gradients_are_of_the_data_that_forward_saw(f: Callable[..., torch.Tensor]) -> None:
    """As in torch, which saves views: `w.data = ...` leaves the old data to a leaf's graph; else it is an error."""

    def program() -> None:
        x, w, _, _ = block()
        x, w = (x, w) if f is F.linear else (x, w.detach().t().contiguous().requires_grad_())
        want = torch.autograd.grad(f(x, w).sum(), (x, w))
        out = f(x, w).sum()
        w.data, x.data = w.data * 3, x.data * 3
        for got, value in zip(torch.autograd.grad(out, (x, w)), want, strict=True):
            assert torch.equal(got.full_tensor(), value.full_tensor())
        h = x * 1.0
        out = f(h, w).sum()
        h.data = h.data * 3
        with pytest.raises(RuntimeError, match="other data after the forward"):
            torch.autograd.grad(out, (x, w))
        frozen, h = w.detach(), x * 1.0
        out = f(h, frozen)
        h.add_(1.0)  # not needed for its own gradient
        torch.autograd.grad(out.sum(), x)

    simulate(2)(program)


def test_results_may_be_written() -> None:
    def program() -> None:
        x, w, b, _ = block()
        out = F.relu_(F.linear(x, w, b))
        (got,) = torch.autograd.grad(out.sum(), w)
        full = [t.full_tensor().detach().requires_grad_() for t in (x, w, b)]
        (want,) = torch.autograd.grad(F.relu_(F.linear(*full)).sum(), full[1])
        torch.testing.assert_close(got.full_tensor(), want)

    simulate(2)(program)


def test_autocast_forward_mode_and_transforms_go_through_the_chain() -> None:
    def program() -> None:
        x, w, b, _ = block()
        with torch.autocast("cpu", torch.bfloat16):
            out = F.linear(x, w, b)
            assert out.dtype is torch.bfloat16
        assert all(g.dtype is torch.float32 for g in torch.autograd.grad(out.float().sum(), (x, w, b)))
        full = [t.full_tensor().detach() for t in (x, w, b)]
        got = torch.func.grad(lambda v: F.linear(x.detach(), v, b.detach()).sum())(w.detach())
        want = torch.func.grad(lambda v: F.linear(full[0], v, full[2]).sum())(full[1])
        torch.testing.assert_close(got.full_tensor(), want)

    def forward_mode() -> None:
        x, w, _, _ = block(1)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(w.detach(), torch.ones_like(w.detach()))
            moved = torch.autograd.forward_ad.unpack_dual(F.linear(x.detach(), dual)).tangent
        torch.testing.assert_close(moved.to_local(), F.linear(x.to_local(), torch.ones(8, 6)).detach())

    simulate(2)(program)
    simulate(1)(forward_mode)


def test_without_gradients_and_in_inference_mode() -> None:
    def program() -> None:
        x, w, b, _ = block()
        want = F.linear(x, w, b).full_tensor().detach()
        with torch.no_grad():
            out = F.linear(x, w, b)
            assert not out.requires_grad and out.grad_fn is None
            torch.testing.assert_close(out.full_tensor(), want)
        with torch.inference_mode():
            torch.testing.assert_close(F.linear(x, w, b).full_tensor(), want)
        w.requires_grad_(False)
        grads = torch.autograd.grad(F.linear(x, w, b).sum(), (x, b))
        assert [tuple(g.shape) for g in grads] == [(2, 4, 6), (8,)]

    simulate(2)(program)


def test_errors_are_those_of_the_chain(op_by_op: Callable[[bool], None]) -> None:
    def program() -> list[str]:
        x, w, _, v = (t.detach() for t in block())
        calls = (
            lambda: F.linear(x, v[:, :5]),
            lambda: torch.matmul(x, x),
            lambda: F.linear(x, w.double()),
        )
        said = []
        for call in calls:
            with pytest.raises(RuntimeError) as error:
                call()
            said.append(str(error.value))
        return said

    whole = simulate(2)(program)
    op_by_op(True)
    assert whole == simulate(2)(program)


def test_plain_tensors_are_told_apart_as_ever() -> None:
    """The kernels stand between the call and dispatch, and hold what they hand on."""

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(3, 2, 4), mesh, [R])
        w, layer = torch.randn(4, 4), torch.nn.Linear(4, 4)
        cell = dtensor.distribute_module(torch.nn.GRU(4, 4), mesh)
        assert cell(x)[0].shape == (3, 2, 4)  # whose first state torch makes, plain
        calls = (
            lambda: F.linear(x, w),
            lambda: F.linear(x, torch.ones(4, 4)),
            lambda: x @ w.t(),
            lambda: x @ torch.ones(4, 4),
            lambda: layer(x),
        )
        for call in calls:
            with pytest.raises(dtensor.errors.MixedTensorError):
                call()

    simulate(2)(program)


def test_lowered_and_compiled() -> None:
    def program() -> None:
        x, w, b, v = block()
        want = torch.autograd.grad(mlp(x, w, b, v).sum(), (w, b, v))

        def step(x: Any, w: Any, b: Any, v: Any) -> Any:
            return torch.autograd.grad(mlp(x, w, b, v).sum(), (w, b, v))

        for got, value in zip(dtensor.lower(step, x, w, b, v)(x, w, b, v), want, strict=True):
            torch.testing.assert_close(got.full_tensor(), value.full_tensor())

    simulate(2)(program)


def test_gradients_that_are_cut_in_a_way_of_their_own() -> None:
    """Where an input is not needed, nothing makes the gradient of the result be sharded as that input is."""
    full = {
        F.linear: (torch.randn(4, 6, 8), torch.randn(10, 8)),
        torch.matmul: (torch.randn(4, 6, 8), torch.randn(8, 10)),
    }
    pull = torch.randn(4, 6, 10)
    cuts: list[Any] = [R, Shard(0), Shard(1)]

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for f, needed in itertools.product(full, ((True, False), (False, True))):
            values = full[f]
            leaves = [t.clone().requires_grad_(n) for t, n in zip(values, needed, strict=True)]
            f(*leaves).backward(pull)
            for layout in itertools.product(cuts[:2], cuts, cuts):
                *tensors, g = (distribute_tensor(t, mesh, [p]) for t, p in zip((*values, pull), layout, strict=True))
                ours = [t.requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
                f(*ours).backward(g)
                at = needed.index(True)
                torch.testing.assert_close(ours[at].grad.full_tensor(), leaves[at].grad)

    simulate(2)(program)


def plain_factors_of_torchs() -> tuple[float, list[str]]:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    d = distribute_tensor(full, mesh, [Shard(0)])
    u, s, v = torch.pca_lowrank(d, q=3, center=False)  # makes a random matrix, by which it multiplies every batch
    error = float(((u * s.unsqueeze(-2)) @ v.mT - d).full_tensor().abs().max().item())
    w, refused = torch.randn(4, 2), []
    for other in (lambda: d @ w, lambda: d @ torch.ones(4, 2), lambda: d @ torch.ones(1, 4, 2).expand(2, 4, 2)):
        with pytest.raises(dtensor.errors.MixedTensorError) as e:
            other()
        refused.append(str(e.value))
    return error, refused


def test_plain_factors_that_torch_makes_are_told_from_the_users() -> None:
    for error, refused in simulate(2)(plain_factors_of_torchs):
        assert error < 1e-5 and len(refused) == 3 and all("plain" in text for text in refused)
