"""Large gathers and exchanges without a buffer: values bit for bit those of the usual way, memory, messages, errors."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gloo_ranks import run_ranks
from helpers.peak import allocated
from helpers.reshard_cases import Layout, local_of, numbers, shard_of, spec_of
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.errors import CollectiveError
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import StridedShard
from dtensor.redistribute.cost_model import CostModel, use_cost_model
from dtensor.redistribute.executor import unbuffered, unbuffered_messages
from dtensor.redistribute.executor.copies import Place
from dtensor.redistribute.executor.run import _bind, redistribute_local
from dtensor.redistribute.executor.unbuffered_messages import Lists, Messages
from dtensor.redistribute.plan import plan_reshard
from dtensor.redistribute.planner.layout_space import Space
from dtensor.spec import Spec

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
T0 = StridedShard(0, split_factor=2)

Run = Callable[[torch.Tensor, bool], torch.Tensor]


@contextlib.contextmanager
def taken_for_large(piece: int = 64) -> Iterator[list[str]]:
    """Every tensor goes the direct way, in messages of `piece` bytes; gives the kinds of the exchanges."""
    seen: list[str] = []
    before = unbuffered.SAVES, unbuffered.EVEN, unbuffered.PIECE, Messages.exchange

    def exchange(self: Messages, kind: str, *args: Any) -> None:
        seen.append(kind)
        before[3](self, kind, *args)

    unbuffered.SAVES, unbuffered.EVEN, unbuffered.PIECE = 1, 1, piece
    Messages.exchange = exchange  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        unbuffered.SAVES, unbuffered.EVEN, unbuffered.PIECE, Messages.exchange = before  # type: ignore[method-assign]


def buffered(src: Spec, dst: Spec) -> Run:
    """The usual way."""
    messenger_of = unbuffered.messenger_of
    unbuffered.messenger_of = lambda comm, device_type: None
    try:
        return _bind(plan_reshard(src, dst))
    finally:
        unbuffered.messenger_of = messenger_of


class Nothing(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


def odd(x: torch.Tensor, how: int, rank: int) -> torch.Tensor:
    """The same numbers as a tensor that needs a look, on some ranks."""
    if how == 1 and rank % 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == 2 and rank < 2:
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    if how == 3 and rank and x.dtype.is_floating_point:
        return torch.nn.Parameter(x.clone())
    return x


def agrees_on_gloo(rank: int, world: int) -> dict[str, int]:
    """Drawn alike on all ranks: any dtype, uneven, empty and split-factor shards, messages of every size."""
    draw, bad, kinds = random.Random(11), [], dict[str, int]()
    meshes = [init_device_mesh("cpu", s) for s in ((4,), (2, 2))] + [DeviceMesh("cpu", [[3, 1], [0, 2]])]
    for i in range(80):
        mesh, dtype = draw.choice(meshes), draw.choice(DTYPES if i % 2 else DTYPES[:3])
        ndim = draw.choice((1, 2, 2, 3))
        full = numbers([draw.choice((1, 2, 3, 5, 8, 9, 16, 0)) for _ in range(ndim)], torch.float64).to(dtype)
        settled: list[Placement] = [R, R, S0, *[Shard(draw.randrange(ndim)) for _ in range(2)], T0]
        op = draw.choice(["sum", "sum", "avg", "max", "product"])
        pending = [Partial(op)] * 2 if dtype in (*DTYPES[:5], torch.bool) else []
        src = tuple(draw.choice([*settled, *pending]) for _ in mesh.shape)
        dst = tuple(draw.choice(settled) for _ in mesh.shape)
        how, piece, model = draw.randrange(4), draw.choice((8, 64, 4096)), CostModel()
        if dtype in (torch.bfloat16, torch.float32) and i % 3 == 0:
            model = CostModel(wire={torch.bfloat16: torch.float32, torch.float32: torch.bfloat16})
        a, b = spec_of(mesh, src, full), spec_of(mesh, dst, full)
        x = shard_of(full, tuple(R if isinstance(p, Partial) else p for p in src), mesh.shape, mesh.coord or ())
        if any(isinstance(p, Partial) for p in src) and dtype != torch.bool:
            x = x * (rank + 1) + rank % 2
        with taken_for_large(piece) as seen, use_cost_model(model):
            direct, usual = _bind(plan_reshard(a, b)), buffered(a, b)
            mode = Nothing() if i % 5 == 0 and rank % 2 else contextlib.nullcontext()
            with torch.inference_mode() if i % 7 == 0 else torch.no_grad(), mode:
                given = odd(x.clone(), how, rank)
                got = [direct(given, False), direct(x.clone(), False), direct(given, True)]
                got = [y.wait() if hasattr(y, "wait") else y for y in got]
                want = usual(x.clone(), False)
        for kind in seen:
            kinds[kind] = kinds.get(kind, 0) + 1
        for y in got:
            right = y.dtype is want.dtype and y.shape == want.shape and same(y, want) and same(given, x)
            new = y is given or (y.is_contiguous() and not (y.numel() and y.data_ptr() == given.data_ptr()))
            if not (right and (new or src == dst)):
                bad.append(f"{i}: {src} -> {dst} of {tuple(full.shape)} {dtype} ({how}, {piece}): {right} {new}")
    assert not bad, bad[:5]
    return kinds


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bit for bit."""
    x, y = (t.detach().clone(memory_format=torch.contiguous_format) for t in (x, y))
    return x.shape == y.shape and (
        not x.numel() or torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
    )


LARGE: list[tuple[tuple[int, ...], Layout, Layout, str]] = [
    ((4,), (S0,), (R,), "uneven, larger"), ((4,), (T0,), (R,), "even, uneven, larger"), ((4,), (S0,), (S1,), ""),
    ((2, 2), (S0, S0), (R, S0), "even, uneven, larger"), ((2, 2), (S0, S1), (R, R), "uneven, larger"),
    ((2, 2), (S1, S1), (R, S1), "even, uneven, larger"), ((2, 2), (S0, S0), (R, T0), "uneven, larger"),
    ((2, 2), (S1, P), (T0, T0), ""), ((4,), (P,), (S1,), "larger"),
]  # fmt: skip
"""Of which tensors messages are sent: of 1 MiB, evenly sharded or not, or of 8 MiB."""


def large_on_gloo(rank: int, world: int) -> None:
    """At their true size: what goes this way, as one collective of the same kind and bytes; small ones do not."""
    bad = []
    for shape, kind_of in (
        ((1024, 256), "even"),
        ((1021, 253), "uneven"),
        ((64, 32), "small"),
        ((2048, 1024), "larger"),
    ):
        full = numbers(shape, torch.float32)
        for mesh_shape, src, dst, how in LARGE:
            mesh = init_device_mesh("cpu", mesh_shape)
            a, b = spec_of(mesh, src, full), spec_of(mesh, dst, full)
            x, runs, counts = (
                local_of(full, src, mesh.shape, mesh.coord or ()),
                (_bind(plan_reshard(a, b)), buffered(a, b)),
                [],
            )
            begun = {g: n[0] for g, n in unbuffered_messages._begun.items()}
            for run in runs:
                with CommDebugMode() as debug:
                    y = run(x, False)
                counts.append(
                    (dict(debug.get_comm_counts()), debug.get_total_counts(), sum(debug.get_comm_bytes().values()))
                )
                if not torch.equal(y, shard_of(full, dst, mesh.shape, mesh.coord or ())):
                    bad.append(f"{src} -> {dst} of {shape}: values")
            went = sum(n[0] - begun.get(g, 0) for g, n in unbuffered_messages._begun.items())
            plan = plan_reshard(a, b)
            exact = 4 * plan.received_elements  # the usual way may pad
            off = 0.05 * exact if plan.collectives == ("reduce_scatter",) else 0  # a plan counts it as on a ring
            kind = plan.collectives[0].removesuffix("_reduce")
            mixed = counts[0][:2] == counts[1][:2] and counts[0][1] == 1 and kind in str(counts[0][0])
            if went and abs(counts[0][2] - exact) > off:
                bad.append(f"{src} -> {dst} of {shape}: {counts[0][2]} bytes, {exact} are lacking")
            expected = kind_of in how.split(", ")
            if not mixed or went != expected:
                bad.append(f"{src} -> {dst} of {shape}: {went} exchanges, counted {counts}")
    assert not bad, bad


def memory_on_gloo(rank: int, world: int) -> None:
    """Large gathers, exchanges and reduce-scatters allocate at most as much as input and output, and two messages."""
    one: list[Layout] = [(k,) for k in (R, S0, S1, T0, P)]
    two: list[Layout] = [
        (S0, S0),
        (S1, S1),
        (S0, S1),
        (R, S0),
        (S1, R),
        (R, T0),
        (T0, T0),
        (S0, P),
        (P, S1),
        (R, R),
        (P, P),
    ]
    bad, kinds = [], set()
    for mesh_shape, layouts in (((4,), one), ((2, 2), two)):
        mesh = init_device_mesh("cpu", mesh_shape)
        cases = [((1024, 256), pair) for pair in itertools.product(layouts, layouts)]
        cases += [((1021, 263), pair) for _, pair in cases[1::3]]
        for shape, (src, dst) in cases:
            if src == dst or any(q is P and p is not P for p, q in zip(src, dst)):
                continue
            full = numbers(shape)
            a, b = spec_of(mesh, src, full), spec_of(mesh, dst, full)
            plan = plan_reshard(a, b)
            if {"spread_reduce", "all_reduce", "all_to_all_reduce"} & set(plan.collectives) or not plan.collectives:
                continue
            kinds |= set(plan.collectives)
            x = local_of(full, src, mesh.shape, mesh.coord or ())
            held = allocated(x, a, b, 3)
            space = Space(mesh.shape, shape, x.itemsize, CostModel())
            most = space.facts(src).nbytes + space.facts(dst).nbytes
            if plan.collectives == ("all_gather",) and full.nbytes < unbuffered.EVEN:
                most = max(most, 2 * space.facts(dst).nbytes)  # a buffer of even parts, until they are in place
            if held > 1.06 * most:
                bad.append(f"{src} -> {dst} of {shape}, {plan.collectives}: {held / most:.2f}")
    assert not bad, bad
    assert kinds == {"all_gather", "all_to_all", "reduce_scatter"}, kinds


class Stand:
    """A group that has lists exchanged, as NCCL's does: contiguous tensors of one dtype, of any sizes."""

    def __init__(self, group: Any) -> None:
        self.group, self.calls = group, 0

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any) -> None:
        assert options.asyncOp is False and all(t.is_contiguous() for t in (*outputs, *inputs))
        assert len({t.dtype for t in (*outputs, *inputs)}) == 1
        self.calls += 1
        rank = self.group.rank()
        works = [self.group.recv([t], i, 7) for i, t in enumerate(outputs) if i != rank and t.numel()]
        works += [self.group.send([t], i, 7) for i, t in enumerate(inputs) if i != rank and t.numel()]
        assert not outputs[rank].numel() and not inputs[rank].numel()
        for work in works:
            work.wait()


def lists_on_gloo(rank: int, world: int) -> None:
    """NCCL's way, on a stand-in: what two ranks want is one view twice; what does not land in place goes as before."""
    cases: list[tuple[tuple[int, ...], Layout, Layout, int]] = [
        ((2, 2), (S0, S0), (R, S0), 1), ((2, 2), (S0, S0), (S1, R), 1), ((2, 2), (S1, S1), (R, S1), 0),
        ((4,), (S0,), (R,), 0), ((4,), (S1,), (R,), 0), ((2, 2), (S1, P), (T0, T0), 0),
    ]  # fmt: skip
    bad = []
    for mesh_order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        for (shape, src, dst, calls), rows, dtype in itertools.product(cases, (16, 13, 5), (torch.float32, torch.bool)):
            if dtype is torch.bool and any(isinstance(p, Partial) for p in src):
                continue
            mesh = DeviceMesh("cpu", torch.tensor(mesh_order).view(shape))
            full = numbers((rows, 12), dtype)
            a, b = spec_of(mesh, src, full), spec_of(mesh, dst, full)
            plan = plan_reshard(a, b)
            comm: Any = a.mesh.comm(plan.steps[0].axes if len(shape) > 1 else 0)
            stand, group, queue = Stand(comm.group), comm.group, unbuffered_messages.in_queue
            messenger_of = unbuffered.messenger_of
            unbuffered.messenger_of = lambda comm, device_type: Lists(comm)  # type: ignore[arg-type]
            try:
                with taken_for_large():
                    run = _bind(plan)
                    unbuffered_messages.in_queue = lambda x: True
                    comm.group = stand if calls else group
                    y = run(local_of(full, src, mesh.shape, mesh.coord or ()), False)
            finally:
                comm.group, unbuffered.messenger_of, unbuffered_messages.in_queue = group, messenger_of, queue
            if not torch.equal(y, shard_of(full, dst, mesh.shape, mesh.coord or ())) or stand.calls != calls:
                bad.append(f"{src} -> {dst} of {tuple(full.shape)} {dtype}: {stand.calls} calls")
    assert not bad, bad[:5]


def missing_on_gloo(rank: int, world: int) -> str:
    """A rank that does not come: the error says which collective, for what, and what became of the next one."""
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=1))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    x = DTensor.from_local(torch.ones(256, 2048), mesh, [S0])
    text = ""
    if rank != 1:
        for _ in range(2):
            with pytest.raises(CollectiveError) as caught:
                x.redistribute(mesh, [R])
            text = str(caught.value)
            assert "all_gather over axis 'tp' of the mesh (tp=4), ranks (0, 1, 2, 3), of which" in text, text
            assert "got: float32[1024, 2048] on cpu; gloo group" in text, text
            assert "for: redistribute f32[1024@tp,2048]" in text, text
            assert "test_reshard_unbuffered.py:" in text and "x.redistribute(mesh, [R])" in text, text
    dist.barrier()
    return text


def halfway_on_gloo(rank: int, world: int) -> None:
    """A part that a rank cannot put in its place is an error there; nobody waits, and the next call is right."""
    mesh, full = init_device_mesh("cpu", (4,)), numbers((2048, 1024), torch.float32)
    a, b = spec_of(mesh, (S1,), full), spec_of(mesh, (R,), full)
    x, put = local_of(full, (S1,), mesh.shape, mesh.coord or ()), Place.put

    def broken(self: Place, *given: Any) -> None:
        if rank == 2:
            raise MemoryError("no room for a part")
        put(self, *given)

    Place.put = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(MemoryError) if rank == 2 else contextlib.nullcontext():
            redistribute_local(x, a, b)
    finally:
        Place.put = put  # type: ignore[method-assign]
    assert torch.equal(redistribute_local(x, a, b), full)


def backward_on_gloo(rank: int, world: int) -> None:
    """Through autograd, with checks of anomalies, in two threads of modes: as the plain ops."""
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(512.0 * 256).view(512, 256) % 97
    for src, dst in (((S0,), (R,)), ((S1,), (R,)), ((T0,), (R,))):
        leaf = local_of(full, src, mesh.shape, mesh.coord or ()).requires_grad_()
        x = DTensor.from_local(leaf, mesh, list(src), shape=full.shape, stride=full.stride())
        y = x.redistribute(mesh, list(dst))
        (y * y).sum().backward()
        assert torch.equal(y.to_local(), full), (src, dst)
        assert leaf.grad is not None and torch.equal(leaf.grad, 2 * leaf.detach()), (src, dst)


def compiled_on_gloo(rank: int, world: int) -> None:
    """A graph holds functional collectives, as before."""
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(512.0 * 256).view(512, 256)
    spec, target = spec_of(mesh, (S0,), full), spec_of(mesh, (R,), full)
    from torch.fx.experimental.proxy_tensor import make_fx

    local = local_of(full, (S0,), mesh.shape, mesh.coord or ())
    graph = make_fx(lambda x: redistribute_local(x, spec, target), tracing_mode="fake")(local)
    names = [str(n.target) for n in graph.graph.nodes if "c10d" in str(n.target)]
    assert any("all_gather_into_tensor" in n for n in names), names
    assert torch.equal(graph(local), full)


@pytest.mark.processes
def test_on_gloo_processes() -> None:
    cases = [
        agrees_on_gloo,
        large_on_gloo,
        memory_on_gloo,
        lists_on_gloo,
        backward_on_gloo,
        compiled_on_gloo,
        halfway_on_gloo,
        missing_on_gloo,
    ]
    outcome = run_ranks(4, cases, timeout=100)
    outcome.check()
    kinds = outcome.results["agrees_on_gloo"]
    assert kinds[0] == kinds[1] == kinds[2] == kinds[3] and kinds[0]["all_gather"] > 10 and kinds[0]["all_to_all"] > 10


@pytest.mark.parametrize("shape", [(7, 5), (1, 9, 2), (1, 1), (300,), ()])
@pytest.mark.parametrize("most", [1, 4, 10, 1000])
def test_slabs_are_all_of_a_part(shape: tuple[int, ...], most: int) -> None:
    full = torch.arange(1.0, 1 + max(1, torch.Size(shape).numel())).view(shape)
    region = tuple(((0, n),) for n in shape)
    out, flat, at = torch.zeros(shape), full.view(-1), 0
    for rows in unbuffered._slabs(shape, most):
        place = Place(unbuffered._only(region, rows))
        n = torch.Size(place.shape).numel()
        assert n <= most or rows[1] == 1
        place.put(out, flat[at : at + n].view(place.shape))
        at += n
    assert at == full.numel() and torch.equal(out, full)
