"""`torch.compile` on functions of DTensors: one graph, the numbers of one device, never a stale layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from functorch.compile import min_cut_rematerialization_partition as min_cut
from helpers.gloo_ranks import run_ranks
from torch.testing import assert_close

import dtensor
from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh


def compiled(fn: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(fn, backend=backend, fullgraph=True)
    return made


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ up) @ down


def case_one_graph(rank: int, world: int) -> None:
    """All four calls are in one graph, values and gradients are those of one device."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))

    def step(local: torch.Tensor, up: DTensor, down: DTensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = DTensor.from_local(local, mesh, [Shard(0), Replicate()])
        y = mlp(x, up, down)
        if y.placements[1].is_partial():
            y = y.redistribute(mesh, [Shard(0), Replicate()])
        part = y.to_local() * (mesh.get_local_rank("dp") + 1)
        return part.sum(), y.full_tensor().square().sum()

    torch.manual_seed(1)
    x, up, down = torch.randn(4, 5), torch.randn(5, 6), torch.randn(6, 3)
    ups = distribute_tensor(up, mesh, [Replicate(), Shard(1)]).requires_grad_()
    downs = distribute_tensor(down, mesh, [Replicate(), Shard(0)]).requires_grad_()
    first, second = compiled(step)(x.chunk(2)[mesh.get_local_rank("dp")], ups, downs)
    (first + second).backward()
    ref = [up.requires_grad_(), down.requires_grad_()]
    out = mlp(x, *ref)
    weights = torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None]
    assert_close(second, out.square().sum())
    ((out * weights).sum() + out.square().sum()).backward()
    for mine, its in zip((ups, downs), ref, strict=True):
        assert mine.grad is not None and its.grad is not None
        assert_close(mine.grad.full_tensor(), its.grad)


@pytest.mark.processes
@pytest.mark.slow
def test_on_processes() -> None:
    run_ranks(2, [case_one_graph], timeout=120).check()


def start_fake_world(rank: int = 0) -> dtensor.DeviceMesh:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    return init_device_mesh("cpu", (4,))


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="the fake group of torch 2.11 leaves what it gives unset")
def test_layouts_and_writes() -> None:
    """Another layout or shape is another graph; uneven and pending inputs; what is written is there afterwards."""
    start_fake_world()
    mesh = init_device_mesh("cpu", (2, 2))

    def step(x: DTensor, w: DTensor) -> DTensor:
        x.mul_(2)
        return (x @ w).relu().sum(0)

    run = compiled(step)
    uneven, pending = [Shard(0), Shard(1)], [Replicate(), Partial()]
    for rows, layout in ((7, uneven), (7, pending), (7, uneven), (3, uneven)):
        plain, weight = torch.randn(rows, 6), torch.randn(6, 5)
        w = distribute_tensor(weight, mesh, [Replicate(), Replicate()], src_data_rank=None)
        xs = [distribute_tensor(plain, mesh, layout, src_data_rank=None) for _ in range(2)]
        got, eager = run(xs[0], w), step(xs[1], w)
        assert got._spec is eager._spec
        assert_close(got.to_local(), eager.to_local())
        assert_close(xs[0].to_local(), xs[1].to_local())


def test_placements_made_before_a_graph_breaks() -> None:
    """What torch hands on from one graph to the next holds them by weak references."""
    mesh = start_fake_world()

    def step(x: DTensor) -> DTensor:
        whole = [Replicate() for _ in x.placements]
        cut = whole.copy()
        cut[0] = Shard(1)
        torch._dynamo.graph_break()
        return x.redistribute(placements=cut)

    torch._dynamo.reset()
    run = torch.compile(step, backend="aot_eager")
    for rows in (8, 4, 6):
        x = distribute_tensor(torch.randn(rows, 4), mesh, [Shard(0)], src_data_rank=None)
        assert run(x).placements == (Shard(1),)


def test_local_tensors_of_other_sizes() -> None:
    """`from_local` of tensors whose sizes change, which the compiler takes for symbols by then: another graph each."""
    mesh = start_fake_world()

    def step(local: torch.Tensor, like: DTensor) -> DTensor:
        x = DTensor.from_local(local, mesh, [Shard(0)]).square()
        return DTensor.from_local(x.to_local() + 1, like.device_mesh, like.placements)

    run = compiled(step)
    like = distribute_tensor(torch.randn(8, 5), mesh, [Shard(1)], src_data_rank=None)
    for rows, cols in ((2, 3), (4, 3), (3, 3), (3, 6)):
        local = torch.randn(rows, cols, requires_grad=True)
        got = run(local, like)
        assert got.shape == (rows, 4 * cols) and got.placements == (Shard(1),)
        assert all(type(n) is int for n in got._spec.shape)
        assert_close(got.to_local(), local.square() + 1)
        (grad,) = torch.autograd.grad(got.to_local().sum(), local)
        assert_close(grad, 2 * local)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_does_what_eager_does() -> None:
    """Forward and backward, collectives and uneven shards included, on one rank of a world that does not exist."""
    mesh = start_fake_world()

    def step(x: DTensor, w: DTensor) -> DTensor:
        return (x @ w).sin().redistribute(mesh, [Replicate()])

    plain, weight = torch.randn(5, 4), torch.randn(4, 6)
    found = []
    for run in (step, compiled(step, "inductor")):
        x = distribute_tensor(plain, mesh, [Replicate()], src_data_rank=None)
        w = distribute_tensor(weight, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
        out = run(x, w)
        out.square().sum().backward()
        assert isinstance(w.grad, DTensor)
        found.append((out.to_local(), w.grad.to_local()))
    assert_close(found[1], found[0])


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older torch looks at a DTensor's class only")
def view_written(x: torch.Tensor) -> Any:
    a, b = x[1:3].split([4, 1], -1)
    b -= 0.7
    return a, b


def view_written_after_a_break(x: torch.Tensor) -> Any:
    x.mul_(0.5)
    rows, part = x.unbind(0), x[1:3].t()[1:]
    torch._dynamo.graph_break()
    torch._foreach_mul_(rows[1:], 2.0)
    part[-2:] -= 0.7
    return part


def views_of_views(x: torch.Tensor) -> Any:
    a = x.unflatten(0, (2, 2))[:, 0]
    torch._dynamo.graph_break()
    b = a.t()[1:]
    torch._dynamo.graph_break()
    b.mul_(3)
    return b, a * 2, x.sum()


def base_and_view(x: torch.Tensor) -> Any:
    a = x[:3]
    torch._dynamo.graph_break()
    first = a + 1
    x.mul_(2)
    return first, a + 1


@pytest.mark.parametrize("layout", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_writes_through_views(layout: Any) -> None:
    """A view of an argument is one after the graph has ended, too, whether it had to move data or not."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    for step in (view_written, view_written_after_a_break, views_of_views, base_and_view):
        torch._dynamo.reset()
        run = torch.compile(step, backend="aot_eager")
        for _ in range(2):
            plain = torch.arange(20.0).reshape(4, 5)
            x = distribute_tensor(plain.clone(), mesh, [layout])
            got, want = run(x), step(plain)
            assert_close(x.full_tensor(), plain)
            for mine, its in zip(got, want, strict=True):
                assert_close(mine.full_tensor(), its)


def test_a_given_view_is_not_written_in_silence() -> None:
    """In one graph for all, a write to a view that moved and was given is an error, that says what to do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = distribute_tensor(torch.arange(20.0).reshape(4, 5), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(Exception) as caught:
        compiled(lambda view: view.add_(1))(x[1:3])
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, dtensor.errors.LayoutError):
        error = error.__cause__ or error.__context__
    assert "does not reach the tensor that it is a view of" in str(error)
    assert_close(compiled(lambda view: view + 1)(x[1:3]).full_tensor(), torch.arange(20.0).reshape(4, 5)[1:3] + 1)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, True),
    "rand_like": torch.rand_like,
    "bernoulli of what is read": lambda x: torch.bernoulli(x * 0.5),
    "normal_ and uniform_": lambda x: x.clone().normal_() + x.clone().uniform_(),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x.view(4, 2, 4, 8), x.view(4, 2, 4, 8), x.view(4, 2, 4, 8), dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws(name: str) -> None:
    """In one graph: replicas draw alike, shards differently, another call other numbers, the same seed the same."""
    draw = DRAWS[name]
    parts: dict[tuple[int, str], list[torch.Tensor]] = {}
    for rank in (0, 1):
        start_fake_world(rank)
        mesh = init_device_mesh("cpu", (2, 2))
        run = compiled(lambda x: draw(x) * 2)
        for layout in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
            x = distribute_tensor(torch.ones(8, 32), mesh, layout, src_data_rank=None)
            torch.manual_seed(3)
            first, second = run(x).to_local(), run(x).to_local()
            torch.manual_seed(3)
            assert_close(run(x).to_local(), first)
            assert not torch.equal(first, second)
            parts[rank, repr(layout)] = [first, second]
            x.requires_grad_()
        dist.destroy_process_group()
    replicas, shards = (repr(layout) for layout in ([Shard(0), Replicate()], [Replicate(), Shard(0)]))
    assert_close(parts[0, replicas], parts[1, replicas])  # ranks 0 and 1 differ along the second axis
    assert not torch.equal(parts[0, shards][0], parts[1, shards][0])


def test_a_mask_that_was_dropped_out_is_that_of_the_gradient() -> None:
    """Drawn once, in forward, or computed again from the same number."""
    x = distribute_tensor(torch.ones(8, 32), start_fake_world(), [Shard(0)], src_data_rank=None).requires_grad_()
    y = compiled(lambda x: torch.nn.functional.dropout(x.sin(), 0.5, True).square())(x)
    y.sum().backward()
    assert isinstance(x.grad, DTensor) and 0 < (y.to_local() == 0).sum() < y.to_local().numel()
    assert torch.equal(x.grad.to_local() == 0, y.to_local() == 0)


def test_ranks_make_the_same_backward() -> None:
    """Where parts have different sizes, and some are empty, ranks send the same collectives forward and backward."""
    from torch._dynamo.backends.common import aot_autograd

    def step(x: DTensor, w: DTensor, z: DTensor) -> torch.Tensor:
        q, k = torch.nn.functional.linear(x, w).unflatten(-1, (2, 16)).unbind(-2)
        y = (q @ k.mT).softmax(-1) @ q
        return (y * y).mean() + torch.xlogy(z, y.abs() + 0.5).square().mean()

    sent: list[list[str]] = []
    for rank in (0, 3):
        mesh = start_fake_world(rank)
        torch._dynamo.reset()
        mine: list[str] = []

        def keep(graph: torch.fx.GraphModule, _: Any, mine: list[str] = mine) -> Any:
            mine += [str(n.target) for n in graph.graph.nodes if "c10d" in str(n.target)] + ["end"]
            return make_boxed_func(graph.forward)

        args = [
            distribute_tensor(torch.randn(*shape), mesh, [p], src_data_rank=None)
            for shape, p in (((3, 8, 16), Replicate()), ((32, 16), Shard(1)), ((3, 8, 16), Shard(0)))
        ]
        args[0].requires_grad_()
        run = torch.compile(step, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut))
        run(*args).backward()
        sent.append(mine)
        dist.destroy_process_group()
    assert sent[0].count("end") == 2 and len(sent[0]) > 6
    assert sent[1] == sent[0]


def test_no_rank_loads_what_another_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor over one cache folder, rank after rank: parts of equal shapes, of which each rank has its own.

    Views and products of matrices only, so that no C++ is compiled.
    """
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, weight = torch.arange(28.0).view(7, 4), torch.randn(4, 3)

    def step(x: DTensor, w: DTensor) -> DTensor:
        return x.redistribute(placements=[Shard(0)] * x.device_mesh.ndim) @ w

    for shape in ((4,), (2, 2)):
        for rank in (0, 1):
            start_fake_world(rank)
            mesh = init_device_mesh("cpu", shape)

            def local_step(x: torch.Tensor, w: torch.Tensor, mesh: dtensor.DeviceMesh = mesh) -> torch.Tensor:
                whole = (Replicate(),) * mesh.ndim
                return step(DTensor.from_local(x, mesh, whole), DTensor.from_local(w, mesh, whole)).to_local()

            for fn, wrapped in ((step, True), (local_step, False))[: 3 - mesh.ndim]:
                found = []
                counters.clear()
                for run in (fn, compiled(fn, "inductor")):
                    x, w = plain.clone().requires_grad_(), weight.clone().requires_grad_()
                    args: list[Any] = [x, w]
                    if wrapped:
                        args = [DTensor.from_local(t.detach(), mesh, None).requires_grad_() for t in args]
                    out = run(*args)
                    part = out.to_local() if wrapped else out
                    grads = torch.autograd.grad(part.square().sum(), args)
                    found.append((part, *(g.to_local() if wrapped else g for g in grads)))
                assert_close(found[1], found[0])
                assert not counters["aot_autograd"]["autograd_cache_hit"]
            dist.destroy_process_group()


def test_what_a_graph_cannot_hold_is_refused() -> None:
    """Collectives of simulated ranks, which would wait for each other for ever; numbers that ranks must agree on."""

    def on_ranks() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        compiled(lambda x: x.full_tensor())(x)

    with pytest.raises(Exception, match="simulated ranks inside torch.compile"):
        dtensor.simulate(2)(on_ranks)
    x = distribute_tensor(torch.ones(4), start_fake_world(), [Replicate()], src_data_rank=None)
    with pytest.raises(Exception, match="enerator"):
        compiled(lambda x: x.normal_(generator=torch.Generator()))(x)


def test_collectives_are_functional_and_by_name() -> None:
    """A graph holds functional collectives by the name of their group, and a layout that changes makes another."""
    mesh = start_fake_world()
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    run = torch.compile(lambda x: (x + x).sum(0), backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    full = torch.compile(lambda x: x.full_tensor(), backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    for layout, count in ((Shard(0), 1), (Shard(1), 2), (Shard(0), 2)):
        run(distribute_tensor(torch.randn(8, 4), mesh, [layout], src_data_rank=None))
        assert len(graphs) == count
    cut = torch.compile(
        lambda x: x.redistribute(placements=[Shard(0)]), backend=aot_autograd(fw_compiler=keep), fullgraph=True
    )
    cut(distribute_tensor(torch.randn(9, 64), mesh, [Partial()], src_data_rank=None))
    assert "reduce_scatter_tensor" in graphs[-1] and "c10d.reduce_scatter" not in graphs[-1]  # uneven, and waited for
    full(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)], src_data_rank=None))
    group = mesh.get_group().group_name
    assert "_c10d_functional.all_gather_into_tensor" in graphs[-1] and f"'{group}'" in graphs[-1]


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """A program on DTensors that it is given is exported; one that makes or moves some is refused, with the call."""
    from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = start_fake_world()

    class Ops(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(distribute_tensor(torch.randn(6, 8), mesh, [Shard(1)], src_data_rank=None))

        def forward(self, x: DTensor) -> Any:
            return torch.nn.functional.silu(x @ self.w).softmax(0)

    class Moves(Ops):
        def forward(self, x: DTensor) -> Any:
            return (x @ self.w).redistribute(placements=[Replicate()])

    x, other = (distribute_tensor(torch.randn(4, 6), mesh, [Replicate()], src_data_rank=None) for _ in range(2))
    ops = Ops()
    got, want = torch.export.export(ops, (x,), strict=strict).module()(other), ops(other)
    assert got._spec is want._spec
    assert_close(got.to_local(), want.to_local())
    with pytest.raises(RuntimeError, match="torch.export of a program that calls redistribute"):
        torch.export.export(Moves(), (x,), strict=strict)
    (x @ ops.w).redistribute(placements=[Replicate()])  # a move that is known from now on
    with pytest.raises(RuntimeError, match="torch.export of a program that calls redistribute"):
        torch.export.export(Moves(), (x,), strict=strict)
    mlp = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with pytest.raises(RuntimeError, match="torch.export of a program that calls from_local"):
        torch.export.export(mlp, (torch.randn(4, 6),), strict=strict)
