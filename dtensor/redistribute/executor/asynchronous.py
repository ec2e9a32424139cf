"""Asynchronous redistributions: results that are still under way, and steps that run on a side stream.

A result under way is a tensor that finishes a collective, and what follows it, when it is first used.

An asynchronous redistribution of one collective needs no more: the group has a stream of its own. Of several steps only
the last could be left under way so; the ones before it would make the current stream wait, and with it all that the
program queues next. So the whole plan runs on a side stream of the device:

    current stream    ...x ── copy ──┬── the program's next kernels ───┬── first use of the result ...
    side stream                      └── step 1 ── step 2 ── event ────┘

The side stream starts after what the current one has queued so far, and the result waits for the side stream's event
when it is first used, on whatever stream is current then. The host waits for nothing. The plan reads a copy of `x`,
made on the current stream, as the program may write to `x` at once. Where `x` is itself under way, the current stream
waits for it, as it counts as there from then on, for all streams. Memory: the copy is marked as used by the side stream
and the result as used by the stream that takes it, so that the allocator gives neither out too early. While a CUDA
graph is captured the steps stay on the capturing stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor.comm.issue import gathering, in_queue
from dtensor.comm.pending import Pending
from dtensor.comm.wire import traced, waited
from dtensor.errors import CollectiveError

__all__ = ["arriving", "belongs_to", "has_side_stream", "on_side_stream", "unwaited"]


def unwaited(finish: Callable[[], torch.Tensor], like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor of `shape`, and of the dtype and device of `like`, that calls `finish` when first used.

    It is an `AsyncCollectiveTensor`, so code that looks for one and calls `wait()` works. For who launches several
    collectives as one (`dtensor.redistribute.executor.coalescing`), and waits at once, the bare `Pending` will do.
    """
    if gathering.now is not None:
        return Pending(finish=finish)  # type: ignore[return-value]
    made: torch.Tensor = _unwaited_class()(finish, like, shape)
    return made


def arriving(pending: Pending[torch.Tensor]) -> torch.Tensor:
    """What a collective fills, as torch's own waiting tensor; an error of the group says what it was for."""
    if pending.raw is None or traced(pending.raw):
        return pending.tensor
    made: torch.Tensor = _arriving_class()(pending.raw, pending.wait)
    return made


def belongs_to(result: torch.Tensor, plan: object) -> torch.Tensor:
    """`result`, which may have to be waited for, of `plan`: errors that show then will say so."""
    if type(result).__name__ == "AsyncCollectiveTensor" and hasattr(result, "plan"):
        result.plan = plan
    return result


def _told(wait: Callable[[], torch.Tensor], plan: object) -> torch.Tensor:
    try:
        return wait()
    except CollectiveError as e:
        if plan is not None:
            e.during(f"redistribute {plan}")
        raise


@functools.cache
def _arriving_class() -> Any:
    """The class; made when first needed, because its base loads much of `torch.distributed`."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    class Arriving(AsyncCollectiveTensor):
        """An `AsyncCollectiveTensor` that waits through its collective, which knows what to say of an error."""

        finish: Any
        plan: Any

        @staticmethod
        def __new__(cls: Any, elem: torch.Tensor, finish: Callable[[], torch.Tensor]) -> Any:
            made = AsyncCollectiveTensor.__new__(cls, elem)
            made.finish, made.plan = finish, None
            return made

        def trigger_wait(self) -> torch.Tensor:
            if not self.completed:
                _told(self.finish, self.plan)
                self.finish, self.completed = None, True
            return self.elem

        wait = trigger_wait

    Arriving.__name__ = AsyncCollectiveTensor.__name__
    return Arriving


@functools.cache
def _unwaited_class() -> Any:
    """The class; made when first needed, because its base loads much of `torch.distributed`."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.utils._pytree import tree_map_only

    class Unwaited(AsyncCollectiveTensor):
        """An `AsyncCollectiveTensor` whose value is computed, not only waited for."""

        finish: Any
        plan: Any

        @staticmethod
        def __new__(cls: Any, finish: Callable[[], torch.Tensor], like: torch.Tensor, shape: Sequence[int]) -> Any:
            made = torch.Tensor._make_wrapper_subclass(
                cls, tuple(shape), dtype=like.dtype, layout=like.layout, device=like.device
            )
            made.finish, made.completed, made.plan = finish, False, None
            return made

        def trigger_wait(self) -> torch.Tensor:
            if not self.completed:
                self.elem = _told(self.finish, self.plan)
                self.finish, self.completed = None, True
            return self.elem

        wait = trigger_wait
        _get_acs_underlying_tensor = trigger_wait

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            self.trigger_wait()
            return ["elem"], None

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            args, kwargs = tree_map_only(cls, lambda t: t.trigger_wait(), (args, kwargs or {}))
            return func(*args, **kwargs)

    Unwaited.__name__ = AsyncCollectiveTensor.__name__  # by which others tell that there is something to wait for
    return Unwaited


# ------------------------------------------------------------ side streams
_sides: dict[torch.device, Any] = {}


def streams(device: torch.device) -> Any:
    """What torch calls the device's module, with `Stream`, `Event`, `current_stream` and `stream`."""
    return getattr(torch, device.type)


def has_side_stream(x: torch.Tensor) -> bool:
    """True for a tensor on a device with streams, unless a graph is being captured."""
    if not in_queue(x):
        return False
    capturing: Callable[[], bool] | None = getattr(streams(x.device), "is_current_stream_capturing", None)
    return capturing is None or not capturing()


def _side(device: torch.device) -> Any:
    if device not in _sides:
        _sides[device] = streams(device).Stream(device=device)
    return _sides[device]


def on_side_stream(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
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
