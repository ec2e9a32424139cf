"""Samples of views, slices, joins, indexing and factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from helpers.laws import Sample, ints, rand

aten = torch.ops.aten
SCALAR = rand(1)[0].clone()


def _shape(name: str, fn: Callable[[torch.Tensor], Any], *shape: int, **options: Any) -> Sample:
    return Sample(f"{name} of {list(shape)}", fn, (rand(*shape) if shape else SCALAR,), **options)


VIEWS = [
    _shape("merge", lambda x: x.reshape(-1), 4, 6),
    _shape("merge uneven", lambda x: x.reshape(-1), 5, 3),
    _shape("merge three", lambda x: x.reshape(2, -1), 2, 6, 4),
    _shape("split", lambda x: x.reshape(4, 3, 5), 12, 5),
    _shape("split last", lambda x: x.reshape(5, 2, 6), 5, 12),
    _shape("split uneven", lambda x: x.reshape(5, 2), 10),
    _shape("regroup", lambda x: x.reshape(2, 24), 8, 6),
    _shape("regroup without common factor", lambda x: x.reshape(2, 4, 3, 2), 2, 3, 4, 2),
    _shape("regroup to both sides", lambda x: x.reshape(4, 6), 6, 4),
    _shape("ones", lambda x: x.reshape(1, 4, 1, 6, 1), 4, 1, 6),
    _shape("only ones", lambda x: x.reshape(1, 1, 1), 1, 1),
    _shape("to 0-d", lambda x: x.reshape(()), 1),
    _shape("from 0-d", lambda x: x.reshape(1, 1)),
    _shape("empty", lambda x: x.reshape(0, 2, 3), 0, 6),
    _shape("empty elsewhere", lambda x: x.reshape(3, 0), 4, 0, 2),
    _shape("view then back", lambda x: x.reshape(8, 6).reshape(4, 2, 6) * 2, 4, 12),
    _shape("flatten, transpose, unflatten", lambda x: x.flatten(0, 1).t().unflatten(1, (2, 4)), 2, 4, 3),
    _shape("unsafe_view", lambda x: aten._unsafe_view(x, [6, 2]), 3, 4, grads=False),
    _shape("reshape_alias", lambda x: aten._reshape_alias(x, [6, 4], [4, 1]), 2, 3, 4, grads=False),
    _shape("permute", lambda x: x.permute(-1, 0, 1), 5, 3, 4),
    _shape("transpose", lambda x: x.transpose(0, -1), 5, 3, 4),
    _shape("t", lambda x: x.t(), 5, 3),
    _shape("t of 1-d", lambda x: x.t(), 5),
    _shape("mT", lambda x: x.mT, 2, 5, 3),
    _shape("movedim", lambda x: x.movedim(0, -1), 5, 3, 2),
    _shape("unsqueeze", lambda x: (x.unsqueeze(1), x.unsqueeze(-1)), 5, 3),
    _shape("squeeze", lambda x: x.squeeze(), 1, 4, 1, 3),
    _shape("squeeze of what is 1 by chance", lambda x: x.squeeze(), 4, 3),
    _shape("squeeze dim", lambda x: (x.squeeze(-1), x.squeeze(0)), 4, 1),
    _shape("squeeze dims", lambda x: (x.squeeze((0, 1)), x.squeeze((0, -1))), 1, 4, 1),
    _shape("squeeze 0-d", lambda x: x.squeeze(0)),
    _shape("expand", lambda x: x.expand(4, -1, 3), 5, 1),
    _shape("expand new", lambda x: x.expand(2, 1, 5), 5),
    _shape("unbind", lambda x: x.unbind(1), 5, 3),
    _shape("unbind one used", lambda x: x.unbind(0)[1] * 2, 3, 4),
    _shape("diagonal", lambda x: x.diagonal(1, 0, -1), 4, 3, 5),
    _shape("diag_embed", lambda x: torch.diag_embed(x, 1, 0, -1), 3, 4),
    _shape("unfold", lambda x: x.unfold(0, 3, 2), 7, 4),
    # of pending tensors only maxima and minima: bits would show the rounding of a sum
    _shape("view dtype same", lambda x: x.view(torch.int32), 4, 6, grads=False, pending=("max", "min")),
    _shape("view dtype narrower", lambda x: x.view(torch.int16), 5, 6, grads=False, pending=("max", "min")),
    _shape("view dtype wider", lambda x: x.view(torch.float64), 5, 8, grads=False, pending=("max", "min")),
    _shape("view_as_complex", lambda x: torch.view_as_real(torch.view_as_complex(x)), 5, 4, 2),
]

SLICES = [
    _shape("select", lambda x: (x[1], x.select(-1, -2)), 4, 3),
    _shape("select of 1-d", lambda x: x[2], 5),
    _shape("slice", lambda x: (x[1:4], x[:, ::2], x[-3:-1], x[5:5]), 6, 5),
    _shape("whole slice", lambda x: x[:, 0:9] * x[-6:], 6, 5),
    _shape("narrow", lambda x: x.narrow(1, 1, 2), 4, 5),
    _shape("narrow_copy", lambda x: aten.narrow_copy(x, 1, 1, 2), 4, 5, grads=False),
    _shape("split", lambda x: x.split(2, 0), 5, 4),
    _shape("split one used", lambda x: x.split(2, 1)[1] * 2, 5, 4),
    _shape("split sizes", lambda x: x.split([1, 0, 3], -1), 5, 4),
    _shape("chunk", lambda x: x.chunk(3, 1), 4, 7),
    _shape("tensor_split", lambda x: x.tensor_split((1, 3), 0), 5, 4),
    _shape("tril", lambda x: x.tril(-1), 5, 4),
    _shape("triu of a batch", lambda x: x.triu(1), 3, 4, 6),
    _shape("tril in place", lambda x: x.tril_(), 5, 4, inplace=True, may_refuse=True),
    _shape("flip", lambda x: x.flip((0, -1)), 5, 4, 3),
    _shape("roll", lambda x: x.roll(2, 1), 4, 5),
    _shape("roll flat", lambda x: x.roll(3), 4, 5),
    _shape("rot90", lambda x: torch.rot90(x, 1, (0, 1)), 4, 5, 3),
    _shape("pad", lambda x: F.pad(x, (1, 2)), 5, 4),
    _shape("pad with a number", lambda x: F.pad(x, (1, 0, 0, -1), value=2.5), 5, 4),
    _shape("reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), 3, 4, 5),
    _shape("replicate", lambda x: F.pad(x, (1, 0, 2, 1), mode="replicate"), 5, 2, 4, 3),
    _shape("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), 3, 16, 4, 5),
    _shape("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), 4, 2, 8, 6),
    _shape("channel_shuffle", lambda x: torch.channel_shuffle(x, 2), 3, 8, 5),
    _shape("repeat", lambda x: x.repeat(2, 1, 3), 4, 6),
    _shape("repeat none", lambda x: x.repeat(0, 2), 4, 3),
    _shape("repeat_interleave", lambda x: x.repeat_interleave(2, 1), 3, 4),
    Sample("select_scatter", lambda x, s: x.select_scatter(s, -1, 2), (rand(5, 4), rand(5, seed=1))),
    Sample("slice_scatter", lambda x, s: x.slice_scatter(s, 0, 1, 5, 2), (rand(6, 4), rand(2, 4, seed=1))),
    Sample("slice_scatter all", lambda x, s: x.slice_scatter(s, 0), (rand(5, 4), rand(5, 4, seed=1))),
    Sample("diagonal_scatter", lambda x, s: x.diagonal_scatter(s), (rand(5, 4), rand(4, seed=1))),
    Sample("cat", lambda x, y: torch.cat([x, y], 1), (rand(5, 2), rand(5, 3, seed=1))),
    Sample("cat first", lambda x, y: torch.cat([x, y, x]), (rand(4, 3), rand(2, 3, seed=1))),
    Sample("cat with nothing", lambda x, y: torch.cat([x, y], -1), (rand(5, 2), torch.zeros(0))),
    Sample("cat of dtypes", lambda x, y: torch.cat([x, y]), (rand(4, 3), rand(4, 3, dtype=torch.float64))),
    Sample("stack", lambda x, y: torch.stack([x, y], -1), (rand(5, 3), rand(5, 3, seed=1))),
    Sample("hstack", lambda x, y: torch.hstack([x, y]), (rand(5, 3), rand(5, 2, seed=1))),
]

INDEXING = [
    Sample("index_select", lambda x, i: x.index_select(-1, i), (rand(5, 6), ints(6, 4))),
    Sample("index_select of 0-d", lambda x, i: x.index_select(0, i), (SCALAR, ints(1, 1))),
    Sample("gather", lambda x, i: x.gather(1, i), (rand(5, 4), ints(4, 5, 3))),
    Sample("gather fewer rows", lambda x, i: x.gather(-1, i), (rand(5, 4), ints(4, 3, 6))),
    Sample("take", lambda x, i: x.take(i), (rand(5, 4), ints(20, 3, 4))),
    Sample("index", lambda x, i: (x[i], x[:, i % 3]), (rand(5, 3, 4), ints(5, 4))),
    Sample("index two", lambda x, i, j: (x[i, j], x[:, i, j]), (rand(4, 4, 5), ints(4, 5), ints(4, 5, seed=1))),
    Sample("index apart", lambda x, i, j: x[i, :, j], (rand(4, 3, 5), ints(4, 6), ints(5, 6, seed=1))),
    Sample("index broadcast", lambda x, i, j: x[i, j], (rand(4, 5, 3), ints(4, 3, 1), ints(5, 1, 4, seed=1))),
    Sample("index by a mask", lambda x, m: x[m], (rand(5, 4), rand(5, dtype=torch.bool))),
    Sample("index_add", lambda x, i, s: x.index_add(0, i, s, alpha=2), (rand(5, 4), ints(5, 6), rand(6, 4, seed=1))),
    Sample("index_add last", lambda x, i, s: x.index_add(-1, i, s), (rand(5, 4), ints(4, 6), rand(5, 6, seed=1))),
    Sample(
        "index_copy",
        lambda x, i, s: x.index_copy(0, i, s),
        (rand(6, 4), torch.tensor([4, 0, 5]), rand(3, 4, seed=1)),
    ),
    Sample(
        "index_reduce",
        lambda x, i, s: x.index_reduce(0, i, s, "amax"),
        (rand(5, 4), ints(5, 6), rand(6, 4, seed=1)),
        grads=False,
    ),
    Sample("index_fill", lambda x, i: x.index_fill(1, i, 2.5), (rand(5, 4), ints(4, 2))),
    Sample(
        "scatter",
        lambda x, i, s: x.scatter(1, i, s),
        (rand(5, 4), torch.tensor([[2, 0], [1, 3], [3, 2], [0, 1], [2, 1]]), rand(5, 2, seed=1)),
    ),
    Sample("scatter number", lambda x, i: x.scatter(0, i, -1.5), (rand(5, 4), ints(5, 2, 4))),
    Sample("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), (rand(5, 4), ints(4, 5, 6), rand(5, 6, seed=1))),
    Sample(
        "scatter_add fewer",
        lambda x, i, s: x.scatter_add(0, i, s),
        (rand(5, 4), ints(5, 3, 2), rand(4, 3, seed=1)),
        grads=False,
    ),
    Sample(
        "scatter_reduce sum",
        lambda x, i, s: x.scatter_reduce(0, i, s, "sum"),
        (rand(5, 4), ints(5, 6, 4), rand(6, 4, seed=1)),
    ),
    Sample(
        "scatter_reduce amax",
        lambda x, i, s: x.scatter_reduce(0, i, s, "amax"),
        (rand(5, 4), ints(5, 6, 4), rand(6, 4, seed=1)),
        grads=False,
    ),
    Sample(
        "scatter_reduce mean",
        lambda x, i, s: x.scatter_reduce(1, i, s, "mean", include_self=False),
        (rand(5, 4), ints(4, 5, 3), rand(5, 3, seed=1)),
        grads=False,
    ),
    Sample(
        "index_put", lambda x, i, v: x.index_put((i,), v), (rand(6, 4), torch.tensor([4, 0, 5]), rand(3, 4, seed=1))
    ),
    Sample(
        "index_put adding",
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (rand(5, 4), ints(5, 6), rand(6, 4, seed=1)),
    ),
    Sample(
        "index_put broadcast",
        lambda x, i, j, v: x.index_put((i, j), v, accumulate=True),
        (rand(4, 5, 3), ints(4, 4), ints(5, 4, seed=1), rand(3, seed=1)),
    ),
    Sample(
        "index_put second",
        lambda x, i, v: aten.index_put(x, [None, i], v, True),
        (rand(5, 4), ints(4, 3), rand(5, 3, seed=1)),
        grads=False,
    ),
    Sample(
        "index_put mask",
        lambda x, m, v: aten.index_put(x, [m], v),
        (rand(5, 4), rand(5, 4, dtype=torch.bool), rand(1)),
        grads=False,
    ),
    Sample(
        "index_put row mask",
        lambda x, m, v: aten.index_put(x, [None, m], v),
        (rand(5, 4), rand(4, dtype=torch.bool), rand(1)),
        grads=False,
    ),
    Sample("isin", lambda x, t: torch.isin(x, t), (ints(6, 5, 4), torch.tensor([1, 4]))),
    Sample("masked_fill", lambda x, m: x.masked_fill(m, 2.5), (rand(5, 4), rand(4, dtype=torch.bool))),
    Sample("put", lambda x, i, s: x.put(i, s, accumulate=True), (rand(5, 4), ints(20, 6), rand(6, seed=1))),
]

WRITES = [
    Sample(
        "row =", lambda x, v: x.__setitem__(1, v) or x, (rand(5, 4), rand(4, seed=1)), inplace=True, may_refuse=True
    ),
    Sample(
        "column =",
        lambda x, v: x.__setitem__((slice(None), 1), v) or x,
        (rand(5, 4), rand(5, seed=1)),
        inplace=True,
        may_refuse=True,
    ),
    Sample("slice += 1", lambda x: x[:, 1:3].add_(1.0), (rand(5, 4),), inplace=True, may_refuse=True),
    Sample("view *=", lambda x: x.view(5, 2, 2).mul_(2.0), (rand(5, 4),), inplace=True, may_refuse=True),
    Sample("transpose *=", lambda x: x.t().mul_(2.0), (rand(5, 4),), inplace=True),
    Sample("fill_", lambda x: x.fill_(2.5), (rand(5, 4),), inplace=True),
    Sample("zero_", lambda x: x.zero_(), (rand(5, 4),), inplace=True),
    Sample("copy_", lambda x, y: x.copy_(y), (rand(5, 4), rand(4, seed=1)), inplace=True),
    Sample(
        "masked_fill_", lambda x, m: x.masked_fill_(m, 2.5), (rand(5, 4), rand(5, 4, dtype=torch.bool)), inplace=True
    ),
    Sample(
        "index_fill_", lambda x, i: x.index_fill_(0, i, 2.5), (rand(5, 4), ints(5, 2)), inplace=True, may_refuse=True
    ),
    Sample(
        "scatter_ number",
        lambda x, i: x.scatter_(1, i, 2.5),
        (rand(5, 4), ints(4, 5, 2)),
        inplace=True,
        may_refuse=True,
    ),
    Sample(
        "index_add_",
        lambda x, i, s: x.index_add_(0, i, s),
        (rand(5, 4), ints(5, 3), rand(3, 4, seed=1)),
        inplace=True,
        may_refuse=True,
    ),
    Sample(
        "mask =",
        lambda x, m, v: x.index_put_((m,), v),
        (rand(5, 4), rand(5, 4, dtype=torch.bool), rand(1)),
        inplace=True,
    ),
]

FACTORIES = [
    _shape("zeros_like", torch.zeros_like, 5, 4, grads=False),
    _shape("ones_like", torch.ones_like, 5, 4, grads=False),
    _shape("full_like", lambda x: torch.full_like(x, 2, dtype=torch.int64), 5, 4, grads=False),
    _shape("ones_like of a transpose", lambda x: torch.ones_like(x.t()), 5, 4, grads=False),
    _shape("empty_like", lambda x: torch.empty_like(x).fill_(3.0), 5, 4, grads=False),
    _shape("new_zeros", lambda x: (x.new_zeros(5, 4), x.new_zeros(3)), 5, 4, grads=False),
    _shape("new_ones", lambda x: (x.new_ones(5, 4), x.new_ones(4, 5, 2)), 5, 4, grads=False),
    _shape("new_full", lambda x: (x.new_full((5, 4), 2.0), x.new_full((), 3)), 5, 4, grads=False),
    _shape("new_empty", lambda x: x.new_empty(5, 4).fill_(1.0), 5, 4, grads=False),
    _shape("new_empty_strided", lambda x: aten.new_empty_strided(x, [5, 4], [1, 5]).copy_(x), 5, 4, grads=False),
]

SAMPLES = [*VIEWS, *SLICES, *INDEXING, *WRITES, *FACTORIES]
