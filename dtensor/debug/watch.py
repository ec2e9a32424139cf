"""`watch_collectives`: a report, while a program hangs, of the collective that it hangs in and the line that issued it.

    with dtensor.debug.watch_collectives(seconds=60):
        train()

On the CPU a collective that never ends raises in the end, and the error says which one it was. On NCCL the host does
not wait: the program runs on, and blocks much later in some `.item()`; after the group's timeout torch's watchdog ends
the process without a Python error. So this writes, before that, what was issued and has not been passed:

    rank 3: no collective has ended for 60 s; the first that may not have:
      all_reduce over axis 'tp' of the mesh (dp=2, tp=4), ranks (0, 1, 2, 3) of bfloat16[8, 4096], from train.py:31, ...
      all_gather over ...

How it tells: a thread looks four times in `seconds`. On a device it records an event on the default stream and notes
how many collectives had been issued; while the event is not reached, one of those is in the way, or work before it
(collectives that run on another stream, and are waited for there, are not seen). On the CPU it looks whether a rank's
thread stands in the wait for a collective. Each collective costs some microseconds more inside, for its line.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from dtensor.comm import failure as comm_failure
from dtensor.comm.issue import Sent

__all__ = ["watch_collectives"]

SHOWN = 5
_WAIT = Sent.wait.__code__


@contextlib.contextmanager
def watch_collectives(seconds: float = 60.0, report: Callable[[str], None] | None = None) -> Iterator[None]:
    """Inside, a collective that does not end within `seconds` is reported: once, by `report`, or on stderr.

    Raises ValueError where `seconds` is not positive.
    """
    if seconds <= 0:
        raise ValueError(f"watch_collectives(seconds={seconds}): it must be positive")
    watch = _Watch(seconds, report or (lambda text: print(text, file=sys.stderr, flush=True)))
    comm_failure.watchers.append(watch.issued)
    watch.thread.start()
    try:
        yield
    finally:
        comm_failure.watchers.remove(watch.issued)
        watch.over.set()
        watch.thread.join()


class _Watch:
    """What was issued, how much of it is known to have been passed, and since when nothing more has been."""

    def __init__(self, seconds: float, report: Callable[[str], None]) -> None:
        self.seconds, self.report = seconds, report
        self.texts: deque[tuple[int, str]] = deque(maxlen=comm_failure.KEPT)
        self.count = self.passed = 0
        self.since = time.monotonic()
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.probe: tuple[Any, int] | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watch_collectives", daemon=True)

    def issued(self, text: str) -> None:
        self.count += 1
        self.texts.append((self.count, text))

    def _run(self) -> None:
        while not self.over.wait(self.seconds / 4):
            before = self.passed
            self._look()
            if self.passed > before or self.passed == self.count:
                self.since = time.monotonic()
            elif time.monotonic() - self.since >= self.seconds:
                self._tell()
                return

    def _look(self) -> None:
        """Find out how many collectives have been passed."""
        if self.device is None:
            if not any(_waits(frame) for frame in sys._current_frames().values()):
                self.passed = self.count
            else:
                self.passed = max(self.passed, self.count - 1)
            return
        if self.probe is not None and self.probe[0].query():
            self.passed, self.probe = self.probe[1], None
        if self.probe is None and self.passed < self.count:
            count, event = self.count, torch.cuda.Event()
            event.record(torch.cuda.default_stream(self.device))
            self.probe = event, count

    def _tell(self) -> None:
        rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
        open_ones = [text for at, text in list(self.texts) if at > self.passed][:SHOWN]
        lost = self.count - self.passed - len([1 for at, _ in self.texts if at > self.passed])
        head = f"{rank}no collective has ended for {self.seconds:g} s; the first that may not have:"
        if lost > 0:
            head += f" ({lost} older ones are forgotten)"
        self.report("\n  ".join([head, *open_ones]))


def _waits(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code is _WAIT:
            return True
        frame = frame.f_back
    return False
