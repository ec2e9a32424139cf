"""Samples of ops that put the elements of a dim elsewhere, of sizes that no mesh divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from helpers.laws import Sample, rand

aten = torch.ops.aten


def one(name: str, fn: Callable[[torch.Tensor], Any], *shape: int, **options: Any) -> Sample:
    """A sample of one tensor."""
    return Sample(f"{name} of {list(shape)}", fn, (rand(*shape),), **options)


SLICES = [
    one("steps", lambda x: (x[1::3], x[-2:], x[:1], x[2:2]), 11, 3),
    one("slices of few", lambda x: (x[1:], x[:1, 1:]), 2, 3),
    one("select", lambda x: (x[0], x[-1], x[4, 1]), 7, 3),
    one("split", lambda x: x.split([1, 0, 5, 3]), 9, 2),
    one("split by", lambda x: x.split(4, 1), 2, 10),
    one("chunks of few", lambda x: x.chunk(2), 3, 2),
    one("narrow_copy", lambda x: aten.narrow_copy(x, 0, -5, 3), 7, 2, grads=False),
    Sample("slice_scatter", lambda x, s: x.slice_scatter(s, 0, 1, 9, 3), (rand(10, 2), rand(3, 2, seed=1))),
    Sample("select_scatter", lambda x, s: x.select_scatter(s, 0, -2), (rand(7, 3), rand(3, seed=1))),
]
JOINS = [
    Sample("cat", lambda x, y: torch.cat([x, y, x[:1]]), (rand(5, 3), rand(2, 3, seed=1))),
    Sample("cat even", lambda x, y: torch.cat([x, y]), (rand(4, 3), rand(4, 3, seed=1))),
    Sample("cat of dtypes", lambda x, y: torch.cat([x, y]), (rand(3, 2), rand(4, 2, dtype=torch.float64))),
    Sample("cat of complex", lambda x, y: torch.cat([x, y.conj()]), (rand(3), rand(5, dtype=torch.complex64)),
           grads=False),
    Sample("cat and chunk", lambda x, y: [t * 2 for t in torch.cat([x, y], 1).chunk(2, 1)],
           (rand(3, 4), rand(3, 4, seed=1))),
    one("repeat", lambda x: x.repeat(2, 3, 2), 5, 3),
    one("repeat_interleave", lambda x: x.repeat_interleave(3, 0), 5, 2),
]  # fmt: skip
ORDERS = [
    one("flip", lambda x: (x.flip(0), x.flip(0, 1)), 7, 5),
    one("roll", lambda x: (x.roll(3, 0), x.roll((-1, 2), (0, 1)), x.roll(2, 0).roll(-9, 0)), 7, 5),
    one("roll flat", lambda x: (x.roll(4), x.roll(-1)), 5, 3),
    one("roll 1-d", lambda x: x.roll(2), 7),
    one("rot90", lambda x: (x.rot90(), x.rot90(2), x.rot90(-1, (1, 0))), 5, 7),
    one("topk", lambda x: (x.topk(3, 0)[0], x.topk(2, 0, largest=False)[0]), 9, 3),
    one("topk of all", lambda x: x.topk(5, 0, sorted=True), 5),
    one("kthvalue", lambda x: (x.kthvalue(2, 0), x.kthvalue(8, 0, True), x.kthvalue(5, 0)), 9, 3, grads=False),
    one("sort", lambda x: (x.sort(0), x.sort(stable=True, dim=0, descending=True)), 7, 3),
    one("sort 1-d", lambda x: x.sort(stable=True), 9),
]
PADS = [
    one("pad", lambda x: F.pad(x, (0, 3, 2, 1), value=1.5), 5, 3),
    one("pad and crop", lambda x: F.pad(x, (-1, 0, 4, -3)), 5, 3),
    one("reflect", lambda x: F.pad(x, (4, 3), mode="reflect"), 2, 5),
    one("reflect 2-d", lambda x: F.pad(x, (1, 0, 2, 3), mode="reflect"), 1, 5, 4),
    one("replicate", lambda x: F.pad(x, (5, 2), mode="replicate"), 2, 3),
    one("replicate 3-d", lambda x: F.pad(x, (1, 2, 0, 3, 1, 1), mode="replicate"), 1, 3, 2, 5),
    one("circular", lambda x: F.pad(x, (2, 1), mode="circular"), 2, 5),
]
WINDOWS = [
    one("unfold", lambda x: x.unfold(0, 3, 1), 8, 2),
    one("unfold apart", lambda x: x.unfold(0, 2, 3), 10, 2),
    one("unfold one", lambda x: x.unfold(0, 6, 5), 7, 2),
    one("unfold of nothing", lambda x: x.unfold(0, 0, 1), 3, grads=False),
    one("diagonal", lambda x: (x.diagonal(), x.diagonal(2), x.diagonal(-3)), 6, 5),
    one("diagonal of a batch", lambda x: x.diagonal(1, 2, 0), 5, 2, 7),
    one("diagonal beyond", lambda x: x.diagonal(9), 6, 5),
    one("diag_embed", lambda x: (x.diag_embed(), x.diag_embed(-2, 0, 2)), 2, 5),
    Sample("diagonal_scatter", lambda x, s: x.diagonal_scatter(s, 1), (rand(5, 6), rand(5, seed=1))),
]

NO_STRATEGIES = {"circular of [2, 5]"}
"""Made of parts of an uninitialised tensor: the layouts are checked all the same."""
SAMPLES = [*SLICES, *JOINS, *ORDERS, *PADS, *WINDOWS]
