"""StyleAxis: the mesh axis that a style works on, and what tensors are over the other axes of the mesh.

A style names one placement per tensor. On a mesh of one axis that is the whole layout. On a mesh of several,
`parallelize_module(net, mesh, plan, axis="tp", others={"dp": Shard(0)})` says the rest:

    parameters       the style's placement over tp, replicated over dp
    plain tensors    the style's placement over tp, `others` over dp (here: each row has its own batch)
    DTensors         brought to the style's placement over tp, left as they are over dp
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtensor.errors import short
from dtensor.mesh import DeviceMesh
from dtensor.mesh.device_mesh import as_mesh
from dtensor.placement import Placement, Replicate, Shard
from dtensor.tensor import DTensor

from .compare import Checks

__all__ = ["Others", "StyleAxis", "style_axis"]

Others = Placement | Mapping[str | int, Placement] | None


@dataclass(frozen=True, slots=True)
class StyleAxis:
    """Axis number `index` of `mesh`. `others`: by axis, how plain tensors lie over it; None where nobody said.

    `check`: the ranks compare plain inputs; `compared`: what has been compared.
    """

    mesh: DeviceMesh
    index: int
    others: tuple[Placement | None, ...]
    check: Checks = False
    compared: set[object] = field(default_factory=set, compare=False, repr=False)

    @property
    def size(self) -> int:
        """How many ranks the style's axis has."""
        return self.mesh.size(self.index)

    @property
    def position(self) -> int | None:
        """This rank's place on the style's axis; None for a rank outside the mesh."""
        coord = self.mesh.get_coordinate()
        return None if coord is None else coord[self.index]

    def parameter(self, own: Placement) -> list[Placement]:
        """The layout of a parameter: `own` over the style's axis, replicated over the others."""
        return [own if i == self.index else Replicate() for i in range(self.mesh.ndim)]

    def piece(self, own: Placement, call: str) -> list[Placement]:
        """The layout that a plain tensor is taken to have. ValueError where it is not known over some axis."""
        if len(self.others) == 1:
            return [own]
        placed = [own if i == self.index else p for i, p in enumerate(self.others)]
        if None not in placed:
            return [p for p in placed if p is not None]
        names = self.mesh.mesh_dim_names or tuple(map(str, range(self.mesh.ndim)))
        unsaid = [names[i] for i, p in enumerate(placed) if p is None]
        raise ValueError(
            f"{call}: a plain tensor came, and nothing says how it lies over {' and '.join(unsaid)}\n"
            f"  rule: on a mesh of several axes a plain tensor's layout must be known over all of them\n"
            f"  fix: parallelize_module(..., others=Shard(0)) where each row of the mesh has its own batch, "
            "others=Replicate() where all have the same; or pass DTensors"
        )

    def moved(self, x: DTensor, own: Placement, call: str) -> list[Placement]:
        """The layout of `x` with `own` over the style's axis. ValueError where `x` lives on another mesh."""
        if x.device_mesh != self.mesh:
            raise ValueError(
                f"{call}: the input is a DTensor of another mesh than the module's\n"
                f"  got: {x.device_mesh!r}, the module is on {self.mesh!r}\n"
                "  fix: parallelize the module over the input's mesh, parallelize_module(..., mesh, plan, axis=...), "
                "or pass the local tensor, x.to_local()"
            )
        return [own if i == self.index else p for i, p in enumerate(x.placements)]

    def extent(self, local: int, dim: int, ndim: int) -> int:
        """Global size of a dim of a plain tensor over the axes other than the style's, its parts taken as even."""
        for i, p in enumerate(self.others):
            if i != self.index and isinstance(p, Shard) and p.dim % ndim == dim:
                local *= self.mesh.size(i)
        return local


def style_axis(
    style: object, mesh: object, axis: str | int | None = None, others: Others = None, check: Checks = False
) -> StyleAxis:
    """The axis of `mesh` that `style` works on: its only one, or the one that `axis` names.

    Raises ValueError for a mesh of several axes where `axis` is None, for an unknown axis, and for `others` that
    name the style's own axis or an unknown one; TypeError for others that are no placements.
    """
    ours = as_mesh(mesh)
    if axis is None and ours.ndim != 1:
        names = ours.mesh_dim_names
        pick = f'mesh["{names[-1]}"]' if names else 'name the axes and pass one of them, e.g. mesh["tp"]'
        raise ValueError(
            f"{type(style).__name__}: a style works over one mesh axis\n  got: {ours!r} with {ours.ndim} axes\n"
            f"  fix: {pick}; or keep the mesh and say which axis and what the others do: "
            f'parallelize_module(..., axis="{names[-1] if names else ours.ndim - 1}", others=Shard(0))'
        )
    index = 0 if axis is None else _number(ours, axis)
    return StyleAxis(ours, index, _over_others(ours, index, others), check)


def _number(mesh: DeviceMesh, axis: str | int) -> int:
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and -mesh.ndim <= axis < mesh.ndim:
        return axis % mesh.ndim
    raise ValueError(f"parallelize_module: the mesh has no axis {short(axis)}\n  got: {mesh!r}")


def _over_others(mesh: DeviceMesh, index: int, others: Others) -> tuple[Placement | None, ...]:
    if others is None or isinstance(others, Placement):
        return tuple(None if i == index else others for i in range(mesh.ndim))
    if not isinstance(others, Mapping) or not all(isinstance(p, Placement) for p in others.values()):
        raise TypeError(
            f"parallelize_module: others takes a placement, or one for each axis by name, got {short(others)}; "
            'e.g. {"dp": Shard(0)}'
        )
    placed: list[Placement | None] = [None] * mesh.ndim
    for name, placement in others.items():
        i = _number(mesh, name)
        if i == index:
            raise ValueError(f"parallelize_module: others names {name!r}, the axis that the styles work on")
        placed[i] = placement
    return tuple(placed)
