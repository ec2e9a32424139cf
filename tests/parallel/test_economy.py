"""Programs send no more than they must: a step of training, a table sharded by rows, products of shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import ints, make, rand
from helpers.modules import Block
from helpers.parallel import same, seeded
from torch import nn

from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, init_device_mesh, simulate
from dtensor.comm.observers import observers
from dtensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from dtensor.redistribute.cost_model import CostModel, use_cost_model
from meter import Meter

R, P, S = Replicate(), Partial(), Shard
Layout = tuple[Placement, ...]


def on(shape: tuple[int, ...], f: Callable[[DeviceMesh], object]) -> None:
    simulate(4)(lambda: f(init_device_mesh("cpu", shape)))


def sent(f: Callable[[], Any]) -> tuple[Any, list[str], int]:
    """What `f` gives, the collectives it issues, and the elements that this rank receives in them."""
    kinds: list[str] = []
    elements: list[int] = []

    def watch(kind: str, ranks: object, received: int, itemsize: int) -> None:
        kinds.append(kind)
        elements.append(received)

    observers.append(watch)
    try:
        got = f()
    finally:
        observers.remove(watch)
    return got, kinds, sum(elements)


# ------------------------------------------------------------ layout changes that send nothing
KEEP: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "channels last": lambda x: x.view(1, 2, 4, 6).contiguous(memory_format=torch.channels_last),
    "detach": lambda x: x.detach(),
    "half": lambda x: x.half(),
    "copy": lambda x: x.to(torch.float64, copy=True),
    "complex": lambda x: x.to(torch.complex64),
}


@pytest.mark.parametrize("name", KEEP)
def test_copies_of_a_pending_sum_stay_pending(name: str) -> None:
    def f(mesh: DeviceMesh) -> None:
        for op in ("sum", "avg") if name == "complex" else ("sum", "avg", "max", "min"):
            x = make(rand(8, 6), mesh, [Partial(op)])
            got, kinds, _ = sent(lambda x=x: KEEP[name](x))
            assert kinds == [] and got.placements == (Partial(op),)
            torch.testing.assert_close(got.full_tensor(), KEEP[name](rand(8, 6)), rtol=1e-2, atol=1e-2)

    on((4,), f)


# ------------------------------------------------------------ FSDP-like products
PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "linear": F.linear,
    "linear of 3 dims": lambda x, w: F.linear(x.view(8, -1, x.shape[-1]), w),
    "mm": lambda x, w: x @ w.t(),
    "matmul of 3 dims": lambda x, w: x.view(8, -1, x.shape[-1]) @ w.t(),
    "addmm": lambda x, w: torch.addmm(w[0, :1] * 0, x, w.t()),
}


@pytest.mark.parametrize("size", [(64, 16, 16), (512, 32, 24)], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_shards_of_rows_gather_the_weight(name: str, size: tuple[int, int, int]) -> None:
    """Forward and backward, and the weight's gradient is reduced into the weight's own layout."""
    m, k, n = size

    def f(mesh: DeviceMesh) -> None:
        two = mesh.ndim == 2
        xl, wl = ((S(0), R), (S(0), S(0))) if two else ((S(0),), (S(0),))
        a, b = rand(m, k).requires_grad_(), rand(n, k, seed=1).requires_grad_()
        x, w = make(rand(m, k), mesh, xl, True), make(rand(n, k, seed=1), mesh, wl, True)
        want = PRODUCTS[name](a, b)
        want.square().sum().backward()
        if name == "addmm":
            PRODUCTS[name](x, w)  # which makes a zero out of the weight
        out, kinds, n_forward = sent(lambda: F.linear(x, w) if name == "addmm" else PRODUCTS[name](x, w))
        _, back, n_backward = sent(lambda: out.square().sum().backward())
        same(out, want)
        same(x.grad, a.grad)
        same(w.grad, b.grad)
        assert len(kinds) == 1 and n_forward <= n * k and n_backward <= 2 * n * k, (kinds, back)
        assert out.placements[0].is_shard() and (not two or out.placements[1].is_shard(out.ndim - 1))
        assert w.grad.placements == wl and x.grad.placements[0] == S(0)

    on((4,), f)
    on((2, 2), f)


# ------------------------------------------------------------ tables sharded by rows
TABLES: list[tuple[tuple[int, ...], Layout, Layout, Layout]] = [  # mesh, table, indices, gradient of the output
    ((4,), (S(0),), (R,), (R,)),
    ((4,), (S(0),), (R,), (S(0),)),
    ((4,), (S(0),), (S(0),), (S(0),)),
    ((4,), (S(0),), (R,), (P,)),
    ((2, 2), (S(0), S(0)), (R, R), (R, R)),
    ((2, 2), (S(0), S(0)), (S(0), R), (S(0), R)),
    ((2, 2), (R, S(0)), (S(0), R), (S(0), R)),
    ((2, 2), (S(0), S(1)), (R, R), (R, R)),
]


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("case", range(len(TABLES)))
def test_no_rank_makes_the_gradient_of_a_whole_table(case: int, options: dict[str, Any]) -> None:
    shape, table, indices, grad = TABLES[case]
    rows, width = 1000, 12

    def f(mesh: DeviceMesh) -> None:
        full = rand(rows, width).requires_grad_()
        g = rand(4, 6, width, seed=5)
        F.embedding(ints(rows, 4, 6), full, **options).backward(g)
        w, i = make(rand(rows, width), mesh, table, True), make(ints(rows, 4, 6), mesh, indices)
        gy = make(g, mesh, grad)
        torch.autograd.grad(F.embedding(i, w, **options), w, gy)  # plans are made outside of the measurement
        kept = [x.detach().to_local() for x in (w, i, gy)]
        with Meter(kept) as meter:
            y = F.embedding(i, w, **options)
            (got,) = torch.autograd.grad(y, w, gy)
        same(got, full.grad)
        assert got.placements == table or got.placements == tuple(P if p is R else p for p in table)
        own = 4 * rows * width // (4 if shape == (4,) or R not in table else 2)
        beside = meter.peak - sum(x.nbytes for x in kept)
        assert beside <= 2.2 * own + 16 * g.nbytes, (beside, own)  # the gradient, and it once more with a row to spare

    on(shape, f)


def test_a_table_under_a_style_makes_its_own_rows_only() -> None:
    def f(mesh: DeviceMesh) -> None:
        for rows, out in ((1600, R), (1600, S(1))):
            net = parallelize_module(nn.Embedding(rows, 12), mesh, RowwiseParallel(input_layouts=R, output_layouts=out))
            i = ints(rows, 4, 8)
            net(i).sum().backward()
            net.weight.grad = None
            kept = [net.weight.detach().to_local(), i]
            with Meter(kept) as meter:
                net(i).sum().backward()
            assert net.weight.grad.placements == (S(0),)
            assert meter.peak - sum(x.nbytes for x in kept) <= 2.2 * rows * 12 + 12 * 4 * 8 * 12 * 4

    on((4,), f)


# ------------------------------------------------------------ a step of a transformer block
def plain_plan() -> dict[str, Any]:
    return {
        "att.[qkv]": ColwiseParallel(), "att.o": RowwiseParallel(), "mlp.a": ColwiseParallel(),
        "mlp.b": RowwiseParallel(),
    }  # fmt: skip


def sequence_plan() -> dict[str, Any]:
    to_sequence = lambda: RowwiseParallel(output_layouts=S(1))  # noqa: E731
    return {
        "norm?": SequenceParallel(), "att": PrepareModuleInput(input_layouts=S(1), desired_input_layouts=R),
        "att.[qkv]": ColwiseParallel(), "att.o": to_sequence(),
        "mlp": PrepareModuleInput(input_layouts=S(1), desired_input_layouts=R), "mlp.a": ColwiseParallel(),
        "mlp.b": to_sequence(),
    }  # fmt: skip


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("cut", [False, True], ids=["plain", "sequence"])
def test_a_step_of_a_block(cut: bool, form: dict[str, bool]) -> None:
    """Forward, backward, clipping and AdamW: as many collectives as there must be, and one process's numbers."""
    forward = ["all_gather", "reduce_scatter"] * 2 if cut else ["all_reduce"] * 2

    def f(mesh: DeviceMesh) -> None:
        ref = seeded(Block)
        net = parallelize_module(copy.deepcopy(ref), mesh, sequence_plan() if cut else plain_plan())
        pairs = list(zip(ref.parameters(), net.parameters(), strict=True))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, **form) for m in (net, ref)]
        for step in range(2):
            x = rand(2, 8, 16, seed=step)
            y = (x.chunk(4, 1)[mesh.get_local_rank()] if cut else x).clone()
            x.requires_grad_(), y.requires_grad_()
            out, sent_forward, _ = sent(lambda y=y: net(y))
            _, sent_backward, _ = sent(lambda out=out: out.square().sum().backward())
            ref(x).square().sum().backward()
            assert sent_forward == forward and sorted(sent_backward) == sorted(forward)
            same(y.grad, x.grad.chunk(4, 1)[mesh.get_local_rank()] if cut else x.grad)
            clip = partial(nn.utils.clip_grad_norm_, max_norm=1.0, foreach=form.get("foreach"))
            total = clip(ref.parameters())
            got, sent_clip, _ = sent(partial(clip, net.parameters()))
            same(got, total)
            _, sent_step, _ = sent(optimizers[0].step)
            optimizers[1].step()
            assert sent_clip == ["all_reduce"] * (2 if cut else 1) and sent_step == []
            for p, q in pairs:
                torch.testing.assert_close(q.full_tensor() if isinstance(q, DTensor) else q, p, rtol=1e-3, atol=1e-4)
                p.grad = q.grad = None

    on((4,), f)


@pytest.mark.parametrize("cut", [False, True], ids=["plain", "sequence"])
def test_a_step_of_a_block_on_two_axes(cut: bool) -> None:
    """Tensor-parallel over one axis, its own batch over the other: pending gradients of any shape in one bucket."""

    def f() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ref = seeded(Block)
        plan = sequence_plan() if cut else plain_plan()
        net = parallelize_module(copy.deepcopy(ref), mesh, plan, axis="tp", others={"dp": S(0)})
        row, column = mesh.get_coordinate() or (0, 0)
        x = rand(4, 8, 16)
        mine = lambda t: t.chunk(2, 0)[row].chunk(2, 1)[column] if cut else t.chunk(2, 0)[row]  # noqa: E731
        y = mine(x).clone().requires_grad_()
        ref(x.requires_grad_()).square().sum().backward()
        out, forward, _ = sent(lambda: net(y))
        _, backward, _ = sent(lambda: out.square().sum().backward())
        assert forward == (["all_gather", "reduce_scatter"] * 2 if cut else ["all_reduce"] * 2)
        assert sorted(backward) == sorted(forward)
        torch.testing.assert_close(y.grad, mine(x.grad), rtol=1e-3, atol=1e-4)
        pairs = [(p, q) for p, q in zip(ref.parameters(), net.parameters(), strict=True) if isinstance(q, DTensor)]
        total = nn.utils.get_total_norm([p.grad for p, _ in pairs])
        got, kinds, _ = sent(lambda: nn.utils.clip_grad_norm_([q for _, q in pairs], 1e9))
        torch.testing.assert_close(got.full_tensor(), total, rtol=1e-3, atol=1e-4)
        assert kinds == ["all_reduce"] * (3 if cut else 2)  # pending over dp; with norms over both; the total
        assert sent(torch.optim.AdamW([q for _, q in pairs], lr=0.1).step)[1] == []
        for p, q in pairs:
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-3, atol=1e-3)

    simulate(4)(f)


# ------------------------------------------------------------ lists of plain tensors and DTensors
def test_list_ops_take_both_kinds_side_by_side() -> None:
    def f(mesh: DeviceMesh) -> None:
        full = [rand(6, 4, seed=i) for i in range(4)]
        other = [rand(6, 4, seed=9 + i) for i in range(4)]
        kinds: list[Layout | None] = [None, (S(0),), None, (P,)]
        mixed = lambda ts: [t.clone() if k is None else make(t, mesh, k) for t, k in zip(ts, kinds, strict=True)]  # noqa: E731
        a, b = mixed(full), mixed(other)
        for got, want in (
            (torch._foreach_add(a, b, alpha=2), torch._foreach_add(full, other, alpha=2)),
            (torch._foreach_mul(a, 2.0), torch._foreach_mul(full, 2.0)),
            (torch._foreach_norm(a, 2.0), torch._foreach_norm(full, 2.0)),
            (torch._foreach_mul(a, [1.0, 2.0, 3.0, 4.0]), torch._foreach_mul(full, [1.0, 2.0, 3.0, 4.0])),
        ):
            for g, w, k in zip(got, want, kinds, strict=True):
                assert isinstance(g, DTensor) is (k is not None)
                same(g, w)
        number = make(torch.tensor(3.0), mesh, [P])
        for target in (a, a[::2]):
            before = [t.clone() for t in target]
            torch._foreach_mul_(target, number)
            for t, was in zip(target, before, strict=True):
                same(t, was * 3.0)
        same(a[0].clone().mul_(number), a[0] * 3)
        before = [t.clone() for t in a]
        with pytest.raises(RuntimeError, match="mixed"):  # elements that mix kinds
            torch._foreach_add_(a, [*b[1:], b[0]])
        for t, was in zip(a, before, strict=True):
            same(t, was)
        with pytest.raises(RuntimeError, match="written, is a plain tensor"):
            a[0].mul_(a[1])

    on((4,), f)


@pytest.mark.parametrize("count", (1, 2))
def test_gradients_settle_in_the_dtype_of_the_wire(count: int) -> None:
    """In bfloat16 alone the three small parts are lost, however many gradients travel together."""

    def f(mesh: DeviceMesh) -> None:
        part = torch.full((3,), 1.0 if mesh.get_rank() == 0 else 2**-8, dtype=torch.bfloat16)
        with use_cost_model(CostModel(wire={torch.bfloat16: torch.float32})):
            params = [nn.Parameter(make(torch.ones(3, dtype=torch.bfloat16), mesh, (R,))) for _ in range(count)]
            for p in params:
                p.grad = DTensor.from_local(part.clone(), mesh, [P])
            torch.nn.utils.clip_grad_norm_(params, 1e9)
            for p in params:
                assert isinstance(p.grad, DTensor)
                assert p.grad.full_tensor()[0].item() == 1.015625

    on((4,), f)
