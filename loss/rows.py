"""Cross entropy on one rank: what it knows of every row from the classes it holds, and what follows from all ranks'.

A *row* is one prediction: the logits of all classes at one place of the other dims. From the classes here come a few
numbers a row, its *statistics*:

    max, sum of exp(x - max), logit of the target where it is here
    with label smoothing also  sum of w (x - max)  and  sum of w

Statistics of several sets of classes merge into those of their union, so a set may be all classes, what a rank
holds, or a piece of that:

    ranks 0..3:  (m, s, x) (m, s, x) (m, s, x) (m, s, x)   ──merge──▶   (m, s, x)      loss = log s + m - x

Everything is done in blocks of rows that fit into a cache or are small beside the logits: no copy of the logits is
ever made, in their own precision or a higher one. The gradient is written where it will stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dtensor.intervals import Interval
from dtensor.propagation_rules.build import accumulation_dtype, finite_top, local_max_and_sum, local_slots, merged_sums

__all__ = [
    "Classes", "Runs", "along_classes", "block_gradient", "block_statistics", "blocks", "class_dim", "finish",
    "index_totals", "merge", "merged_relative", "own_weights", "piece", "row_gradient", "row_shift", "row_statistics",
]  # fmt: skip

Runs = tuple[Interval, ...]
Block = tuple[int, int, int] | None
"""(dim, start, length) of a narrowed tensor; None: all of it."""

BLOCK_ELEMENTS = {"cpu": 1 << 19}
OTHER_BLOCK = 1 << 25


def class_dim(ndim: int) -> int:
    """The dim that holds the classes: 1, or 0 for a tensor of one dim."""
    return 1 if ndim > 1 else 0


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a call, as one rank sees them.

    Attributes:
        runs: intervals of the class dim that are here.
        count: number of classes of all ranks.
        weight: one number for each of all classes, in the dtype of sums; None for ones.
        ignore_index: the target of rows that do not count.
        smoothing: share of the target that all classes divide among them.
    """

    runs: Runs
    count: int
    weight: torch.Tensor | None
    ignore_index: int
    smoothing: float

    @property
    def mass(self) -> torch.Tensor | int:
        """Sum of all classes' weights."""
        return self.count if self.weight is None else self.weight.sum()

    def weight_of(self, target: torch.Tensor) -> torch.Tensor:
        """What a row of each target weighs; anything where the target names no class."""
        assert self.weight is not None
        return self.weight.take(torch.where((target >= 0) & (target < self.count), target, 0))


# ------------------------------------------------------------ blocks
def blocks(x: torch.Tensor, c: int) -> Iterator[Block]:
    """Pieces of `x` with whole classes (dim `c`), along the largest of the other dims."""
    others = [d for d in range(x.ndim) if d != c]
    if not others:
        yield None
        return
    d = max(others, key=lambda d: x.shape[d])
    n = x.shape[d]
    at_once = max(BLOCK_ELEMENTS.get(x.device.type, OTHER_BLOCK) * n // max(x.numel(), 1), 1)
    if at_once >= n:
        yield None
        return
    for start in range(0, n, at_once):
        yield d, start, min(at_once, n - start)


def piece(t: torch.Tensor, block: Block, shift: int = 0) -> torch.Tensor:
    """`t` narrowed to `block`, whose dim is `shift` more here."""
    return t if block is None else t.narrow(block[0] + shift, block[1], block[2])


def row_shift(block: Block, c: int) -> int:
    """What to add to the dim of a block of logits, for a tensor without the class dim."""
    return -1 if block is not None and block[0] > c else 0


# ------------------------------------------------------------ statistics
def row_statistics(logits: torch.Tensor, target: torch.Tensor, classes: Classes) -> torch.Tensor:
    """Statistics of all rows, [3 or 5, rows...]."""
    c, acc = class_dim(logits.ndim), accumulation_dtype(logits.dtype)
    out = target.new_empty((5 if classes.smoothing else 3, *target.shape), dtype=acc)
    for block in blocks(logits, c):
        x, shift = piece(logits, block).to(acc), row_shift(block, c)
        block_statistics(x, piece(target, block, shift), classes, piece(out, block, shift + 1), x.dtype != logits.dtype)
        del x  # before the next is made
    return out


def block_statistics(
    x: torch.Tensor, target: torch.Tensor, classes: Classes, out: torch.Tensor, mine_to_spoil: bool
) -> None:
    """Statistics of logits `x` into `out`; `x` may be overwritten where it is `mine_to_spoil`."""
    c = class_dim(x.ndim)
    slot, here = local_slots(target, classes.runs)
    if x.shape[c] == 0:
        out.zero_()[0] = float("-inf")
        return
    out[2] = torch.where(here, x.gather(c, slot.unsqueeze(c)).squeeze(c), 0)
    if not classes.smoothing and not mine_to_spoil:
        out[0], out[1] = (t.squeeze(c) for t in local_max_and_sum(x, c))
        return
    top = torch.amax(x, c, out=out[0])
    x = torch.sub(x, finite_top(top).unsqueeze(c), out=x if mine_to_spoil else None)
    if classes.smoothing:
        w = None if classes.weight is None else own_weights(classes.weight, classes.runs)
        torch.sum(x if w is None else x * along_classes(w, x.ndim), c, out=out[3])
        out[4] = x.shape[c] if w is None else w.sum()
    torch.sum(x.exp_(), c, out=out[1])


def merge(stats: torch.Tensor) -> torch.Tensor:
    """Statistics of the union of sets of classes, from theirs, stacked in front: [sets, n, ...] to [n, ...]."""
    tops = stats[:, 0]
    top, total = merged_sums(tops, stats[:, 1])
    merged = [top, total, stats[:, 2].sum(0)]
    if stats.shape[1] == 5:
        merged += [merged_relative(stats[:, 3], tops, stats[:, 4], top), stats[:, 4].sum(0)]
    return torch.stack(merged)


def merged_relative(sums: torch.Tensor, tops: torch.Tensor, masses: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """sum(w (x - top)) over all sets, from each one's sum(w (x - its own max)) and sum(w)."""
    shift = torch.where(masses == 0, torch.zeros_like(tops), masses * (finite_top(tops) - top))
    return (sums + shift).sum(0)


# ------------------------------------------------------------ the loss
def index_totals(target: torch.Tensor, classes: Classes, dtype: torch.dtype) -> torch.Tensor:
    """[what the rows that count weigh together, how many targets name no class]."""
    counts = target != classes.ignore_index
    bad = counts & ((target < 0) | (target >= classes.count))
    weights = counts if classes.weight is None else torch.where(counts, classes.weight_of(target), 0)
    return torch.stack([weights.sum(dtype=dtype), bad.sum(dtype=dtype)])


def finish(
    stats: torch.Tensor, target: torch.Tensor, classes: Classes, per_row: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss (rows or their sum), max, log of the sum of exponentials, `index_totals`; from statistics of all classes."""
    top, log_sum = stats[0], stats[1].log()  # kept apart: added up, large logits would take the logarithm's digits
    loss = log_sum + (top - stats[2])
    if classes.weight is not None:
        loss = classes.weight_of(target) * loss
    if classes.smoothing:
        spread = classes.mass * log_sum - stats[3]
        loss = (1 - classes.smoothing) * loss + classes.smoothing / classes.count * spread
    loss = torch.where(target != classes.ignore_index, loss, 0)
    return loss if per_row else loss.sum(), top.clone(), log_sum, index_totals(target, classes, top.dtype)


# ------------------------------------------------------------ the gradient
def row_gradient(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, top: torch.Tensor, log_sum: torch.Tensor,
    classes: Classes,
) -> torch.Tensor:  # fmt: skip
    """Gradient of the logits that are here, in their dtype. `grad`: one number, or one a row."""
    c, acc = class_dim(logits.ndim), top.dtype
    out = torch.empty_like(logits)
    for block in blocks(logits, c):
        shift, x, place = row_shift(block, c), piece(logits, block), piece(out, block)
        per_row = [piece(t, block, shift) if t.ndim else t for t in (grad, target, top, log_sum)]
        work = place if out.dtype == acc else torch.empty_like(x, dtype=acc)
        torch.sub(x, per_row[2].unsqueeze(c), out=work)
        block_gradient(per_row[0], work, per_row[1], per_row[3], classes)
        if work is not place:
            place.copy_(work)
        del work
    return out


def block_gradient(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, log_sum: torch.Tensor, classes: Classes
) -> None:
    """`x`, logits less the row's max, is overwritten with the gradient."""
    c, s = class_dim(x.ndim), classes.smoothing
    grad = torch.where(target != classes.ignore_index, grad, torch.zeros_like(log_sum))
    scale = grad if classes.weight is None else grad * classes.weight_of(target)
    hot, cold = ((1 - s) * scale, s / classes.count * grad) if s else (scale, scale)
    share = log_sum.neg().exp_().mul_(hot + cold * classes.mass if s else hot)
    # A row that does not count is multiplied by 0, not filled with it: where it holds nan, so does the gradient.
    x.exp_().mul_(share.unsqueeze(c))
    if s and classes.weight is None:
        x -= cold.unsqueeze(c)
    elif s and classes.weight is not None:
        x -= cold.unsqueeze(c) * along_classes(own_weights(classes.weight, classes.runs), x.ndim)
    slot, here = local_slots(target, classes.runs)
    if x.shape[c]:
        x.scatter_add_(c, slot.unsqueeze(c), torch.where(here, -hot, 0).unsqueeze(c))


# ------------------------------------------------------------ weights
def own_weights(weight: torch.Tensor, runs: Runs) -> torch.Tensor:
    """The weights of the classes that are here."""
    parts = [weight.narrow(0, start, length) for start, length in runs]
    return torch.cat(parts) if parts else weight[:0]


def along_classes(weight: torch.Tensor, ndim: int) -> torch.Tensor:
    """`weight` shaped to multiply logits of `ndim` dims."""
    return weight.view(-1, *[1] * (ndim - 2)) if ndim > 1 else weight
