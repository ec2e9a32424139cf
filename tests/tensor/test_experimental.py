"""local_map, register_sharding and implicit_replication."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.laws import Sample, check_layouts, check_strategies, rand

import dtensor
from dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, Spec, distribute_module, distribute_tensor
from dtensor import init_device_mesh as init
from dtensor.debug import CommDebugMode
from dtensor.experimental import implicit_replication, local_map, register_sharding
from dtensor.rules.registry import find, unregister

R, P, S = Replicate(), Partial(), Shard
_serial = itertools.count()


def on(f: Callable[[DeviceMesh], object], *shape: int) -> list[object]:
    n = 1
    for k in shape:
        n *= k
    return dtensor.simulate(n)(lambda: f(init("cpu", shape)))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.full_tensor() if isinstance(a, DTensor) else a, b)


# ------------------------------------------------------------ local_map
@pytest.mark.parametrize("rows", [8, 7, 5, 3, 1])
@pytest.mark.parametrize("redistribute", [False, True])
def test_any_number_of_rows(rows: int, redistribute: bool) -> None:
    """Uneven shards included, with the gradients of a sharded and of a replicated input."""

    def f(mesh: DeviceMesh) -> None:
        x, w = rand(rows, 6), rand(6, 5, seed=1)
        given = S(1) if redistribute else S(0)
        dx, dw = distribute_tensor(x, mesh, [given]), distribute_tensor(w, mesh, [R])
        fn = local_map(torch.mm, [S(0)], ([S(0)], [R]), redistribute_inputs=redistribute)
        dx.requires_grad_(), dw.requires_grad_()
        with CommDebugMode() as mode:
            out = fn(dx, dw)
        assert out.placements == (S(0),) and out.shape == (rows, 5)
        assert mode.get_total_counts() == redistribute + bool(rows % 4)
        x.requires_grad_(), w.requires_grad_()
        want = x @ w
        close(out, want)
        out.square().sum().backward()
        want.square().sum().backward()
        close(dx.grad, x.grad)
        close(dw.grad, w.grad)

    on(f, 4)


def test_gradients_of_mixed_outputs() -> None:
    """A replicated output next to a pending one: each rank adds its share of the replicated one's gradient."""

    def f(mesh: DeviceMesh) -> None:
        x, w = rand(8, 3), rand(3, seed=1)
        dx, dw = distribute_tensor(x, mesh, [S(0)]).requires_grad_(), distribute_tensor(w, mesh, [R]).requires_grad_()
        a, b = local_map(lambda x, w: ((x * w).sum(), w * 2), ([P], [R]), ([S(0)], [R]))(dx, dw)
        (a.redistribute(placements=[R]).to_local() + b.to_local().sum()).backward()
        x.requires_grad_(), w.requires_grad_()
        ((x * w).sum() + (w * 2).sum()).backward()
        close(dx.grad, x.grad)
        close(dw.grad, w.grad)

    on(f, 4)


def test_the_function_sees_plain_tensors_and_structures() -> None:
    def f(mesh: DeviceMesh) -> None:
        x = distribute_tensor(rand(8, 2), mesh, [S(0)])
        seen: list[Any] = []

        @local_map(out_placements=([S(0)], None), in_placements=([S(0)], None))
        def fn(d: dict[str, torch.Tensor], k: int, *, scale: torch.Tensor) -> tuple[torch.Tensor, int]:
            seen.append((type(d["a"]), type(scale)))
            return d["a"] * k * scale, k

        out, k = fn({"a": x}, 3, scale=x)
        assert seen == [(torch.Tensor, torch.Tensor)] and k == 3
        close(out, rand(8, 2) * 3 * rand(8, 2))
        plain = local_map(lambda t: t * 2, [S(0)], ([S(0)],))(torch.ones(3))
        assert not isinstance(plain, DTensor)

    on(f, 4)


def test_uneven_parts_that_are_no_chunks_raise_on_all_ranks() -> None:
    def f(mesh: DeviceMesh) -> int:
        x = distribute_tensor(rand(7, 2), mesh, [S(0)])
        with pytest.raises(ValueError, match="torch.chunk's parts"):
            local_map(lambda t: t[: mesh.get_local_rank()], [S(0)], ([S(0)],))(x)
        return 1

    assert len(on(f, 4)) == 4


MAPS: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
    "layout": ("fix: redistribute_inputs=True", {"out_placements": [S(0)], "in_placements": ([S(1)],)}, lambda t: t),
    "None for a DTensor": ("is None, but input 0", {"out_placements": [S(0)], "in_placements": (None,)}, lambda t: t),
    "count": ("2 layouts for 1 inputs", {"out_placements": [S(0)], "in_placements": ([S(0)], [R])}, lambda t: t),
    "outputs": ("returned 2 outputs", {"out_placements": ([S(0)],)}, lambda t: (t, t)),
    "no tensor": ("give None", {"out_placements": [S(0)]}, lambda t: 3),
    "tensor": ("give its layout", {"out_placements": None}, lambda t: t),
}


@pytest.mark.parametrize(("text", "options", "fn"), MAPS.values(), ids=MAPS)
def test_errors_of_local_map(text: str, options: dict[str, Any], fn: Callable[..., Any]) -> None:
    def f(mesh: DeviceMesh) -> None:
        x = distribute_tensor(rand(8, 2), mesh, [S(0)])
        with pytest.raises(ValueError, match=text):
            local_map(fn, **options)(x)

    on(f, 4)


# ------------------------------------------------------------ register_sharding
def op(schema: str, fn: Callable[..., Any]) -> Any:
    """A new operator with one implementation for real and meta tensors."""
    name = f"op{next(_serial)}"
    lib = torch.library.Library("clients_test", "FRAGMENT")
    _libraries.append(lib)
    lib.define(name + schema)
    lib.impl(name, fn, "CompositeExplicitAutograd")
    return getattr(torch.ops.clients_test, name).default


_libraries: list[Any] = []


def test_a_rule_holds_on_every_mesh() -> None:
    twice = op("(Tensor x) -> Tensor", lambda x: x * 2)

    @register_sharding(twice)
    def rule(x: Spec) -> list[Any]:
        return [([S(d)], [S(d)]) for d in range(x.ndim)] + [([P], [P])]

    sample = Sample("twice", lambda x: twice(x), (rand(5, 6),), grads=False, pending=("sum",))
    for mesh in ((4,), (2, 2), (2, 3)):
        check_layouts(sample, mesh).must_hold()
        check_strategies(sample, mesh).must_hold()

    def f(mesh: DeviceMesh) -> None:
        for p in (S(0), S(1), P):
            x = distribute_tensor(rand(5, 6), mesh, [p])
            with CommDebugMode() as mode:
                assert twice(x).placements == (p,)
            assert mode.get_total_counts() == 0

    on(f, 4)


@pytest.mark.parametrize(("kind", "values"), [
    ("bool", (True, False)), ("str", ("a", "b")), ("int", (0, 1)), ("float", (0.0, 1.0)), ("int[]", ([0], [1])),
])  # fmt: skip
def test_every_static_argument_is_in_the_key(kind: str, values: tuple[Any, Any]) -> None:
    def dim(v: Any) -> int:
        return values.index(list(v) if isinstance(v, (list, tuple)) else v)

    total = op(f"(Tensor x, {kind} how) -> Tensor", lambda x, how: x.sum(dim(how)))

    @register_sharding(total)
    def rule(x: Spec, how: Any) -> list[Any]:
        d = dim(how)
        return [([P], [S(d), None]), ([S(0)], [S(1 - d), None])]

    def f(mesh: DeviceMesh) -> None:
        x = distribute_tensor(rand(8, 4), mesh, [S(0)])
        for v in (*values, *values):
            close(total(x, v), rand(8, 4).sum(dim(v)))

    on(f, 4)


def test_lists_keywords_defaults_and_several_outputs() -> None:
    add = op("(Tensor[] xs, *, Tensor? y=None, float by=1.0) -> Tensor", lambda xs, y=None, by=1.0: sum(xs) * by)

    @register_sharding(add)
    def rule(xs: list[Spec], y: Spec | None = None) -> list[Any]:
        return [([S(0)], [S(0)] * len(xs) + [None if y is None else S(0)])]

    two = op("(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x.sum(0)))

    @register_sharding(two)
    def rule_two(x: Spec) -> list[Any]:
        return [([S(0), P], [S(0)])]

    def f(mesh: DeviceMesh) -> None:
        x = distribute_tensor(rand(8, 3), mesh, [S(0)])
        close(add([x, x]), rand(8, 3) * 2)
        close(add([x, x], y=x), rand(8, 3) * 2)
        a, b = two(x)
        assert a.placements == (S(0),) and b.placements == (P,)
        close(b, rand(8, 3).sum(0))

    on(f, 4)


ROWS: dict[str, tuple[str, list[Any]]] = {
    "too few": ("1 input placements for 2 arguments", [([R], [R])]),
    "too many outputs": ("2 output placements for 1 outputs", [([R, R], [R, R])]),
    "a dim that is not there": ("for a tensor of 1 dims", [([S(1)], [R, R])]),
    "None for a tensor": ("1 input placements|needs a placement", [([R], [R, None])]),
    "no placement": ("no placement", [([R], ["x", R])]),
    "no pair": ("a row is a pair", [[R]]),
}


@pytest.mark.parametrize(("text", "rows"), ROWS.values(), ids=ROWS)
def test_rows_that_do_not_fit(text: str, rows: list[Any]) -> None:
    add = op("(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y)
    register_sharding(add)(lambda x, y: rows)

    def f(mesh: DeviceMesh) -> None:
        x = distribute_tensor(rand(8), mesh, [R])
        with pytest.raises(ValueError, match=text):
            add(x, x)

    on(f, 4)


def test_what_is_registered() -> None:
    with pytest.raises(TypeError, match="operator overload"):
        register_sharding(torch.add)  # type: ignore[arg-type]
    first, second = op("(Tensor x) -> Tensor", lambda x: x + 1), op("(Tensor x) -> Tensor", lambda x: x + 2)
    register_sharding([first, second])(lambda x: [([S(0)], [S(0)])])
    names = [f"{o.namespace}.{o._schema.name.split('::')[1]}.default" for o in (first, second)]
    assert all(find(n) is not None for n in names)
    for n in names:
        unregister(n)


# ------------------------------------------------------------ the others
def test_implicit_replication() -> None:
    def f(mesh: DeviceMesh) -> None:
        x = distribute_tensor(rand(8, 3), mesh, [S(0)])
        with implicit_replication():
            with implicit_replication():
                pass
            close(torch.ones(3) + x, rand(8, 3) + 1)
        with pytest.raises(RuntimeError, match="mixed"):
            x + rand(8, 3)

    on(f, 4)


@pytest.mark.parametrize(
    ("body", "row", "how"),
    [
        (lambda x: x.cumsum(0), ([S(0)], [S(0)]), r"other values.*: value .* at \[4, 0\], not .*; 1\d of 24"),
        (lambda x: x.sum(0), ([S(0)], [S(0)]), "shards of shapes"),
        (lambda x: x.relu(), ([Partial()], [Partial()]), r"does not reduce.*: value .* at \[\d, \d\], not"),
        (lambda x: x.sum(0), ([R], [S(0)]), r"differs on position 0 .*: value"),
    ],
)
def test_a_row_that_gives_other_numbers_is_refused(body, row, how) -> None:
    library = torch.library.Library("shardwright_rows", "FRAGMENT")
    name = f"op{abs(hash(how))}"
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, body, "CompositeExplicitAutograd")
    op = getattr(torch.ops.shardwright_rows, name).default
    try:
        register_sharding(op)(lambda x: [row])

        def f(mesh: DeviceMesh) -> None:
            with pytest.raises(ValueError, match=how):
                op(distribute_tensor(torch.randn(8, 3), mesh, [R]))

        on(f, 2)
        register_sharding(op, check=False)(lambda x: [row])
        on(lambda mesh: op(distribute_tensor(torch.randn(8, 3), mesh, [R])).shape, 2)
    finally:
        unregister(f"shardwright_rows.{name}.default")


def test_distribute_module() -> None:
    def f(mesh: DeviceMesh) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
        net[0].bias.requires_grad_(False)

        def split(name: str, part: torch.nn.Module, mesh: DeviceMesh) -> None:
            if name == "0":
                w = distribute_tensor(part.weight.detach(), mesh, [S(0)])  # type: ignore[operator]
                part.register_parameter("weight", torch.nn.Parameter(w))

        distribute_module(net, mesh, split)
        assert net[0].weight.placements == (S(0),) and not net[0].bias.requires_grad
        assert all(isinstance(t, DTensor) for t in (*net.parameters(), *net.buffers()))
        with pytest.raises(RuntimeError, match="distributed before"):
            distribute_module(net, mesh)
        with pytest.raises(ValueError, match="must take 3 arguments"):
            distribute_module(torch.nn.Linear(2, 2), mesh, input_fn=lambda x: x)
        with pytest.warns(FutureWarning, match="input_fn of two arguments"):
            old = distribute_module(torch.nn.Linear(4, 2), mesh, None, lambda i, m: DTensor.from_local(i[0], m, [R]))
        close(old(torch.ones(1, 4)), old.weight.full_tensor().sum(1)[None] + old.bias.full_tensor())
        shared = torch.nn.Linear(3, 3)
        tied = distribute_module(torch.nn.Sequential(shared, torch.nn.Linear(3, 3)), mesh)
        assert tied[0].weight is shared.weight

    on(f, 4)
