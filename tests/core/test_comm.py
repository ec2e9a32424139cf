"""Every communicator gives what the specification functions say, over the list of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers.comm_cases import DTYPES, FLOATS, OTHERS, every, exercise_movement, exercise_reductions, same
from helpers.gloo_ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor.comm.communicator import Communicator
from dtensor.comm.encodings import reduction
from dtensor.comm.observers import observers
from dtensor.comm.pending import Pending
from dtensor.comm.reduce_ops import reduce_tensors
from dtensor.mesh.device_mesh import init_device_mesh
from dtensor.simulate import Traffic, fake_world, simulate


def exercise_layouts(c: Communicator) -> None:
    """Inputs that are transposed, expanded, conjugated or need gradients; results are new and contiguous."""
    base = torch.arange(6.0).reshape(2, 3) + c.rank
    xs = [torch.arange(6.0).reshape(2, 3) + r for r in range(c.size)]
    for view in (lambda t: t.t(), lambda t: t[:, 1], lambda t: t[:1].expand(4, 3), lambda t: t.requires_grad_() * 1):
        x = view(base.clone())
        expected = [view(t.clone()).detach() for t in xs]
        got = c.all_reduce(x)
        same(got, sum(expected[1:], expected[0]))
        assert got.is_contiguous() and not got.requires_grad
        for g, e in zip(c.all_gather(x, [x.shape] * c.size), expected):
            same(g, e)
        same(c.reduce_scatter([x] * c.size, "max"), reduce_tensors(expected, "max"))
        for g, e in zip(c.all_to_all([x] * c.size, [x.shape] * c.size), expected):
            same(g, e)
        same(c.broadcast(x, 0), expected[0])
    z = torch.complex(base, base).conj()
    expected = [torch.complex(t, -t) for t in xs]
    same(c.all_reduce(z), sum(expected[1:], expected[0]))
    same(c.all_reduce(z, "product"), reduce_tensors(expected, "product"))
    same(c.all_gather(z, [z.shape] * c.size)[0], expected[0])
    same(c.all_reduce(torch.complex(base, base).imag), sum(xs[1:], xs[0]))


def exercise_async(c: Communicator) -> None:
    x = torch.ones(3)
    for op, value in (("sum", float(c.size)), ("max", 1.0)):
        pending = c.all_reduce(x, op, async_op=True)
        assert isinstance(pending, Pending)
        assert (pending.wait() == value).all() and pending.wait() is pending.wait()
        lazy = c.all_reduce(x, op, async_op=True).tensor
        assert torch.equal(lazy * 2, torch.full((3,), 2 * value))
    both = c.all_reduce(x, async_op=True)
    assert (both.tensor + 0 == c.size).all() and (both.wait() == c.size).all()
    gathered = c.all_gather(x, [(3,)] * c.size, async_op=True)
    moved = c.all_to_all([x] * c.size, [(3,)] * c.size, async_op=True)
    reduced = c.reduce_scatter([x] * c.size, async_op=True)
    sent = c.broadcast(x, 0, async_op=True)
    spread = c.scatter([x] * c.size if c.rank == 0 else None, x, 0, shapes=[(3,)] * c.size, async_op=True)
    assert len(gathered.wait()) == len(moved.wait()) == c.size
    assert (reduced.wait() == c.size).all() and (sent.wait() == 1).all() and (spread.wait() == 1).all()
    with pytest.raises(TypeError, match="wait"):
        c.all_gather(x, [(3,)] * c.size, async_op=True).tensor  # noqa: B018


def exercise_meta(c: Communicator) -> None:
    x = torch.empty(2, 3, device="meta", dtype=torch.bfloat16)
    shapes = [(i, 3) for i in range(c.size)]
    own = x.new_empty(c.rank, 3)
    assert c.all_reduce(x).shape == (2, 3)
    assert [tuple(t.shape) for t in c.all_gather(own, shapes)] == shapes
    assert [tuple(t.shape) for t in c.all_to_all([own] * c.size, shapes)] == shapes
    assert c.reduce_scatter([x] * c.size).dtype == torch.bfloat16
    assert c.broadcast(x, 0).is_meta and c.scatter([x] * c.size, x, 0).is_meta


def refusals(c: Communicator) -> None:
    """What is refused before anything is sent."""
    x = torch.ones(2)
    for message, call in [
        ("shapes must have one entry a position", lambda: c.all_gather(x, [(2,)])),
        ("was announced", lambda: c.all_gather(x, [(3,)] * c.size)),
        ("parts must have one entry", lambda: c.reduce_scatter([x])),
        ("parts must have one entry", lambda: c.all_to_all([x], [(2,)] * c.size)),
        ("shapes must have one entry", lambda: c.all_to_all([x] * c.size, [(2,)])),
        ("src is a position", lambda: c.broadcast(x, c.size)),
        ("src is a position", lambda: c.scatter(None, x, -1)),
        ("must give parts", lambda: c.scatter(None, x, c.rank)),
        ("was announced", lambda: c.scatter([torch.ones(3)] * c.size, x, c.rank)),
        ("was announced", lambda: c.scatter(None, x, c.rank, shapes=[(3,)] * c.size)),
        ("unknown reduction", lambda: c.all_reduce(x, "mean")),
        ("unknown reduction", lambda: c.reduce_scatter([x] * c.size, "")),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def on_simulated(exercise: Callable[..., None], *args: object) -> None:
    simulate(4)(every, exercise, *args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simulated_ranks_follow_the_specification(dtype: torch.dtype) -> None:
    on_simulated(exercise_reductions, [dtype])
    on_simulated(exercise_movement, [dtype])


@pytest.mark.parametrize("exercise", [exercise_layouts, exercise_async, exercise_meta, refusals])
def test_simulated_ranks(exercise: Callable[..., None]) -> None:
    on_simulated(exercise)


def gloo_floats(rank: int, world: int) -> None:
    every(exercise_reductions, FLOATS, few=True)


def gloo_others(rank: int, world: int) -> None:
    every(exercise_reductions, OTHERS, few=True)


def gloo_movement(rank: int, world: int) -> None:
    every(exercise_movement, DTYPES, few=True)


def gloo_rest(rank: int, world: int) -> None:
    for exercise in (exercise_layouts, exercise_async, exercise_meta, refusals):
        every(exercise)


class Names(TorchDispatchMode):
    """The collectives that go through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func._schema.name.split("::")
        if space in ("c10d", "_c10d_functional") and name != "wait_tensor":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def gloo_one_collective_a_call(rank: int, world: int) -> None:
    """Also for uneven parts and for reductions that gloo lacks; each is seen by dispatch modes."""
    c = init_device_mesh("cpu", (world,)).comm()
    shapes = [(i, 2) for i in range(world)]
    x = torch.ones(rank, 2)
    full = [torch.ones(s) for s in shapes]
    mine = torch.ones(rank, 2)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("all_reduce", lambda: c.all_reduce(mine.new_ones(3))),
        ("all_reduce", lambda: c.all_reduce(mine.new_ones(3), "max")),
        ("all_reduce", lambda: c.all_reduce(mine.new_ones(3).bool(), "avg")),
        ("_allgather_base_", lambda: c.all_reduce(torch.ones(2, dtype=torch.complex64), "product")),
        ("_allgather_base_", lambda: c.all_gather(x, shapes)),
        ("reduce_scatter_tensor", lambda: c.reduce_scatter(full)),
        ("all_to_all_single", lambda: c.all_to_all(full, [(rank, 2)] * world)),
        ("broadcast", lambda: c.broadcast(torch.ones(2), 1)),
        ("scatter_", lambda: c.scatter(full if rank == 2 else None, x, 2, shapes=shapes)),
        ("all_to_all_single", lambda: c.scatter(full if rank == 2 else None, x, 2)),
    ]
    for name, call in calls:
        with Names() as seen:
            call()
        assert seen.names == [name], (seen.names, name)
    one = init_device_mesh("cpu", (1, world)).comm(0)
    with Names() as seen:
        y = torch.ones(2)
        out = one.all_reduce(y, "avg"), one.all_gather(y, [(2,)])[0], one.reduce_scatter([y]), one.broadcast(y)
        out += one.all_to_all([y], [(2,)])[0], one.scatter([y], y)
    assert seen.names == [] and all(torch.equal(o, y) and o.data_ptr() != y.data_ptr() for o in out)


def gloo_async_tensor(rank: int, world: int) -> None:
    """The result of an asynchronous all_reduce is torch's own waiting tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    c = init_device_mesh("cpu", (world,)).comm()
    pending = c.all_reduce(torch.ones(2), async_op=True)
    lazy = pending.tensor
    assert isinstance(lazy, AsyncCollectiveTensor) and pending.tensor is lazy
    assert (lazy + 0 == world).all()
    assert not isinstance(c.all_reduce(torch.ones(2), "min", async_op=True).tensor, AsyncCollectiveTensor)


@pytest.mark.processes
def test_gloo_follows_the_specification() -> None:
    run_ranks(
        4, [gloo_floats, gloo_others, gloo_movement, gloo_rest, gloo_one_collective_a_call, gloo_async_tensor], 120
    ).check()


def test_bit_operations_where_the_backend_has_none() -> None:
    """NCCL has no bit operations: integers are gathered and reduced here, booleans are compared."""
    assert reduction("bxor", torch.int32, 4, False).wire is None
    assert reduction("bxor", torch.int32, 4, True).wire == "bxor"
    assert reduction("bor", torch.bool, 4, False).wire == "max"


def test_nan_wins() -> None:
    nan, inf = float("nan"), float("inf")
    for dtype in FLOATS:
        x = torch.tensor([nan, -inf, inf, 0.0, -0.0, -1.0, 1.0], dtype=dtype)
        for op in ("max", "min"):
            how = reduction(op, dtype, 2, True)
            assert how.encode is not None and how.decode is not None
            same(how.decode(how.encode(x)), x)
            code = how.encode(x)
            assert (code[0] >= code if op == "max" else code[0] <= code).all(), "NaN is the extreme"
            assert (code[1:].sort().values == code[[1, 5, 4, 3, 6, 2]]).all(), "the order is that of the numbers"


def test_meaning_of_reductions() -> None:
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    either, both = [True, True, False], [True, False, False]
    for op, expected in [("sum", either), ("max", either), ("bor", either), ("product", both), ("avg", both)]:
        assert reduce_tensors([a, b], op).tolist() == expected
    assert reduce_tensors([a, b], "bxor").tolist() == [False, True, False]
    assert reduce_tensors([torch.tensor([-3]), torch.tensor([0])], "avg").tolist() == [-1]
    assert reduce_tensors([torch.tensor([3.0]), torch.tensor([4.0])], "norm2").tolist() == [5.0]
    assert reduce_tensors([torch.tensor([3.0]), torch.tensor([4.0])], "norm0").tolist() == [7.0]
    assert reduce_tensors([torch.tensor([1], dtype=torch.uint16)] * 3, "sum").dtype == torch.uint16
    with pytest.raises(TypeError, match="complex"):
        reduce_tensors([torch.ones(1, dtype=torch.complex64)] * 2, "max")


def test_same_can_fail() -> None:
    with pytest.raises(AssertionError):
        same(torch.ones(2), torch.zeros(2))
    with pytest.raises(AssertionError):
        same(torch.ones(2), torch.ones(2, dtype=torch.float64))


def traffic_of(c: Communicator) -> None:
    x = torch.ones(6, dtype=torch.bfloat16)
    shapes = [(i,) for i in range(c.size)]
    c.all_reduce(x)
    c.all_gather(x[: c.rank], shapes)
    c.reduce_scatter([x[:i] for i in range(c.size)])
    c.all_to_all([x] * c.size, [(6,)] * c.size)
    c.broadcast(x, 0)
    c.scatter([x] * c.size if c.rank == 1 else None, x, 1)


def test_observers_and_traffic() -> None:
    """Simulated and fake communicators report the same traffic; the fake world also writes it down."""
    seen: list[tuple[str, tuple[int, ...], int, int]] = []
    expected = [
        ("all_reduce", 9), ("all_gather", 5), ("reduce_scatter", 4), ("all_to_all", 18), ("broadcast", 6),
        ("scatter", 0),
    ]  # fmt: skip

    def observer(kind: str, ranks: tuple[int, ...], received: int, itemsize: int) -> None:
        seen.append((kind, ranks, received, itemsize))

    def program() -> None:
        c = init_device_mesh("cpu", (4,)).comm()
        if c.rank == 1:
            observers.append(observer)
        traffic_of(c)  # one line for all ranks
        if c.rank == 1:
            observers.remove(observer)

    simulate(4)(program)
    simulated = list(seen)
    assert [(k, n) for k, _, n, _ in simulated] == expected
    assert all(ranks == (0, 1, 2, 3) and itemsize == 2 for _, ranks, _, itemsize in simulated)
    seen.clear()
    with fake_world(4, rank=1) as world:
        c = init_device_mesh("cpu", (4,)).comm()
        observers.append(observer)
        traffic_of(c)
        observers.remove(observer)
    assert seen == simulated
    assert world.traffic == [Traffic(k, 4, n, 2 * n) for k, n in expected]
    with pytest.raises(ValueError, match="observers"):
        observers.remove(observer)


def test_fake_results_have_the_right_shapes() -> None:
    with fake_world(8, rank=3):
        c = init_device_mesh("cpu", (8,)).comm()
        refusals(c)
        shapes = [(i, 2) for i in range(8)]
        assert [tuple(t.shape) for t in c.all_gather(torch.ones(3, 2), shapes)] == shapes
        parts = [torch.ones(s) for s in shapes]
        assert c.reduce_scatter(parts).shape == (3, 2)
        assert [tuple(t.shape) for t in c.all_to_all(parts, [(3, 2)] * 8)] == [(3, 2)] * 8
        assert c.all_reduce(torch.ones(2, dtype=torch.int8), "max").dtype == torch.int8
        with pytest.raises(TypeError):
            c.all_reduce(torch.ones(2), "bor")
        exercise_meta(c)
        assert c.broadcast(torch.ones(2), 3).tolist() == [1, 1]
        assert c.scatter(None, torch.ones(5), 0).shape == (5,)
        assert isinstance(c.all_reduce(torch.ones(2), async_op=True), Pending)


def test_communicator_repr() -> None:
    with fake_world(100):
        text = repr(init_device_mesh("cpu", (100,)).comm())
    assert text == "FakeCommunicator(ranks=(0, 1, 2, 3, 4, 5, 6, 7, ...), rank=0)"


def test_group_of_other_ranks_is_refused() -> None:
    from dtensor.comm.c10d import C10dCommunicator

    def program() -> None:
        with pytest.raises(ValueError, match="the group holds ranks"):
            C10dCommunicator(dist.group.WORLD, [0, 2], 0)

    simulate(2)(program)
