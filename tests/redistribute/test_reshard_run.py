"""The executor: memory, unwaited results, meta tensors, ranks outside the mesh, errors; and real processes."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.gloo_ranks import run_ranks
from helpers.peak import allocated
from helpers.reshard_cases import Layout, P, R, as_many, local_of, numbers, pairs, shard_of, spec_of
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor
from dtensor import DTensor, distribute_tensor
from dtensor.comm import issue as comm_sent
from dtensor.comm.observers import observers
from dtensor.comm.wire import eager
from dtensor.errors import LayoutError
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.placement import Partial, Placement, Shard, StridedShard
from dtensor.redistribute.cost_model import CostModel, use_cost_model
from dtensor.redistribute.executor.run import known_move, redistribute_local, run_reshard
from dtensor.redistribute.plan import plan_reshard
from dtensor.redistribute.planner.layout_space import Space
from dtensor.spec import Spec

S0, S1 = Shard(0), Shard(1)


def on_ranks(n: int, body: Callable[[DeviceMesh], Any], mesh_shape: tuple[int, ...] = ()) -> list[Any]:
    return dtensor.simulate(n)(lambda: body(init_device_mesh("cpu", mesh_shape or (n,))))


def test_same_spec_gives_the_same_tensor() -> None:
    def body(mesh: DeviceMesh) -> bool:
        x = numbers((4,))
        return redistribute_local(x, spec_of(mesh, (R,), x), spec_of(mesh, (R,), x)) is x

    assert all(on_ranks(2, body))


@pytest.mark.parametrize(
    ("src", "dst"),
    [(R, S0), (R, S1), (R, StridedShard(0, split_factor=2)), (S0, S1), (P, R), (P, S0), (S0, R)],
    ids=str,
)
def test_results_share_no_memory_with_the_input(src: Placement, dst: Placement) -> None:
    def body(mesh: DeviceMesh) -> bool:
        kept = []
        for shape in ((8, 8), (1, 8), (1, 1)):  # in the last, a rank's shard may be all there is
            full = numbers(shape)
            x = local_of(full, (src,), mesh.shape, mesh.coord or ())
            before = x.clone()
            y = redistribute_local(x, spec_of(mesh, (src,), full), spec_of(mesh, (dst,), full))
            y.fill_(-1.0)
            kept.append(torch.equal(x, before) and y.is_contiguous())
        return all(kept)

    assert all(on_ranks(4, body))


def test_remembered_moves() -> None:
    """Called again a redistribution takes a short way: same values and specs, only where it is the same call."""

    def body(mesh: DeviceMesh) -> list[bool]:
        full = torch.arange(24.0).reshape(6, 4)
        x = distribute_tensor(full, mesh, [S0])
        first, again = (x.redistribute(placements=[Shard(-1)]) for _ in range(2))
        right = [torch.equal(again.to_local(), first.to_local()), again._spec is first._spec]
        assert known_move(x._spec, [Shard(-1)], x.to_local()) is not None
        with use_cost_model(CostModel(latency=1.0)):
            right.append(known_move(x._spec, [Shard(-1)], x.to_local()) is None)
        right += [known_move(x._spec, what, x.to_local()) is None for what in ([R], [[]], [0], iter([R]))]  # type: ignore[arg-type]
        for _ in range(2):
            odd = distribute_tensor(torch.complex(full, full), mesh, [S0])
            turned = DTensor.from_local(odd.to_local().conj(), mesh, [S0], run_check=False)
            right.append(torch.equal(turned.redistribute(placements=[R]).to_local(), torch.complex(full, -full)))
            right.append(torch.equal(odd.redistribute(placements=[R]).to_local(), torch.complex(full, full)))
            with pytest.raises(RuntimeError, match="pending reduction"):
                x.redistribute(placements=[P])
            with pytest.raises(ValueError, match="placements"):
                x.redistribute(placements=[R, R])
        return right

    for right in on_ranks(2, body):
        assert all(right), right


def test_received_elements_are_what_communicators_count() -> None:
    def body(mesh: DeviceMesh) -> list[str]:
        full, bad = numbers((5, 7)), []
        for src, dst in pairs((2, 3), 2, 150, seed=7):
            seen: list[int] = []
            count = lambda kind, ranks, received, itemsize, seen=seen: seen.append(received)  # noqa: E731
            plan = plan_reshard(spec_of(mesh, src, full), spec_of(mesh, dst, full))
            x = local_of(full, src, mesh.shape, mesh.coord or ())
            observers.append(count)
            run_reshard(plan, x)
            observers.remove(count)
            if not as_many(seen, plan) or sum(seen) != plan.received_elements:
                bad.append(f"{plan}\n counted {seen}, planned {plan.received_elements}")
        return bad

    for bad in on_ranks(6, body, (2, 3)):
        assert not bad, bad[0]


@pytest.mark.parametrize(
    ("src", "dst"), [(S0, R), (S1, R), (S0, S1), (P, R), (P, S0), (P, S1), (R, S0), (R, P), (R, R)], ids=str
)
@pytest.mark.parametrize("shape", [(8, 8), (5, 7)], ids=str)
def test_async_gives_the_same_once_used(src: Placement, dst: Placement, shape: tuple[int, ...]) -> None:
    def body(mesh: DeviceMesh) -> bool:
        return async_agrees(mesh, src, dst, shape)

    assert all(on_ranks(4, body))


def async_agrees(mesh: DeviceMesh, src: Placement, dst: Placement, shape: tuple[int, ...]) -> bool:
    full = numbers(shape)
    a, b = spec_of(mesh, (src,), full), spec_of(mesh, (dst,), full)
    x = local_of(full, (src,), mesh.shape, mesh.coord or ())
    want = redistribute_local(x, a, b)
    late = redistribute_local(x.clone(), a, b, async_op=True)
    same = late.shape == want.shape and late.dtype == want.dtype and late.stride() == want.stride()
    viewed = redistribute_local(x.clone(), a, b, async_op=True)
    again = redistribute_local(x.clone(), a, b, async_op=True)
    waited = again.wait() if hasattr(again, "wait") else again
    return same and all(
        [torch.equal(late + 0, want), torch.equal(viewed.view(-1) + 0, want.view(-1)), torch.equal(waited, want)]
    )


def test_unwaited_results_can_be_moved_on() -> None:
    def body(mesh: DeviceMesh) -> bool:
        full, spec = numbers((5, 7)), {}
        for p in (S0, S1, R, P):
            spec[p] = spec_of(mesh, (p,), full)
        x = local_of(full, (P,), mesh.shape, mesh.coord or ())
        for src, dst in ((P, S0), (S0, S1), (S1, R), (R, S0), (S0, R), (R, P), (P, R)):
            x = redistribute_local(x, spec[src], spec[dst], async_op=True)
        return torch.equal(x + 0, full)

    assert all(on_ranks(4, body))


def test_meta_tensors_move_as_shapes() -> None:
    def body(mesh: DeviceMesh) -> list[str]:
        full, bad = numbers((5, 7)), []
        for src, dst in pairs((2, 2), 2, 80, seed=9):
            a, b = spec_of(mesh, src, full), spec_of(mesh, dst, full)
            x = torch.empty(a.local_shape, dtype=full.dtype, device="meta")
            y = redistribute_local(x, a, b)
            bad += [] if y.is_meta and y.shape == b.local_shape else [f"{src} -> {dst}"]
        return bad

    for bad in on_ranks(4, body, (2, 2)):
        assert not bad


def test_ranks_outside_the_mesh_get_an_empty_part() -> None:
    def body() -> tuple[int, ...]:
        mesh = DeviceMesh("cpu", [0, 2])
        full = numbers((4, 3))
        x = local_of(full, (S0,), mesh.shape, mesh.coord) if mesh.coord else full.new_empty(0)
        return tuple(redistribute_local(x, spec_of(mesh, (S0,), full), spec_of(mesh, (R,), full)).shape)

    shapes = dtensor.simulate(3)(body)
    assert shapes[0] == shapes[2] == (4, 3) and 0 in shapes[1]


def test_permuted_ranks() -> None:
    def body() -> list[str]:
        mesh, bad = DeviceMesh("cpu", [[3, 1], [2, 0]]), []
        full = numbers((5, 6))
        for src, dst in pairs((2, 2), 2, 80, seed=11):
            if any(isinstance(p, Partial) for p in dst):
                continue
            x = local_of(full, src, mesh.shape, mesh.coord or ())
            y = redistribute_local(x, spec_of(mesh, src, full), spec_of(mesh, dst, full))
            bad += [] if torch.equal(y, shard_of(full, dst, mesh.shape, mesh.coord or ())) else [f"{src} -> {dst}"]
        return bad

    for bad in dtensor.simulate(4)(body):
        assert not bad


def test_a_local_tensor_of_another_shape_is_refused() -> None:
    def body(mesh: DeviceMesh) -> str:
        full = numbers((5, 7))
        with pytest.raises(LayoutError, match="its shard of that layout has shape") as e:
            redistribute_local(full, spec_of(mesh, (S0,), full), spec_of(mesh, (R,), full))
        return str(e.value)

    text = on_ranks(2, body)[0]
    assert "f64[5@0,7]" in text and "(5, 7)" in text and "(3, 7)" in text and "from_local" in text


# ------------------------------------------------------------ real processes
class Calls(TorchDispatchMode):
    """Names of the collectives that torch.distributed is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and "wait" not in name:
            name = name.strip("_").removesuffix("_tensor").removesuffix("_single")
            self.names.append("all_gather" if name.startswith("allgather") else name)
        return func(*args, **(kwargs or {}))


def on_gloo(rank: int, world: int) -> None:
    """The law on gloo: values, one collective of the natural kind, unwaited results."""
    bad = []
    kinds: list[tuple[Placement, Placement, list[str]]] = [
        (S0, R, ["all_gather"]), (S1, R, ["all_gather"]), (P, R, ["all_reduce"]), (P, S0, ["reduce_scatter"]),
        (P, S1, ["reduce_scatter"]), (S0, S1, ["all_to_all"]), (S1, S0, ["all_to_all"]), (R, S1, []),
        (StridedShard(0, split_factor=2), S0, ["all_to_all"]),
    ]  # fmt: skip
    for ranks in ([0, 1, 2, 3], [2, 0, 3, 1]):
        mesh = DeviceMesh("cpu", ranks)
        for shape in ((8, 8), (5, 7), (3, 2)):
            for src, dst, names in kinds:
                bad += value_faults(mesh, (src,), (dst,), numbers(shape), names)
                bad += [] if async_agrees(mesh, src, dst, shape) else [f"async {src} -> {dst} of {shape}"]
    mesh = init_device_mesh("cpu", (2, 2))
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        for src, dst in pairs((2, 2), 2, 40, seed=13):
            bad += value_faults(
                mesh, src, dst, numbers((5, 7), dtype) % 8 if not dtype.is_complex else numbers((5, 7), dtype)
            )
    bad += value_faults(mesh, (S0, S1), (S1, R), numbers((5, 7), torch.bool))
    assert not bad, bad[:5]


def value_faults(
    mesh: DeviceMesh, src: Layout, dst: Layout, full: torch.Tensor, names: list[str] | None = None
) -> list[str]:
    dst = tuple(R if isinstance(p, Partial) else p for p in dst)
    x = local_of(full, src, mesh.shape, mesh.coord or ())
    before = x.clone()
    with Calls() as calls:
        y = redistribute_local(x, spec_of(mesh, src, full), spec_of(mesh, dst, full))
    if names == ["all_gather"] and full.shape[0] % mesh.size():  # very uneven shards travel as they are
        names = calls.names if calls.names in (["all_gather"], ["all_to_all"]) else names
    bad = [] if names is None or calls.names == names else [f"{src} -> {dst} of {tuple(full.shape)}: {calls.names}"]
    right = torch.equal(y, shard_of(full, dst, mesh.shape, mesh.coord or ())) and torch.equal(x, before)
    return bad if right else [*bad, f"{src} -> {dst} of {tuple(full.shape)} {full.dtype}: wrong values"]


def bound_on_gloo(rank: int, world: int) -> None:
    """Collectives that are bound, and ranks whose tensors need a look among them: values, new contiguous memory."""
    bad = []
    for mesh_shape, most in (((4,), 40), ((2, 2), 40)):
        mesh = init_device_mesh("cpu", mesh_shape)
        for (full_shape, dtype), (src, dst) in itertools.product(
            (((8, 8), torch.float32), ((5, 7), torch.bfloat16), ((4, 4, 4), torch.int64)), pairs(mesh_shape, 2, most, 7)
        ):
            full, dst = numbers(full_shape, dtype) % 8, tuple(R if isinstance(p, Partial) else p for p in dst)
            x = local_of(full, src, mesh.shape, mesh.coord or ())
            spec, target = spec_of(mesh, src, full), spec_of(mesh, dst, full)
            want = shard_of(full, dst, mesh.shape, mesh.coord or ())
            gapped = x.transpose(0, -1).contiguous().transpose(0, -1)
            leaf = x.clone().requires_grad_(dtype.is_floating_point)
            uses = ("first", x), ("alike", x), ("gaps", gapped if rank % 2 else x), ("leaf", leaf if rank < 2 else x)
            for name, given in uses:
                with torch.no_grad():
                    before, y = given.clone(), redistribute_local(given, spec, target)
                new = y is given or (y.is_contiguous() and not (y.numel() and y.data_ptr() == given.data_ptr()))
                if not (torch.equal(y, want) and torch.equal(given, before) and (new or spec is target)):
                    bad.append(f"{name}: {src} -> {dst} of {full_shape} {dtype}")
    assert not bad, bad[:5]


def uneven_on_gloo(rank: int, world: int) -> None:
    """Shards of different sizes, drawn alike on all ranks, some on a device with queues: new, contiguous, right memory.

    Used again with other numbers, so that a buffer that is used twice would show in the first result.
    """
    draw, bad, kinds = random.Random(5), [], (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int16)
    meshes = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))]
    for i in range(110):
        mesh, ndim, dtype = draw.choice(meshes), draw.choice((1, 2, 2, 3)), draw.choice((kinds[0], *kinds))
        sizes = (5, 31, 67) if i % 5 == 0 else (1, 2, 3, 5, 7, 9, 0)  # the largest of them are not small
        full = numbers([draw.choice(sizes) for _ in range(ndim)], dtype)
        settled: list[Placement] = [
            R,
            *[Shard(draw.randrange(ndim)) for _ in range(3)],
            StridedShard(0, split_factor=2),
        ]
        pending = [P] if dtype in kinds[:2] else []
        src = tuple(draw.choice([*settled, *pending]) for _ in mesh.shape)
        dst = tuple(draw.choice(settled) for _ in mesh.shape)
        given = [local_of(x, src, mesh.shape, mesh.coord or ()) for x in (full, full.flip(0))]
        want = [shard_of(x, dst, mesh.shape, mesh.coord or ()) for x in (full, full.flip(0))]
        spec, target = spec_of(mesh, src, full), spec_of(mesh, dst, full)
        how = draw.random()
        if how < 0.3 and rank % 2:
            given[1] = given[1].transpose(0, -1).contiguous().transpose(0, -1)
        elif how > 0.7 and rank < 2:
            given[1] = torch.cat([given[1].new_zeros(3), given[1].flatten()])[3:].view(given[1].shape)
        before, queue = [x.clone() for x in given], comm_sent.in_queue
        comm_sent.in_queue = eager if i % 4 == 0 else queue
        try:
            with torch.inference_mode() if i % 3 == 0 else contextlib.nullcontext():
                got = [redistribute_local(given[j], spec, target) for j in (0, 0, 1, 0, 1)]
        finally:
            comm_sent.in_queue = queue
        held = [y.untyped_storage().data_ptr() for y in (*got, *given) if y.numel()]
        for y, j in zip(got, (0, 0, 1, 0, 1)):
            right = (
                y.shape == want[j].shape
                and y.dtype is dtype
                and torch.equal(y, want[j])
                and torch.equal(given[j], before[j])
            )
            alone = y is given[j] or (y.is_contiguous() and len({*held}) == len(held))
            exact = y is given[j] or y.untyped_storage().nbytes() <= 1.06 * y.nbytes + 400
            if not right or not (src == dst or not want[j].numel() or (alone and exact)):
                bad.append(f"{src} -> {dst} of {tuple(full.shape)} {dtype}: {right} {alone} {exact}")
    assert not bad, bad[:5]


def written_meanwhile_on_gloo(rank: int, world: int) -> None:
    """What the caller writes to its tensor after the call does not reach the result."""
    mesh, bad = init_device_mesh("cpu", (4,)), []
    kinds: list[Placement] = [R, S0, S1, P, StridedShard(0, split_factor=2)]
    for shape, dtype in (((256, 512), torch.float32), ((257, 511), torch.float32), ((256, 64), torch.complex64)):
        full = numbers(shape, dtype)
        for src, dst in itertools.product(kinds, kinds[:3] + kinds[4:]):
            if src == dst:
                continue
            x = local_of(full, (src,), mesh.shape, mesh.coord or ())
            late = redistribute_local(x, spec_of(mesh, (src,), full), spec_of(mesh, (dst,), full), async_op=True)
            x.add_(1)
            right = torch.allclose(late + 0, shard_of(full, (dst,), mesh.shape, mesh.coord or ()))
            bad += [] if right else [f"{src} -> {dst} of {shape}"]
    assert not bad, bad


def overlapping_on_gloo(rank: int, world: int) -> None:
    """Several redistributions are under way together: all are issued before the first is waited for."""
    mesh = init_device_mesh("cpu", (4,))
    full = numbers((64, 64))
    jobs = [((S0,), (R,)), ((S0,), (S1,)), ((P,), (R,)), ((P,), (S1,)), ((S1,), (R,))]
    inputs = [local_of(full, src, mesh.shape, mesh.coord or ()) for src, _ in jobs]
    events: list[str] = []

    class Order(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            space, _, name = func._schema.name.partition("::")
            if space in ("c10d", "_c10d_functional"):
                events.append("wait" if "wait" in name else "issue")
            return func(*args, **(kwargs or {}))

    with Order():
        late = [
            redistribute_local(x, spec_of(mesh, src, full), spec_of(mesh, dst, full), async_op=True)
            for x, (src, dst) in zip(inputs, jobs)
        ]
        issued = len(events)
        done = [y + 0 for y in late]
    assert events[:issued].count("issue") == len(jobs), events
    assert "wait" not in events[:issued], events
    for y, (_, dst) in zip(done, jobs):
        assert torch.equal(y, shard_of(full, dst, mesh.shape, mesh.coord or ())), dst


MORE = {
    "all_to_all": "what several ranks want is sent once for each; what arrives lies in a buffer until it is in place",
    "all_to_all_reduce": "the pending parts of what a rank wants arrive together, before they are reduced",
    "spread_reduce": "the parts that a rank reduces arrive together, and the sums that it sends are laid side by side",
    "all_gather": "shards that do not follow each other in the result lie in a buffer until they are in place",
    "reduce_scatter": "parts of a split-factor shard are laid side by side, then padded to one size",
}
"""Why more than input and output may be held: see `most_bytes`.

Of small tensors, as here: large ones hold no more, but for reductions by receivers and balanced ones
(`test_reshard_unbuffered.py`).
"""


def most_bytes(collectives: tuple[str, ...], kinds: Layout, even: bool, held: int, made: int) -> int:
    """What a redistribution may allocate: as much as its input and output, or for the reasons in `MORE`."""
    most = held + made
    strided = any(isinstance(p, StridedShard) for p in kinds)
    if "all_to_all" in collectives or "all_gather" in collectives:
        most = max(most, 2 * made)
    if "all_to_all_reduce" in collectives or "spread_reduce" in collectives:
        most = 2 * held + made
    if "reduce_scatter" in collectives and strided and not even:
        most = 2 * held + made
    if "all_gather" in collectives[1:]:
        most += held
    return most if even else int(1.05 * most)


def memory_on_gloo(rank: int, world: int) -> None:
    """What a redistribution allocates, the result included: see `most_bytes`."""
    lines: list[Layout] = [(k,) for k in (R, S0, S1, P, StridedShard(0, split_factor=2))]
    grids: list[Layout] = [
        (R, R), (S0, S0), (S1, S1), (S0, S1), (S1, S0), (S0, R), (R, S1), (P, R), (P, S1), (P, P)
    ]  # fmt: skip
    bad = []
    for kinds, mesh in ((lines, init_device_mesh("cpu", (4,))), (grids, init_device_mesh("cpu", (2, 2)))):
        all_pairs = list(itertools.product(kinds, kinds))
        cases = [((128, 96), pair) for pair in all_pairs] + [((125, 93), pair) for pair in all_pairs[::3]]
        for shape, (src, dst) in cases:
            if src == dst or any(q is P and p is not P for p, q in zip(src, dst)):
                continue
            full = numbers(shape)
            x = local_of(full, src, mesh.shape, mesh.coord or ())
            a, b = spec_of(mesh, src, full), spec_of(mesh, dst, full)
            most_held = allocated(x, a, b, 6)
            space = Space(mesh.shape, shape, x.itemsize, CostModel())
            # of the largest shards, which small ones are padded to
            held, made = space.facts(src).nbytes, space.facts(dst).nbytes
            most = most_bytes(plan_reshard(a, b).collectives, src + dst, shape == (128, 96), held, made)
            if most_held > most + 64:
                bad.append(f"{src} -> {dst} of {shape}: {most_held} bytes for {held} + {made}")
    assert not bad, bad


@pytest.mark.processes
def test_on_gloo_processes() -> None:
    run_ranks(
        4,
        [on_gloo, bound_on_gloo, uneven_on_gloo, memory_on_gloo, overlapping_on_gloo, written_meanwhile_on_gloo],
        timeout=300,
    ).check()


@pytest.mark.parametrize("guard", [torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
def test_results_are_contiguous(mesh_shape: tuple[int, ...], guard: Callable[[], Any]) -> None:
    """Kernels read them by their memory: also where parts of one element a dim would lie side by side as a view.

    Most redistributions are made and run below autograd, where, as in inference, torch does not note what is a view.
    """

    def body() -> list[str]:
        with guard():
            return strided()

    def strided() -> list[str]:
        mesh, bad = init_device_mesh("cpu", mesh_shape), []
        for full in ((4, 4, 5, 4), (6, 4, 2), (4, 4)):
            kinds: list[Placement] = [R, Partial(), *(Shard(d) for d in range(len(full)))]
            stride = torch.empty(full).stride()
            for a, b in itertools.product(itertools.product(kinds, repeat=len(mesh_shape)), repeat=2):
                if any(isinstance(p, Partial) for p in b):
                    continue
                src = Spec.make(mesh, a, full, stride, torch.float32)
                local = torch.zeros(src.local_shape)
                for late in (False, True):
                    got = redistribute_local(local, src, src.with_placements(b), async_op=late)
                    got = got.wait() if type(got).__name__ == "AsyncCollectiveTensor" else got
                    made = torch.empty(got.shape).stride()
                    if got is not local and got.numel() and got.stride() != made:
                        bad.append(f"{full}: {a} -> {b}: {got.stride()}")
        return bad

    assert dtensor.simulate(4)(body)[0] == []
