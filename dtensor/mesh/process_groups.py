"""The process groups of meshes, beside the default group of `torch.distributed`, and what is told of their end.

A gloo group has threads, which end with the group object: `destroy_process_group` takes it out of torch's tables, and
waits for the threads if nobody else holds it. Whoever does holds them too, beyond the interpreter's end, where a thread
that drops the last tensor it has sent aborts the process. So what holds a group here lets go of it when it is
destroyed (`on_destroyed`), and groups that nobody destroys are destroyed at the end of the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["GroupTable", "group_table", "is_mesh_made", "on_destroyed"]

_PREFIX = "dtensor:"
_PATIENCE = 3.0
"""Seconds that the end of the process waits for collectives that are under way."""


_mesh_made: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class GroupTable:
    """The process groups of meshes, each made once for its ranks in their order, by its members only.

    A group's name holds its ranks and how many groups of these ranks came before, so members agree on it whatever
    other groups they are in, and ranks outside need not take part.

    NCCL communicators are bound to this process's device and connected at once. Splitting one off the default group's
    shares its resources and takes no rendezvous, but all ranks of the world must take part. So that is done only for
    the axes of a mesh over the whole world, which all ranks make alike, and where the default group is bound to a
    device (`init_process_group(device_id=...)`), as only then it is sure to be connected. What is split together, a
    *family* of rows that share out the world, is remembered together: whether one is known is the same on all ranks.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._count: dict[tuple[int, ...], int] = {}
        self._families: set[tuple[tuple[int, ...], ...]] = set()
        self.process = os.getpid()

    def get(
        self, ranks: Sequence[int], device_type: str, backend: str | None = None, options: object = None,
        rows: Sequence[Sequence[int]] | None = None, desc: str = "mesh",
    ) -> dist.ProcessGroup:  # fmt: skip
        """The group of `ranks`, which this rank is one of. With `options` always a new group.

        `rows`: the ranks of all groups like this one, in one order on all ranks, where together they are the world and
        every rank makes its own now. `desc` is what logs call the group.
        """
        default = c10d._get_default_group()
        members = tuple(ranks)
        backend = backend or self._backend(default, device_type)
        plain = backend == c10d._world.pg_map[default][0] and options is None
        if plain and members == tuple(range(default.size())):
            return default
        key = (members, backend)
        family = None if rows is None or not plain else tuple(tuple(row) for row in rows)
        parent = None if family is None or family in self._families else _parent(default, backend)
        known = self._made.get(key) if options is None and parent is None else None
        if known is not None:
            return known
        if parent is not None and family is not None:
            self._families.add(family)
            options = _split(parent, family.index(members) + 1)
            group = self._make(members, backend, options, device_type, desc)
            self._made[key] = group
            return group
        group = self._make(members, backend, options, device_type, desc)
        if options is None:
            self._made[key] = group
        return group

    def let_go(self, group: dist.ProcessGroup) -> None:
        """Forget a group that was destroyed: the next mesh over its ranks makes another."""
        self._made = {key: made for key, made in self._made.items() if made is not group}

    def splits(self, device_type: str) -> bool:
        """True where the groups of a whole world's mesh of such devices are split off the default group's."""
        default = c10d._get_default_group()
        return _parent(default, self._backend(default, device_type)) is not None

    @staticmethod
    def _backend(default: dist.ProcessGroup, device_type: str) -> str:
        """The default group's backend, or the device's own where that one cannot serve it."""
        backend = str(c10d._world.pg_map[default][0])
        usual = dist.Backend.default_device_backend_map.get(device_type)
        if usual is not None and {backend, usual} == {"gloo", "nccl"}:
            return usual
        return backend

    def _make(
        self, members: tuple[int, ...], backend: str, options: object, device_type: str, desc: str
    ) -> dist.ProcessGroup:  # fmt: skip
        timeout = getattr(options, "_timeout", None) or c10d._get_default_timeout(dist.Backend(backend))
        before = self._count.get(members, 0)
        self._count[members] = before + 1
        name = f"{_PREFIX}{'_'.join(map(str, members))}:{before}"
        group = _new_group(members, name, backend, options, timeout, _device(backend, device_type), desc)
        _mesh_made.add(group)
        return group


def _is_nccl(backend: str) -> bool:
    return "nccl" in backend


def _parent(default: dist.ProcessGroup, backend: str) -> object:
    """The default group's NCCL backend, where a communicator can be split off it; else None."""
    if not _is_nccl(backend) or default.bound_device_id is None:
        return None
    return c10d._get_split_source(default)


def _split(parent: object, color: int) -> object:
    """Options for a communicator split off `parent` by the ranks that give the same `color`, which is positive."""
    options: Any = c10d.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = False
    options.split_from, options.split_color = parent, color
    made: object = options
    return made


def _device(backend: str, device_type: str) -> torch.device | None:
    """The device that an NCCL communicator is bound to: the default group's, or the current one."""
    if not _is_nccl(backend) or device_type == "cpu":
        return None
    bound: torch.device | None = c10d._get_default_group().bound_device_id
    if bound is not None and bound.type == device_type:
        return bound
    handle = getattr(torch, device_type, None)
    if handle is None or not handle.is_available():
        return None
    return torch.device(device_type, handle.current_device())


def _new_group(
    members: tuple[int, ...], name: str, backend: str, options: object, timeout: timedelta,
    device: torch.device | None, desc: str,
) -> dist.ProcessGroup:  # fmt: skip
    """`dist.new_group` by a name of our own, connected to `device` at once if there is one; only members call it."""
    default = c10d._get_default_group()
    store = c10d._world.pg_map[default][1]
    if options is not None and hasattr(options, "_timeout"):
        options._timeout = timeout
    with _unbound(default):
        group, _ = c10d._new_process_group_helper(
            len(members), members.index(default.rank()), list(members), dist.Backend(backend), store,
            c10d.GroupName(name), backend_options=options, timeout=timeout, device_id=device, group_desc=desc,
        )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(members)}
    return cast(dist.ProcessGroup, group)


@contextmanager
def _unbound(default: dist.ProcessGroup) -> Iterator[None]:
    """Hide the device that the default group is bound to: torch would split a group off it, by a hash of its ranks."""
    device = default.bound_device_id
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


_tables: list[tuple[weakref.ref[dist.ProcessGroup], GroupTable]] = []


def group_table() -> GroupTable:
    """The table of the current default group. Raises ValueError where torch.distributed is not initialised."""
    default = c10d._get_default_group()
    for ref, table in _tables:
        if ref() is default:
            return table
    _tables[:] = [(r, t) for r, t in _tables if r() is not None]
    table = GroupTable()
    _tables.append((weakref.ref(default), table))
    return table


class _Ranks(dict[int, int]):
    """A group's entry in c10d's table of ranks, which torch drops when the group is destroyed, in whatever way."""


def on_destroyed(group: dist.ProcessGroup, told: Callable[[dist.ProcessGroup], None]) -> None:
    """Have `told(group)` called when `group` is destroyed, once however often this is asked for."""
    ranks = c10d._world.pg_group_ranks
    if group not in ranks or isinstance(ranks[group], _Ranks):
        return
    entry, ref = _Ranks(ranks[group]), weakref.ref(group)

    def gone() -> None:
        destroyed = ref()
        if destroyed is not None:
            for _, table in _tables:
                table.let_go(destroyed)
            told(destroyed)

    weakref.finalize(entry, gone).atexit = False
    ranks[group] = entry


def is_mesh_made(group: dist.ProcessGroup) -> bool:
    """True for a group that a table made, and can make again; not for the program's own and the default one."""
    return group in _mesh_made


@atexit.register
def _end() -> None:
    """Destroy gloo groups that meshes were made in and that the program has left to the end of the process.

    Not after a fork, in which their threads are missing. Other backends end in their own way.
    """
    if not dist.is_initialized() or all(table.process != os.getpid() for _, table in _tables):
        return
    if any("gloo" not in c or "nccl" in c for c in map(str, c10d._world.pg_backend_config.values())):
        return

    def destroy() -> None:
        with suppress(Exception):
            dist.destroy_process_group()

    with suppress(RuntimeError):  # no more threads
        thread = threading.Thread(target=destroy, daemon=True)
        thread.start()
        thread.join(_PATIENCE)
