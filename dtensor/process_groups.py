"""The process groups of meshes, beside the default group of `torch.distributed`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["GroupTable", "group_table"]


class GroupTable:
    """The process groups of meshes, each made once for its ranks in their order, by its members only.

    A group's name holds its ranks and how many groups of these ranks came before, so members agree on it whatever
    other groups they are in, and ranks outside need not take part. For the same reason groups are not split off a
    default group that is bound to a device (eager NCCL): that takes all ranks of the world.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._count: dict[tuple[int, ...], int] = {}

    def get(
        self, ranks: Sequence[int], device_type: str, backend: str | None = None, options: object = None
    ) -> dist.ProcessGroup:
        """The group of `ranks`, which this rank is one of. With `options` always a new group."""
        default = c10d._get_default_group()
        members = tuple(ranks)
        backend = backend or self._backend(default, device_type)
        plain = backend == c10d._world.pg_map[default][0] and options is None
        if plain and members == tuple(range(default.size())):
            return default
        key = (members, backend)
        known = self._made.get(key) if options is None else None
        if known is not None and known in c10d._world.pg_map:
            return known
        group = self._make(members, backend, options)
        if options is None:
            self._made[key] = group
        return group

    @staticmethod
    def _backend(default: dist.ProcessGroup, device_type: str) -> str:
        """The default group's backend, or the device's own where that one cannot serve it."""
        backend = str(c10d._world.pg_map[default][0])
        usual = dist.Backend.default_device_backend_map.get(device_type)
        if usual is not None and {backend, usual} == {"gloo", "nccl"}:
            return usual
        return backend

    def _make(self, members: tuple[int, ...], backend: str, options: object) -> dist.ProcessGroup:
        timeout = getattr(options, "_timeout", None) or c10d._get_default_timeout(dist.Backend(backend))
        before = self._count.get(members, 0)
        self._count[members] = before + 1
        return _new_group(members, f"dtensor:{'_'.join(map(str, members))}:{before}", backend, options, timeout)


def _new_group(
    members: tuple[int, ...], name: str, backend: str, options: object, timeout: timedelta
) -> dist.ProcessGroup:
    """`dist.new_group` by a name of our own; only the members call it."""
    default = c10d._get_default_group()
    store = c10d._world.pg_map[default][1]
    with _unbound(default):
        group, _ = c10d._new_process_group_helper(
            len(members), members.index(default.rank()), list(members), dist.Backend(backend), store,
            c10d.GroupName(name), backend_options=options, timeout=timeout, group_desc="mesh",
        )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(members)}
    return cast(dist.ProcessGroup, group)


@contextmanager
def _unbound(default: dist.ProcessGroup) -> Iterator[None]:
    """Hide the device that the default group is bound to, so that torch makes a group instead of splitting one off."""
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
