"""What a mesh is, before it communicates: its axes over a rank map, this rank's place in it, and its value."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dtensor.comm.communicator import Communicator
from dtensor.comm.world import World, current_world
from dtensor.errors import short
from dtensor.mesh.layout import Axis, axis_digit, axis_offsets, axis_size
from dtensor.placement import ConstantMeta

__all__ = ["AxisRef", "BackendConfig", "MeshGeometry", "Ranks"]

Ranks = npt.NDArray[np.int64]
BackendConfig = tuple[str | None, object]
AxisRef = int | str


_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, MeshGeometry] = weakref.WeakValueDictionary()


class MeshGeometry(metaclass=ConstantMeta):  # type: ignore[metaclass]
    """A grid of ranks as one of them sees it. `shape`, `ndim` and `coord` (None outside) are plain attributes.

    `graph_number` is how a compiled graph names this object. A mesh takes other attributes; they are no part of its
    value.
    """

    __slots__ = (
        "__dict__", "__weakref__", "_axes", "_comms", "_device_type", "_flattened", "_groups", "_hash", "_key", "_map",
        "_names",
        "_overrides", "_position", "_rank", "_ready", "_root", "_slices", "_world", "coord", "graph_number", "ndim",
        "shape",
    )  # fmt: skip

    shape: tuple[int, ...]
    ndim: int
    coord: tuple[int, ...] | None
    graph_number: int

    def _setup(
        self,
        device_type: str,
        rank_map: Ranks,
        key: object,
        axes: tuple[Axis, ...],
        names: tuple[str, ...] | None,
        world: World | None,
        rank: int | None,
        root: Any,
    ) -> None:
        self._device_type = device_type
        self._map = rank_map
        self._key = key
        self._axes = axes
        self._names = names
        self._world = world
        self._rank = world.rank if rank is None and world is not None else rank
        self._root = root
        self._overrides: tuple[BackendConfig, ...] | None = None
        self._ready = False
        self._groups: dict[Axis, dist.ProcessGroup | None] = {}
        self._flattened: dict[str, Any] = {}
        self._slices: dict[tuple[str, ...], Any] = {}
        self._comms: dict[Any, Communicator] = {}
        self._hash: int | None = None
        self.shape = tuple(axis_size(a) for a in axes)
        self.ndim = len(axes)
        self.graph_number = next(_numbers)
        _by_number[self.graph_number] = self
        self._position = self._find_position()
        self.coord = None if self._position is None else tuple(axis_digit(a, self._position) for a in axes)

    @staticmethod
    def by_number(number: int) -> Any:
        """The mesh of this `graph_number`. KeyError when it is no longer there."""
        return _by_number[number]

    @staticmethod
    def all() -> list[Any]:
        """The meshes that there are in this process, of all ranks and worlds."""
        return list(_by_number.values())

    def _find_position(self) -> int | None:
        """Where this rank stands in the rank map."""
        if self._root is not None:
            return cast(MeshGeometry, self._root)._position
        if self._rank is None:
            return None
        if isinstance(self._key, int):
            return self._rank if self._rank < self._key else None
        found = np.flatnonzero(self._map == self._rank)
        return int(found[0]) if found.size else None

    def _derive(self, axes: Sequence[Axis], names: tuple[str, ...] | None) -> Self:
        """A mesh of other axes over the same rank map; shares groups through the root."""
        out = type(self).__new__(type(self))
        root = self._get_root_mesh()
        out._setup(self._device_type, self._map, self._key, tuple(axes), names, self._world, self._rank, root)
        out._ready = root._ready
        if self is not root:
            out._groups.update(self._groups)
        return out

    @property
    def device_type(self) -> str:
        """ "cpu", "cuda"."""
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
        return prod(self.shape) if mesh_dim is None else self.shape[self.axis_of(mesh_dim)]

    def axis_of(self, axis: AxisRef) -> int:
        """The index, 0 to ndim-1, of an axis given by index (may be negative) or name.

        Raises KeyError for an unknown name, IndexError for an index out of range.
        """
        if isinstance(axis, str):
            if self._names is None:
                raise KeyError(f"No `mesh_dim_names` found: this mesh has no axis {axis!r}, use an index")
            if axis not in self._names:
                told = f"Mesh dimension {short(axis)} does not exist. Available are {self._names}"
                raise KeyError(f"{told}; use one of them")
            return self._names.index(axis)
        if type(axis) is not int:
            try:
                axis = index(None if isinstance(axis, bool) else axis)  # type: ignore[arg-type]
            except (TypeError, ValueError, RuntimeError):
                got = f"{short(axis)} is no mesh dimension: an int or a name is"
                raise TypeError(f"{got}\n  fix: one of {self._fitting()}") from None
        if not -self.ndim <= axis < self.ndim:
            raise IndexError(
                f"mesh dimension {axis} is out of range for a mesh of {self.ndim} dimensions\n"
                f"  fix: one of {self._fitting()}"
            )
        return axis % self.ndim

    def _fitting(self) -> str:
        """What stands for an axis, for errors."""
        return ", ".join(map(repr, (*range(self.ndim), *(self._names or ()))))

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
            told = f"{self!r} has {self.ndim} dimensions: get_local_rank(mesh_dim) needs to know which"
            raise RuntimeError(f"{told}\n  fix: get_local_rank(0)")
        if isinstance(mesh_dim, str) and mesh_dim in self._get_root_mesh()._flattened:
            local: int = self._get_root_mesh()._flattened[mesh_dim].get_local_rank()
            return local
        axis = self.axis_of(0 if mesh_dim is None else mesh_dim)
        if self.coord is None:
            raise IndexError(f"rank {self._rank} is not in {self!r}, so it has no local rank there")
        return self.coord[axis]

    @property
    def _layout(self) -> Any:
        """The axes in torch's own form: what torch's pipelines, which send no meshes, tell a mesh by."""
        from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout

        return _MeshLayout([_FlatLayout(tuple(n for n, _ in a), tuple(step for _, step in a)) for a in self._axes])

    def _get_root_mesh(self) -> Self:
        return self if self._root is None else self._root

    def _is_current_rank_part_of_mesh(self) -> bool:
        return self.coord is not None

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        return self.axis_of(mesh_dim_name)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MeshGeometry):
            return NotImplemented
        return hash(self) == hash(other) and self._value() == other._value()

    def _value(self) -> tuple[object, ...]:
        identity = None if self._world is None else self._world.identity
        return self._axes, self._names, self._device_type, self._rank, identity, self._key

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self._value())
        return self._hash

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        dims = ", ".join(f"{n}={s}" for n, s in zip(self._names, self.shape)) if self._names else None
        strides = tuple(a[0][1] if len(a) == 1 else tuple(stride for _, stride in a) for a in self._axes)
        text = f"DeviceMesh({f'({dims})' if dims is not None else self.shape}, {self._device_type!r}, stride={strides}"
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "") == "DETAIL":
            text += f", Mesh: {self.ranks.tolist()}"
        return text + ")"
