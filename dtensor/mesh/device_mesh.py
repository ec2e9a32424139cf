"""DeviceMesh: ranks on a grid, with names for the axes and a communicator for each.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh["tp"]                        the 1-D mesh of this rank's row; shares the groups of `mesh`
    mesh.coord                        this rank's place in it, None outside
    mesh.comm("tp"), mesh.comm((0, 1))   collectives along one axis, or along several flattened into one

Names, signatures and exception types are those of `torch.distributed.device_mesh`. A mesh object belongs to
one rank. Positions along an axis follow the mesh, also where its ranks are in no ascending order.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
import torch.distributed as dist

from dtensor import torch_changes
from dtensor.comm.world import World, check_own, current_world, has_world
from dtensor.errors import expect, short
from dtensor.mesh.arguments import (
    as_names,
    as_ranks,
    as_shape,
    backward_on_this_thread,
    check_device_type,
    choose_device,
    normalise_override,
    start_world,
    typed_names,
)
from dtensor.mesh.geometry import AxisRef, BackendConfig
from dtensor.mesh.groups import MeshGroups, canonical
from dtensor.mesh.layout import Axis, axis_size, coalesce, overlap, row_major, split_axis

__all__ = ["DeviceMesh", "as_mesh", "init_device_mesh"]

Override = dict[Any, Any]


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[DeviceMesh] = []


active_meshes = _Active()


class DeviceMesh(MeshGroups):
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

    __slots__ = ()

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
        check_device_type("DeviceMesh", device_type)
        if mesh is None:
            raise TypeError("DeviceMesh(device_type, mesh) needs the ranks\n  fix: for instance [[0, 1], [2, 3]]")
        ranks = as_ranks(mesh)
        if backend_override is not None and len(backend_override) != ranks.ndim:
            raise ValueError(
                f"backend_override has {len(backend_override)} entries for {ranks.ndim} mesh dimensions; "
                "give one (backend, options) pair each"
            )
        names = as_names(mesh_dim_names, ranks.ndim)
        flat = ranks.reshape(-1)
        is_range = bool(flat.size == 0 or (flat[0] == 0 and flat[-1] == flat.size - 1 and (np.diff(flat) == 1).all()))
        if not is_range and np.unique(flat).size != flat.size:
            raise ValueError(f"DeviceMesh: a rank occurs twice in {short(ranks.tolist())}")
        key: object = flat.size if is_range else flat.tobytes()
        if flat.size == 0 and ranks.ndim:
            raise ValueError(f"DeviceMesh: a mesh of shape {ranks.shape} has no ranks; every axis needs at least one")
        world = self._find_world(device_type, flat.size, _init_backend, _rank)
        least, most = (0, flat.size - 1) if is_range else (int(flat.min()), int(flat.max()))
        if least < 0 or (_init_backend and world is not None and most >= world.size):
            bound = "no rank" if world is None else f"no rank of a world of {world.size}"
            rank = least if least < 0 else most
            raise RuntimeError(
                f"DeviceMesh: {short(ranks.tolist())} names rank {rank}, {bound}\n  fix: ranks of the world, from 0 on"
            )
        torch_changes.apply("mesh")
        self._setup(device_type, flat, key, row_major(ranks.shape), names, world, _rank, None)
        self._overrides = tuple(backend_override) if backend_override else None
        if _init_backend:
            self._make_groups(everyone=True)

    @staticmethod
    def _find_world(device_type: str, count: int, init_backend: bool, rank: int | None) -> World | None:
        """The world of a new mesh of `count` ranks, made where it is missing; None for a mesh of pure geometry."""
        if not has_world():
            if not init_backend and rank is not None:
                return None
            if init_backend:
                start_world(device_type)
        world = current_world()
        if init_backend:
            if count > world.size:
                raise RuntimeError(
                    f"Mesh should not be bigger than default world size {world.size}, but found {count} ranks!\n"
                    f"  fix: a mesh of at most {world.size} ranks, or start {count}"
                )
            if world.kind == "c10d":
                choose_device(device_type, world)
            backward_on_this_thread(device_type)
        return world

    # other meshes from this one

    def __getitem__(self, mesh_dim_names: str | Sequence[str]) -> DeviceMesh:
        """The sub-mesh of the named axes, given in mesh order, with this rank in it.

        All names of the mesh give the mesh itself; names of meshes flattened before work on the root (as in
        torch, with a deprecation warning). Raises RuntimeError for a mesh without names and for axes that
        overlap, KeyError for a name that is not there and for names out of order, TypeError for no names.
        """
        if not self._names:
            raise RuntimeError("Cannot slice a DeviceMesh without mesh_dim_names!")
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else mesh_dim_names
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"a DeviceMesh is sliced by the names of its dimensions {self._names}, got {short(mesh_dim_names)}\n"
                f"  fix: mesh[{self._names[0]!r}]"
            )
        names = tuple(names)
        if names == self._names:
            return self
        made: DeviceMesh | None = self._slices.get(names)
        if made is None or any(name not in self._names for name in names):
            made = self._slices[names] = self._derive(self._named_axes(names), names)
        return made

    def _named_axes(self, names: tuple[str, ...]) -> list[Axis]:
        own = self._names or ()
        root = self._get_root_mesh()
        flattened = root._flattened if self == root else {}
        unknown = [name for name in names if name not in own and name not in flattened]
        if unknown or not names:
            told = f"Valid mesh_dim_names are {[*own, *flattened]}; pass one or several of them"
            raise KeyError(f"Invalid mesh_dim_names {short(names)} specified. {told}")
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
        if mesh_dim_name is not None:
            expect("flatten", "mesh_dim_name", mesh_dim_name, str, "the new axis's name", 'mesh.flatten("dp_tp")')
        name = mesh_dim_name or "_".join(self._names)
        if self.ndim == 1 and name in self._names:
            return self
        root = self._get_root_mesh()
        if name in (root._names or ()):
            raise ValueError(f"{name} already exists in {root!r}; give the flattened mesh another name")
        axis = coalesce(pair for a in self._axes for pair in a)
        made: DeviceMesh | None = root._flattened.get(name)
        if made is not None:
            if made._axes != (axis,):
                raise ValueError(f"a flattened mesh {name} of other dimensions exists; choose another name")
            return made
        made = self._derive((axis,), (name,))
        if backend_override is not None:
            made._overrides = normalise_override({0: backend_override}, 1, None)
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
                raise ValueError(f"dim {dim} specified in `_unflatten` is not in {self._names}\n  fix: one of them")
        elif isinstance(dim, int) and not -self.ndim <= dim < self.ndim:
            raise ValueError(f"dim {dim} specified in `_unflatten` is out of range {self.ndim}\n  fix: 0")
        i, fix = self.axis_of(dim), 'mesh._unflatten("a", (2, 2), ("b", "c"))'
        for name, value, kind in (("mesh_sizes", mesh_sizes, int), ("mesh_dim_names", mesh_dim_names, str)):
            expect("_unflatten", name, value, tuple | list, "a tuple, one for each new axis", fix)
            for entry in value:
                expect("_unflatten", f"an entry of {name}", entry, kind, f"{kind.__name__}", fix)
        if len(mesh_sizes) != len(mesh_dim_names):
            raise RuntimeError(
                "mesh_dim_names must have same length as mesh_sizes in _unflatten!\n"
                "  fix: a name for each size"
            )
        parts = split_axis(self._axes[i], tuple(mesh_sizes))
        if parts is None:
            got = f"mesh_sizes {short(tuple(mesh_sizes))}"
            raise ValueError(f"{got} do not divide dimension {dim} of size {self.shape[i]}\n  fix: others")
        names = list(self._names or (str(k) for k in range(self.ndim)))
        names[i : i + 1] = list(mesh_dim_names)
        out = self._derive((*self._axes[:i], *parts, *self._axes[i + 1 :]), as_names(names, len(names)))
        if backend_override is not None:
            given = normalise_override(dict(backend_override), len(parts), tuple(mesh_dim_names))
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
        fix = 'DeviceMesh._concatenate([mesh["a"], mesh["b"]])'
        expect("_concatenate", "device_mesh_list", device_mesh_list, list | tuple, "a list of meshes", fix)
        for m in device_mesh_list:
            expect("_concatenate", "an entry of device_mesh_list", m, DeviceMesh, "a mesh", fix)
        if not device_mesh_list:
            raise ValueError(f"_concatenate needs at least one mesh\n  fix: {fix}")
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
        out = first._derive(axes, as_names(names, len(names)))
        for m in device_mesh_list:
            for key, group in m._get_root_mesh()._groups.items():
                out._get_root_mesh()._groups.setdefault(key, group)
        return out

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
            if mesh is not None and as_ranks(mesh).tolist() != ranks:
                raise ValueError(f"Invalid mesh {mesh} for ProcessGroup with ranks {ranks}")
            out = DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, _init_backend=False)
            out._adopt([group])
            return out
        expect(
            "DeviceMesh.from_group", "group", group, Sequence, "a process group, or a list of them",
            'DeviceMesh.from_group(dist.group.WORLD, "cpu")',
        )  # fmt: skip
        groups = list(group)
        if not groups:
            raise ValueError("Expects at least one ProcessGroup to be passed\n  fix: from_group(group, device_type)")
        if mesh is None:
            raise ValueError("Must pass mesh if passing multiple ProcessGroups\n  fix: mesh=[[0, 1], [2, 3]]")
        if mesh_dim_names is None:
            raise ValueError(
                "Must pass mesh_dim_names if passing multiple ProcessGroups\n"
                "  fix: mesh_dim_names=(\"dp\", \"tp\")"
            )
        grid = as_ranks(mesh)
        if grid.ndim != len(groups):
            raise ValueError(
                f"Expects mesh with ndim equal to number of ProcessGroups but got mesh {short(grid.tolist())} "
                f"and {len(groups)} ProcessGroups"
            )
        out = DeviceMesh(device_type, grid, mesh_dim_names=mesh_dim_names, _init_backend=False)
        if out.coord is not None:
            for i, g in enumerate(groups):
                got, expected = dist.get_process_group_ranks(g), sorted(out._along(out._axes[i]))
                if sorted(got) != expected:
                    raise ValueError(
                        f"mesh {short(grid.tolist())} has ranks {short(expected)} along axis {i}, "
                        f"group {i} has {short(got)}"
                    )
        out._adopt(groups)
        return out

    @staticmethod
    def from_torch(mesh: object) -> DeviceMesh:
        """Our mesh for a `torch.distributed.device_mesh.DeviceMesh`: same ranks, names and process groups.

        The same object for the same mesh. Raises TypeError for anything else.
        """
        from torch.distributed.device_mesh import DeviceMesh as TorchMesh

        if not isinstance(mesh, TorchMesh):
            raise TypeError(
                f"from_torch takes a torch.distributed.device_mesh.DeviceMesh, got {short(mesh)}\n"
                "  fix: torch's mesh"
            )
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
        if not active_meshes.stack:
            raise RuntimeError("No device mesh is currently active!\n  fix: pass a mesh, or call inside `with mesh:`")
        return active_meshes.stack[-1]

    def __enter__(self) -> DeviceMesh:
        active_meshes.stack.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        active_meshes.stack.pop()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        root = self._get_root_mesh()
        key = self._key if isinstance(self._key, int) else self._map.tolist()
        place = root._axes, root._names, self._axes, self._names, self._ready, self._rank
        return rebuild_mesh, (self._device_type, key, *place)


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
    check_device_type("init_device_mesh", device_type)
    shape = as_shape(mesh_shape)
    mesh_dim_names = typed_names(mesh_dim_names, len(shape))
    if mesh_dim_names is not None:
        if len(set(mesh_dim_names)) != len(mesh_dim_names):
            raise RuntimeError(f"Each mesh_dim_name must be unique. Found repeated mesh_dim_name in {mesh_dim_names}")
        if len(mesh_dim_names) != len(shape):
            raise RuntimeError(
                "mesh_shape and mesh_dim_names should have same length! "
                f"Found len(mesh_dim_names): {len(mesh_dim_names)} and len(mesh_shape):{len(shape)}.\n"
                "  fix: one name for each axis"
            )
    overrides = None
    if backend_override is not None:
        fix = 'backend_override={"tp": "gloo"}'
        what = "a mapping from axes to backends"
        expect("init_device_mesh", "backend_override", backend_override, Mapping, what, fix)
        overrides = normalise_override(dict(backend_override), len(shape), mesh_dim_names)
    ranks = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=overrides)


def rebuild_mesh(
    device_type: str,
    rank_map: int | list[int],
    root_axes: tuple[Axis, ...],
    root_names: tuple[str, ...] | None,
    axes: tuple[Axis, ...],
    names: tuple[str, ...] | None,
    ready: bool,
    rank: int | None = None,
) -> DeviceMesh:
    """Unpickle a mesh as this process's rank sees it. Groups are made, or found again, when first used.

    A process without a group, such as a worker that saves, sees it as `rank` did, which pickled it.
    """
    world = current_world() if has_world() else None
    if world is None:
        warnings.warn(
            "A DeviceMesh was unpickled where torch.distributed is not initialised: it has no groups, and is seen as "
            f"by rank {rank}, which pickled it.",
            stacklevel=2,
        )
    flat = np.arange(rank_map, dtype=np.int64) if isinstance(rank_map, int) else np.asarray(rank_map, dtype=np.int64)
    key: object = rank_map if isinstance(rank_map, int) else flat.tobytes()
    torch_changes.apply("mesh")
    root = DeviceMesh.__new__(DeviceMesh)
    root._setup(device_type, flat, key, root_axes, root_names, world, rank if world is None else None, None)
    root._ready = ready and world is not None
    return root if (axes, names) == (root_axes, root_names) else root._derive(axes, names)


_converted: weakref.WeakKeyDictionary[Any, dict[object, DeviceMesh]] = weakref.WeakKeyDictionary()


def _numbers(nested: Any) -> tuple[int, ...]:
    """The numbers in a number (which torch 2.11 has for an axis of one) or in a tuple of tuples, in order."""
    return (nested,) if isinstance(nested, int) else tuple(n for part in nested for n in _numbers(part))


def axes_of(mesh: Any) -> tuple[Axis, ...]:
    """The axes of torch's mesh, which have the same (shape, stride) form as ours.

    Axes of one have lost their stride there; they get back that of the mesh that this is a slice of, or row-major's.
    """
    axes = tuple(coalesce(zip(_numbers(axis.shape), _numbers(axis.stride))) for axis in mesh._layout)
    root = getattr(mesh, "_root_mesh", None) or mesh
    like = row_major([axis_size(axis) for axis in axes])
    if root is not mesh and root.mesh_dim_names and mesh.mesh_dim_names:
        named = dict(zip(root.mesh_dim_names, axes_of(root)))
        like = tuple(named.get(name, axis) for name, axis in zip(mesh.mesh_dim_names, like))
    return tuple(b if axis_size(a) == axis_size(b) == 1 else a for a, b in zip(axes, like))


def _convert(mesh: Any) -> DeviceMesh:
    """Our mesh for torch's."""
    axes = axes_of(mesh)
    root = mesh._get_root_mesh()
    if root is not mesh:
        ours = DeviceMesh.from_torch(root)._derive(axes, mesh.mesh_dim_names)
    else:
        flat = mesh._rank_map.numpy().astype(np.int64)
        ours = DeviceMesh(mesh.device_type, flat, _init_backend=False, _rank=getattr(mesh, "_rank", None))
        ours._setup(mesh.device_type, ours._map, ours._key, axes, mesh.mesh_dim_names, ours._world, ours._rank, None)
    if getattr(mesh, "_dim_group_names", None):
        ours._ready = True
        shared = ours._get_root_mesh()._groups
        for axis, group in zip(axes, mesh.get_all_groups()):
            if canonical(axis) not in shared:
                ours._take(shared, canonical(axis), group)
    return ours


def as_mesh(mesh: object) -> DeviceMesh:
    """`mesh` as a mesh of ours: itself, a torch DeviceMesh converted (once), None as the current mesh.

    Raises RuntimeError for None where no mesh is active, TypeError for anything else.
    """
    if isinstance(mesh, DeviceMesh):
        if mesh._world is not None and mesh._world.kind == "simulated":
            check_own(mesh._world, "this mesh")
        return mesh
    if mesh is None:
        return DeviceMesh.current()
    if type(mesh).__name__ == "DeviceMesh":
        return DeviceMesh.from_torch(mesh)
    raise TypeError(f"{short(mesh)} is no DeviceMesh\n  fix: one made by init_device_mesh(device_type, shape)")
