"""The process groups and communicators of a mesh.

Groups are made when the mesh is, one for each axis, and are shared by all meshes sliced from one root: a group is known
by the positions that its axis runs over. Communicators are made when first asked for.

What a mesh holds of a group is dropped when the group is destroyed; where it is needed afterwards, all members make
another, as a mesh made anew does. A group that the program made and gave to a mesh is not made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch.distributed as dist

from dtensor.comm.c10d import C10dCommunicator
from dtensor.comm.communicator import Communicator
from dtensor.comm.world import World, current_world, forget
from dtensor.mesh.geometry import AxisRef, BackendConfig, MeshGeometry
from dtensor.mesh.layout import Axis, axis_digit, axis_offsets, axis_size, coalesce
from dtensor.mesh.process_groups import group_table, is_mesh_made, on_destroyed

__all__ = ["MeshGroups"]


class MeshWorld(Protocol):
    """What a mesh asks of a world that is not c10d."""

    def communicator(self, ranks: tuple[int, ...], position: int) -> Communicator:
        """The communicator of `ranks` (mesh order), in which this rank has `position`."""

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A process group of `ranks` for the user's own calls."""


class MeshGroups(MeshGeometry):
    """A grid of ranks that can communicate along its axes."""

    __slots__ = ()

    def _make_groups(self, everyone: bool = False) -> None:
        """Make the groups of all axes longer than 1, in order. In c10d worlds the members of each must do so alike.

        `everyone`: all ranks of the mesh do so now, so that groups of a mesh over the whole world can be split off.
        """
        self._ready = True
        if not self._in_c10d():
            return
        if self._position is None:
            return
        world = everyone and self._map.size == dist.get_world_size() and group_table().splits(self._device_type)
        for i, axis in enumerate(self._axes):
            if axis_size(axis) > 1:
                self._group_of(axis, i, self._rows(axis) if world else None)

    def _in_c10d(self) -> bool:
        """True where groups are those of `torch.distributed` (or would be: a mesh of pure geometry has none)."""
        return self._world is None or self._world.kind == "c10d"

    def _rows(self, axis: Axis) -> list[list[int]]:
        """The ranks along `axis`, for every place along the others."""
        offsets = axis_offsets(axis)
        first = np.ones(self._map.size, dtype=bool)
        positions = np.arange(self._map.size, dtype=np.int64)
        for size, stride in axis:
            first &= positions // stride % size == 0
        rows: list[list[int]] = self._map[positions[first][:, None] + offsets].tolist()
        return rows

    def _override(self, axis: int | None) -> BackendConfig:
        return self._overrides[axis] if self._overrides is not None and axis is not None else (None, None)

    def _along(self, axis: Axis) -> tuple[int, ...]:
        """The ranks along `axis` through this rank, in order."""
        if self._position is None:
            raise RuntimeError(
                f"rank {self._rank} is not in {self!r}, so it has no group there; "
                "test `mesh.get_coordinate() is None` first"
            )
        own = sum(self._position // stride % size * stride for size, stride in axis)
        ranks: list[int] = self._map[self._position - own + axis_offsets(axis)].tolist()
        return tuple(ranks)

    def _group_of(
        self, axis: Axis, index: int | None = None, rows: Sequence[Sequence[int]] | None = None
    ) -> dist.ProcessGroup:
        """The process group of the ranks along `axis`, in their order; shared by all meshes of one root."""
        if not self._ready:
            raise RuntimeError("DeviceMesh process groups not initialized!")
        key = canonical(axis)
        override = self._override(index)
        shared = self._groups if override != (None, None) else self._get_root_mesh()._groups
        group = self._groups.get(key) or shared.get(key)
        if group is None:
            ranks = self._along(axis)
            if key in shared or not self._is_current():
                raise RuntimeError(
                    f"the process group of the ranks {ranks} that {self!r} was made with has been destroyed; make a "
                    "mesh after init_process_group(), or of groups that are there"
                )
            if self._in_c10d():
                group = group_table().get(ranks, self._device_type, *override, rows=rows, desc=self._named(axis))
            else:
                group = _mesh_world(self._world).group(ranks)
            self._take(shared, key, group)
        return group

    def _is_current(self) -> bool:
        """False where the world of this mesh was that of a default group that has been destroyed."""
        own = self._world
        return own is None or own.kind != "c10d" or (dist.is_initialized() and own.identity == current_world().identity)

    def _take(self, groups: dict[Axis, dist.ProcessGroup | None], key: Axis, group: dist.ProcessGroup) -> None:
        """Enter `group` into the `groups` of this mesh or its root, until it is destroyed."""
        groups[key] = group
        if self._in_c10d():
            on_destroyed(group, _let_go)

    def get_group(self, mesh_dim: AxisRef | None = None) -> dist.ProcessGroup:
        """The process group of one axis, for calls to `torch.distributed`. Its ranks are in mesh order.

        Raises RuntimeError without `mesh_dim` where there are several axes and on ranks outside the mesh,
        KeyError for an unknown name, IndexError for an index out of range.
        """
        if mesh_dim is None and self.ndim != 1:
            raise RuntimeError(
                f"{self!r} has {self.ndim} dimensions: get_group(mesh_dim) needs to know which; "
                "get_all_groups() gives all of them"
            )
        flattened = self._get_root_mesh()._flattened
        if isinstance(mesh_dim, str) and mesh_dim in flattened:
            return cast(MeshGroups, flattened[mesh_dim]).get_group()
        i = self.axis_of(0 if mesh_dim is None else mesh_dim)
        return self._group_of(self._axes[i], i)

    def get_all_groups(self) -> list[dist.ProcessGroup]:
        """One process group for each axis, in order."""
        return [self.get_group(i) for i in range(self.ndim)]

    @property
    def _dim_group_names(self) -> list[str]:
        """The name of each axis's process group, which torch's functional collectives take from a mesh."""
        return [str(group.group_name) for group in self.get_all_groups()]

    def comm(self, axes: AxisRef | tuple[AxisRef, ...] | None = None) -> Communicator:
        """The communicator along one axis, or along several flattened into one, row-major in the order given.

        Without `axes` that of the only axis. The same object for the same axes. Raises RuntimeError without `axes`
        where there are several, on ranks outside the mesh and where the mesh was made without groups, KeyError or
        IndexError for an axis that is not there, ValueError for one given twice.
        """
        try:
            found = self._comms.get(axes)
        except TypeError:  # a list, or a mapping
            found = self.comm(tuple(axes) if isinstance(axes, list) else self.axis_of(axes))  # type: ignore[arg-type]
        if found is None:
            if axes is None and self.ndim != 1:
                raise RuntimeError(f"{self!r} has {self.ndim} dimensions: comm(axes) needs to know which; use 0")
            if isinstance(axes, tuple) and len(axes) == 1:
                found = self.comm(axes[0])
            elif isinstance(axes, tuple):
                places = tuple(self.axis_of(a) for a in axes)
                if len(set(places)) != len(places):
                    raise ValueError(f"comm({axes}): an axis occurs twice")
                name = "+".join(self._names[i] if self._names else str(i) for i in places)
                found = self._make_comm(coalesce(pair for i in places for pair in self._axes[i]), None, name)
            else:
                i = self.axis_of(0 if axes is None else axes)
                found = self._make_comm(self._axes[i], i)
            self._comms[axes] = found
        return found

    def _make_comm(self, axis: Axis, index: int | None, name: str | None = None) -> Communicator:
        ranks = self._along(axis)
        position = axis_digit(axis, self._position or 0)
        if not self._in_c10d():
            return _mesh_world(self._world).communicator(ranks, position)
        return C10dCommunicator(self._group_of(axis, index), ranks, position, self._named(axis, name))

    def _named(self, axis: Axis, name: str | None = None) -> str:
        """What logs and errors call an axis: "'tp' of the mesh (dp=2, tp=4)", or `name` where several meet."""
        if name is None:
            own = {canonical(a): self._names[i] if self._names else str(i) for i, a in enumerate(self._axes)}
            name = own.get(canonical(axis), "flattened")
        shape = ", ".join(f"{n}={k}" if self._names else str(k) for n, k in zip(self._names or self.shape, self.shape))
        return f"{name!r} of the mesh ({shape})"

    def _adopt(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Use `groups`, one an axis, as this root mesh's own."""
        self._ready = True
        if self._position is not None:
            for axis, group in zip(self._axes, groups):
                self._take(self._groups, canonical(axis), group)


def canonical(axis: Axis) -> Axis:
    """The same for all axes that go over the same positions in the same order: groups count as meshes do."""
    return coalesce(axis)


def _mesh_world(world: World | None) -> MeshWorld:
    return world  # type: ignore[return-value]


def _let_go(group: dist.ProcessGroup) -> None:
    """Drop what meshes, their communicators and the tables of the process hold of a group that was destroyed."""
    forget()
    for mesh in MeshGroups.all():
        for key in [key for key, own in mesh._groups.items() if own is group]:
            mesh._groups[key] = None
            if is_mesh_made(group):
                del mesh._groups[key]
        for axes in [axes for axes, comm in mesh._comms.items() if getattr(comm, "group", None) is group]:
            del mesh._comms[axes]
    C10dCommunicator.let_go(group)
