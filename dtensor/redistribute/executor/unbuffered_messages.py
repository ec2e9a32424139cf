"""How a group exchanges parts without a buffer around them: parts leave from where they lie and go where they belong.

    gloo    one message (or several) from rank to rank over the group's own connections
    NCCL    one all-to-all of lists of tensors, which may be views and may be the same one twice

On gloo a part that is not one piece of the result (columns) arrives in several messages, in turns, in one or more spare
tensors. All that is sent is offered at once, so that no rank waits for another's turn, and a message travels when the
other side asks for it: nobody keeps what has not been asked for.

Dispatch modes see messages as what they are, sends and receives; `dtensor.comm.observers`, and so `CommDebugMode`, are
told of one collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtensor.comm.c10d import C10dCommunicator
from dtensor.comm.communicator import Communicator
from dtensor.comm.issue import in_queue, issued
from dtensor.comm.observers import MESSAGE, observers, standing_for
from dtensor.comm.wire import carried

__all__ = ["Lists", "Messages", "Messenger", "Turn", "messenger_of"]

_TAG, _ROUNDS, _NUMBERS = 1 << 30, 1 << 12, 1 << 17
"""A message's tag: what collectives and programs do not use, which exchange of the group it is of, which it is in it.

So what an exchange that failed left under way is not taken for the next one's.
"""

_begun: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
"""How many exchanges each group has begun."""

_CPU = torch.device("cpu")
_SPARES = 8
"""Messages at most that are received in turns at one time."""


class Turn(NamedTuple):
    """A message that is not received in place. `put` is called with what arrived: 1-D, `numel` elements.

    `position` None: nothing arrives, `put` is called with an empty tensor when its turn has come.
    """

    position: int | None
    number: int
    numel: int
    put: Callable[[torch.Tensor], None]


class Messenger:
    """What exchanges parts for a communicator."""

    in_place_only: bool
    """True where every part must be received as one message, in place."""

    def exchange(
        self, kind: str, x: torch.Tensor, out: torch.Tensor, leave: Sequence[tuple[int, Sequence[torch.Tensor]]],
        arrive: Sequence[tuple[int, int, torch.Tensor]], turns: Sequence[Turn], room: int,
    ) -> None:  # fmt: skip
        """One exchange, of `kind`, that fills `out` from the contiguous `x`.

        `leave`: for positions, what each is sent, message by message, contiguous; `arrive`: from a position the message
        of a number into a contiguous view; `turns` come after those, in order, through spare tensors of at most `room`
        elements together where one is not larger. Raises CollectiveError where the group fails.
        """
        raise NotImplementedError


def messenger_of(comm: Communicator, device_type: str) -> Messenger | None:
    """How the group of a communicator exchanges parts of tensors on `device_type`, alike on all ranks.

    None for groups that are written in Python, and where torch compares what ranks issue.
    """
    if not isinstance(comm, C10dCommunicator) or comm.size == 1 or not comm.compiled:
        return None
    if dist.get_debug_level() is dist.DebugLevel.DETAIL:
        return None
    if device_type == "cpu":
        try:
            own = comm.group._get_backend(_CPU)
        except RuntimeError:  # a group for other devices only
            return None
        gloo: Any = getattr(dist, "ProcessGroupGloo", None)
        return Messages(comm) if gloo is not None and type(own) is gloo else None
    return Lists(comm) if "nccl" in c10d.get_backend_config(comm.group) else None


class Messages(Messenger):
    """The messages of a gloo group, which carries bytes of any dtype."""

    in_place_only = False

    def __init__(self, place: C10dCommunicator) -> None:
        self._place, self._at = place, place.group_rank
        self._begun = _begun.setdefault(place.group, [0])

    def exchange(
        self, kind: str, x: torch.Tensor, out: torch.Tensor, leave: Sequence[tuple[int, Sequence[torch.Tensor]]],
        arrive: Sequence[tuple[int, int, torch.Tensor]], turns: Sequence[Turn], room: int,
    ) -> None:  # fmt: skip
        """See `Messenger`."""
        received = sum([t.numel() for *_, t in arrive]) + sum([t.numel for t in turns if t.position is not None])
        if len(observers):
            observers.report(kind, self._place.ranks, received, x.itemsize)
        self._begun[0] += 1
        under_way = lambda: _UnderWay(self, x, leave, arrive, turns, room)  # noqa: E731
        issued(self._place, kind, out, under_way, ()).wait()

    def receive(self, into: torch.Tensor, position: int, number: int) -> Any:
        """The work of the message of that number from a position."""
        if not torch._C._len_torch_dispatch_stack():
            return self._backend().recv([into], self._at(position), self._tag(number))
        with standing_for(MESSAGE):
            return self._place.group.recv([into], self._at(position), self._tag(number))

    def send(self, x: torch.Tensor, position: int, number: int) -> Any:
        """The work of a message to a position."""
        if not torch._C._len_torch_dispatch_stack():
            return self._backend().send([x], self._at(position), self._tag(number))
        with standing_for(MESSAGE):
            return self._place.group.send([x], self._at(position), self._tag(number))

    def _backend(self) -> Any:
        """gloo's own group; not kept, as it has threads that end with it."""
        return self._place.group._get_backend(_CPU)

    def _tag(self, number: int) -> int:
        return _TAG + self._begun[0] % _ROUNDS * _NUMBERS + number % _NUMBERS


class _UnderWay:
    """An exchange by messages, begun when it is made; `wait()` ends it."""

    def __init__(
        self, by: Messages, x: torch.Tensor, leave: Sequence[tuple[int, Sequence[torch.Tensor]]],
        arrive: Sequence[tuple[int, int, torch.Tensor]], turns: Sequence[Turn], room: int,
    ) -> None:  # fmt: skip
        self._by, self._turns = by, turns
        self._coming = [t for t in turns if t.position is not None]
        self._asked = 0
        most = max([t.numel for t in self._coming], default=0)
        spares = min(_SPARES, len(self._coming), max(1, room // most)) if most else 0
        self._spares = [x.new_empty(most) for _ in range(spares)]
        self._pending: list[tuple[Any, torch.Tensor]] = []
        self._works = [by.receive(view, position, number) for position, number, view in arrive]
        for _ in range(spares):
            self._ask()
        self._sent = [by.send(t, position, i) for position, some in leave for i, t in enumerate(some)]
        self._nothing = x.new_empty(0)

    def _ask(self) -> None:
        """Ask for the next message that is received in its turn, into the spare that is free."""
        if self._asked < len(self._coming):
            turn = self._coming[self._asked]
            spare = self._spares[self._asked % len(self._spares)].narrow(0, 0, turn.numel)
            self._pending.append((self._by.receive(spare, turn.position or 0, turn.number), spare))
            self._asked += 1

    def wait(self) -> None:
        """Until all has arrived and left. RuntimeError where the group fails.

        Where a part cannot be put in its place, all others are taken all the same, so that no rank waits for this one.
        """
        failure: Exception | None = None
        for work in self._works:
            work.wait()
        for turn in self._turns:
            message = self._nothing
            if turn.position is not None:
                work, message = self._pending.pop(0)
                work.wait()
            if failure is None:
                try:
                    turn.put(message)
                except Exception as e:
                    failure = e
            if turn.position is not None:
                self._ask()
        for work in self._sent:
            work.wait()
        if failure is not None:
            raise failure


class Lists(Messenger):
    """The all-to-all of lists of an NCCL group, which are sends and receives of one launch."""

    in_place_only = True

    def __init__(self, place: C10dCommunicator) -> None:
        self._place = place

    def exchange(
        self, kind: str, x: torch.Tensor, out: torch.Tensor, leave: Sequence[tuple[int, Sequence[torch.Tensor]]],
        arrive: Sequence[tuple[int, int, torch.Tensor]], turns: Sequence[Turn], room: int,
    ) -> None:  # fmt: skip
        """See `Messenger`; here `turns` are this rank's own part only."""
        place = self._place
        nothing = carried(x.new_empty(0))
        outputs, inputs = [nothing] * place.size, [nothing] * place.size
        for position, _, view in arrive:
            outputs[place.group_rank(position)] = carried(view)
        for position, some in leave:
            inputs[place.group_rank(position)] = carried(some[0])
        options = c10d.AllToAllOptions()
        options.asyncOp = not in_queue(x)
        with standing_for(kind):
            sent = issued(place, kind, out, place.group.alltoall, (outputs, inputs, options))
        for turn in turns:
            turn.put(nothing)
        sent.wait()
