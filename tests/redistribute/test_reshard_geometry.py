"""What the ranks of a group hold and share, dim by dim, against sets of indices, element by element."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch

from dtensor.intervals import Region, Runs, common, region_shape, region_size
from dtensor.mesh.device_mesh import init_device_mesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.redistribute.geometry import Parts, by_dim, held_along, holdings, members, parts_along, shared_along
from dtensor.simulate import fake_world
from dtensor.spec import Spec, contiguous_stride

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 12, 13)


def chunk(items: Sequence[int], k: int, r: int) -> list[int]:
    """Chunk r of k, as torch.chunk cuts."""
    n = -(-len(items) // k)
    return list(items[r * n : (r + 1) * n])


def indices(spec: Spec, layout: Sequence[Placement], coord: Sequence[int]) -> list[list[int]]:
    """Per dim, the indices that the rank at `coord` holds, by the definition of the placements."""
    held = [list(range(n)) for n in spec.shape]
    for p, k, r in zip(layout, spec.mesh.shape, coord):
        if isinstance(p, Shard):
            held[p.dim] = chunk(held[p.dim], k, r)
        elif isinstance(p, StridedShard):
            parts = [chunk(held[p.dim], p.split_factor, i) for i in range(p.split_factor)]
            held[p.dim] = [i for part in parts for i in chunk(part, k, r)]
    return held


def flat(region: Region) -> list[list[int]]:
    """Per dim, the elements of the runs of a region, which are as few as can be."""
    for runs in region:
        assert all(n > 0 for _, n in runs)
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs)), region
    return [[i for start, n in runs for i in range(start, start + n)] for runs in region]


def inside(part: list[list[int]], whole: list[list[int]]) -> list[list[int]]:
    """Per dim, where in `whole` the indices lie that are in `part` too."""
    return [[at for at, i in enumerate(mine) if i in theirs] for theirs, mine in zip(map(set, part), whole)]


def drawn(draw: random.Random, ndim: int, axes: int) -> tuple[Placement, ...]:
    def one() -> Placement:
        kind = draw.choice("RPSSSFF") if ndim else draw.choice("RP")
        if kind in "SF":
            d = draw.randrange(ndim)
            return Shard(d) if kind == "S" else StridedShard(d, split_factor=draw.choice((1, 2, 3, 4)))
        return Replicate() if kind == "R" else Partial()

    return tuple(one() for _ in range(axes))


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2), (2, 3), (1, 4), (2, 3, 2)], ids=str)
def test_what_ranks_hold_and_share_is_what_sets_of_indices_say(mesh_shape: tuple[int, ...]) -> None:
    draw, ndims = random.Random(math.prod(mesh_shape)), (0, 1, 2, 2, 3)
    with fake_world(math.prod(mesh_shape)):
        mesh = init_device_mesh("cpu", mesh_shape)
        coords = [*itertools.product(*map(range, mesh_shape))]
        for _ in range(60):
            shape = tuple(draw.choice(SIZES) for _ in range(draw.choice(ndims)))
            mine, theirs = (drawn(draw, len(shape), len(mesh_shape)) for _ in range(2))
            spec = Spec.make(mesh, mine, shape, contiguous_stride(shape), torch.float32)
            axes = tuple(a for a in range(len(mesh_shape)) if draw.random() < 0.7) or (0,)
            coord = draw.choice(coords)
            group = [at for at in coords if all(at[a] == coord[a] for a in range(len(mesh_shape)) if a not in axes)]
            assert [*members(spec, axes, coord)] == group

            own = indices(spec, mine, coord)
            assert flat(holdings(spec, mine, coord)) == own
            assert list(spec.local_shape_of(coord)) == [*map(len, own)]
            held, shared = held_along(spec, theirs, axes, coord), shared_along(spec, mine, theirs, axes, coord)
            assert len(held) == len(shared) == len(group)
            for d, runs in enumerate(by_dim(spec, theirs, axes, coord)):
                assert [*runs] == [region[d] for region in held]
            for at, region, part in zip(group, held, shared):
                other = indices(spec, theirs, at)
                assert flat(region) == other, (spec, theirs, at)
                assert flat(part) == inside(other, own), (spec, theirs, coord, at)
                assert list(region_shape(part)) == [len(some) for some in inside(other, own)]
                first, second = common(holdings(spec, mine, coord), region)
                assert first == part and flat(second) == inside(own, other)


def test_the_axes_of_a_group_ascend() -> None:
    with fake_world(4):
        spec = Spec.make(init_device_mesh("cpu", (2, 2)), (Shard(0), Shard(0)), (8,), (1,), torch.float32)
        with pytest.raises(ValueError, match="must ascend"):
            held_along(spec, spec.placements, (1, 0), (0, 0))


def test_adjacent_regions_are_those_that_make_up_the_tensor_along_a_dim() -> None:
    draw, found = random.Random(3), {True: 0, False: 0}
    for _ in range(600):
        whole = tuple(draw.choice((1, 2, 3, 5, 8)) for _ in range(draw.choice((1, 2, 3))))
        dim = draw.randrange(len(whole))
        edges = [0, *sorted(draw.choices(range(whole[dim] + 1), k=draw.choice((0, 1, 3)))), whole[dim]]
        regions = []
        for lo, hi in itertools.pairwise(edges):
            region: list[Runs] = [((0, n),) for n in whole]
            region[dim] = ((lo, hi - lo),) if hi > lo else ()
            regions.append(region)
        for _ in range(draw.choice((0, 0, 1))):  # mostly not side by side any more
            other = draw.choice(regions)
            some: list[Runs] = [(), ((0, 1),), ((0, 1), (2, 1))]
            other[draw.randrange(len(whole))] = draw.choice(some)
        parts = [part for region in regions if all(part := flat(tuple(region)))]
        ways = [
            d
            for d, n in enumerate(whole)
            if [i for part in parts for i in part[d]] == [*range(n)]
            and all(part[e] == [*range(m)] for part in parts for e, m in enumerate(whole) if e != d)
        ]
        named = [tuple(region) for region in regions]
        got = Parts(whole, len(named), named.copy).dim
        assert got in ways if ways else got is None, (regions, whole)
        found[bool(ways)] += 1
    assert min(found.values()) > 100


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2), (2, 3), (1, 4), (2, 3, 2)], ids=str)
def test_tilings_are_the_regions_that_they_stand_for(mesh_shape: tuple[int, ...]) -> None:
    """Parts in closed form, taken by views of the tensor, are those that the list of regions names."""
    draw, tiled = random.Random(math.prod(mesh_shape)), 0
    with fake_world(math.prod(mesh_shape)):
        mesh = init_device_mesh("cpu", mesh_shape)
        coords = [*itertools.product(*map(range, mesh_shape))]
        for _ in range(400):
            shape = tuple(draw.choice((4, 6, 8, 12, 24, 0)) for _ in range(draw.choice((1, 2, 2, 3))))
            mine, theirs = (drawn(draw, len(shape), len(mesh_shape)) for _ in range(2))
            spec = Spec.make(mesh, mine, shape, contiguous_stride(shape), torch.float32)
            axes = tuple(a for a in range(len(mesh_shape)) if draw.random() < 0.8) or (0,)
            parts = parts_along(spec, mine, theirs, axes, draw.choice(coords))
            if parts.tiling is None:
                continue
            tiled += 1
            x = torch.arange(math.prod(parts.shape)).view(parts.shape)
            rows = x.view(parts.tiling.split).permute(parts.tiling.order).reshape(parts.count, -1)
            for row, region in zip(rows, parts.regions):
                some = x
                for d, where in enumerate(flat(region)):
                    some = some.index_select(d, torch.tensor(where, dtype=torch.int64))
                assert torch.equal(row, some.reshape(-1)), (spec, theirs, region)
            assert parts.sizes == [*map(region_size, parts.regions)] and parts.even
            assert not parts.in_order or torch.equal(rows.reshape(-1), x.view(-1))
    assert tiled, mesh_shape
