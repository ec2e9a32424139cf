"""Random ops: replicas agree, shards differ, seeds repeat; on CPU the numbers are those of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import make, rand

from dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from dtensor.dispatch import random as rng
from dtensor.placement import StridedShard

Fn = Callable[[torch.Tensor], torch.Tensor]

DRAWS: dict[str, Fn] = {
    "uniform_": lambda x: x.uniform_(2, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "exponential_": lambda x: x.exponential_(),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "random_": lambda x: x.random_(1, 50),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randn_like f64": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.4),
    "dropout": lambda x: F.dropout(x + 1.0, 0.5, training=True),
    "dropout1d": lambda x: F.feature_alpha_dropout(x + 1.0, 0.5, training=True),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x, std=0.5),
    "xavier": lambda x: torch.nn.init.xavier_uniform_(x),
}
DRAWN_FROM: dict[str, Fn] = {
    "bernoulli": lambda x: torch.bernoulli(x * 0 + 0.5),
    "normal": lambda x: torch.normal(x * 0, 1.0),
    "poisson": lambda x: torch.poisson(x * 0 + 9.0),
    "native_dropout": lambda x: torch.ops.aten.native_dropout(x + 1.0, 0.5, True)[0],
    "multinomial": lambda x: torch.multinomial(x * 0 + 1.0, 3, replacement=True),
}
LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((4,), (Replicate(),)),
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((2, 2), (Shard(1), Shard(0))),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Replicate(), Shard(1))),
    ((2,), (StridedShard(1, split_factor=2),)),
]


def drawn(
    shape: tuple[int, ...], placements: tuple[Placement, ...], fn: Fn, seeds: Callable[[int], int]
) -> list[torch.Tensor]:
    """Per rank the full result, and what the default generator gives next."""

    def run() -> torch.Tensor:
        mesh = init_device_mesh("cpu", shape)
        torch.manual_seed(seeds(mesh.get_rank()))
        out = fn(make(torch.zeros(9, 6), mesh, placements))
        assert isinstance(out, DTensor)
        assert out.placements == placements or fn is DRAWN_FROM["multinomial"]
        return torch.cat([out.full_tensor().flatten().float(), torch.rand(3)])

    size = 1
    for k in shape:
        size *= k
    return simulate(size)(run)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_of_one_device(name: str, layout: tuple[tuple[int, ...], tuple[Placement, ...]]) -> None:
    torch.manual_seed(5)
    plain = DRAWS[name](torch.zeros(9, 6)).flatten().float()
    want = torch.cat([plain, torch.rand(3)])
    for got in drawn(*layout, DRAWS[name], lambda r: 5):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", [*DRAWS, *DRAWN_FROM])
def test_ranks_agree_whatever_their_seeds(name: str, layout: tuple[tuple[int, ...], tuple[Placement, ...]]) -> None:
    fn = (DRAWS | DRAWN_FROM)[name]
    got, again = drawn(*layout, fn, lambda r: 7 + r), drawn(*layout, fn, lambda r: 7 + r)
    for a, b in zip(got, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(a[:-3], got[0][:-3], rtol=0, atol=0)
    assert len({tuple(g[-3:].tolist()) for g in got}) == len(got), "ranks that are seeded differently stay so"


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "seeded"])
@pytest.mark.parametrize("name", ["normal_", "rand_like", "bernoulli_", "dropout", "bernoulli"])
def test_shards_differ_and_the_seed_repeats(name: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not whole:
        monkeypatch.setattr(rng, "WHOLE_DRAW", 0)
    fn = (DRAWS | DRAWN_FROM)[name]

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2))
        outs = []
        for seed in (3, 3, None):
            if seed is not None:
                torch.manual_seed(seed)
            x = fn(make(torch.zeros(64, 6), mesh, [Shard(0), Replicate()]))
            assert isinstance(x, DTensor)
            outs.append(x.to_local())
        return outs[0], outs[1], outs[2]

    got = simulate(4)(run)
    assert torch.equal(got[0][0], got[1][0]) and torch.equal(got[2][0], got[3][0])
    assert not torch.equal(got[0][0], got[2][0])
    assert all(torch.equal(a, b) and not torch.equal(b, c) for a, b, c in got)


def test_pending_targets_get_the_numbers_of_one_device_and_pending_models_read_no_values() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        p = make(rand(6, 4), mesh, [Partial()])
        for fn in (lambda x: x.uniform_(), lambda x: x.bernoulli_(0.5), lambda x: x.normal_()):
            q = p.clone()
            torch.manual_seed(1)
            assert fn(q) is q and q.placements == (Partial(),)
            torch.manual_seed(1)
            assert torch.equal(q.full_tensor(), fn(rand(6, 4)))
        y = torch.rand_like(p)
        assert isinstance(y, DTensor) and y.placements == (Replicate(),)
        torch.manual_seed(1)
        dropped = F.dropout(p, 0.5, training=True).full_tensor()
        torch.manual_seed(1)
        torch.testing.assert_close(dropped, F.dropout(rand(6, 4), 0.5, training=True))

    simulate(4)(run)


def test_dropout_gradient_uses_the_mask() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.ones(16, 5), mesh, [Shard(0)]).requires_grad_()
        y = F.dropout(x, 0.25, training=True)
        y.sum().backward()
        assert isinstance(x.grad, DTensor)
        torch.testing.assert_close(x.grad.full_tensor(), y.full_tensor())

    simulate(4)(run)


def test_equal_seeds_send_nothing() -> None:
    from dtensor.comm.observers import observers

    def run() -> list[str]:
        mesh = init_device_mesh("cpu", (4,))
        sent: list[str] = []
        watch = lambda kind, ranks, elements, itemsize: sent.append(kind)  # noqa: E731
        x = distribute_tensor(torch.zeros(4), mesh, [Replicate()])
        torch.manual_seed(0)
        observers.append(watch)
        with rng.equal_seeds():
            x.normal_()
        x.normal_()
        observers.remove(watch)
        return sent

    assert simulate(4)(run) == [["broadcast"]] * 4


def test_own_generator() -> None:
    def run() -> torch.Tensor:
        mesh = init_device_mesh("cpu", (4,))
        g = torch.Generator().manual_seed(11)
        return distribute_tensor(torch.zeros(8), mesh, [Shard(0)]).normal_(generator=g).full_tensor()

    want = torch.zeros(8).normal_(generator=torch.Generator().manual_seed(11))
    for got in simulate(4)(run):
        torch.testing.assert_close(got, want)
