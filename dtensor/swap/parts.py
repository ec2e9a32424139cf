"""This rank's part of what a state dict holds whole: of a plain tensor, or of a DTensor in any layout."""

from __future__ import annotations

import torch

from dtensor.distribute import distribute_tensor
from dtensor.placement import Replicate
from dtensor.spec import Spec
from dtensor.tensor import DTensor

__all__ = ["part_of"]


def part_of(value: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The part in layout `spec` of `value`, a tensor of its shape, as a plain tensor.

    A plain one, the same on all ranks, is sharded here. A DTensor of `spec`'s mesh, or of one of which it is a slice,
    is redistributed; any other is gathered, then sharded.
    """
    if isinstance(value, DTensor):
        mesh, wanted = value._spec.mesh, spec.mesh.mesh_dim_names
        if mesh == spec.mesh:
            return value.redistribute(placements=spec.placements).to_local()
        names = mesh.mesh_dim_names
        if names and wanted and wanted == tuple(n for n in names if n in wanted) and mesh[wanted] == spec.mesh:
            layout = dict(zip(wanted, spec.placements, strict=True))
            return value.redistribute(placements=[layout.get(name, Replicate()) for name in names]).to_local()
        value = value.full_tensor()
    return distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None).to_local()
