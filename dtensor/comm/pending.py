"""One collective of a process group, from its call to its result: on which stream it runs, and what an error says.

Three ways to issue one, by what the caller wants and what the tensor is:

    synchronous, on an accelerator    torch's in-place collectives with `asyncOp` off: they join the queue of the
                                      current stream, as a kernel does; nothing is waited for, and no event is recorded
    asynchronous, on an accelerator   functional collectives: the group's own stream waits for the current one, the
                                      work keeps what it reads and writes alive, and waiting makes the stream that is
                                      current then wait for the group's; the host never waits
    on the CPU, and in a trace        functional collectives, which a graph can hold; waiting for one takes the host

Several that are independent can be one launch on an accelerator: they join the one that is `gathering.now`
(`dtensor.comm.coalescing`).

A group that fails (a timeout, an abort, a peer that is gone) raises where a collective is issued or waited for. Such an
error is raised again as a `CollectiveError` (`dtensor.comm.failure`), which says what it was.
"""

from __future__ import annotations

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
    "NATIVE", "Sent", "all_gather", "all_reduce", "all_to_all", "broadcast", "fake_refused", "gathering", "in_queue",
    "issued", "reduce_scatter",
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


def issued(place: Place, kind: str, out: torch.Tensor, call: Callable[..., Any], *args: Any) -> Sent:
    """`call(*args)`, a method of the group that fills `out` and returns a work, or None once `out` is in the queue."""
    note(place, kind, out)
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
    if (async_op and gathering.now is None) or not in_queue(x):
        return _functional(place, "all_reduce", x.contiguous(), _F.all_reduce.default, wire)
    out = _private(waited(x), of)
    options = dist.AllreduceOptions()
    options.reduceOp = NATIVE[wire]  # type: ignore[assignment]
    options.asyncOp = async_op
    return issued(place, "all_reduce", out, place.group.allreduce, [out], options)


def all_gather(place: Place, flat: torch.Tensor, async_op: bool) -> Sent:
    """All positions' `flat` in one tensor, by group rank."""
    if (async_op and gathering.now is None) or not in_queue(flat):
        return _functional(place, "all_gather", flat, _F.all_gather_into_tensor.default, place.size)
    flat = waited(flat)
    out = flat.new_empty(place.size * flat.numel())
    options = c10d.AllgatherOptions()
    options.asyncOp = async_op
    return issued(place, "all_gather", out, place.group._allgather_base, out, flat, options)


def reduce_scatter(place: Place, flat: torch.Tensor, wire: str, async_op: bool) -> Sent:
    """The reduction of this position's part of `flat` (1-D, parts of equal size, by group rank)."""
    if (async_op and gathering.now is None) or not in_queue(flat):
        return _functional(place, "reduce_scatter", flat, _F.reduce_scatter_tensor.default, wire, place.size)
    flat = waited(flat)
    out = flat.new_empty(flat.numel() // place.size)
    options = dist.ReduceScatterOptions()
    options.reduceOp = NATIVE[wire]  # type: ignore[assignment]
    options.asyncOp = async_op
    return issued(place, "reduce_scatter", out, place.group._reduce_scatter_base, out, flat, options)


def fake_refused(place: Place, flat: torch.Tensor, error: CollectiveError) -> bool:
    """True where torch's fake group, which carries nothing, refused: it makes what arrives of what leaves."""
    return not flat.numel() and dist.get_backend(place.group) == "fake" and "inputBuffer is empty" in str(error)


def all_to_all(
    place: Place, flat: torch.Tensor, arrive: Sequence[int], leave: Sequence[int], async_op: bool
) -> Sent:  # fmt: skip
    """What the others sent, one after the other by group rank. `arrive`, `leave`: elements from and to each."""
    try:
        return _all_to_all(place, flat, list(arrive), list(leave), async_op)
    except CollectiveError as e:
        if not fake_refused(place, flat, e):
            raise
        _all_to_all(place, flat.to("meta"), list(arrive), list(leave), async_op)  # what dispatch modes see
        return Sent(place, "all_to_all", flat.new_zeros(sum(arrive)), None)


def _all_to_all(place: Place, flat: torch.Tensor, arrive: list[int], leave: list[int], async_op: bool) -> Sent:
    if (async_op and gathering.now is None) or not in_queue(flat):
        return _functional(place, "all_to_all", flat, _F.all_to_all_single.default, arrive, leave)
    flat = waited(flat)
    out = flat.new_empty(sum(arrive))
    options = c10d.AllToAllOptions()
    options.asyncOp = async_op
    return issued(place, "all_to_all", out, place.group.alltoall_base, out, flat, arrive, leave, options)


def broadcast(place: Place, flat: torch.Tensor, root: int, async_op: bool) -> Sent:
    """The `flat` of group rank `root`, in a new tensor."""
    if (async_op and gathering.now is None) or not in_queue(flat):
        return _functional(place, "broadcast", flat, _F.broadcast.default, root)
    out = waited(flat).clone()
    options = c10d.BroadcastOptions()
    options.rootRank = root
    options.asyncOp = async_op
    return issued(place, "broadcast", out, place.group.broadcast, [out], options)
