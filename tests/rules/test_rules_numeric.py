"""The laws, for linear algebra, transforms and other numeric ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.laws import HELD, Sample, check_layouts, check_strategies, make, rand
from helpers.samples.numeric import LAYOUTS_ONLY, SAMPLES

from dtensor import Replicate, Shard, init_device_mesh, simulate


@pytest.mark.parametrize("sample", [*SAMPLES, *LAYOUTS_ONLY], ids=lambda s: s.name)
def test_layouts(sample: Sample) -> None:
    """Layouts of the inputs, some of all there are, give the plain result, forward and backward."""
    check_layouts(sample, (2, 2), limit=6).must_hold()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_strategies(sample: Sample) -> None:
    """Derived strategies, the first of each call, give the plain result."""
    report = check_strategies(sample, (3,), limit=8, held=HELD)
    assert not report.wrong, "\n".join(report.wrong[:10])


BAD_INDEX: dict[str, Callable[[Any, Any], Any]] = {
    "index": lambda x, i: x[:, i],
    "index_add": lambda x, i: x.index_add(1, i, x[:, :1]),
    "index_copy": lambda x, i: x.index_copy(1, i, x[:, :1]),
    "index_fill": lambda x, i: x.index_fill(1, i, 2.0),
    "index_select": lambda x, i: x.index_select(1, i),
    "select on the sharded dim": lambda x, i: x.t().index_select(0, i),
    "take": lambda x, i: x.take(i + 20),
}


@pytest.mark.parametrize("name", BAD_INDEX)
def test_a_bad_index_fails_on_all_ranks(name: str) -> None:
    """Also on those whose shard is empty, and on those that do not hold what a good index would point to."""

    def run() -> None:
        mesh = init_device_mesh("cpu", (4,))
        x, i = (make(t, mesh, [p]) for t, p in ((rand(2, 5), Shard(0)), (torch.tensor([7]), Replicate())))
        with pytest.raises((IndexError, RuntimeError), match="range|bounds"):
            BAD_INDEX[name](x, i)

    simulate(4)(run)


def test_a_bad_matrix_fails_on_all_ranks() -> None:
    """Decompositions fail together, although one rank alone holds the matrix that does not converge."""

    def run() -> None:
        mesh = init_device_mesh("cpu", (2,))
        bad = torch.eye(40).repeat(64, 1, 1)
        bad[63, 0, 0] = float("nan")
        for decompose in (torch.linalg.svdvals, torch.linalg.pinv, torch.linalg.eig):
            with pytest.raises(RuntimeError, match="of the batch"):
                decompose(make(bad, mesh, [Shard(0)]))
        with pytest.raises(torch.linalg.LinAlgError):
            torch.linalg.cholesky(make(-torch.eye(2).repeat(2, 1, 1), mesh, [Shard(0)]))

    simulate(2)(run)
