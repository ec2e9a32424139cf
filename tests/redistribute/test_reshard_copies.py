"""Parts taken out of tensors and put back: the elements, and what is a view."""

from __future__ import annotations

import itertools
import random

import torch
from helpers.reshard_cases import numbers

from dtensor.intervals import Region, common, dim_intervals
from dtensor.redistribute.executor.copies import Pack, Place, Unpack, private
from dtensor.redistribute.geometry import Parts

Shape = tuple[int, ...]


def parts_of(shape: Shape, cuts: list[tuple[int, int, int]]) -> list[Region]:
    """The shards of a tensor sharded by (dim, positions, split factor) after each other, by position."""
    out = []
    for at in itertools.product(*[range(k) for _, k, _ in cuts]):
        by_dim = [tuple([(k, r, f) for (d, k, f), r in zip(cuts, at) if d == dim]) for dim in range(len(shape))]
        out.append(tuple(map(dim_intervals, shape, by_dim)))
    return out


def taken(x: torch.Tensor, region: Region) -> torch.Tensor:
    """A region, element by element."""
    for d, runs in enumerate(region):
        x = x.index_select(
            d, torch.tensor([i for start, n in runs for i in range(start, start + n)], dtype=torch.int64)
        )
    return x


def drawn(seed: int) -> list[tuple[Shape, list[Region]]]:
    draw, out = random.Random(seed), []
    for _ in range(60):
        shape = tuple(draw.choice((1, 2, 3, 4, 5, 7, 8, 12, 0)) for _ in range(draw.choice((1, 2, 2, 3))))
        cuts = [(draw.randrange(len(shape)), draw.choice((2, 3, 4)), draw.choice((0, 0, 2, 3))) for _ in range(2)]
        out.append((shape, parts_of(shape, cuts[: draw.choice((1, 1, 2))])))
    return out


def parts(shape: Shape, regions: list[Region]) -> Parts:
    return Parts(shape, len(regions), lambda: regions)


def test_parts_are_taken_and_put_back() -> None:
    """Of contiguous tensors that do not begin at their memory's first element, and of tensors with gaps."""
    for shape, regions in drawn(0):
        x = torch.cat([torch.zeros(3), numbers(shape, torch.float32).flatten()])[3:].view(shape)
        want = torch.cat([taken(x, region).flatten() for region in regions])
        pack, unpack = Pack(parts(shape, regions)), Unpack(parts(shape, regions))
        for given in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
            assert torch.equal(pack(given), want) and pack(given).is_contiguous(), (shape, regions)
            assert all(map(torch.equal, pack.each(given), [t for r in regions if (t := taken(x, r)).numel()]))
        back = unpack(want.clone())
        assert torch.equal(back, x) and back.is_contiguous() and back.stride() == torch.empty(shape).stride()


def test_a_region_goes_from_place_to_place() -> None:
    """Also where both regions have several runs, of different lengths."""
    for seed in range(4):
        draw = random.Random(seed)
        for shape, regions in drawn(seed):
            other = draw.choice(
                parts_of(shape, [(draw.randrange(len(shape)), draw.choice((2, 3)), draw.choice((0, 2)))])
            )
            for have in regions:
                of, to = common(have, other)
                sizes = [tuple([sum(n for _, n in runs) for runs in region]) for region in (have, other)]
                x, y = numbers(sizes[0]), torch.zeros(sizes[1], dtype=torch.float64)
                Place(to).put(y, Place(of).get(x))
                assert torch.equal(taken(y, to), taken(x, of)) and y.count_nonzero() == taken(x, of).count_nonzero()


def test_rows_are_sent_as_they_lie() -> None:
    x, whole = numbers((7, 5)), (7, 5)
    pack = Pack(parts(whole, parts_of(whole, [(0, 4, 0)])))
    assert pack(x).data_ptr() == x.data_ptr() and pack(x).dim() == 1
    some = Pack(parts(whole, parts_of(whole, [(0, 4, 0)])[1:3]))
    assert some(x).data_ptr() == x[2:].data_ptr() and torch.equal(some(x), x[2:6].flatten())
    assert private(pack(x), x).data_ptr() != x.data_ptr()


def test_a_region_of_many_runs() -> None:
    """Of so many runs that they are not copied one by one: by an index, to their places and to those alone."""
    runs = tuple((i * i, 1 + i % 2) for i in range(1, 90))
    n = sum(k for _, k in runs)
    region, whole = (((0, 3),), runs), (3, 8000)
    out, part = torch.ones(whole), torch.arange(3.0 * n).view(3, n)
    Place(region).put(out, part)
    index = torch.tensor([i for start, k in runs for i in range(start, start + k)])
    want = torch.ones(whole)
    want[:, index] = part
    assert torch.equal(out, want) and torch.equal(Place(region).get(out), part)
