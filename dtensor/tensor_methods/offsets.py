"""Helpers that programs import from `torch.distributed.tensor._utils`, under the same names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dtensor.errors import LayoutError
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.spec import Spec, contiguous_stride, normalize_placements

__all__ = ["compute_local_shape_and_global_offset"]


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Iterable[object], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's shard, and where it starts in the global tensor.

    Args:
        global_shape: sizes of the global tensor.
        mesh: the mesh; this rank must be on it.
        placements: one per mesh axis.
        skip_offset: give () instead of the offset.

    Returns:
        (local shape, offset per dim in elements). An empty shard starts at the dim's end.

    Raises:
        LayoutError: this rank is not on the mesh, or a split factor shards its shard into several runs, which no one
            offset describes (`skip_offset=True` still gives the shape).
        ValueError, IndexError: the placements do not fit mesh and shape.
    """
    call = "compute_local_shape_and_global_offset"
    shape = tuple(int(n) for n in global_shape)
    layout = normalize_placements(placements, mesh, len(shape), call)
    if mesh.coord is None:
        raise LayoutError(f"{call}: this rank is not on {mesh}")
    spec = Spec.make(mesh, layout, shape, contiguous_stride(shape), torch.float32)
    local = tuple(spec.local_shape_of(mesh.coord))
    if skip_offset:
        return local, ()
    for d, runs in enumerate(spec.intervals_of(mesh.coord)):
        if any(a + n != b for (a, n), (b, _) in zip(runs, runs[1:], strict=False)):
            raise LayoutError(
                f"{call}: this rank's part of dim {d} of {spec} is the runs {list(runs)}, which no one offset "
                "describes; use Spec.intervals_of, or skip_offset=True for the shape alone"
            )
    return local, spec.local_offset_of(mesh.coord)
