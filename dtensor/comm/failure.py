"""What an error says when a collective does not end: which one, over which ranks, for what, from which line.

torch says "Timed out waiting 1800000ms for recv operation to complete". What helps is the call that did not end:

    all_reduce over axis 'tp', ranks (0, 1), of which this is rank 0: the group did not finish it
      got: f32[4, 8] on cpu; gloo group 'dtensor:0_1:0': Timed out waiting 2000ms for recv operation to complete
      for: redistribute f32[4,8]{P:tp} -> f32[4,8], step 1: all_reduce over tp: [P(sum)] -> [R], ...
      from: train.py:31, in step: loss = model(x).sum()
      before it, on this rank: all_gather over axis 'dp' of bf16[1024]; ...
      fix: look at the other ranks: ...

Nothing of that is put together before something failed. What was issued before is kept as a few references, in a ring
of the last `KEPT`; the lines of the program are read off the stack when the error is made.
"""

from __future__ import annotations

import linecache
import sys
from collections import deque
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dtensor.errors import SEE_INPUTS, CollectiveError
from dtensor.folders import users_frame

__all__ = ["KEPT", "Place", "failed", "note", "recent", "watchers"]

KEPT = 32
"""Collectives that are remembered."""

recent: deque[tuple[Place, str, torch.Size, torch.dtype]] = deque(maxlen=KEPT)
"""The last collectives that this rank issued: where, kind, shape and dtype of what travels. Oldest first."""


class Place(Protocol):
    """What is known of the group: a communicator over `torch.distributed`."""

    group: Any
    name: str
    axis: str
    ranks: tuple[int, ...]
    rank: int
    size: int

    @property
    def compiled(self) -> bool:
        """False for a group that is written in Python."""


watchers: list[Callable[[str], None]] = []
"""Called with the text of every collective that is issued, and its line; see `dtensor.debug.watch`."""


def note(place: Place, kind: str, x: torch.Tensor) -> None:
    """Remember that a collective is issued."""
    recent.append((place, kind, x.shape, x.dtype))
    if watchers:
        text = f"{_text(place, kind, x.shape, x.dtype)}, from {_programs_line()}"
        for watcher in tuple(watchers):
            watcher(text)


def failed(place: Place, kind: str, x: torch.Tensor, error: RuntimeError) -> RuntimeError:
    """The error to raise for `error`, which the group raised when `kind` of `x` was issued or waited for."""
    if isinstance(error, CollectiveError) or type(x).__name__ in ("FakeTensor", "FunctionalTensor"):
        return error
    line = _programs_line()
    before = [_text(*entry[:2], entry[2], entry[3]) for entry in islice(reversed(recent), 1, 5)]
    text = str(error).strip().splitlines() or [type(error).__name__]
    facts = [
        f"got: {_tensor(x.shape, x.dtype)} on {x.device}; {_backend(place)} group {place.name!r}: {text[0]}",
        f"from: {line}" if line else "",
        f"before it, on this rank: {'; '.join(before)}" if before else "",
        "fix: look at the other ranks of this group: each must issue the same collectives in the same order. One that "
        "is missing here has ended, or waits elsewhere (in another branch, in another group's collective); "
        + SEE_INPUTS,
    ]
    head = f"{kind} over {_over(place)}, of which this is rank {place.ranks[place.rank]}: the group did not finish it"
    return CollectiveError("\n  ".join([head, *(f for f in facts if f)]))


def _over(place: Place) -> str:
    shown = ", ".join(map(str, place.ranks[:16])) + (", ..." if place.size > 16 else "")
    return (f"axis {place.axis}, " if place.axis else "") + f"ranks ({shown})"


def _text(place: Place, kind: str, shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{kind} over {_over(place)} of {_tensor(shape, dtype)}"


def _tensor(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _backend(place: Place) -> str:
    try:
        return str(dist.get_backend(place.group))
    except (ValueError, RuntimeError, AssertionError):  # a group that is gone
        return "a"


# ------------------------------------------------------------ the user's line
def _programs_line() -> str:
    """The innermost line on this thread's stack that is neither ours nor torch's; "" where there is none.

    A backward on an accelerator runs on a thread of torch's own, whose stack does not lead back to the program: then
    the line where the main thread stands.
    """
    found = _line_of(sys._getframe(1))
    if found:
        return found
    import threading

    main = sys._current_frames().get(threading.main_thread().ident or 0)
    found = _line_of(main) if main is not None else ""
    return f"{found} (where the main thread stands)" if found else ""


def _line_of(frame: FrameType | None) -> str:
    frame = users_frame(frame)
    if frame is None:
        return ""
    name = frame.f_code.co_filename
    text = linecache.getline(name, frame.f_lineno).strip()
    return f"{name}:{frame.f_lineno}, in {frame.f_code.co_name}" + (f": {text}" if text else "")
