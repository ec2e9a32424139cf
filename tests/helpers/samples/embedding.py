"""Samples of embedding lookups."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from helpers.laws import Sample, ints, rand


def lookup(n: int, **kw: object) -> object:
    return lambda w, i: F.embedding(i, w, **kw)  # type: ignore[arg-type]


SAMPLES = [
    Sample("embedding", lookup(11), (rand(11, 6), ints(11, 4, 3))),
    Sample("embedding even", lookup(8), (rand(8, 4), ints(8, 8)), pending=("sum",)),
    Sample("embedding of one index", lookup(5), (rand(5, 3), torch.tensor(4))),
    Sample("embedding few rows", lookup(2), (rand(2, 5), ints(2, 7)), pending=("sum",)),
    Sample("embedding no index", lookup(5), (rand(5, 3), ints(5, 0)), pending=("sum",)),
    Sample("embedding int32", lookup(9), (rand(9, 3), ints(9, 5).int()), pending=("sum",)),
    Sample(
        "embedding padding",
        lookup(9, padding_idx=4),
        (rand(9, 3), torch.tensor([[4, 1, 4], [8, 0, 4]])),
        pending=("sum",),
    ),
    Sample("embedding padding 0", lookup(9, padding_idx=0), (rand(9, 3), torch.tensor([0, 1, 0])), pending=("sum",)),
    Sample("embedding padding -1", lookup(9, padding_idx=-1), (rand(9, 3), torch.tensor([8, 1, 8])), pending=("sum",)),
    Sample(
        "embedding by frequency",
        lookup(9, scale_grad_by_freq=True),
        (rand(9, 3), torch.tensor([[4, 1, 4], [8, 4, 1]])),
        pending=("sum",),
    ),
    Sample(
        "embedding by frequency, padding",
        lookup(9, scale_grad_by_freq=True, padding_idx=4),
        (rand(9, 3), torch.tensor([[4, 1, 4], [8, 4, 1]])),
        pending=("sum",),
    ),
]


def renorm(order: float) -> object:
    return lambda w, i: F.embedding(i, w, max_norm=1.0, norm_type=order)


RENORM = [
    Sample(
        f"renorm {p}",
        renorm(p),
        (rand(9, 5), torch.tensor([[4, 1, 4], [8, 0, 1]])),
        grads=False,
        pending=(),
        inplace=True,
    )
    for p in (2.0, 1.0, 3.0, float("inf"))
]

BAGS = [
    Sample(
        f"bag {mode}",
        lambda w, i, o, mode=mode: F.embedding_bag(i, w, o, mode=mode),
        (rand(9, 6), ints(9, 8), torch.tensor([0, 3, 3, 5])),
        grads=mode != "max",
        pending=(),
    )
    for mode in ("sum", "mean", "max")
]

BAGS.append(
    Sample(
        "bag per sample weights",
        lambda w, i, s: F.embedding_bag(i, w, per_sample_weights=s, mode="sum"),
        (rand(9, 6), ints(9, 4, 3), rand(4, 3)),
        pending=(),
    )
)
