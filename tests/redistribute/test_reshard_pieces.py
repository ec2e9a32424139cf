"""Parts taken out of tensors and put back by few copies: the elements, their number, and what is a view."""

from __future__ import annotations

import itertools
import math
import random
from itertools import accumulate

import pytest
import torch
from helpers.reshard_cases import numbers

from dtensor.redistribute.executor import pieces as reshard_pieces
from dtensor.redistribute.executor.pieces import copier, lies, maker, moved, packer
from dtensor.redistribute.geometry import Region, common, region_size
from dtensor.spec import dim_intervals

Shape = tuple[int, ...]


def parts_of(shape: Shape, cuts: list[tuple[int, int, int]]) -> list[Region]:
    """The shards of a tensor cut by (dim, positions, split factor) after each other, by position."""
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


@pytest.mark.parametrize("small", [reshard_pieces.SMALL, 0], ids=["by an index", "by boxes"])
def test_parts_are_taken_and_put_back(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(reshard_pieces, "SMALL", small)
    for few in (0, 512):
        monkeypatch.setattr(reshard_pieces, "_FEW", few)
        for shape, regions in drawn(few):
            x = torch.cat([torch.zeros(3), numbers(shape, torch.float32).flatten()])[3:].view(shape)  # not at 0
            want = torch.cat([taken(x, region).flatten() for region in regions])
            pack, sizes = packer(regions, shape), [*map(region_size, regions)]
            assert pack is not None
            for _ in range(2):
                assert torch.equal(pack(x), want) and pack(x).is_contiguous(), (shape, regions)
            landing = lies(regions, shape, [0, *accumulate(sizes)], True)
            if not x.numel():
                assert landing == []
                continue
            assert landing is not None
            back = maker(landing, shape)
            for flat in (want, want + 1):
                assert torch.equal(back(flat), x + (flat[0] - want[0])), (shape, regions)
            assert back(want).is_contiguous()


def test_what_stays_goes_from_place_to_place() -> None:
    """Also where both regions have several runs, of unlike lengths."""
    for seed in range(4):
        draw = random.Random(seed)
        for shape, regions in drawn(seed):
            other = draw.choice(
                parts_of(shape, [(draw.randrange(len(shape)), draw.choice((2, 3)), draw.choice((0, 2)))])
            )
            for have in regions:
                of, to = common(have, other)
                sizes = [tuple([sum(n for _, n in runs) for runs in region]) for region in (have, other)]
                if not region_size(of):
                    continue
                found = moved(of, sizes[0], to, sizes[1])
                assert found is not None
                x, y = numbers(sizes[0]), torch.zeros(sizes[1], dtype=torch.float64)
                copier(found)(x, y)
                assert torch.equal(taken(y, to), taken(x, of)) and y.count_nonzero() == taken(x, of).count_nonzero()


@pytest.mark.parametrize(
    ("shape", "cuts", "most"),
    [
        ((8, 12), [(1, 4, 0)], 1),
        ((7, 5), [(1, 4, 0)], 2),  # of 2 columns, of 1
        ((7, 67), [(1, 8, 0)], 2),
        ((8, 12), [(0, 2, 0), (1, 4, 0)], 1),
        ((7, 67), [(0, 2, 0), (1, 4, 0)], 4),
        ((24, 5), [(0, 4, 3)], 1),  # a split-factor shard has runs at even distances
    ],
    ids=str,
)
def test_few_copies_do(shape: Shape, cuts: list[tuple[int, int, int]], most: int) -> None:
    regions = parts_of(shape, cuts)
    for out in (False, True):
        found = lies(regions, shape, [0, *accumulate(map(region_size, regions))], out)
        assert found is not None and len(found) <= most, found
        assert sum(math.prod(p.size) for p in found) == math.prod(shape)


def test_rows_are_sent_as_they_lie() -> None:
    x, whole = numbers((7, 5)), (7, 5)
    for regions, first in ((parts_of(whole, [(0, 4, 0)]), 0), (parts_of(whole, [(0, 4, 0)])[1:3], 10)):
        pack = packer(regions, whole)
        assert pack is not None and pack(x).data_ptr() == x[first // 5 :].data_ptr() and pack(x).dim() == 1


def test_too_many_pieces_are_left_to_others() -> None:
    """Parts of lengths that all differ are a copy each."""
    regions: list[Region] = [(((n * n, n),),) for n in range(1, 100)]
    assert packer(regions, (10000,)) is None


def test_gaps_are_no_leftovers() -> None:
    """What pads a part that is sent is a value that was given, or zero: never memory as it was."""
    found = lies([(((0, 3),),), (((3, 2),),)], (5,), [0, 3], False)
    assert found is not None
    for total in (6, reshard_pieces.SMALL + 6):
        made = maker(found, (total,), [(5, total - 5)])(torch.arange(5.0))
        assert made[:5].tolist() == [0, 1, 2, 3, 4] and not made[5:].any()
