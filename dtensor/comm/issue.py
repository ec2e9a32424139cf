"""One collective of a process group, from its call to its result: by which call, on which stream, what an error says.

Two ways to issue one, of the same tensors and sizes, so that ranks may differ in which they take:

    the group's own call     what is synchronous, outside traces and dispatch modes. On an accelerator it joins the
                             queue of the current stream, as a kernel does: nothing is waited for. On the CPU the host
                             waits for it.
    a functional collective  what is asynchronous: the group's own stream waits for the current one, the work keeps what
                             it reads and writes alive, and the stream that is current when it is waited for then waits
                             for the group's. Also what a graph must hold and what a dispatch mode looks at.

Several that are independent can be one launch on an accelerator: they join the one that is `gathering.now`
(`dtensor.comm.coalescing`).

A group that fails (a timeout, an abort, a peer that is gone) raises where a collective is issued or waited for. Such an
error is raised again as a `CollectiveError` (`dtensor.comm.failure`), which says what it was.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.fx import traceback

from dtensor.comm.failure import Place, failed, note
from dtensor.comm.wire import eager, waited
from dtensor.errors import CollectiveError

__all__ = [
    "NATIVE", "Sent", "all_gather", "all_reduce", "all_to_all", "broadcast", "gathering", "in_queue", "issued",
    "reduce_scatter", "reduce_scatter_list", "scatter",
]  # fmt: skip

_F = torch.ops._c10d_functional
_wait: Callable[[torch.Tensor], torch.Tensor] = _F.wait_tensor.default

NATIVE = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT, "band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip
"""The groups' own reductions, by our names."""


BLOCKING = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", os.environ.get("NCCL_BLOCKING_WAIT", "0")) == "1"
"""Waiting takes the host, until a timeout: then every collective is waited for, so that its error is raised here."""


def in_queue(x: torch.Tensor) -> bool:
    """True where work on `x` is queued on a stream of its device, so that a collective can be queued there too."""
    return x.device.type != "cpu" and not BLOCKING and eager(x)


def _own_call(place: Place, x: torch.Tensor, async_op: bool) -> bool:
    """Whether the group is asked itself; else a functional collective is issued."""
    if x.is_cpu and not async_op and type(x) is torch.Tensor and not _modes() and place.compiled:
        return True
    return in_queue(x) and not (async_op and gathering.now is None)


_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


@functools.cache
def _options(kind: Any, wire: str | None = None) -> tuple[Any, Any]:
    """Options of a class of c10d's, for a call that joins the current stream's queue and for one to be waited for."""
    queued, waited_for = kind(), kind()
    queued.asyncOp, waited_for.asyncOp = False, True
    if wire is not None:
        queued.reduceOp = waited_for.reduceOp = NATIVE[wire]
    return queued, waited_for


class Launch(Protocol):
    """Several collectives of one group that are launched as one: see `dtensor.comm.coalescing`."""

    def issue(
        self, place: Place, kind: str, out: torch.Tensor, call: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        """Add `call(*args)`, a method of the group that fills `out`."""

    def wait(self) -> None:
        """Nothing, once the launch is over and waited for. Raises RuntimeError before."""


class _Gathering(threading.local):
    """The launch that this thread's asynchronous collectives of queued tensors join; None where each goes alone."""

    now: Launch | None = None


gathering = _Gathering()


class Sent:
    """A collective that was issued: `wait()` gives the tensor `out` that it fills, ready for the current stream.

    `work`: what the group returned; None where `out` is in the current stream's queue already, `_wait` for functional
    collectives, a `Launch` for one of several.
    """

    __slots__ = ("kind", "out", "place", "work")

    def __init__(self, place: Place, kind: str, out: torch.Tensor, work: Any) -> None:
        self.place, self.kind, self.out, self.work = place, kind, out, work

    @property
    def lazy(self) -> torch.Tensor | None:
        """`out` where it may be handed on before it is waited for, as functional collectives may be."""
        return self.out if self.work is _wait else None

    def wait(self) -> torch.Tensor:
        """The result. Raises CollectiveError where the group failed."""
        work = self.work
        if work is None:
            return self.out
        try:
            if work is _wait:
                return _wait(self.out)
            work.wait()
        except RuntimeError as e:
            raise failed(self.place, self.kind, self.out, e) from e
        self.work = None
        return self.out


def issued(
    place: Place, kind: str, out: torch.Tensor, call: Callable[..., Any], args: tuple[Any, ...],
    options: tuple[Any, Any] | None = None, async_op: bool = False,
) -> Sent:  # fmt: skip
    """`call(*args)`, a method of the group that fills `out` and returns a work, or None once `out` is in the queue.

    `options`: as of `_options`, of which the call takes one.
    """
    note(place, kind, out)
    if options is not None:
        args = (*args, options[async_op or not in_queue(out)])
    launch = gathering.now
    try:
        if launch is not None:
            launch.issue(place, kind, out, call, args)
            return Sent(place, kind, out, launch)
        return Sent(place, kind, out, call(*args))
    except RuntimeError as e:
        raise failed(place, kind, out, e) from e


def _functional(place: Place, kind: str, x: torch.Tensor, call: Callable[..., torch.Tensor], *args: Any) -> Sent:
    note(place, kind, x)
    facts = traceback.current_meta
    in_backward = facts.get(_PASS) == "is_backward"
    try:
        if in_backward:  # else torch chooses by local sizes whether forward sends it, and ranks may choose differently
            facts[_PASS] = "must_be_in_backward"
        return Sent(place, kind, call(x, *args, place.name), _wait)
    except RuntimeError as e:
        raise failed(place, kind, x, e) from e
    finally:
        if in_backward:
            facts[_PASS] = "is_backward"


_PASS = "partitioner_tag"
"""Where torch's compiler notes of what it traces whether it is part of a forward or of a backward."""


def _private(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous and in memory of its own: a copy unless it was made for this, and shares none with `of`."""
    if x.untyped_storage()._cdata == of.untyped_storage()._cdata or not x.is_contiguous():
        return x.clone(memory_format=torch.contiguous_format)
    return x


def all_reduce(place: Place, x: torch.Tensor, of: torch.Tensor, wire: str, async_op: bool) -> Sent:
    """`x`, which was encoded of `of` or is `of`, reduced with the group's own `wire`; neither is written to."""
    if not _own_call(place, x, async_op):
        return _functional(place, "all_reduce", x.contiguous(), _F.all_reduce.default, wire)
    out = _private(waited(x), of)
    options = _options(dist.AllreduceOptions, wire)
    return issued(place, "all_reduce", out, place.group.allreduce, ([out],), options, async_op)


def all_gather(place: Place, flat: torch.Tensor, async_op: bool) -> Sent:
    """All positions' `flat` in one tensor, by group rank.

    Several functional gathers under way in one gloo group can spoil the heap of the process, so on the CPU the group
    is asked itself, too, where the gather is asynchronous.
    """
    own = _own_call(place, flat, async_op)
    if not own and (not eager(flat) or in_queue(flat)):
        return _functional(place, "all_gather", flat, _F.all_gather_into_tensor.default, place.size)
    flat = waited(flat)
    out = flat.new_empty(place.size * flat.numel())
    call = place.group._allgather_base
    if not place.compiled and not in_queue(flat):  # it may know torch's newer name only
        call = getattr(place.group, "all_gather_single", call)
    return issued(place, "all_gather", out, call, (out, flat), _options(c10d.AllgatherOptions), async_op)


def reduce_scatter(place: Place, flat: torch.Tensor, wire: str, async_op: bool) -> Sent:
    """The reduction of this position's part of `flat` (1-D, parts of equal size, by group rank)."""
    if not _own_call(place, flat, async_op):
        return _functional(place, "reduce_scatter", flat, _F.reduce_scatter_tensor.default, wire, place.size)
    flat = waited(flat)
    out = flat.new_empty(flat.numel() // place.size)
    options = _options(dist.ReduceScatterOptions, wire)
    return issued(place, "reduce_scatter", out, place.group._reduce_scatter_base, (out, flat), options, async_op)


def reduce_scatter_list(place: Place, parts: list[torch.Tensor], rank: int, wire: str, async_op: bool) -> Sent:
    """As `reduce_scatter`, of parts that differ in size; this position has the group's rank `rank`. Not in traces."""
    out = torch.empty_like(parts[rank], memory_format=torch.contiguous_format)
    options = _options(dist.ReduceScatterOptions, wire)
    return issued(place, "reduce_scatter", out, place.group.reduce_scatter, ([out], [parts]), options, async_op)


def all_to_all(
    place: Place, flat: torch.Tensor, arrive: Sequence[int], leave: Sequence[int], async_op: bool
) -> Sent:  # fmt: skip
    """What the others sent, one after the other by group rank. `arrive`, `leave`: elements from and to each."""
    try:
        return _all_to_all(place, flat, list(arrive), list(leave), async_op)
    except CollectiveError as e:
        if flat.numel() or dist.get_backend(place.group) != "fake" or "inputBuffer is empty" not in str(e):
            raise
        # torch's fake group, which carries nothing, makes what arrives of what leaves
        _all_to_all(place, flat.to("meta"), list(arrive), list(leave), async_op)  # what dispatch modes see
        return Sent(place, "all_to_all", flat.new_zeros(sum(arrive)), None)


def _all_to_all(place: Place, flat: torch.Tensor, arrive: list[int], leave: list[int], async_op: bool) -> Sent:
    if not _own_call(place, flat, async_op):
        return _functional(place, "all_to_all", flat, _F.all_to_all_single.default, arrive, leave)
    flat = waited(flat)
    out, options = flat.new_empty(sum(arrive)), _options(c10d.AllToAllOptions)
    return issued(place, "all_to_all", out, place.group.alltoall_base, (out, flat, arrive, leave), options, async_op)


def broadcast(place: Place, flat: torch.Tensor, root: int, async_op: bool) -> Sent:
    """The `flat` of group rank `root`, in a new tensor."""
    if not _own_call(place, flat, async_op):
        return _functional(place, "broadcast", flat, _F.broadcast.default, root)
    out = waited(flat).clone()
    options = c10d.BroadcastOptions()
    options.rootRank, options.asyncOp = root, async_op or not in_queue(out)
    return issued(place, "broadcast", out, place.group.broadcast, ([out], options))


def scatter(place: Place, out: torch.Tensor, parts: list[torch.Tensor] | None, root: int, async_op: bool) -> Sent:
    """Into `out`, this position's of the `parts` that group rank `root` gives, in the order of group ranks."""
    options = dist.ScatterOptions()
    options.rootRank, options.asyncOp = root, async_op or not in_queue(out)
    return issued(place, "scatter", out, place.group.scatter, ([out], [] if parts is None else [parts], options))
