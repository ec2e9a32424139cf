"""Functions on real processes: what fails is named, with its case, and the others run all the same."""

from __future__ import annotations

import time

import pytest
import torch
from helpers.gloo_ranks import run_ranks

from dtensor.placement import Shard


def wrong(rank: int, world: int) -> None:
    for dim in range(2):
        for layout in ((Shard(0), Shard(dim)), (Shard(dim), Shard(0))):
            if rank == 1 and layout[0] == Shard(1):
                raise ValueError("not this one")


def hangs(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(60)


def right(rank: int, world: int) -> tuple[int, int]:
    return rank, torch.get_num_threads()


@pytest.mark.processes
def test_what_fails_is_named_and_the_others_run() -> None:
    outcome = run_ranks(2, [wrong, hangs, right], timeout=2)
    (told,) = outcome.failures["wrong"]
    assert told.startswith("rank 1: ") and "ValueError: not this one" in told
    assert "test_gloo_ranks.py:" in told and "dim=1" in told and "layout=(Shard(dim=1), Shard(dim=0))" in told
    assert [told.split(":")[0] for told in outcome.failures["hangs"]] == ["rank 0"]
    assert "in hangs" in outcome.failures["hangs"][0]
    assert outcome.results["right"] == [(0, 1), (1, 1)]
    outcome.check(right)
    with pytest.raises(AssertionError, match="wrong failed on rank 1"):
        outcome.check()
