"""Placements: predicates, identity, immutability, text."""

import copy
import pickle
from itertools import product

import pytest
import torch

from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard, _StridedShard, as_placement

ALL = [Shard(0), Shard(-1), StridedShard(1, split_factor=4), Replicate(), Partial(), Partial("max"), Partial("norm2")]


@pytest.mark.parametrize("p", ALL, ids=repr)
def test_value_semantics(p: Placement) -> None:
    assert pickle.loads(pickle.dumps(p)) is p
    assert copy.deepcopy(p) is p
    names = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial, "_StridedShard": _StridedShard}
    names |= {op: op for op in ("sum", "max", "norm2")}  # torch prints reductions without quotes
    assert eval(repr(p), names) is p
    assert [q for q in ALL if q == p] == [p]
    with pytest.raises(AttributeError):
        p.dim = 3  # type: ignore[attr-defined]


def test_predicates() -> None:
    assert Shard(1).is_shard() and Shard(1).is_shard(1) and not Shard(1).is_shard(0)
    assert not StridedShard(1, split_factor=2).is_shard()
    assert Replicate().is_replicate() and not Replicate().is_partial()
    assert Partial("max").is_partial() and Partial("max").is_partial("max") and not Partial("max").is_partial("sum")
    assert Partial(None) is Partial("sum")
    assert str(Shard(0)) == "S(0)" and str(Replicate()) == "R" and str(Partial()) == "P(sum)"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Partial("bogus"), ValueError),
        (lambda: Shard("a"), TypeError),  # type: ignore[arg-type]
        (lambda: Shard(1.5), TypeError),  # type: ignore[arg-type]
        (lambda: StridedShard(0, split_factor=0), ValueError),
        (lambda: StridedShard(0, split_factor=2, sf=2), TypeError),
        (lambda: as_placement("S(0)"), TypeError),
    ],
)
def test_refused(make, error) -> None:
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("factor", [0, 1, 2, 3])
def test_size_and_offset_of_a_chunk(factor: int) -> None:
    cut = StridedShard(0, split_factor=factor) if factor else Shard(0)
    for n, chunks in product(range(12), (1, 2, 3, 4)):
        parts = [list(range(n))] if factor == 0 else [c.tolist() for c in torch.arange(n).chunk(factor)] if n else []
        for rank in range(chunks):
            pieces = [(torch.tensor(part).chunk(chunks)[rank:] or [torch.tensor([])])[0].tolist() for part in parts]
            mine = sum(pieces, [])
            start = mine[0] if mine else n if factor == 0 else -1
            assert cut.local_shard_size_and_offset(n, chunks, rank) == (len(mine), start)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(-1), StridedShard(0, split_factor=2)], ids=repr)
@pytest.mark.parametrize("n", [0, 1, 5, 8])
def test_the_parts_of_a_whole_tensor(placement: Shard | StridedShard, n: int) -> None:
    x = torch.arange(n * n).reshape(n, n)
    parts, pads = placement._split_tensor(x, 4, with_padding=False, contiguous=False)
    sizes = [placement.local_shard_size_and_offset(n, 4, i)[0] for i in range(4)]
    assert [part.shape[placement.dim] for part in parts] == sizes and pads == []
    padded, pads = placement._split_tensor(x, 4)
    assert pads == [max(sizes) - size for size in sizes]
    for whole, part, pad in zip(padded, parts, pads, strict=True):
        assert whole.is_contiguous()
        assert torch.equal(whole.narrow(placement.dim, 0, max(sizes) - pad), part)
        assert not whole.narrow(placement.dim, max(sizes) - pad, pad).any()
    if isinstance(placement, Shard):
        assert torch.equal(torch.cat(parts, placement.dim), x)
