"""Windows over a dim that is sharded: each rank brings in the rows of its neighbours that its outputs look at.

An output row o of a convolution or a pool reads the input rows [o s - p, o s - p + reach). Input and output are
both sharded as `Shard` shards them, so a rank's outputs may look at rows of one neighbour, of several, or of none, and
uneven shards shift the borders:

    10 rows, window 3, padding 1, 4 ranks       holds  0-2  3-5  6-8  9        looks at  0-3  2-6  5-9  8-9

Who needs what follows from the layouts alone, so every rank knows it of all; one all-to-all brings exactly those
rows, and none is issued where nobody needs any. The way back adds what was computed for foreign rows to their
owners: it is the transpose of the way there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dtensor.comm.communicator import Communicator
from dtensor.intervals import Interval
from dtensor.rules.kernel import KernelContext
from dtensor.spec import Spec

from .exchange import places

__all__ = ["Halo"]

Span = tuple[int, int]
"""Rows [start, stop)."""


def _span_of(runs: Sequence[Interval]) -> Span:
    """The rows of a dim that was sharded into contiguous pieces; (0, 0) for an empty piece."""
    return (runs[0][0], runs[-1][0] + runs[-1][1]) if runs else (0, 0)


def _common(a: Span, b: Span) -> Span:
    lo, hi = max(a[0], b[0]), min(a[1], b[1])
    return (lo, hi) if lo < hi else (lo, lo)


@dataclass(frozen=True, slots=True)
class Halo:
    """Rows along one dim of an input: `held[i]` by position i of `comm`, `wanted[i]` for its outputs.

    `outputs` are the rows of the output that this rank computes.
    """

    comm: Communicator
    dim: int
    held: tuple[Span, ...]
    wanted: tuple[Span, ...]
    outputs: Span

    @staticmethod
    def of(
        ctx: KernelContext, axes: Sequence[int], x: Spec, y: Spec, dim: int, reads: Callable[[int, int], Span]
    ) -> Halo:
        """Input `x` and output `y` are sharded on `dim` over `axes`; outputs [a, b) read the rows `reads`."""
        comm = x.mesh.comm(tuple(axes))
        made, whole = [_span_of(runs) for runs in places(y, dim)], (0, x.shape[dim])
        wanted = tuple(_common(reads(*s), whole) if s[0] < s[1] else (0, 0) for s in made)
        return Halo(comm, dim, tuple(_span_of(runs) for runs in places(x, dim)), wanted, made[comm.rank])

    @property
    def rows(self) -> Span:
        """The rows that `bring` gives here."""
        return self.wanted[self.comm.rank]

    def _idle(self) -> bool:
        return all(_common(w, h) == w or w[0] == w[1] for w, h in zip(self.wanted, self.held, strict=True))

    def bring(self, x: torch.Tensor) -> torch.Tensor:
        """Rows `rows` of the whole, from this rank's rows `x` and the others'."""
        me = self.comm.rank
        mine, d = self.held[me], self.dim
        take = lambda s: x.narrow(d, s[0] - mine[0], s[1] - s[0]) if s[1] > s[0] else x.narrow(d, 0, 0)  # noqa: E731
        if self._idle():
            return take(self.rows)
        parts = [take(_common(mine, w)).contiguous() for w in self.wanted]
        sizes = [_common(self.rows, h) for h in self.held]
        shapes = [(*x.shape[:d], hi - lo, *x.shape[d + 1 :]) for lo, hi in sizes]
        return torch.cat(self.comm.all_to_all(parts, shapes), d)

    def give_back(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of this rank's rows, from the gradient of rows `rows` here and of the others' there."""
        me = self.comm.rank
        mine, (first, _), d = self.held[me], self.rows, self.dim
        own = grad.new_zeros((*grad.shape[:d], mine[1] - mine[0], *grad.shape[d + 1 :]))
        take = lambda s: grad.narrow(d, s[0] - first if s[1] > s[0] else 0, s[1] - s[0])  # noqa: E731
        pieces = [_common(mine, w) for w in self.wanted]
        if self._idle():
            got = {me: take(pieces[me])}
        else:
            parts = [take(_common(self.rows, h)).contiguous() for h in self.held]
            shapes = [(*grad.shape[:d], hi - lo, *grad.shape[d + 1 :]) for lo, hi in pieces]
            got = dict(enumerate(self.comm.all_to_all(parts, shapes)))
        for i, part in got.items():
            lo, hi = pieces[i]
            if lo < hi:
                own.narrow(d, lo - mine[0], hi - lo).add_(part)
        return own
