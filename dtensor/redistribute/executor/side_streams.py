"""A redistribution of several steps that overlaps with what the program does next: it runs on a stream beside.

An asynchronous redistribution of one collective needs nothing of this: the group has a stream of its own. Of several
steps only the last could be left under way so; the ones before it would make the current stream wait, and with it all
that the program queues next. Here the whole plan runs on a side stream of the device:

    current stream    ...x ── copy ──┬── the program's next kernels ───┬── first use of the result ...
    side stream                      └── step 1 ── step 2 ── event ────┘

The side stream starts after what the current one has queued so far, and the result waits for the side stream's event
when it is first used, on whatever stream is current then. The host waits for nothing. The plan reads a copy of `x`,
made on the current stream, as the program may write to `x` at once. Where `x` is itself on its way, the current stream
waits for it, as it counts as there from then on, for all streams. Memory: the copy is marked as used by the side stream
and the result as used by the stream that takes it, so that the allocator gives neither out too early. While a CUDA
graph is captured the steps stay on the capturing stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor.comm.pending import in_queue
from dtensor.comm.wire import waited
from dtensor.redistribute.executor.asynchronous import unwaited

__all__ = ["beside", "can_run_beside"]

_sides: dict[torch.device, Any] = {}


def streams(device: torch.device) -> Any:
    """What torch calls the device's module, with `Stream`, `Event`, `current_stream` and `stream`."""
    return getattr(torch, device.type)


def can_run_beside(x: torch.Tensor) -> bool:
    """True for a tensor on a device with streams, unless a graph is being captured."""
    if not in_queue(x):
        return False
    capturing: Callable[[], bool] | None = getattr(streams(x.device), "is_current_stream_capturing", None)
    return capturing is None or not capturing()


def _side(device: torch.device) -> Any:
    if device not in _sides:
        _sides[device] = streams(device).Stream(device=device)
    return _sides[device]


def beside(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`run(x)`, of `shape`, on the side stream: a tensor that waits for it when first used."""
    module, side = streams(x.device), _side(x.device)
    given = waited(x).clone(memory_format=torch.contiguous_format)
    side.wait_stream(module.current_stream(x.device))
    given.record_stream(side)
    with module.stream(side):
        made = run(given)
        done = module.Event()
        done.record(side)

    def finish() -> torch.Tensor:
        here = module.current_stream(made.device)
        here.wait_event(done)
        made.record_stream(here)
        return made

    return unwaited(finish, x, shape)
