"""Several independent collectives of one process group as one launch (NCCL's group calls).

    with Together(comm, device) as launch:
        sent = [issue a, issue b, ...]       # each `async_op=True`; the group takes them down
    results = [s.wait() for s in sent]       # ready for the current stream

NCCL then puts them on the device as one kernel, where each alone would be one. Nothing runs before the end, so nothing
may be read before: `wait()` inside is an error. What is sent and filled is kept until then, as memory that is given
back in between would be given out again, and written to, before the launch.

Inside, the group is asked as for asynchronous collectives, as torch does for its batches: they run on the group's own
stream, after what the current one held when each was issued; at the end the current stream waits for that one. So the
group's watchdog times the launch as a whole, and what the caller queues next comes after it. One group at a time: the
next launch starts when this one has been waited for.

Only collectives that a group passes on as they are may be inside. Lists of parts (`reduce_scatter`, `scatter`) are not:
NCCL's group makes launches of its own of them, which would end this one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from dtensor.comm.failure import Place, failed
from dtensor.comm.issue import gathering

__all__ = ["Together"]

_PLAIN = frozenset({"allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "broadcast"})
"""Methods of a group that issue one collective of NCCL, with nothing before or after it."""


class Together:
    """A context: the collectives that this thread issues inside are one launch of `place`'s group, on `device`.

    They must be of that group, independent of each other, and issued with `async_op`. The end raises CollectiveError
    where the group fails. RuntimeError where a launch is under way already.
    """

    __slots__ = ("_device", "_kept", "_kinds", "_open", "_place")

    def __init__(self, place: Place, device: torch.device) -> None:
        self._place, self._device = place, device
        self._kept: list[tuple[Any, ...]] = []
        self._kinds: list[tuple[str, torch.Tensor]] = []
        self._open = False

    def __enter__(self) -> Together:
        if gathering.now is not None:
            raise RuntimeError("a launch of several collectives is under way on this thread: end it first")
        self._place.group._start_coalescing(self._device)
        self._open, gathering.now = True, self
        return self

    def issue(
        self, place: Place, kind: str, out: torch.Tensor, call: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        """Add `call(*args)`, a method of the group that fills `out`. RuntimeError for what cannot be inside."""
        if place.name != self._place.name or call.__name__ not in _PLAIN:
            raise RuntimeError(f"{call.__name__} of group {place.name!r} inside a launch of group {self._place.name!r}")
        self._kept.append((out, *args))
        self._kinds.append((kind, out))
        call(*args)

    def wait(self) -> None:
        """Nothing, once the launch is over. RuntimeError inside: there is nothing to read yet."""
        if self._open:
            raise RuntimeError("a collective was read before the launch that it is part of")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        gathering.now = None
        try:
            work = self._place.group._end_coalescing(self._device)
            if work is not None:
                work.wait()  # the current stream does, not the host
            self._open = False
        except RuntimeError as e:
            if error is None:
                raise self._failed(e) from e
        finally:
            self._kept.clear()

    def _failed(self, e: RuntimeError) -> RuntimeError:
        if not self._kinds:
            return e
        kinds = ", ".join(kind for kind, _ in self._kinds)
        return failed(self._place, f"one launch of {kinds}", self._kinds[-1][1], e)
