"""Specs: interning, geometry against a specification by enumeration, the layout string."""

import itertools
import pickle
from typing import Any

import pytest
import torch

from dtensor import Partial, Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh
from dtensor.errors import LayoutError
from dtensor.intervals import Interval, dim_intervals, parts_of_runs, split_runs
from dtensor.simulate import fake_world, simulate
from dtensor.spec import Spec, contiguous_stride, normalize_placements
from dtensor.tensor_methods.offsets import compute_local_shape_and_global_offset


def cut(items: list[int], k: int, r: int) -> list[int]:
    """The r-th chunk as torch.chunk shards it."""
    parts = torch.tensor(items).chunk(k) if items else ()
    return parts[r].tolist() if r < len(parts) else []


def by_enumeration(size: int, cuts: tuple[tuple[int, int, int], ...]) -> list[int]:
    items = list(range(size))
    for k, r, factor in cuts:
        if not factor:
            items = cut(items, k, r)
        else:
            pieces = [p.tolist() for p in torch.tensor(items).chunk(factor)] if items else []
            items = [i for piece in pieces for i in cut(piece, k, r)]
    return items


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 8, 9, 12, 13])
def test_intervals_are_what_chunking_gives(size: int) -> None:
    kinds = [(k, f) for k in (1, 2, 3, 4) for f in (0, 1, 2, 3, 4)]
    for chain in itertools.chain(((a,) for a in kinds), itertools.product(kinds[::3], kinds[::2])):
        for ranks in itertools.product(*(range(k) for k, _ in chain)):
            cuts = tuple((k, r, f) for (k, f), r in zip(chain, ranks, strict=True))
            got = [i for start, n in dim_intervals(size, cuts) for i in range(start, start + n)]
            assert got == by_enumeration(size, cuts), cuts


def test_one_object_per_value_and_text_round_trip() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        for text in (
            "f32[8@dp,16]{P:tp}",
            "bf16[8@dp+tp,3]",
            "i64[]",
            "f64[16@tp:4,2@dp]",
            "b8[0]{P(max):dp}",
            "f32[4]",
        ):
            spec = Spec.parse(text, mesh)
            assert str(spec) == text
            assert Spec.parse(str(spec), mesh) is spec
            assert pickle.loads(pickle.dumps(spec)) is spec
        spec = Spec.make(mesh, (Shard(0), Partial()), (8, 16), (16, 1), torch.float32)
        assert str(spec) == "f32[8@dp,16]{P:tp}" and spec.local_shape == (4, 16)
        with pytest.raises(ValueError, match="expected dtype"):
            Spec.parse("f32 8", mesh)


def test_shards_tile_the_tensor() -> None:
    with fake_world(6):
        mesh = init_device_mesh("cpu", (2, 3))
        some = [Replicate(), Shard(0), Shard(1), StridedShard(0, split_factor=2), StridedShard(1, split_factor=3)]
        for shape, placed in itertools.product([(7, 5), (1, 6), (0, 2), (12, 12)], itertools.product(some, repeat=2)):
            spec = Spec.make(mesh, placed, shape, contiguous_stride(shape), torch.float32)
            count = torch.zeros(shape, dtype=torch.int64)
            for coord in itertools.product(range(2), range(3)):
                rows, cols = ([i for s, n in runs for i in range(s, s + n)] for runs in spec.intervals_of(coord))
                count[torch.tensor(rows, dtype=torch.int64)[:, None], torch.tensor(cols, dtype=torch.int64)] += 1
                assert spec.local_shape_of(coord) == (len(rows), len(cols))
            copies = 1
            for p, k in zip(placed, (2, 3), strict=True):
                copies *= k if isinstance(p, Replicate) else 1
            assert (count == copies).all(), (shape, placed)


def test_empty_shards_start_at_the_end() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        spec = Spec.make(mesh, (Shard(0),), (5, 2), (2, 1), torch.float32)
        assert [spec.local_offset_of((r,)) for r in range(4)] == [(0, 0), (2, 0), (4, 0), (5, 0)]


@pytest.mark.parametrize(
    ("placements", "error", "text"),
    [
        ([Shard(0)], ValueError, "1 placements for a mesh of 2 axes"),
        ([Shard(0), Shard(2)], IndexError, "names dim 2 of a tensor of 2 dims"),
        ([Shard(-3), Replicate()], IndexError, "use a dim in"),
        ([Partial("sum"), Partial("max")], ValueError, "one kind of reduction"),
        (["S(0)", Replicate()], TypeError, "no placement"),
        ("SR", TypeError, "sequence of placements"),
    ],
)
def test_bad_placements(placements, error, text) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2))
        with pytest.raises(error, match=text):
            normalize_placements(placements, mesh, 2, "call")


def test_negative_dims_and_sum_beside_avg() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2))
        assert normalize_placements([Shard(-1), StridedShard(-2, split_factor=2)], mesh, 2, "call") == (
            Shard(1), StridedShard(0, split_factor=2),
        )  # fmt: skip
        assert normalize_placements([Partial("sum"), Partial("avg")], mesh, 2, "call")
        assert normalize_placements(None, mesh, 2, "call") == (Replicate(), Replicate())


def test_a_hundred_thousand_ranks() -> None:
    with fake_world(100_000):
        mesh = init_device_mesh("cpu", (100, 1000))
        spec = Spec.make(mesh, (Shard(0), Shard(1)), (5000, 2001), (2001, 1), torch.float32)
        assert spec.local_shape_of((99, 999)) == (50, 0) and spec.local_shape_of((0, 3)) == (50, 3)


@pytest.mark.parametrize("layout", [(Shard(0), Shard(0)), (StridedShard(0, split_factor=2), Shard(0))])
@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 9])
def test_shape_and_offset_describe_the_shard(n: int, layout: tuple) -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        full = torch.arange(n)
        local = distribute_tensor(full, mesh, layout).to_local()
        sizes, offset = compute_local_shape_and_global_offset(full.shape, mesh, layout)
        assert sizes == tuple(local.shape) and offset[0] <= n
        assert torch.equal(full[offset[0] : offset[0] + sizes[0]], local)

    simulate(4)(program)


def test_runs_have_no_one_offset() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        layout = (StridedShard(0, split_factor=2),)
        with pytest.raises(LayoutError, match="no one offset"):
            compute_local_shape_and_global_offset((8,), mesh, layout)
        assert compute_local_shape_and_global_offset((8,), mesh, layout, skip_offset=True) == ((4,), ())


class _Counted(tuple[Interval, ...]):
    """Runs that count how often one of them is looked at."""

    looked = 0

    def __getitem__(self, i: Any) -> Any:
        self.looked += 1
        return super().__getitem__(i)


@pytest.mark.parametrize("n", [1, 7, 40, 400])
def test_runs_are_cut_in_one_walk(n: int) -> None:
    """Elements of windows of many runs, and no more steps than there are runs and windows."""
    runs = _Counted((7 * i, 1 + i % 4) for i in range(n))
    elements = [e for start, m in runs for e in range(start, start + m)]
    for size, step in ((1, 1), (1, 3), (2, 5), (0, 1), (len(elements), 1 + len(elements))):
        windows = [(lo, min(lo + size, len(elements))) for lo in range(0, len(elements), step)]
        runs.looked = 0
        got = parts_of_runs(runs, windows)
        assert runs.looked <= len(runs) + len(windows)
        want = [e for lo, hi in windows for e in elements[lo:hi]]
        assert [e for start, m in got for e in range(start, start + m)] == want


def test_cutting_every_row_takes_time_that_grows_with_the_rows() -> None:
    """The columns of a matrix sharded over two axes, flattened: as many runs as rows, each cut again."""
    for rows in (300, 301):
        runs = _Counted(dim_intervals(rows * 8, ((2, 0, rows),)))
        for r in (0, 1):
            runs.looked = 0
            assert len(split_runs(runs, 2, r, rows)) == rows
            assert runs.looked <= 3 * rows
