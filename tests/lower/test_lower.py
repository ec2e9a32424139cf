"""`dtensor.lower`: the numbers of eager steps and of one process, nothing stale, clear refusals."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.gloo_ranks import run_ranks
from torch import nn
from torch.testing import assert_close

import dtensor
from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from dtensor.loss import loss_parallel
from dtensor.lowering import LowerError
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

R = Replicate()


def on(mesh_shape: tuple[int, ...], f: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `f(mesh, *args)` on simulated ranks."""
    n = 1
    for k in mesh_shape:
        n *= k
    return simulate(n)(lambda: f(init_device_mesh("cpu", mesh_shape), *args))


def full(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


class Net(nn.Module):
    """Embedding split by rows, two matmuls, a norm, tied nothing; `make` lays out the parameters."""

    def __init__(self, make: Callable[[torch.Tensor, list[Any]], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        layouts = {
            "table": [R, Shard(0)],
            "up": [Shard(0), Shard(1)],
            "down": [R, Shard(0)],
            "gain": [R, R],
            "bias": [R, R],
        }
        shapes = {"table": (7, 5), "up": (5, 9), "down": (9, 7), "gain": (5,), "bias": (7,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(make(torch.randn(shape) * 0.4, layouts[name])))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(F.embedding(tokens, self.table), (5,), self.gain)
        return F.gelu(h @ self.up) @ self.down + self.bias


def train(make: Callable[..., Any], kind: str, lowered: bool, steps: int = 5) -> tuple[list[torch.Tensor], Any]:
    net = Net(make)
    opt = OPTIMIZERS[kind](list(net.parameters()))

    def step(net: Net, opt: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(net(tokens), tokens)
        loss.backward()
        opt.step()
        return loss

    run: Any = step
    torch.manual_seed(4)
    batches = [make(torch.randint(0, 7, (6,)), [Shard(0), R]) for _ in range(steps)]
    if lowered:
        before = [full(p) for p in net.parameters()]
        run = dtensor.lower(step, net, opt, batches[0])
        assert all(torch.equal(full(p), b) for p, b in zip(net.parameters(), before, strict=True))
        assert not opt.state and all(p.grad is None for p in net.parameters())
    found = [full(run(net, opt, b)) for b in batches]
    return found + [full(p) for p in net.parameters()], run


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_those_of_eager_and_of_one_process(kind: str) -> None:
    expected, _ = train(lambda t, _: t, kind, False)

    def f(mesh: Any) -> None:
        make = lambda t, layout: distribute_tensor(t, mesh, layout)  # noqa: E731
        eager, _ = train(make, kind, False)
        got, run = train(make, kind, True)
        for a, b, c in zip(got, eager, expected, strict=True):
            assert_close(a, b)
            assert_close(a, c)
        assert run.programs == 2  # the first step makes the optimizer's state

    on((2, 3) if kind == "adam" else (2, 2), f)


def test_gradients_accumulate_and_stay() -> None:
    """`.grad` after a call is what eager leaves, pending sums included."""

    def f(mesh: Any) -> None:
        w = [distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [R]).requires_grad_() for _ in range(2)]
        xs = [distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)]) for _ in range(3)]

        def step(w: DTensor, x: DTensor) -> None:
            (x @ w).square().sum().backward()

        run = dtensor.lower(step, w[1], xs[0])
        for x in xs:
            step(w[0], x)
            run(w[1], x)
            assert w[0].grad is not None and w[1].grad is not None
            assert w[0].grad.placements == w[1].grad.placements == (Partial(),)
            assert_close(w[1].grad.full_tensor(), w[0].grad.full_tensor())

    on((2,), f)


def test_another_call_is_another_program() -> None:
    """Layouts, shapes, dtypes, requires_grad, grad mode, meshes, numbers, what is reachable."""

    def f(mesh: Any) -> None:
        config = {"scale": 2.0}
        net = nn.Dropout(0.5).eval()

        def step(x: DTensor, power: int = 2) -> DTensor:
            return net(x) ** power * config["scale"]

        plain = torch.arange(12.0).view(6, 2)
        make = lambda layout, t=plain, m=mesh: distribute_tensor(t, m, [layout])  # noqa: E731
        run = dtensor.lower(step, make(Shard(0)))
        count = 1

        def check(x: DTensor, *args: Any, new: bool = True) -> None:
            nonlocal count
            count += new
            got, eager = run(x, *args), step(x, *args)
            assert got.placements == eager.placements and got.dtype == eager.dtype and got.shape == eager.shape
            assert_close(got.full_tensor(), eager.full_tensor())
            assert run.programs == count

        check(make(Shard(0)), new=False)
        check(make(Shard(1)))
        check(make(R))
        check(make(Shard(0)), new=False)
        check(make(Shard(0), plain[:5]))
        check(make(Shard(0), plain.double()))
        check(make(Shard(0), plain.t()))
        check(make(Shard(0)), 3)
        check(make(Shard(0)).requires_grad_())
        with torch.no_grad():
            check(make(Shard(0)))
        config["scale"] = 3.0
        check(make(Shard(0)))
        other = dtensor.DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
        check(make(Shard(0), m=other))
        net.train()
        count += 1
        assert not torch.equal(run(make(R)).to_local(), run(make(R)).to_local()) and run.programs == count

    on((2,), f)


SCALE = 2.0
conf = types.ModuleType("conf")


def helper(x: Any) -> Any:
    return x * SCALE


class Config:
    scale = 2.0

    @property
    def shown(self) -> float:
        return SCALE

    def __call__(self, x: Any) -> Any:
        return helper(x)


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 2.0


class Scaled(nn.Module):
    k = 2.0

    def forward(self, x: Any) -> Any:
        return helper(x) * self.k


def set_scale(v: float) -> None:
    global SCALE
    SCALE = v


def reached() -> list[tuple[str, Callable[[Any], Any], Callable[[], Any]]]:
    """Functions that look at something, and what changes it."""
    enabled, queue, slots, config, net = {1}, collections.deque([2.0]), Slots(), Config(), Scaled()
    array, raw, table, proxy = (
        numpy.array([2.0]),
        bytearray([2]),
        {"k": (1, [2.0])},
        types.MappingProxyType({"k": [2.0]}),
    )
    user, chain, space, gain = (
        collections.UserDict(k=2.0),
        collections.ChainMap({"k": 2.0}),
        types.SimpleNamespace(k=2.0),
        [2.0],
    )
    hooked = nn.Identity()
    hooked.register_forward_hook(lambda m, a, out: out * gain[0])
    values, zero = {"k": 2.0}, {"k": 0.0}
    view = values.values()
    opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 1.0)
    conf.scale = 2.0  # type: ignore[attr-defined]

    @functools.wraps(helper)
    def wrapped(x: Any) -> Any:
        return helper(x) * gain[0]

    return [
        ("set", lambda x: x * 5.0 if 3 in enabled else x, lambda: enabled.add(3)),
        ("deque", lambda x: x * queue[0], lambda: queue.__setitem__(0, 5.0)),
        ("slots", lambda x: x * slots.scale, lambda: setattr(slots, "scale", 5.0)),
        ("class", lambda x: x * Config.scale, lambda: setattr(Config, "scale", 5.0)),
        ("module", lambda x: x * conf.scale, lambda: setattr(conf, "scale", 5.0)),
        ("property", lambda x: x * config.shown, lambda: set_scale(5.0)),
        ("call", lambda x: config(x), lambda: set_scale(6.0)),
        ("forward", net, lambda: set_scale(7.0)),
        ("class of a module", net, lambda: setattr(Scaled, "k", 5.0)),
        ("array", lambda x: x * float(array[0]), lambda: array.__setitem__(0, 5.0)),
        ("bytes", lambda x: x * raw[0], lambda: raw.__setitem__(0, 5)),
        ("nested", lambda x: x * table["k"][1][0], lambda: table["k"][1].__setitem__(0, 5.0)),
        ("proxy", lambda x: x * proxy["k"][0], lambda: proxy["k"].__setitem__(0, 5.0)),
        ("user dict", lambda x: x * user["k"], lambda: user.__setitem__("k", 5.0)),
        ("chain", lambda x: x * chain["k"], lambda: chain.__setitem__("k", 5.0)),
        ("namespace", lambda x: x * space.k, lambda: setattr(space, "k", 5.0)),
        ("hook", hooked, lambda: gain.__setitem__(0, 5.0)),
        ("decorator", wrapped, lambda: gain.__setitem__(0, 6.0)),
        ("view", lambda x: x * next(iter(view)), lambda: values.__setitem__("k", 5.0)),
        ("scheduler", lambda x: x * scheduler.get_last_lr()[0], lambda: scheduler._last_lr.__setitem__(0, 5.0)),
        ("sign of zero", lambda x: 1 / (x * zero["k"]), lambda: zero.__setitem__("k", -0.0)),
    ]


def test_whatever_a_function_looks_at_is_seen() -> None:
    def f(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
        for name, look, change in reached():
            run = dtensor.lower(look, x)
            before = full(run(x))
            assert torch.equal(before, full(look(x))), name
            change()
            assert torch.equal(full(run(x)), full(look(x))), name
            assert not torch.equal(full(run(x)), before), name
        index = distribute_tensor(torch.tensor([1, 0]), mesh, [R])
        assert_close(full(dtensor.lower(lambda x, i: x[i], x, index)(x, index)), torch.ones(2))

    try:
        on((1,), f)
    finally:
        set_scale(2.0)
        Config.scale = Scaled.k = 2.0


def test_learning_rates_and_new_parameters_are_seen() -> None:
    def f(mesh: Any) -> None:
        nets = [nn.Linear(3, 2, bias=False) for _ in range(2)]
        torch.manual_seed(1)
        for net in nets:
            net.weight = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]))
        opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])

        def step(net: nn.Linear, opt: torch.optim.Optimizer, x: DTensor) -> DTensor:
            opt.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            opt.step()
            return loss

        run = dtensor.lower(step, nets[1], opts[1], x)
        for i in range(4):
            for net, opt in zip(nets, opts, strict=True):
                opt.param_groups[0]["lr"] = 0.1 if i < 2 else 0.02
                if i == 3:
                    net.weight = nn.Parameter(distribute_tensor(torch.full((2, 3), 0.5), mesh, [Shard(0)]))
                    opt.param_groups[0]["params"] = [net.weight]
            assert_close(full(run(nets[1], opts[1], x)), full(step(nets[0], opts[0], x)))
            assert_close(full(nets[1].weight), full(nets[0].weight))

    on((2,), f)


def test_results_and_writes() -> None:
    """Containers, plain tensors, inputs that are returned, what is written, constants that are written."""

    def f(mesh: Any) -> None:
        def step(x: DTensor, y: torch.Tensor) -> dict[str, Any]:
            x.mul_(2)
            counts = torch.tensor([1.0, 2.0])
            counts.add_(1)
            local = x.to_local() + y
            return {"same": x, "sum": x.sum(0), "parts": [local, counts], "number": 7}

        made = [distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)]) for _ in range(2)]
        y = torch.full((2,), float(mesh.get_rank()))
        run = dtensor.lower(step, made[1], y)
        for _ in range(3):
            want, got = step(made[0], y), run(made[1], y)
            assert got["same"] is made[1] and got["number"] == 7
            assert_close(full(got["sum"]), full(want["sum"]))
            assert_close(got["parts"], want["parts"])
            assert_close(full(made[1]), full(made[0]))
        assert made[1]._version >= 3
        assert run.programs == 1

    on((3,), f)


@pytest.mark.parametrize("layout", [[Shard(0), Shard(1)], [Shard(0), R], [R, R], [Partial(), R]])
def test_random_numbers_are_drawn_anew_and_are_those_of_eager(layout: list[Any]) -> None:
    """Whole and seeded draws, ranks seeded alike or not."""

    def f(mesh: Any) -> None:
        def step(x: DTensor) -> list[DTensor]:
            torch.rand(3)  # unused, and drawn all the same
            noise = [torch.rand_like(x), torch.bernoulli(x.abs().clamp(0, 1)), x.clone().normal_(), F.dropout(x, 0.5)]
            return [*noise, x + dtensor.rand(4, 6, device_mesh=mesh, placements=[R, Shard(1)])]

        x = distribute_tensor(torch.linspace(-2, 2, 24).view(4, 6), mesh, layout)
        run = dtensor.lower(step, x)
        for alike in (True, False):
            found = []
            for f in (step, run):
                torch.manual_seed(0 if alike else mesh.get_rank())
                found.append([t.full_tensor() for _ in range(3) for t in f(x)])
            assert all(map(torch.equal, *found))
            assert not torch.equal(found[1][0], found[1][5])
        assert run.programs == 1

    on((2, 2), f)


class Block(nn.Module):
    """A language model of one layer, for the styles of `parallel`; its norm stays plain."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.drop = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Dropout(0.1)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 20, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.emb(tokens)
        return self.head(x + self.down(self.drop(F.gelu(self.up(self.norm(x))))))


def test_a_parallelized_module_with_plain_parameters() -> None:
    """Styles, `loss_parallel`, dropout, clipping, plain tokens and plain parameters beside DTensors."""

    def f(lowered: bool) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        plan = {
            "emb": RowwiseParallel(input_layouts=R), "up": ColwiseParallel(), "down": RowwiseParallel(),
            "head": ColwiseParallel(use_local_output=False),
        }  # fmt: skip
        net = parallelize_module(Block(), mesh["tp"], plan)
        opt = torch.optim.AdamW(net.parameters(), lr=1e-2)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            with loss_parallel():
                loss = F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            return loss

        torch.manual_seed(1)
        batches = [torch.randint(0, 20, (4, 6)) for _ in range(4)]
        run = dtensor.lower(step, batches[0]) if lowered else step
        torch.manual_seed(2)
        return [full(run(b)) for b in batches] + [full(p) for p in net.parameters()]

    for got, want in zip(simulate(4)(f, True), simulate(4)(f, False), strict=True):
        for a, b in zip(got, want, strict=True):
            assert_close(a, b)


def test_zeros_that_autograd_makes() -> None:
    """The gradient of parts of which some are not used, and nothing that only looks like it."""

    def f(mesh: Any) -> None:
        x = [distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(1)]).requires_grad_() for _ in range(2)]

        def step(x: DTensor) -> torch.Tensor:
            return torch.autograd.grad(x.split(2)[1].square().sum() + x.unbind(0)[0].sum(), x)[0]

        assert_close(full(dtensor.lower(step, x[1])(x[1])), full(step(x[0])))
        rank = float(mesh.get_rank())
        with pytest.raises(RuntimeError):  # may differ from rank to rank
            dtensor.lower(lambda x: x + torch.full((6, 2), rank), x[1])

    on((2,), f)


def test_hooks_are_seen() -> None:
    def f(mesh: Any) -> None:
        w = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()

        def step(w: DTensor) -> None:
            (w * 3).sum().backward()

        run = dtensor.lower(step, w)
        for hook, gradient in ((None, 3.0), (lambda g: g * 2, 6.0), (None, 3.0)):
            w.grad = None
            handle = None if hook is None else w.register_hook(hook)
            run(w)
            assert w.grad is not None
            assert_close(w.grad.full_tensor(), torch.full((4,), gradient))
            if handle is not None:
                handle.remove()

    on((2,), f)


def test_checkpointed_layers_draw_the_same_numbers_again() -> None:
    from torch.utils.checkpoint import checkpoint

    def f(mesh: Any) -> None:
        w = [distribute_tensor(torch.ones(3, 4), mesh, [Shard(1)]).requires_grad_() for _ in range(2)]
        x = distribute_tensor(torch.ones(5, 3), mesh, [R])

        def layer(w: DTensor) -> torch.Tensor:
            return F.dropout(x @ w, 0.5).square()

        def step(w: DTensor) -> torch.Tensor:
            loss = checkpoint(layer, w, use_reentrant=False).sum()
            loss.backward()
            return loss

        run = dtensor.lower(step, w[1])
        for seed in range(3):
            found = []
            for f, leaf in zip((step, run), w, strict=True):
                torch.manual_seed(seed)
                leaf.grad = None
                found.append(full(f(leaf)))
            assert_close(*found)
            assert w[0].grad is not None and w[1].grad is not None
            assert_close(w[1].grad.full_tensor(), w[0].grad.full_tensor())
        assert run.programs == 1

    on((2,), f)


def test_many_variants_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtensor.lowering.step.MAX_PROGRAMS", 2)

    def f(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        run = dtensor.lower(lambda x, n: x * n, x, 0)
        run(x, 1)
        with pytest.warns(UserWarning, match="the argument 1 is 2"):
            run(x, 2)
        for n in (3, 0, 2, 2):
            assert_close(full(run(x, n)), torch.full((4,), float(n)))
        assert run.programs == 2

    on((1,), f)


def test_memory_of_inputs_and_views() -> None:
    """Offsets, shared memory, views that are left out of a program, a view that had to move data."""

    def f(mesh: Any) -> None:
        def step(x: DTensor, y: DTensor) -> tuple[DTensor, DTensor]:
            v = x.t().t().view(2, 3, 2).view(6, 2)[0:6]
            v.add_(y)
            return v.t().t() * 2, x.view(12).view(3, 4).view(12) + 1

        def make() -> tuple[DTensor, DTensor, torch.Tensor]:
            memory = torch.arange(40.0)
            parts = (memory[at : at + 12].view(6, 2) for at in (0, 12))
            x, y = (DTensor.from_local(p, mesh, [R]) for p in parts)
            return x, y, memory

        a, b = make(), make()
        run = dtensor.lower(step, b[0], b[1])
        assert sum("view" in str(n.target) for n in run.graph_module.graph.nodes) == 1
        for i in range(3):
            want, got = step(a[0], a[1]), run(b[0], b[1])
            assert_close([full(t) for t in got], [full(t) for t in want])
            assert_close(b[2], a[2])
            if i:  # both inputs the same memory, not the same tensor
                a, b = ((x, DTensor.from_local(x.to_local(), mesh, [R]), m) for x, _, m in (a, b))
        base = [distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)]) for _ in range(2)]
        moved = [x[1:4] for x in base]
        write = dtensor.lower(lambda x: x.add_(1), base[1])
        write(base[1])
        base[0].add_(1)
        assert_close(full(moved[1]), full(moved[0]))

    on((2,), f)


def start_fake_world() -> dtensor.DeviceMesh:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_the_graph_can_be_read_and_run() -> None:
    mesh = start_fake_world()
    x = DTensor.from_local(torch.randn(4, 6), mesh, [Shard(0), Shard(1)])
    w = DTensor.from_local(torch.randn(6, 5), mesh, [R, Shard(0)]).requires_grad_()

    def step(x: DTensor, w: DTensor) -> DTensor:
        loss = (x @ w).redistribute(placements=[Shard(0), R]).relu().sum()
        loss.backward()
        return loss

    run = dtensor.lower(step, x, w)
    text = str(run)
    assert "x: f32[8@dp,12@tp]" in text and "f32[4,6] 96 B" in text
    assert "# aten.mm.default: f32[8@dp,12@tp], f32[12@tp,5]" in text
    assert "1 all_reduce (80 B)" in text and "gives f32[]{P:dp}" in text
    assert run.collectives == {"all_reduce": (1, 80)}
    graph = run.graph_module
    group = mesh.get_group("tp").group_name
    assert f"torch.ops._c10d_functional.all_reduce.default(mm_default, 'sum', '{group}')" in graph.code
    loss, grad = graph(x.to_local(), w.to_local().detach())
    assert_close(loss, run(x, w).to_local())
    assert w.grad is not None
    assert_close(grad, w.grad.to_local())


def test_what_cannot_be_lowered_is_refused_and_changes_nothing() -> None:
    mesh = start_fake_world()
    make = lambda: DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), R])  # noqa: E731
    x, hidden = make(), [make()]
    calls = {"n": 0}

    number, kept = {"n": torch.ones(3)}, torch.ones(3)
    secret_x, secret_t = weakref.ref(hidden[0]), weakref.ref(kept)  # what a reference leads to is not looked at

    numbers, large, pair = iter([1, 2]), numpy.ones(100_000), (torch.ones(3),)

    def count(x: DTensor) -> DTensor:
        calls["n"] += 1
        return x * 2

    Refused = tuple[str, Callable[[Any], Any], Any]
    cases: list[Refused] = [
        ("looks at values", lambda x: x.sum().item(), x),
        ("looks at values", lambda x: x if x.sum() > 0 else -x, x),
        ("looks at values", lambda x: x.tolist(), x),
        ("Python or numpy", lambda x: x * random.random(), x),
        ("an iterator goes on", lambda x: x * next(numbers), x),
        ("too large to be compared", lambda x: x * float(large[0]), x),
        ("neither an argument", lambda x: x.to_local() + pair[0], x),
        ("looks at values", lambda x: x[x > 0], x),
        ("no place for a generator", lambda x: x.clone().normal_(generator=torch.Generator()), x),
        ("looks at values", lambda x: torch.nonzero(x), x),
        ("neither an argument", lambda x: x + secret_x(), x),
        ("neither an argument", lambda x: x.to_local() + secret_t(), x),
        ("Python value 'n'", count, x),
        ("autograd recorded", lambda x: x * 2, make().requires_grad_() * 2),
        ("autograd recorded", lambda x: x * 2, torch.ones(2, requires_grad=True) * 2),
        ("had to move data", lambda x: x * 2, DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0), R])[1:6]),
    ]
    for message, f, given in cases:
        with pytest.raises(LowerError, match=message):
            dtensor.lower(f, given)
        assert type(x._local_tensor) is torch.Tensor
    assert calls == {"n": 0} and torch.equal(x.to_local(), torch.ones(2, 3))
    assert_close(dtensor.lower(lambda x: x.to_local() + number["n"], x)(x), torch.full((2, 3), 2.0))
    assert torch.compiler.is_compiling() is False
    assert_close((x + hidden[0]).to_local(), torch.full((2, 3), 2.0))  # no cached plan has kept a tensor of a trace


def case_block(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    make = lambda t, layout: distribute_tensor(t, mesh, layout)  # noqa: E731
    expected, _ = train(lambda t, _: t, "adam", False, 3)
    got, run = train(make, "adam", True, 3)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)
    assert run.programs == 2


@pytest.mark.processes
def test_on_processes() -> None:
    run_ranks(4, [case_block]).check()


FOREACH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, maximize=True, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("kind", FOREACH)
def test_foreach_optimizers_take_plain_parameters_beside_sharded_ones(kind: str) -> None:
    shapes, layouts = [(5, 3), (4,), (3, 2), (1, 2)], [[Shard(0)], None, [R], [Shard(1)]]

    def parameters(mesh: Any) -> list[nn.Parameter]:
        torch.manual_seed(7)
        tensors = [torch.randn(s) for s in shapes]
        return [
            nn.Parameter(t if mesh is None or at is None else distribute_tensor(t, mesh, at))
            for t, at in zip(tensors, layouts, strict=True)
        ]

    def steps(mesh: Any, lowered: bool) -> list[torch.Tensor]:
        params = parameters(mesh)
        opt = FOREACH[kind](params)

        def step(params: list[nn.Parameter], opt: torch.optim.Optimizer) -> None:
            for p in params:
                p.grad = p.detach() * 0.5 + 1
            opt.step()

        run: Any = dtensor.lower(step, params, opt) if lowered else step
        for _ in range(3):
            run(params, opt)
        return [full(p) for p in params]

    want = steps(None, False)

    def f(mesh: Any) -> None:
        for lowered in (False, True):
            for got, one in zip(steps(mesh, lowered), want, strict=True):
                assert_close(got, one)

    on((2,), f)


def test_graph_modules_of_models_whose_parameters_have_one_name() -> None:
    mesh = start_fake_world()

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    net = nn.Sequential(block(), block(), nn.Linear(4, 4))
    for layer in net.modules():
        layout = [R, Shard(0) if isinstance(layer, nn.Linear) else R]
        for name, p in [*layer.named_parameters(recurse=False)]:
            setattr(layer, name, nn.Parameter(distribute_tensor(p.detach(), mesh, layout)))
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(net: nn.Module, opt: torch.optim.Optimizer, x: DTensor) -> DTensor:
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    module = dtensor.lower(step, net, opt, distribute_tensor(torch.ones(2, 4), mesh, [R, R])).graph_module
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    assert len({n.target for n in inputs}) == len(inputs) > 10
    module.graph.lint()
    module.recompile()
    module(*[torch.ones(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in inputs])
