"""Who this rank is.

There are three kinds of worlds, and user code does not see which one it runs in:

    c10d        one process a rank, the default group of `torch.distributed` (gloo, NCCL, torch's fake)
    simulated   one thread a rank, all in one process (`dtensor.simulate`)
    fake        one rank of a world of any size that does not exist (`dtensor.simulate.fake_world`)

Simulated and fake worlds are entered per thread and may be nested; where none is entered, the world
is that of `torch.distributed`.

What keeps a mesh alive, and with it its groups, communicators, plans and moves, is what the program holds (the mesh,
its tensors) and the tables of this process that are declared by `kept`. Those are emptied when a world has ended or a
group was destroyed, so nothing that has ended is found again, or outlives its end.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch.distributed as dist

__all__ = [
    "World", "WorldKind", "check_own", "current_world", "ended", "entered", "forget", "fresh_identity", "has_world",
    "innermost", "kept",
]  # fmt: skip

WorldKind = Literal["c10d", "simulated", "fake"]

T = TypeVar("T")
_serial = itertools.count()
_clears: list[Callable[[], object]] = []


class World:
    """One rank's view of its world.

    `rank` in 0..size-1, `kind` as in the module's table, `identity` a hashable token that two ranks of
    one world share and that no other world has. Worlds that are not c10d derive a class from this one
    that also makes communicators.
    """

    __slots__ = ("identity", "kind", "rank", "size")

    def __init__(self, kind: WorldKind, rank: int, size: int, identity: Hashable) -> None:
        self.kind: WorldKind = kind
        self.rank = rank
        self.size = size
        self.identity = identity

    def __repr__(self) -> str:
        return f"World({self.kind!r}, rank={self.rank}, size={self.size})"


class _Entered(threading.local):
    def __init__(self) -> None:
        self.stack: list[World] = []


_entered = _Entered()


def kept(table: T) -> T:
    """`table`, of the whole process, that may hold specs, meshes, communicators or what was made of them.

    A container, or a function behind `lru_cache`; it must bear to be emptied at any time.
    """
    known: Any = table
    _clears.append(known.cache_clear if hasattr(known, "cache_clear") else known.clear)
    return table


def forget() -> None:
    """Empty all that is `kept`."""
    for clear in _clears:
        clear()


def ended() -> None:
    """A simulated or fake world has ended: forget what it left, unless this thread is still inside of another."""
    if not _entered.stack:
        forget()


def fresh_identity(kind: WorldKind) -> tuple[str, int]:
    """A token for a new world of `kind`, never given out before in this process."""
    return kind, next(_serial)


@contextmanager
def entered(world: World) -> Iterator[World]:
    """Make `world` the current one of this thread inside the `with`."""
    _entered.stack.append(world)
    try:
        yield world
    finally:
        _entered.stack.pop()


def current_world() -> World:
    """This rank's world: the innermost one entered on this thread, else that of `torch.distributed`.

    Raises RuntimeError where there is neither.
    """
    if _entered.stack:
        return _entered.stack[-1]
    if not dist.is_initialized():
        raise RuntimeError(
            "There is no world: torch.distributed is not initialised. Call torch.distributed.init_process_group(), "
            "start the program with torchrun, or run the function on simulated ranks: dtensor.simulate(4)(fn)"
        )
    return World("c10d", dist.get_rank(), dist.get_world_size(), _c10d_identity())


_identities: weakref.WeakKeyDictionary[dist.ProcessGroup, Hashable] = weakref.WeakKeyDictionary()
"""Of default groups: one at a time in a process, or in a thread where torch's ranks are threads."""


def _c10d_identity() -> Hashable:
    """A token of the default group: another one after `destroy_process_group` and a new initialisation."""
    group = dist.distributed_c10d._get_default_group()
    found = _identities.get(group)
    if found is None:
        found = _identities[group] = fresh_identity("c10d")
    return found


def has_world() -> bool:
    """True where `current_world()` has an answer."""
    return bool(_entered.stack) or dist.is_initialized()


def check_own(world: World, what: str) -> None:
    """RuntimeError where one simulated rank uses `what` of another rank, or of another run.

    A thread that a rank started itself has entered no world, and counts as that rank.
    """
    here = innermost("simulated")
    if here is not None and here is not world:
        raise RuntimeError(
            f"{what} was made by rank {world.rank} of a simulated run and is used by rank {here.rank}"
            + ("" if here.identity == world.identity else " of another run")
            + "; make it inside the function that is simulated, on every rank (a cache or a global is shared by all)"
        )


def innermost(kind: WorldKind) -> World | None:
    """The innermost world of `kind` entered on this thread, or None."""
    for world in reversed(_entered.stack):
        if world.kind == kind:
            return world
    return None
