"""`torch.distributed` on simulated ranks.

A program's own calls (`dist.all_reduce(x, group=mesh.get_group("tp"))`, `dist.get_rank()`, `dist.new_group`, object
collectives, functional collectives, send and recv) work on simulated ranks: while a run lasts, c10d's table of groups
is one table a rank, `_RankGroups` on the threads of simulated ranks and torch's own on all others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from dtensor.comm.world import innermost
from dtensor.simulation.communicator import SimulatedWorld
from dtensor.simulation.process_group import SimulatedProcessGroup, group_name_of

__all__ = ["installed", "join_torch", "leave_torch"]


class _RankGroups:
    """What c10d keeps of process groups, for one simulated rank: the attributes of its `_World`."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.comms: list[Any] = []
        self.by_ranks: dict[tuple[int, ...], SimulatedProcessGroup] = {}
        self.registered: set[str] = set()

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        return [{"pg_name": name, "ranks": list(self.pg_group_ranks[pg])} for pg, name in self.pg_names.items()]


class _PerThread:
    """Stands where c10d's table of groups stands: a simulated rank's own on its thread, torch's on the others."""

    def __init__(self, original: Any) -> None:
        object.__setattr__(self, "_original", original)

    def _target(self) -> Any:
        world = innermost("simulated")
        return object.__getattribute__(self, "_original") if world is None else cast(SimulatedWorld, world).c10d

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target(), name, value)


_lock = threading.Lock()
_runs = 0
_saved: tuple[Any, Any, Any] | None = None


def _register(name: Any, group: Any) -> None:
    """c10d's `_register_process_group`; on simulated ranks under the group's own, unique name."""
    world = innermost("simulated")
    assert _saved is not None
    if world is None or not isinstance(group, SimulatedProcessGroup):
        _saved[1](name, group)
        return
    registered = cast(SimulatedWorld, world).c10d.registered
    if group.group_name not in registered:
        registered.add(group.group_name)
        _saved[1](group.group_name, group)


def _unregister_all() -> None:
    """c10d's `_unregister_all_process_groups`; on simulated ranks only the rank's own."""
    world = innermost("simulated")
    assert _saved is not None
    if world is None:
        _saved[2]()
    else:
        leave_torch(cast(SimulatedWorld, world))


def _plugin(asked: Any, options: object = None) -> SimulatedProcessGroup | None:
    """The group for `dist.new_group` of torch 2.11; newer ones ask the default group, whose `new_group` makes it."""
    world = innermost("simulated")
    if world is None:
        raise RuntimeError("the 'simulated' backend exists inside dtensor.simulate(n)(fn) only")
    everyone = cast(SimulatedProcessGroup, cast(SimulatedWorld, world).c10d.default_pg)
    return everyone.new_group(asked.global_ranks_in_group, group_name=asked.group_id)


@contextmanager
def installed() -> Iterator[None]:
    """Give every simulated rank its own view of `torch.distributed` inside the `with`; nests."""
    global _runs, _saved
    module: Any = c10d
    with _lock:
        _runs += 1
        if _runs == 1:
            if "simulated" not in dist.Backend.backend_list:
                dist.Backend.register_backend("simulated", _plugin, extended_api=True, devices=["cpu", "cuda"])
            _saved = (module._world, module._register_process_group, module._unregister_all_process_groups)
            module._world = _PerThread(module._world)
            module._register_process_group = _register
            module._unregister_all_process_groups = _unregister_all
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            if _runs == 0 and _saved is not None:
                module._world, module._register_process_group, module._unregister_all_process_groups = _saved
                _saved = None


def join_torch(world: SimulatedWorld, store: Store) -> None:
    """Make the default group of a simulated rank. Call it on the rank's thread, its world entered."""
    world.c10d = _RankGroups()
    everyone = tuple(range(world.size))

    def make(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        members = tuple(ranks)
        groups = world.c10d.by_ranks
        group = groups.get(members)
        if group is None or group not in world.c10d.pg_map:
            group = SimulatedProcessGroup(world, members, group_name_of(world, f"mesh{len(groups)}"), "mesh")
            _enter(world, group, store)
            groups[members] = group
        return cast(dist.ProcessGroup, group)

    world.make_group = make
    world.c10d.default_pg = make(everyone)


def _enter(world: SimulatedWorld, group: SimulatedProcessGroup, store: Store) -> None:
    """Write a group into the rank's tables, as c10d writes the groups that it makes into its own."""
    tables, name = world.c10d, c10d.GroupName(group.group_name)
    tables.pg_map[group] = ("simulated", store)
    tables.pg_names[group] = name
    tables.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend("simulated")))
    tables.pg_group_ranks[group] = {r: i for i, r in enumerate(group._ranks)}
    tables.pg_to_tag[group] = f"ptd:{name}"
    for tag in ("", f"ptd:{name}"):
        tables.tags_to_pg.setdefault(tag, []).append(group)
    cast(Any, c10d)._register_process_group(name, group)


def leave_torch(world: SimulatedWorld) -> None:
    """Take the groups of a simulated rank out of torch's registry."""
    for name in world.c10d.registered:
        cast(Any, c10d)._unregister_process_group(name)
    world.c10d.registered.clear()
