"""Gathers and exchanges of large tensors whose parts go straight from tensor to result: `dtensor.comm.messages`.

    [S(0), S(0)] -> [R, S(0)] on (2, 2)   rank 1 sends its rows, as they lie, to ranks 1 and 3 and gets two others
    S(1) -> R on 4                        each sends its columns, as they lie; what arrives is copied to its columns
                                          some rows at a time
    P -> S(0) on 4                        pending parts are added up as they arrive, in the order of the positions

What a redistribution allocates so is its result, what it sends that does not lie in one piece (each element once), and
one or two pieces of what arrives. The usual way holds what is sent once for each receiver, or all that arrives beside
the result; gloo's own gathers hold their result, and its reduce-scatters their input, twice, out of sight.

Everything here is decided when a plan is bound, from layouts, sizes and the kind of group, and alike on all ranks of
the group: which steps go this way, and into how many messages a part is cut. Results are bit for bit those of the usual
way, but for sums of a reduce-scatter, which gloo adds up in another order than `dtensor.comm.reduce_ops` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from dtensor.comm.communicator import Communicator, padding_counts
from dtensor.comm.messages import Direct, Turn
from dtensor.comm.reduce_ops import Fold, fold_of
from dtensor.comm.wire import waited
from dtensor.redistribute.executor.landing import Add, Landing
from dtensor.redistribute.executor.messages import MANY, Group, Outgoing
from dtensor.redistribute.geometry import region_shape, region_size
from dtensor.redistribute.step import Step
from dtensor.spec import Spec

__all__ = ["SAVES", "direct_exchange", "direct_gather", "direct_reduce", "or_direct"]

Coord = tuple[int, ...]
Way = Callable[[torch.Tensor], torch.Tensor]
R = TypeVar("R")

SAVES = 1 << 17
"""Bytes that a rank must save, at least, for its group to go this way."""

EVEN = 1 << 22
"""Bytes of the result of a gather of even parts from which on it goes this way, and four times those of a part of a
reduce-scatter: below, a collective of the group holds little besides, and is one call to whoever looks on."""


def or_direct(
    way: Way | None, general: Callable[[torch.Tensor, bool], R], dtype: torch.dtype, on: str
) -> Callable[[torch.Tensor, bool], torch.Tensor | R]:
    """`way` for the tensors that it takes, which are alike on all ranks: not traced ones. Others go as before."""
    if way is None:
        return general
    quick = way

    def run(x: torch.Tensor, async_op: bool) -> torch.Tensor | R:
        if async_op or x.dtype is not dtype or x.device.type != on:
            return general(x, async_op)
        x = waited(x)
        if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
            return general(x, async_op)
        return quick((x.detach() if x.requires_grad else x).contiguous())

    return run


def _way(comm: Communicator, spec: Spec, itemsize: int) -> Direct | None:
    """What exchanges parts of a tensor, if that is large."""
    return comm.direct(spec.mesh.device_type) if math.prod(spec.shape) * itemsize >= SAVES else None


def direct_gather(comm: Communicator, spec: Spec, step: Step, coord: Coord) -> Way | None:
    """An all-gather of a large tensor; on NCCL, which gathers in place, of parts of very unlike sizes only."""
    itemsize = spec.dtype.itemsize
    way = _way(comm, spec, itemsize)
    if way is None:
        return None
    group = Group(spec, step, coord, itemsize)
    made, sizes = region_size(group.want[0]) * itemsize, [*map(region_size, group.have)]
    if made < SAVES:
        return None
    if way.whole:
        padded, exact = (comm.size - 1) * max(sizes), sum(sizes) - min(sizes)
        return _bound(way, "all_gather", group) if padding_counts(padded * itemsize, exact * itemsize) else None
    boxes = len({*map(region_shape, group.have)}) == 1 and all(len(runs) < 2 for part in group.have for runs in part)
    if boxes and made < EVEN:
        return None
    return _bound(way, "all_gather", group)


def direct_exchange(comm: Communicator, spec: Spec, step: Step, coord: Coord) -> Way | None:
    """An all-to-all of a large tensor that would take more than its input and output."""
    way = _way(comm, spec, spec.dtype.itemsize)
    if way is None:
        return None
    group = Group(spec, step, coord, spec.dtype.itemsize)
    return _bound(way, "all_to_all", group) if _saves(group) else None


def _saves(group: Group) -> bool:
    """Whether at some rank the usual way takes more than input and output, and enough comes for it to matter."""
    for i, (have, want) in enumerate(zip(group.have, group.want)):
        held, come = region_size(have), group.comes(i)
        if come * group.itemsize < SAVES:
            continue
        if come > held:
            return True
        if group.size <= MANY:
            leave = sum([region_size(group.sent(i, j)[0]) for j in range(group.size) if j != i])
            if leave + come > held + region_size(want):
                return True
    return False


def _all_land(group: Group) -> bool:
    """Whether all that is sent lands in place."""
    return all(
        group.place(i, j) is not None
        for i in range(group.size) for j in range(group.size) if i != j and region_size(group.sent(i, j)[1])
    )  # fmt: skip


def direct_reduce(
    comm: Communicator, spec: Spec, step: Step, coord: Coord, op: str, parts: Sequence[Sequence[int]],
    wide: torch.dtype | None,
) -> Way | None:  # fmt: skip
    """A reduce-scatter, or an all-to-all of the pending parts of a large tensor, which are reduced as they arrive.

    `parts`: positions that together hold what one part has for the result, part by part. `wide`: the dtype in which
    they add up, where it is not that of the tensor (or of the step's wire) that is sent.
    """
    sent = spec.dtype if wide is not None or step.wire is None else step.wire
    way, fold = _way(comm, spec, sent.itemsize), fold_of(op, wide or sent, len(parts))
    if way is None or way.whole or fold is None:
        return None
    group = Group(spec, step, coord, sent.itemsize)
    kind, least = ("reduce_scatter", EVEN // 4) if step.kind == "reduce_scatter" else ("all_to_all", 2 * SAVES)
    if max(map(region_size, group.want)) * sent.itemsize < least:
        return None
    group.first = frozenset(parts[0] if wide is None else ())
    return _bound(way, kind, group, _Sum(fold, parts, wide))


class _Sum(NamedTuple):
    """How parts are put together."""

    fold: Fold
    parts: Sequence[Sequence[int]]
    wide: torch.dtype | None


def _bound(way: Direct, kind: str, group: Group, total: _Sum | None = None) -> Way | None:
    """The step as a callable, for contiguous tensors; None where the group takes only what lands in place."""
    if way.whole and (group.size > MANY or not _all_land(group)):
        return None
    out_shape, outgoing = region_shape(group.want[group.me]), Outgoing(group)
    arrive, landings = _incoming(group, total)
    room = region_size(group.have[group.me]) - outgoing.packed

    def run(x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype if total is None or total.wide is None else total.wide
        out = x.new_empty(out_shape, dtype=dtype)
        whole = out.view(-1)
        views = [(i, 0, whole.narrow(0, at, n)) for i, at, n in arrive]
        turns = [Turn(a.position, a.number, a.landing.numel, a.bound(x, out)) for a in landings]
        way.exchange(kind, x, out, outgoing.of(x), views, turns, room)
        return out if total is None else total.fold.finish(out).to(x.dtype)

    return run


class _Arrival(NamedTuple):
    """Something that is brought to its place in its turn: a message, or of this rank's own tensor (`position` None)."""

    position: int | None
    number: int
    landing: Landing
    add: Add | None

    def bound(self, x: torch.Tensor, out: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Brings a message, or what `x` has, to `out`."""
        bring, add = self.landing.bring, self.add
        if self.position is None:
            return lambda _: bring(x, out, add)
        return lambda message: bring(message, out, add)


def _incoming(group: Group, total: _Sum | None) -> tuple[list[tuple[int, int, int]], list[_Arrival]]:
    """What this rank gets: (position, start, elements) of what lands in place, and all else in the order of turns."""
    me, k = group.me, group.size
    shape, out_shape = region_shape(group.have[me]), region_shape(group.want[me])
    place: list[tuple[int, int, int]] = []
    turns: list[_Arrival] = []
    parts: Sequence[Sequence[int]] = [[(me - j) % k for j in range(k)]] if total is None else total.parts
    for n, part in enumerate(parts):
        add = None if n == 0 or total is None else total.fold.add
        messages: list[_Arrival] = []
        for i in part:
            mine, region = group.sent(i, me)
            if not region_size(region):
                continue
            if i == me:
                own = Landing(region, out_shape, (mine, shape))
                cut = [] if own.few else group.cut(me, me)
                some = [Landing(region, out_shape, (mine, shape), rows) for rows in cut] or [own]
                turns += [_Arrival(None, 0, landing, add) for landing in some]
                continue
            at = group.place(i, me)
            if at is not None:
                place.append((i, at, region_size(region)))
            else:
                some = [Landing(region, out_shape, rows=rows) for rows in group.cut(i, me)]
                messages += [_Arrival(i, number, landing, add) for number, landing in enumerate(some)]
        turns += sorted(messages, key=lambda m: m.number)  # of each the first, so that all are under way
    return place, turns
