"""DeviceMesh: ranks on a grid, with names for the axes and a communicator for each.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh["tp"]                        the 1-D mesh of this rank's row; shares the groups of `mesh`
    mesh.coord                        this rank's place in it, None outside
    mesh.comm("tp"), mesh.comm((0, 1))   collectives along one axis, or along several flattened into one

Names, signatures and exception types are those of `torch.distributed.device_mesh`. A mesh object belongs to
one rank. Positions along an axis follow the mesh, also where its ranks are in no ascending order.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dtensor.comm import Communicator
from dtensor.comm_c10d import C10dCommunicator, group_table
from dtensor.mesh_layout import (
    Axis,
    axis_digit,
    axis_offsets,
    axis_size,
    coalesce,
    overlap,
    row_major,
    split_axis,
)
from dtensor.world import World, current_world, has_world

if TYPE_CHECKING:
    from typing import TypeAlias

    Ranks: TypeAlias = npt.NDArray[np.int64]

__all__ = ["DeviceMesh", "as_mesh", "init_device_mesh"]

BackendConfig = tuple[str | None, object]
Override = dict[Any, Any]
AxisRef = int | str


class MeshWorld(Protocol):
    """What a mesh asks of a world that is not c10d."""

    def communicator(self, ranks: tuple[int, ...], position: int) -> Communicator:
        """The communicator of `ranks` (mesh order), in which this rank has `position`."""

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A process group of `ranks` for the user's own calls."""


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[DeviceMesh] = []


_active = _Active()


class DeviceMesh:
    """Ranks on a grid.

    `mesh` is a (nested) list, array or tensor of global ranks, no rank twice. Without a process group one is
    made from the environment; on CUDA the device is set from LOCAL_RANK unless one was chosen before.
    `mesh_dim_names` names the axes, `backend_override` gives (backend, options) for each. `_init_backend=False`
    makes a mesh without groups, `_rank` one as seen by another rank: both for geometry only.

    `shape`, `ndim` and `coord` (None on ranks outside) are plain attributes. Equal meshes have the same rank
    map, axes, names and device type, and belong to the same rank of the same world; hashes agree.
    Raises TypeError without `mesh`, ValueError for a rank that occurs twice, a wrong number of names or of
    overrides, and RuntimeError for more ranks than the world has.
    """

    __slots__ = (
        "__weakref__", "_axes", "_comms", "_device_type", "_flattened", "_groups", "_hash", "_key", "_map", "_names",
        "_overrides", "_position", "_rank", "_ready", "_root", "_slices", "_world", "coord", "ndim", "shape",
    )  # fmt: skip

    shape: tuple[int, ...]
    ndim: int
    coord: tuple[int, ...] | None

    def __init__(
        self,
        device_type: str,
        mesh: object = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Sequence[BackendConfig] | None = None,
        _init_backend: bool = True,
        _rank: int | None = None,
    ) -> None:
        if mesh is None:
            raise TypeError("DeviceMesh(device_type, mesh) needs the ranks, for instance [[0, 1], [2, 3]]")
        ranks = _as_ranks(mesh)
        if backend_override is not None and len(backend_override) != ranks.ndim:
            raise ValueError(
                f"backend_override has {len(backend_override)} entries for {ranks.ndim} mesh dimensions; "
                "give one (backend, options) pair each"
            )
        names = _as_names(mesh_dim_names, ranks.ndim)
        flat = ranks.reshape(-1)
        is_range = bool(flat.size == 0 or (flat[0] == 0 and flat[-1] == flat.size - 1 and (np.diff(flat) == 1).all()))
        if not is_range and np.unique(flat).size != flat.size:
            raise ValueError(f"DeviceMesh: a rank occurs twice in {ranks.tolist()}")
        key: object = flat.size if is_range else flat.tobytes()
        world = self._find_world(device_type, flat.size, _init_backend, _rank)
        self._setup(device_type, flat, key, row_major(ranks.shape), names, world, _rank, None)
        self._overrides: tuple[BackendConfig, ...] | None = tuple(backend_override) if backend_override else None
        if _init_backend:
            self._make_groups()

    @staticmethod
    def _find_world(device_type: str, count: int, init_backend: bool, rank: int | None) -> World | None:
        """The world of a new mesh of `count` ranks, made where it is missing; None for a mesh of pure geometry."""
        if not has_world():
            if not init_backend and rank is not None:
                return None
            if init_backend:
                dist.init_process_group()
        world = current_world()
        if init_backend:
            if count > world.size:
                raise RuntimeError(
                    f"Mesh should not be bigger than default world size {world.size}, but found {count} ranks!"
                )
            if world.kind == "c10d":
                _choose_device(device_type, world)
        return world

    def _setup(
        self,
        device_type: str,
        rank_map: Ranks,
        key: object,
        axes: tuple[Axis, ...],
        names: tuple[str, ...] | None,
        world: World | None,
        rank: int | None,
        root: DeviceMesh | None,
    ) -> None:
        self._device_type = device_type
        self._map = rank_map
        self._key = key
        self._axes = axes
        self._names = names
        self._world = world
        self._rank = world.rank if rank is None and world is not None else rank
        self._root = root
        self._overrides = None
        self._ready = False
        self._groups: dict[Axis, dist.ProcessGroup] = {}
        self._flattened: dict[str, DeviceMesh] = {}
        self._slices: dict[tuple[str, ...], DeviceMesh] = {}
        self._comms: dict[int | tuple[int, ...], Communicator] = {}
        self._hash: int | None = None
        self.shape = tuple(axis_size(a) for a in axes)
        self.ndim = len(axes)
        self._position = self._find_position()
        self.coord = None if self._position is None else tuple(axis_digit(a, self._position) for a in axes)

    def _find_position(self) -> int | None:
        """Where this rank stands in the rank map."""
        if self._root is not None:
            return self._root._position
        if self._rank is None:
            return None
        if isinstance(self._key, int):
            return self._rank if self._rank < self._key else None
        found = np.flatnonzero(self._map == self._rank)
        return int(found[0]) if found.size else None

    def _derive(self, axes: Sequence[Axis], names: tuple[str, ...] | None) -> DeviceMesh:
        """A mesh of other axes over the same rank map; shares groups through the root."""
        out = DeviceMesh.__new__(DeviceMesh)
        root = self._get_root_mesh()
        out._setup(self._device_type, self._map, self._key, tuple(axes), names, self._world, self._rank, root)
        out._ready = root._ready
        if self is not root:
            out._groups.update(self._groups)
        return out

    # what it is

    @property
    def device_type(self) -> str:
        """"cpu", "cuda"."""
        return self._device_type

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The axes' names."""
        return self._names

    @property
    def ranks(self) -> Ranks:
        """The global ranks of this (sub-)mesh as an int64 array of the mesh's shape.

        Raises RuntimeError for a sub-mesh on a rank that is in none of its kind.
        """
        base = 0
        if prod(self.shape) != self._map.size:
            if self._position is None:
                raise RuntimeError(
                    f"{self!r} is a part of a larger mesh, one for each place along the other axes; "
                    f"rank {self._rank} is in none of them"
                )
            base = self._position - sum(
                self._position // stride % size * stride for axis in self._axes for size, stride in axis
            )
        positions = np.full((1,) * self.ndim, base, dtype=np.int64)
        for i, axis in enumerate(self._axes):
            positions = positions + axis_offsets(axis).reshape((-1,) + (1,) * (self.ndim - 1 - i))
        return self._map[positions.reshape(self.shape)]

    @property
    def mesh(self) -> torch.Tensor:
        """The global ranks as an int32 CPU tensor of the mesh's shape, made anew each time."""
        return torch.tensor(self.ranks.astype(np.int32), dtype=torch.int32, device="cpu")

    def size(self, mesh_dim: int | None = None) -> int:
        """Ranks along one axis, or in all. Raises IndexError for an axis that is not there."""
        return prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def axis_of(self, axis: AxisRef) -> int:
        """The index, 0 to ndim-1, of an axis given by index (may be negative) or name.

        Raises KeyError for an unknown name, IndexError for an index out of range.
        """
        if isinstance(axis, str):
            if self._names is None:
                raise KeyError(f"No `mesh_dim_names` found: this mesh has no axis {axis!r}, use an index")
            if axis not in self._names:
                raise KeyError(f"Mesh dimension '{axis}' does not exist. Available are {self._names}")
            return self._names.index(axis)
        if not -self.ndim <= axis < self.ndim:
            raise IndexError(f"mesh dimension {axis} is out of range for a mesh of {self.ndim} dimensions")
        return axis % self.ndim

    def axis_name(self, axis: int) -> str:
        """The name of axis `axis`, or its number where the mesh has no names."""
        return self._names[axis] if self._names else str(axis % self.ndim)

    def get_rank(self) -> int:
        """This process's global rank. Raises RuntimeError where there is no world."""
        return current_world().rank if self._rank is None else self._rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's place in the mesh, None outside: `mesh.coord`."""
        return self.coord

    def get_local_rank(self, mesh_dim: AxisRef | None = None) -> int:
        """This rank's position along one axis, in mesh order.

        Raises RuntimeError without `mesh_dim` where there are several axes, IndexError on a rank outside,
        KeyError or IndexError for an axis that is not there.
        """
        if mesh_dim is None and self.ndim > 1:
            raise RuntimeError(f"{self!r} has {self.ndim} dimensions: get_local_rank(mesh_dim) needs to know which")
        axis = self.axis_of(0 if mesh_dim is None else mesh_dim)
        if self.coord is None:
            raise IndexError(f"rank {self._rank} is not in {self!r}, so it has no local rank there")
        return self.coord[axis]

    # groups and communicators

    def _make_groups(self) -> None:
        """Make the groups of all axes longer than 1, in order. In c10d worlds the members of each must do so alike."""
        self._ready = True
        if not self._in_c10d():
            return
        table = group_table()
        if table.all_must_call():
            for i, axis in enumerate(self._axes):
                table.make_all([tuple(row) for row in self._rows(axis)], self._device_type, *self._override(i))
        if self._position is None:
            return
        for i, axis in enumerate(self._axes):
            if axis_size(axis) > 1:
                self._group_of(axis, i)

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

    def _group_of(self, axis: Axis, index: int | None = None) -> dist.ProcessGroup:
        """The process group of the ranks along `axis`, whatever their order; shared by all meshes of one root."""
        if not self._ready:
            raise RuntimeError("DeviceMesh process groups not initialized!")
        key = _unordered(axis)
        override = self._override(index)
        shared = self._groups if override != (None, None) else self._get_root_mesh()._groups
        group = self._groups.get(key) or shared.get(key)
        if group is None:
            ranks = self._along(axis)
            if self._in_c10d():
                group = group_table().get(ranks, self._device_type, *override)
            else:
                group = _mesh_world(self._world).group(ranks)
            shared[key] = group
        return group

    def get_group(self, mesh_dim: AxisRef | None = None) -> dist.ProcessGroup:
        """The process group of one axis, for calls to `torch.distributed`. Its ranks are in ascending order.

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
            return flattened[mesh_dim].get_group()
        i = self.axis_of(0 if mesh_dim is None else mesh_dim)
        return self._group_of(self._axes[i], i)

    def get_all_groups(self) -> list[dist.ProcessGroup]:
        """One process group for each axis, in order."""
        return [self.get_group(i) for i in range(self.ndim)]

    def comm(self, axes: AxisRef | tuple[AxisRef, ...] = 0) -> Communicator:
        """The communicator along one axis, or along several flattened into one, row-major in the order given.

        The same object for the same axes. Raises RuntimeError on ranks outside the mesh and where the mesh
        was made without groups, KeyError or IndexError for an axis that is not there.
        """
        found = self._comms.get(axes)  # type: ignore[arg-type]
        if found is None:
            if isinstance(axes, tuple) and len(axes) > 1:
                places = tuple(self.axis_of(a) for a in axes)
                if len(set(places)) != len(places):
                    raise ValueError(f"comm({axes}): an axis occurs twice")
                found = self._make_comm(coalesce(pair for i in places for pair in self._axes[i]), None)
            else:
                i = self.axis_of(axes[0] if isinstance(axes, tuple) else axes)
                found = self._make_comm(self._axes[i], i)
            self._comms[axes] = found  # type: ignore[index]
        return found

    def _make_comm(self, axis: Axis, index: int | None) -> Communicator:
        ranks = self._along(axis)
        position = axis_digit(axis, self._position or 0)
        if not self._in_c10d():
            return _mesh_world(self._world).communicator(ranks, position)
        return C10dCommunicator(self._group_of(axis, index), ranks, position)

    # other meshes from this one

    def __getitem__(self, mesh_dim_names: str | Sequence[str]) -> DeviceMesh:
        """The sub-mesh of the named axes, given in mesh order, with this rank in it.

        All names of the mesh give the mesh itself; names of meshes flattened before work on the root (as in
        torch, with a deprecation warning). Raises RuntimeError for a mesh without names and for axes that
        overlap, KeyError for a name that is not there and for names out of order, TypeError for no names.
        """
        if not self._names:
            raise RuntimeError("Cannot slice a DeviceMesh without mesh_dim_names!")
        if not isinstance(mesh_dim_names, str | tuple | list):
            raise TypeError(
                f"a DeviceMesh is sliced by the names of its dimensions {self._names}, got {mesh_dim_names!r}"
            )
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if names == self._names:
            return self
        made = self._slices.get(names)
        if made is None or any(name not in self._names for name in names):
            made = self._slices[names] = self._derive(self._named_axes(names), names)
        return made

    def _named_axes(self, names: tuple[str, ...]) -> list[Axis]:
        own = self._names or ()
        root = self._get_root_mesh()
        flattened = root._flattened if self == root else {}
        unknown = [name for name in names if name not in own and name not in flattened]
        if unknown or not names:
            raise KeyError(f"Invalid mesh_dim_names {names} specified. Valid mesh_dim_names are {[*own, *flattened]}.")
        if any(name not in own for name in names):
            warnings.warn(
                "Slicing a flattened dim from root mesh is deprecated: keep the mesh that _flatten() returned.",
                FutureWarning,
                stacklevel=3,
            )
        axes = [self._axes[own.index(n)] if n in own else flattened[n]._axes[0] for n in names]
        strides = [stride for axis in axes for size, stride in axis if size > 1]
        if strides != sorted(strides, reverse=True):
            raise KeyError(
                f"Invalid mesh_dim_names {names} specified. Mesh dim indices should be in ascending order, as in {own}."
            )
        if overlap(axes):
            raise RuntimeError(f"Slicing overlapping dim_names {names} is not allowed.")
        return axes

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: object = None) -> DeviceMesh:
        """The 1-D mesh over all axes of this one, row-major, named `mesh_dim_name` or "dp_cp".

        Made once for a name. Raises RuntimeError for a mesh without names, ValueError for a name that the root
        or another flattened mesh has.
        """
        if not self._names:
            raise RuntimeError("Cannot flatten a DeviceMesh without mesh_dim_names!")
        name = mesh_dim_name or "_".join(self._names)
        if self.ndim == 1 and name in self._names:
            return self
        root = self._get_root_mesh()
        if name in (root._names or ()):
            raise ValueError(f"{name} already exists in {root!r}; give the flattened mesh another name")
        axis = coalesce(pair for a in self._axes for pair in a)
        made = root._flattened.get(name)
        if made is not None:
            if made._axes != (axis,):
                raise ValueError(f"a flattened mesh {name} of other dimensions exists; choose another name")
            return made
        made = self._derive((axis,), (name,))
        if backend_override is not None:
            made._overrides = _normalise_override({0: backend_override}, 1, None)
        if made._ready:
            made._make_groups()
        root._flattened[name] = made
        return made

    flatten = _flatten

    def _unflatten(
        self,
        dim: AxisRef,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Override | None = None,
    ) -> DeviceMesh:
        """This mesh with axis `dim` seen as several, `mesh_sizes` major to minor, named `mesh_dim_names`.

        Raises ValueError for an axis that is not there and for sizes that do not multiply to its size,
        RuntimeError for a wrong number of names.
        """
        if isinstance(dim, str):
            if dim not in (self._names or ()):
                raise ValueError(f"dim {dim} specified in `_unflatten` is not in {self._names}")
        elif not -self.ndim <= dim < self.ndim:
            raise ValueError(f"dim {dim} specified in `_unflatten` is out of range {self.ndim}")
        if len(mesh_sizes) != len(mesh_dim_names):
            raise RuntimeError("mesh_dim_names must have same length as mesh_sizes in _unflatten!")
        i = self.axis_of(dim)
        parts = split_axis(self._axes[i], tuple(mesh_sizes))
        if parts is None:
            raise ValueError(f"mesh_sizes {tuple(mesh_sizes)} do not divide dimension {dim} of size {self.shape[i]}")
        names = list(self._names or (str(k) for k in range(self.ndim)))
        names[i : i + 1] = list(mesh_dim_names)
        out = self._derive((*self._axes[:i], *parts, *self._axes[i + 1 :]), _as_names(names, len(names)))
        if backend_override is not None:
            given = _normalise_override(dict(backend_override), len(parts), tuple(mesh_dim_names))
            rest: BackendConfig = (None, None)
            out._overrides = ((rest,) * i) + given + (rest,) * (self.ndim - i - 1)
        if out._ready:
            out._make_groups()
        return out

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """The mesh of the axes of all given meshes, in the order given; they must be of one rank map.

        Raises ValueError for none, RuntimeError for meshes of different rank maps, without names, or that overlap.
        """
        if not device_mesh_list:
            raise ValueError("_concatenate needs at least one mesh")
        first = device_mesh_list[0]
        names: list[str] = []
        for m in device_mesh_list:
            if m._key != first._key or m._device_type != first._device_type or m._world is not first._world:
                if m._key != first._key or m._device_type != first._device_type:
                    raise RuntimeError("Cannot concatenate DeviceMeshes derived from different device meshs")
            if m._names is None:
                raise RuntimeError("Cannot concatenate a DeviceMesh without mesh_dim_names!")
            names += m._names
        axes = [axis for m in device_mesh_list for axis in m._axes]
        if overlap(axes):
            raise RuntimeError(f"Cannot concatenate overlapping meshes: {list(device_mesh_list)}")
        out = first._derive(axes, _as_names(names, len(names)))
        for m in device_mesh_list:
            for key, group in m._get_root_mesh()._groups.items():
                out._get_root_mesh()._groups.setdefault(key, group)
        return out

    def _get_root_mesh(self) -> DeviceMesh:
        return self if self._root is None else self._root

    def _is_current_rank_part_of_mesh(self) -> bool:
        return self.coord is not None

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        return self.axis_of(mesh_dim_name)

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        """The 1-D meshes along the named axis, one for each place along the others. Only this rank's has a group."""
        i = self.axis_of(mesh_dim_name)
        out = []
        for row in self._rows(self._axes[i]):
            part = DeviceMesh(
                self._device_type, row, mesh_dim_names=(mesh_dim_name,), _init_backend=False, _rank=self._rank
            )
            if part.coord is not None and self._ready:
                part._adopt([self.get_group(i)] if self._in_c10d() else [])
            out.append(part)
        return out

    # made from groups and from torch's meshes

    @staticmethod
    def from_group(
        group: dist.ProcessGroup | Sequence[dist.ProcessGroup],
        device_type: str,
        mesh: object = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """A mesh over existing process groups: 1-D over one, or one axis for each of a list.

        A list needs `mesh` and `mesh_dim_names`. Raises ValueError where they are missing, where the list is
        empty, and where `mesh` does not have the groups' ranks.
        """
        if isinstance(group, dist.ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
            if mesh is not None and _as_ranks(mesh).tolist() != ranks:
                raise ValueError(f"Invalid mesh {mesh} for ProcessGroup with ranks {ranks}")
            out = DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, _init_backend=False)
            out._adopt([group])
            return out
        groups = list(group)
        if not groups:
            raise ValueError("Expects at least one ProcessGroup to be passed")
        if mesh is None:
            raise ValueError("Must pass mesh if passing multiple ProcessGroups")
        if mesh_dim_names is None:
            raise ValueError("Must pass mesh_dim_names if passing multiple ProcessGroups")
        grid = _as_ranks(mesh)
        if grid.ndim != len(groups):
            raise ValueError(
                f"Expects mesh with ndim equal to number of ProcessGroups but got mesh {grid.tolist()} "
                f"and {len(groups)} ProcessGroups"
            )
        out = DeviceMesh(device_type, grid, mesh_dim_names=mesh_dim_names, _init_backend=False)
        if out.coord is not None:
            for i, g in enumerate(groups):
                got, expected = dist.get_process_group_ranks(g), sorted(out._along(out._axes[i]))
                if sorted(got) != expected:
                    raise ValueError(f"mesh {grid.tolist()} has ranks {expected} along axis {i}, group {i} has {got}")
        out._adopt(groups)
        return out

    def _adopt(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Use `groups`, one an axis, as this root mesh's own."""
        self._ready = True
        if self._position is not None:
            for axis, group in zip(self._axes, groups):
                self._groups[_unordered(axis)] = group

    @staticmethod
    def from_torch(mesh: object) -> DeviceMesh:
        """Our mesh for a `torch.distributed.device_mesh.DeviceMesh`: same ranks, names and process groups.

        The same object for the same mesh. Raises TypeError for anything else.
        """
        from torch.distributed.device_mesh import DeviceMesh as TorchMesh

        if not isinstance(mesh, TorchMesh):
            raise TypeError(f"from_torch takes a torch.distributed.device_mesh.DeviceMesh, got {mesh!r}")
        per_world = _converted.setdefault(mesh, {})
        world = current_world() if has_world() else None
        token = None if world is None else (world.identity, world.rank)
        if token not in per_world:
            per_world[token] = _convert(mesh)
        return per_world[token]

    # the current mesh

    @staticmethod
    def current() -> DeviceMesh:
        """The mesh of the innermost `with mesh:` of this thread. Raises RuntimeError where there is none."""
        if not _active.stack:
            raise RuntimeError("No device mesh is currently active!")
        return _active.stack[-1]

    def __enter__(self) -> DeviceMesh:
        _active.stack.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.stack.pop()

    # values

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return hash(self) == hash(other) and self._value() == other._value()

    def _value(self) -> tuple[object, ...]:
        identity = None if self._world is None else self._world.identity
        return self._axes, self._names, self._device_type, self._rank, identity, self._key

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self._value())
        return self._hash

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: object) -> DeviceMesh:
        return self

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        root = self._get_root_mesh()
        key = self._key if isinstance(self._key, int) else self._map.tolist()
        return _rebuild, (self._device_type, key, root._axes, root._names, self._axes, self._names, self._ready)

    def __repr__(self) -> str:
        dims = ", ".join(f"{n}={s}" for n, s in zip(self._names, self.shape)) if self._names else None
        strides = tuple(a[0][1] if len(a) == 1 else tuple(stride for _, stride in a) for a in self._axes)
        text = f"DeviceMesh({f'({dims})' if dims is not None else self.shape}, {self._device_type!r}, stride={strides}"
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "") == "DETAIL":
            text += f", Mesh: {self.ranks.tolist()}"
        return text + ")"


def _unordered(axis: Axis) -> Axis:
    """The same for all axes that go over the same positions in some order: process groups sort their ranks."""
    return coalesce(sorted(axis, key=lambda pair: -pair[1]))


def _mesh_world(world: World | None) -> MeshWorld:
    return world  # type: ignore[return-value]


def _as_ranks(mesh: object) -> Ranks:
    """Ranks as an int64 array. Raises TypeError for what is not made of integers, ValueError for a ragged list."""
    if isinstance(mesh, torch.Tensor):
        mesh = mesh.detach().cpu().tolist()
    array = np.asarray(mesh)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"DeviceMesh takes integer ranks, got {array.dtype} in {mesh!r}")
    return np.ascontiguousarray(array, dtype=np.int64).reshape(array.shape)


def _as_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    if not names:
        return None
    made = tuple(names)
    if len(made) != ndim:
        raise ValueError(f"mesh_dim_names {made} names {len(made)} dimensions of a mesh that has {ndim}")
    if len(set(made)) != len(made):
        raise RuntimeError(f"Each mesh_dim_name must be unique. Found repeated mesh_dim_name in {made}")
    return made


def _choose_device(device_type: str, world: World) -> None:
    """Set the process's accelerator from LOCAL_RANK, or rank modulo devices, unless one was set before."""
    handle = getattr(torch, device_type, None)
    if device_type == "cpu" or handle is None or dist.get_backend() == "fake" or handle.is_initialized():
        return
    if "LOCAL_RANK" in os.environ:
        handle.set_device(int(os.environ["LOCAL_RANK"]))
        return
    count = handle.device_count()
    if count == 0:
        return
    warnings.warn(
        f"No device was chosen and LOCAL_RANK is not set: rank {world.rank} takes {device_type}:{world.rank % count}. "
        f"Call torch.{device_type}.set_device() before making the mesh, or start with torchrun.",
        stacklevel=4,
    )
    if world.size > count and world.size % count:
        raise RuntimeError(
            f"DeviceMesh only support homogeneous hardware, but found {world.size} ranks "
            f"and {count} {device_type} devices!"
        )
    handle.set_device(world.rank % count)


def _normalise_override(given: Override, ndim: int, names: tuple[str, ...] | None) -> tuple[BackendConfig, ...]:
    """(backend, options) for each axis from a dict by index or name. Raises RuntimeError for keys that name none."""
    out: list[BackendConfig] = []
    for i in range(ndim):
        name = names[i] if names else None
        if name is not None and name in given:
            if i in given:
                raise RuntimeError(f"Found redundant dim index {i} and name {name} in backend_override")
            value = given.pop(name)
        elif i in given:
            value = given.pop(i)
        else:
            out.append((None, None))
            continue
        if isinstance(value, str):
            out.append((value, None))
        elif isinstance(value, tuple):
            out.append((value[0], value[1]))
        else:
            out.append((None, value))
    if given:
        raise RuntimeError(
            f"Found invalid keys in backend_override: got {list(given)}, expected integers in range [0, {ndim}) "
            f"or one of {names or ()}"
        )
    return tuple(out)


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Override | None = None,
) -> DeviceMesh:
    """A mesh of `mesh_shape` over ranks 0..n-1 in row-major order; all ranks of the world call it alike.

    `backend_override` maps an axis (index or name) to a backend name, options, or both. Raises RuntimeError for
    repeated or too many or few names, for a device type with an index ("cuda:0"), for more ranks than the world
    has, and for override keys that name no axis.
    """
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    if mesh_dim_names is not None:
        if len(set(mesh_dim_names)) != len(mesh_dim_names):
            raise RuntimeError(f"Each mesh_dim_name must be unique. Found repeated mesh_dim_name in {mesh_dim_names}")
        if len(mesh_dim_names) != len(shape):
            raise RuntimeError(
                "mesh_shape and mesh_dim_names should have same length! "
                f"Found len(mesh_dim_names): {len(mesh_dim_names)} and len(mesh_shape):{len(shape)}."
            )
    if device_type and not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. Pass the type alone, device.type"
        )
    overrides = None
    if backend_override is not None:
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        overrides = _normalise_override(dict(backend_override), len(shape), names)
    ranks = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=overrides)


def _rebuild(
    device_type: str,
    rank_map: int | list[int],
    root_axes: tuple[Axis, ...],
    root_names: tuple[str, ...] | None,
    axes: tuple[Axis, ...],
    names: tuple[str, ...] | None,
    ready: bool,
) -> DeviceMesh:
    """Unpickle a mesh as this process's rank sees it. Groups are made, or found again, when first used."""
    world = current_world() if has_world() else None
    if world is None:
        warnings.warn(
            "A DeviceMesh was unpickled before torch.distributed was initialised: it has no rank and no groups.",
            stacklevel=2,
        )
    flat = np.arange(rank_map, dtype=np.int64) if isinstance(rank_map, int) else np.asarray(rank_map, dtype=np.int64)
    key: object = rank_map if isinstance(rank_map, int) else flat.tobytes()
    root = DeviceMesh.__new__(DeviceMesh)
    root._setup(device_type, flat, key, root_axes, root_names, world, None, None)
    root._ready = ready and world is not None
    return root if (axes, names) == (root_axes, root_names) else root._derive(axes, names)


_converted: weakref.WeakKeyDictionary[Any, dict[object, DeviceMesh]] = weakref.WeakKeyDictionary()


def _convert(mesh: Any) -> DeviceMesh:
    """Our mesh for torch's, whose axes have the same (shape, stride) form as ours."""
    axes = tuple(coalesce(zip(axis.shape, axis.stride)) for axis in mesh._layout)
    root = mesh._get_root_mesh()
    if root is not mesh:
        ours = DeviceMesh.from_torch(root)._derive(axes, mesh.mesh_dim_names)
    else:
        flat = mesh._rank_map.numpy().astype(np.int64)
        ours = DeviceMesh(mesh.device_type, flat, _init_backend=False, _rank=getattr(mesh, "_rank", None))
        ours._setup(
            mesh.device_type, ours._map, ours._key, axes, mesh.mesh_dim_names, ours._world, ours._rank, None
        )
    if getattr(mesh, "_dim_group_names", None):
        ours._ready = True
        shared = ours._get_root_mesh()._groups
        for axis, group in zip(axes, mesh.get_all_groups()):
            shared.setdefault(_unordered(axis), group)
    return ours


def as_mesh(mesh: object) -> DeviceMesh:
    """`mesh` as a mesh of ours: itself, a torch DeviceMesh converted (once), None as the current mesh.

    Raises RuntimeError for None where no mesh is active, TypeError for anything else.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is None:
        return DeviceMesh.current()
    if type(mesh).__name__ == "DeviceMesh":
        return DeviceMesh.from_torch(mesh)
    raise TypeError(f"{mesh!r} is no DeviceMesh; make one with init_device_mesh(device_type, shape)")
