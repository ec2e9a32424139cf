"""Chunks of checkpoints, and the checks of `from_local(run_check=True)`."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gloo_ranks import run_ranks
from helpers.laws import make, part_of, rand

from dtensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh, simulate, zeros
from dtensor.placement import StridedShard
from dtensor.spec import Spec, contiguous_stride

LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((4,), (Replicate(),)),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Shard(1), Shard(0))),
    ((2, 2), (Replicate(), Shard(0))),
    ((4,), (StridedShard(0, split_factor=2),)),
    ((2, 2), (StridedShard(1, split_factor=3), Shard(1))),
    ((2, 2), (StridedShard(0, split_factor=2), StridedShard(1, split_factor=2))),
]
INDEX = pytest.importorskip("torch.distributed.checkpoint.metadata").MetadataIndex


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (1, 3), (0, 4)], ids=str)
def test_chunks_tile_the_tensor(layout: tuple[tuple[int, ...], tuple[Placement, ...]], shape: tuple[int, ...]) -> None:
    full = torch.arange(shape[0] * shape[1] * 1.0).reshape(shape)

    def run() -> list[tuple[tuple[int, ...], torch.Tensor]]:
        x = make(full, init_device_mesh("cpu", layout[0]), layout[1])
        found = []
        items = x.__create_write_items__("w", x)
        for chunk, item in zip(x.__create_chunk_list__(), items, strict=True):
            assert item.index == INDEX("w", chunk.offsets) and item.tensor_data.chunk == chunk
            part = x.__get_tensor_shard__(item.index)
            assert part.shape == chunk.sizes
            assert part.untyped_storage().data_ptr() == x._local_tensor.untyped_storage().data_ptr()
            assert all(o <= n for o, n in zip(chunk.offsets, shape, strict=True))
            found.append((tuple(chunk.offsets), part))
        assert sum(p.numel() for _, p in found) == x._local_tensor.numel()
        return found

    again = torch.full(shape, -1.0)
    for chunks in simulate(4)(run):
        for offset, part in chunks:
            again[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
    torch.testing.assert_close(again, full, rtol=0, atol=0)


def test_pending_has_no_chunks() -> None:
    def run() -> None:
        p = make(rand(4), init_device_mesh("cpu", (2,)), [Partial()])
        for ask in (lambda: p.__create_write_items__("x", p), p.__create_chunk_list__):
            with pytest.raises(ValueError, match="pending on mesh axis"):
                ask()

    simulate(2)(run)


def case_save_and_load(rank: int, world: int) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    full = torch.arange(63.0).reshape(9, 7)
    layouts = [(s, p) for s, p in LAYOUTS]
    made = {s: init_device_mesh("cpu", s) for s in {s for s, _ in layouts}}
    for i, (shape, placements) in enumerate(layouts):
        dcp.save({"x": make(full, made[shape], placements)}, checkpoint_id=Path(str(box[0])) / str(i))
    for i, (shape, placements) in itertools.product(range(len(layouts)), layouts):
        spec = Spec.make(made[shape], placements, full.shape, contiguous_stride(full.shape), full.dtype)
        x = DTensor(torch.zeros(spec.local_shape), spec, requires_grad=False)
        dcp.load({"x": x}, checkpoint_id=Path(str(box[0])) / str(i))
        torch.testing.assert_close(x.to_local(), part_of(full, spec), rtol=0, atol=0)


@pytest.mark.processes
def test_any_layout_loads_into_any_other() -> None:
    run_ranks(4, [case_save_and_load], timeout=120).check()


# ------------------------------------------------------------ run_check
def test_run_check_makes_replicas_equal_on_the_mesh_only() -> None:
    def run() -> tuple[torch.Tensor, ...]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rank = mesh.get_rank()
        mine = torch.full((2,), float(rank)).requires_grad_()
        x = DTensor.from_local(mine, mesh["tp"], [Replicate()], run_check=True)
        (x.to_local() * (rank + 1)).sum().backward()
        both = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Replicate(), Shard(0)], run_check=True)
        assert mine.grad is not None
        assert torch.equal(mine, torch.full((2,), float(rank))), "the caller's tensor is left alone"
        return x.to_local().detach(), mine.grad, both.to_local()

    for rank, (x, grad, both) in enumerate(simulate(4)(run)):
        assert x.tolist() == [rank // 2 * 2.0] * 2
        assert grad.tolist() == [rank + 1.0] * 2
        assert both.tolist() == [rank % 2 * 1.0] * 2


@pytest.mark.parametrize("what", ["dtype", "requires_grad", "shape", "stride"])
def test_run_check_refuses_on_every_rank(what: str) -> None:
    def run() -> int:
        mesh = init_device_mesh("cpu", (4,))
        odd = mesh.get_rank() == 2
        t = torch.zeros(3, 2)
        if odd:
            t = {
                "dtype": t.double(), "requires_grad": t.requires_grad_(), "shape": torch.zeros(2, 2),
                "stride": torch.zeros(2, 3).t(),
            }[what]  # fmt: skip
        with pytest.raises(ValueError, match=f"different {what}"):
            DTensor.from_local(t, mesh, [Shard(0)], run_check=True)
        return 1

    assert simulate(4)(run) == [1] * 4


SHAPED: dict[str, tuple[tuple[int, ...], list[Placement], list[tuple[int, ...]], tuple[int, ...]]] = {
    "a row too many": ((4,), [Shard(0)], [(2, 4), (2, 4), (3, 4), (2, 4)], (8, 4)),
    "a row too few": ((4,), [Shard(0)], [(2, 4), (2, 4), (2, 4), (1, 4)], (8, 4)),
    "other columns": ((4,), [Shard(0)], [(2, 4), (2, 5), (2, 4), (2, 4)], (8, 4)),
    "fewer dims": ((4,), [Shard(1)], [(4, 2), (4, 2), (4, 2), (8,)], (4, 8)),
    "no dims": ((4,), [Shard(0)], [(), (2, 4), (2, 4), (2, 4)], (8, 4)),
    "parts in another order": ((4,), [Shard(0)], [(1, 4), (3, 4), (3, 4), (3, 4)], (10, 4)),
    "an empty part has a row": ((4,), [Shard(0)], [(1, 4), (1, 4), (1, 4), (1, 4)], (3, 4)),
    "a replica of another shape": ((4,), [Replicate()], [(8, 4), (8, 4), (8, 4), (4, 8)], (8, 4)),
    "a pending part of another shape": ((4,), [Partial()], [(8, 4), (1, 4), (8, 4), (8, 4)], (8, 4)),
    "two axes": ((2, 2), [Shard(0), Shard(1)], [(4, 2), (4, 2), (4, 2), (4, 3)], (8, 4)),
    "two axes, one dim": ((2, 2), [Shard(0), Shard(0)], [(2, 4), (2, 4), (2, 4), (1, 4)], (8, 4)),
    "a split factor": (
        (2, 2), [StridedShard(0, split_factor=2), Shard(0)], [(2, 4), (2, 4), (3, 4), (2, 4)], (8, 4)
    ),
    "replicas of a shard": ((2, 2), [Shard(0), Replicate()], [(2, 2), (2, 2), (1, 2), (3, 2)], (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("what", SHAPED)
def test_run_check_refuses_parts_that_do_not_fit_the_shape_on_every_rank(what: str) -> None:
    sizes, placed, parts, shape = SHAPED[what]

    def run() -> bool:
        mesh = init_device_mesh("cpu", sizes)
        stride = torch.empty(shape).stride()
        with pytest.raises((ValueError, RuntimeError), match=r"from_local") as seen:
            DTensor.from_local(
                torch.zeros(parts[mesh.get_rank()]), mesh, placed, run_check=True, shape=shape, stride=stride
            )
        here = not isinstance(seen.value, ValueError) or isinstance(seen.value, IndexError)
        assert here or "rank" in str(seen.value)
        right = torch.zeros(Spec.make(mesh, tuple(placed), shape, stride, torch.float32).local_shape)
        assert DTensor.from_local(right, mesh, placed, run_check=True, shape=shape, stride=stride).shape == shape
        return here

    assert 0 < sum(simulate(4)(run)) < 4


@pytest.mark.parametrize("what", ["shape", "given", "placements", "dims", "class", "device"])
def test_run_check_refuses_on_every_rank_what_one_rank_says_otherwise(what: str) -> None:
    def run() -> int:
        mesh = init_device_mesh("cpu", (4,))
        odd = mesh.get_rank() == 3
        t, placed, shape = torch.zeros(2, 2), [Shard(0)], (8, 2)
        if odd and what == "shape":
            t, shape = torch.zeros(0, 2), (6, 2)
        if odd and what == "placements":
            placed = [Shard(1)]
            t, shape = torch.zeros(8, 0), (8, 3)
        if odd and what == "device":
            t = t.to("meta")
        local: Any = [1] if odd and what == "class" else t[0] if odd and what == "dims" else t
        given = {} if what == "dims" or (odd and what == "given") else {"shape": shape, "stride": (shape[1], 1)}
        with pytest.raises((ValueError, RuntimeError, TypeError), match=r"from_local"):
            DTensor.from_local(local, mesh, placed, run_check=True, **given)  # type: ignore[arg-type]
        return 1

    assert simulate(4)(run) == [1] * 4


def test_weights_only_load() -> None:
    import io

    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for placements in (
            [Shard(0), Replicate()],
            [StridedShard(0, split_factor=2), Shard(0)],
            [Partial(), Replicate()],
        ):
            x = zeros(8, 3, device_mesh=mesh, placements=[Shard(0), Replicate()])
            x = make(rand(8, 3), mesh, placements)
            buffer = io.BytesIO()
            torch.save({"x": x, "p": torch.nn.Parameter(x)}, buffer)
            buffer.seek(0)
            back = torch.load(buffer, weights_only=True)
            assert isinstance(back["x"], DTensor) and back["x"]._spec is x._spec
            torch.testing.assert_close(back["x"]._local_tensor, x._local_tensor)

    simulate(4)(run)
