"""Ranks as threads that take turns.

Each rank is a thread, and exactly one of them runs at a time: a rank keeps the baton until it has to wait for
others (in a collective, for a message) or is done. So a run is deterministic, nothing but collectives can
interleave, and "every rank waits" is a fact that can be seen instead of a hang:

    rank 0  ██ meets 1..3 ░░░░░░░░░░░░░░░░░░██ ...
    rank 1  ░░██ meets ░░░░░░░░░░░░░░░░░░░░░░░██          the last to arrive computes everybody's result
    rank 2  ░░░░██ meets ░░░░░░░░░░░░░░░░░░░░░░░██        and goes on; the others queue up behind it
    rank 3  ░░░░░░██ meets: computes ██ meets ...

Two ranks of one group that issue different collectives, and a wait that nobody can end, are a `CollectiveMismatch`
that names two ranks, what each of them does and where; it is raised on every rank. Two that issue the same one from
different lines of the program, where the kind has no root whose part is another, get a warning with both: they may have
met by chance, each for something else (`x.sum().item()` and `x.mean().item()`). An exception on one rank ends
the others at their next collective (`RankStopped`, which `except Exception` does not catch).
"""

from __future__ import annotations

import contextvars
import sys
import threading
import warnings
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch

from dtensor.comm.world import fresh_identity
from dtensor.errors import SEE_INPUTS, BoundedError
from dtensor.folders import NOT_A_PROGRAMS
from dtensor.simulation.generators import RankStreams

__all__ = ["CollectiveMismatch", "RankStopped", "RankThreads", "Signature"]

# What must agree among the ranks of a collective: kind, then (name, value) pairs that are shown when they do not.
Signature = tuple[Any, ...]

_ROOTED = frozenset(
    f"{where}{kind}" for where in ("", "dist.") for kind in ("barrier", "broadcast", "gather", "reduce", "scatter")
)
"""Kinds that ranks often reach from lines of their own: one gives or takes what the others do not, or all only wait."""

_programs: dict[str, bool] = {}
"""By file name, whether its lines are the program's: neither ours nor torch's, nor generated."""

_DEEP = 16
"""Frames of a program that are compared, the innermost ones."""

Place = tuple[tuple[CodeType, int], ...]
"""Where a rank stands in the program: function and instruction of its frames, innermost first."""

_ADVICE = f"All ranks of a group must issue the same collectives in the same order; {SEE_INPUTS}"


class CollectiveMismatch(BoundedError, RuntimeError):
    """Simulated ranks that do not issue the same collectives."""


class RankStopped(BaseException):
    """Ends a rank because another one failed. No Exception, so that user code does not take it for its own."""


class _Meeting:
    """A collective that some ranks of its group have reached."""

    __slots__ = ("arrived", "first", "members", "payloads", "place", "results", "signature")

    def __init__(self, signature: Signature, place: Place, first: int, size: int) -> None:
        self.signature = signature
        self.place = place
        self.first = first
        self.members: list[int] = [-1] * size
        self.payloads: list[Any] = [None] * size
        self.results: list[Any] | None = None
        self.arrived = 0


class _Rank:
    """One rank's thread: its turn, its streams, and what it waits for (None while it can run)."""

    __slots__ = ("done", "ident", "streams", "turn", "waits")

    def __init__(self) -> None:
        self.turn = allocate_lock()
        self.turn.acquire()
        self.ident = 0
        self.waits: tuple[Signature, tuple[int, ...]] | None = None
        self.done = False
        self.streams = RankStreams()


class RankThreads:
    """`size` ranks of one run. `identity` is the run's own, `error` what ended it and `failed` on which rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.identity = fresh_identity("simulated")
        self.error: BaseException | None = None
        self.failed: int | None = None
        self._ended = False
        self._bottom: CodeType | None = None
        self._ranks: list[_Rank] = []
        self._ready: deque[int] = deque(range(size))
        self._meetings: dict[Hashable, _Meeting] = {}
        self._mail: dict[Hashable, deque[Any]] = {}
        self._finished = allocate_lock()

    # running

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """`body(rank)` on every rank; the results in rank order. What ended the run early is left in `error`.

        The caller's thread waits, and its random number streams are as before when this returns.
        """
        caller = RankStreams()
        self._ranks = [_Rank() for _ in range(self.size)]
        results: list[Any] = [None] * self.size
        context = contextvars.copy_context()
        grad = torch.is_grad_enabled()

        def main(rank: int) -> None:
            me = self._ranks[rank]
            me.ident = threading.get_ident()
            me.turn.acquire()
            try:
                if self.error is None:
                    me.streams.restore()
                    with torch.set_grad_enabled(grad), torch.autograd.set_multithreading_enabled(False):
                        results[rank] = context.copy().run(body, rank)
            except RankStopped:
                pass
            except BaseException as error:
                self._fail(error, rank)
            finally:
                me.done = True
                self._pass_on(rank)

        self._bottom = main.__code__
        threads = [
            threading.Thread(target=main, args=(r,), name=f"simulated rank {r}", daemon=True) for r in range(self.size)
        ]
        self._finished.acquire()
        try:
            for thread in threads:
                thread.start()
            self._ranks[self._ready.popleft()].turn.release()
            try:
                self._finished.acquire()
            except BaseException as error:  # an interrupt in the caller's thread ends the ranks too
                self._fail(error, None)
                self._finished.acquire()
                raise
            for thread in threads:
                thread.join()
        finally:
            caller.restore()
        return results

    def _fail(self, error: BaseException, rank: int | None) -> None:
        """Note the first error, and let every waiting rank go on to end."""
        if self.error is not None:
            return
        self.error, self.failed = error, rank
        self._meetings.clear()
        self._mail.clear()
        for r, state in enumerate(self._ranks):
            if state.waits is not None:
                state.waits = None
                self._ready.append(r)

    def _pass_on(self, rank: int) -> None:
        """Give the baton of a finished rank to the next one."""
        if not self._ready and not all(r.done for r in self._ranks):
            self._fail(self._deadlock(), None)
        if self._ready:
            self._ranks[self._ready.popleft()].turn.release()
        else:
            self._finished.release()

    def _wait(self, rank: int, signature: Signature, ranks: tuple[int, ...]) -> None:
        """Hand over until somebody has made `rank` ready again."""
        me = self._ranks[rank]
        me.waits = (signature, ranks)
        if not self._ready:
            self._fail(self._deadlock(), None)
        following = self._ready.popleft()
        if following != rank:
            me.streams.save()
            self._ranks[following].turn.release()
            me.turn.acquire()
            me.streams.restore()

    def check(self) -> None:
        """Raise on this rank what has ended the run, if something has."""
        if self._ended:
            raise RuntimeError(
                "the simulation that this tensor, mesh or group was made in has ended\n"
                f"  got: a collective or a message of one of its {self.size} ranks, which are gone\n"
                "  rule: only what needs no other rank, as x.to_local(), can be done with a result of a simulation\n"
                "  fix: gather inside the function, and return that: x.full_tensor()"
            )
        if self.error is None:
            return
        if isinstance(self.error, CollectiveMismatch):
            raise CollectiveMismatch(*self.error.args)
        raise RankStopped

    def end(self) -> None:
        """From here on nothing can be sent: `check` says so."""
        self._ended, self.error = True, self.error or RuntimeError("ended")

    def _make_ready(self, rank: int) -> None:
        self._ranks[rank].waits = None
        self._ready.append(rank)

    # meeting

    def meet(
        self,
        rank: int,
        ranks: tuple[int, ...],
        position: int,
        signature: Signature,
        payload: Any,
        combine: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """Wait for all of `ranks`, then return `combine(payloads)[position]`, payloads and results by position.

        `combine` runs once, on the last rank to arrive; a CollectiveMismatch that it raises goes to all. Raises
        CollectiveMismatch where another rank of the group came with another signature, and where the group
        cannot come together.
        """
        if self.error is not None:
            self.check()
        meeting = self._meetings.get(ranks)
        if meeting is None:
            meeting = self._meetings[ranks] = _Meeting(signature, _stands(self._bottom), rank, len(ranks))
        elif meeting.signature != signature:
            self._mismatch(rank, signature, meeting)
        elif (place := _stands(self._bottom)) != meeting.place:
            self._apart(rank, place, meeting)
        meeting.members[position] = rank
        meeting.payloads[position] = payload
        meeting.arrived += 1
        if meeting.arrived < len(ranks):
            self._wait(rank, signature, ranks)
        else:
            del self._meetings[ranks]
            try:
                meeting.results = list(combine(meeting.payloads))
            except CollectiveMismatch as error:
                self._fail(error, None)
                raise
            for other in meeting.members:
                if other != rank:
                    self._make_ready(other)
        if meeting.results is None:  # the run ended before the others came
            self.check()
            raise RankStopped
        return meeting.results[position]

    def _mismatch(self, rank: int, signature: Signature, meeting: _Meeting) -> None:
        both = f"{self._describe(meeting.first, meeting.signature)}; {self._describe(rank, signature)}"
        text = f"ranks of one group issued different collectives: {both}. {_ADVICE}"
        error = CollectiveMismatch(text)
        self._fail(error, None)
        raise error

    def _apart(self, rank: int, place: Place, meeting: _Meeting) -> None:
        """Warn where two ranks issue one collective from different places of the program."""
        kind = meeting.signature[0]
        pairs = [(_line(*a), _line(*b)) for a, b in zip(meeting.place, place) if a != b]
        one, other = next(((a, b) for a, b in pairs if a != b), ("", ""))
        if one != other and kind not in _ROOTED:
            warnings.warn(
                f"ranks of one group issue the same {kind} from different lines of the program: "
                f"rank {meeting.first} at {one}, rank {rank} at {other}. "
                f"Where they mean different tensors the result is wrong. {_ADVICE}",
                stacklevel=2,
            )

    # messages

    def post(self, key: Hashable, message: Any, receiver: int) -> None:
        """Leave a message under `key`; wake `receiver` where it waits for it."""
        if self.error is not None:
            self.check()
        self._mail.setdefault(key, deque()).append(message)
        waits = self._ranks[receiver].waits
        if waits is not None and waits[0][0] == "recv":
            self._make_ready(receiver)

    def collect(self, rank: int, keys: Sequence[Hashable], signature: Signature, ranks: tuple[int, ...]) -> Any:
        """The oldest message under the first of `keys` that has one, waiting for it; (index of the key, message)."""
        while True:
            if self.error is not None:
                self.check()
            for i, key in enumerate(keys):
                box = self._mail.get(key)
                if box:
                    return i, box.popleft()
            self._wait(rank, signature, ranks)

    # telling

    def _deadlock(self) -> CollectiveMismatch:
        """The error that tells why no rank can go on: two ranks that differ, and the place of each."""
        waiting = [(r, s.waits) for r, s in enumerate(self._ranks) if not s.done and s.waits is not None]
        if not waiting:
            return CollectiveMismatch(f"no rank can go on, and none is in a collective. {_ADVICE}")
        rank, (signature, ranks) = waiting[0][0], waiting[0][1] or ((), ())
        parts = [f"no rank can go on: {self._describe(rank, signature)}, with ranks {_short(ranks)}"]
        missing = [r for r in ranks if self._ranks[r].done]
        other = next(((r, w) for r, w in waiting if w is not None and w != (signature, ranks)), None)
        if other is not None and other[1] is not None:
            parts.append(f"{self._describe(other[0], other[1][0])}, with ranks {_short(other[1][1])}")
        if missing:
            parts.append(f"rank {missing[0]} has returned and will not join")
        return CollectiveMismatch(f"{'; '.join(parts)}. {_ADVICE}")

    def _describe(self, rank: int, signature: Signature) -> str:
        kind, details = signature[0], signature[1:]
        shown = ", ".join(str(v) if n is None else f"{n}={v}" for n, v in zip(details[::2], details[1::2]))
        return f"rank {rank} is in {kind}({shown}) at {self._place(rank)}"

    def _place(self, rank: int) -> str:
        """file:line of the innermost frame of a rank's that belongs neither to this package nor to torch."""
        frame: FrameType | None = sys._current_frames().get(self._ranks[rank].ident)
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith(NOT_A_PROGRAMS) and not name.startswith("<"):
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return "an unknown place"


def _stands(bottom: CodeType | None) -> Place:
    """This thread's place in the program, which `bottom` has called."""
    out: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (code := frame.f_code) is not bottom and len(out) < _DEEP:
        own = _programs.get(code.co_filename)
        if own is None:
            own = _programs[code.co_filename] = not code.co_filename.startswith((*NOT_A_PROGRAMS, "<"))
        if own:
            out.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(out)


def _line(code: CodeType, instruction: int) -> str:
    """Where in its file an instruction stands."""
    line, _, column, _ = next(islice(code.co_positions(), instruction // 2, None))
    return f"{code.co_filename}:{line}, column {(column or 0) + 1}"


def _short(ranks: tuple[int, ...]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"({', '.join(map(str, ranks[:8]))}, ...)"
