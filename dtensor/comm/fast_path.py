"""Collectives of a process group bound once, for tensors that need no look: the group's own call and nothing besides.

What a plan sends is of one shape and dtype at every call, so that all but the call can be settled before. Bound ones
take tensors of torch's own class on the CPU or in the queue of a device's current stream, contiguous, of a dtype that
every backend carries, outside a trace and dispatch modes; `ready` says whether a tensor is such a one, and all else
goes the general way of `dtensor.comm.c10d`. A rank that goes the general way issues the same collective with the same
sizes, so ranks need not agree on which of the two they go. Bound collectives are synchronous. Errors are those of
`dtensor.comm.pending`. Nothing is bound of the group itself, which may be destroyed: a call looks its method up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from dtensor.comm import pending as comm_sent
from dtensor.comm.failure import Place, failed, note
from dtensor.comm.wire import carrier_of
from dtensor.errors import CollectiveError

__all__ = [
    "Bound",
    "Try",
    "carried",
    "exchange",
    "exchange_into",
    "gather",
    "gather_into",
    "in_carrier",
    "in_pairs",
    "later",
    "modes",
    "options_of",
    "ready",
    "send",
]

Bound = Callable[[torch.Tensor], torch.Tensor]
Try = Callable[[torch.Tensor], torch.Tensor | None]
"""None where the general way is to be taken, as nothing was sent."""

_CARRIED = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8}
)
modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are on."""


def later(make: Callable[[], Try | None]) -> list[Try]:
    """One entry, to be called: None at its first call, so that one alone costs no binding; then what `make` binds."""

    def first(x: torch.Tensor) -> None:
        cell[0] = second

    def second(x: torch.Tensor) -> torch.Tensor | None:
        cell[0] = make() or _never
        return cell[0](x)

    cell: list[Try] = [first]
    return cell


def _never(x: torch.Tensor) -> None:
    return None


def in_carrier(run: Try, dtype: torch.dtype) -> Try | None:
    """`run`, which only moves elements, for tensors of `dtype`: given as one that backends carry. None: no such."""
    carrier = carrier_of(dtype)
    if carrier not in _CARRIED:
        return None
    if carrier is dtype:
        return run

    def viewed(x: torch.Tensor) -> torch.Tensor | None:
        got = run(x.view(carrier))
        return None if got is None else got.view(dtype)

    return viewed


def in_pairs(run: Try) -> Try:
    """`run`, which only moves elements of float64, for complex128: given as pairs along a new last dim."""

    def paired(x: torch.Tensor) -> torch.Tensor | None:
        got = run(torch.view_as_real(x))
        return None if got is None else torch.view_as_complex(got)

    return paired


def ready(x: torch.Tensor) -> bool:
    """True for a tensor that may be given to a bound collective, and to what is bound around it."""
    return type(x) is torch.Tensor and not x.requires_grad and x.is_contiguous() and not x.is_meta and not modes()


def carried(dtype: torch.dtype) -> bool:
    """True for a dtype that every backend carries as it is."""
    return dtype in _CARRIED


Options = tuple[Any, Any]
"""Those of a call whose work is waited for by the host, and of one that joins the current stream's queue."""


def options_of(kind: Any, native: Any = None) -> Options:
    """Options of a class of c10d's; `native`: the group's own op, of a reduction."""
    waited, queued = kind(), kind()
    waited.asyncOp, queued.asyncOp = True, False
    if native is not None:
        waited.reduceOp = queued.reduceOp = native
    return waited, queued


def send(
    place: Place, kind: str, out: torch.Tensor, x: torch.Tensor, options: Options, call: Callable[..., Any], *args: Any
) -> None:
    """`call(*args, one of options)`, which sends `x` and fills `out`."""
    note(place, kind, x)
    try:
        work = call(*args, options[comm_sent.in_queue(x)])
        if work is not None:
            work.wait()
    except RuntimeError as e:
        raise failed(place, kind, out, e) from e


def exchange(place: Place, general: Bound) -> Bound:
    """An all-to-all of as many even parts along dim 0 as positions; the result has the shape of what is sent."""
    size, whole, like = place.size, torch.contiguous_format, torch.empty_like
    options = options_of(c10d.AllToAllOptions)

    def run(x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in _CARRIED:
            return general(x)
        out = like(x, memory_format=whole)
        sizes = [x.shape[0] // size] * size
        send(place, "all_to_all", out, x, options, place.group.alltoall_base, out, x, sizes, sizes)
        return out

    return run


def exchange_into(
    place: Place, leave: Sequence[int], arrive: Sequence[int]
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """An all-to-all from a contiguous 1-D tensor into another. `leave`, `arrive`: elements to and from each position.

    The tensors are of a dtype that is `carried`.
    """
    leave, arrive = list(leave), list(arrive)
    options = options_of(c10d.AllToAllOptions)

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        try:
            send(place, "all_to_all", out, x, options, place.group.alltoall_base, out, x, arrive, leave)
        except CollectiveError as e:
            if not comm_sent.fake_refused(place, x, e):
                raise
            out.zero_()

    return run


def gather(place: Place, shape: Sequence[int], general: Bound) -> Bound:
    """An all-gather along dim 0, whose result has `shape`."""
    options, shape = options_of(c10d.AllgatherOptions), tuple(shape)

    def run(x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in _CARRIED:
            return general(x)
        out = x.new_empty(shape)
        send(place, "all_gather", out, x, options, place.group._allgather_base, out, x)
        return out

    return run


def gather_into(place: Place) -> Callable[[torch.Tensor, list[torch.Tensor]], bool]:
    """An all-gather into tensors of one shape, perhaps views of one; False where the general way is to be taken."""
    options = options_of(c10d.AllgatherOptions)

    def run(x: torch.Tensor, into: list[torch.Tensor]) -> bool:
        if x.dtype not in _CARRIED or comm_sent.in_queue(x):
            return False
        send(place, "all_gather", x, x, options, place.group.allgather, [into], [x])
        return True

    return run
