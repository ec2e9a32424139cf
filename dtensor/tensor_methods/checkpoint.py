"""What `torch.distributed.checkpoint` asks of a tensor: the chunks it holds, and where they lie.

A shard is the product of its dims' intervals, so it is one chunk, or several where a split factor shards a dim
into runs; each is reported with its true offset in the global tensor.

    f32[8@x:2, 3] on an axis of 2        position 0: rows [0,2) and [4,6)     chunks at (0, 0) and (4, 0)

Replicas report the same chunks; the planner keeps one of them. A rank outside the mesh reports none. A pending
reduction has no chunks: which value a part has is not decided yet.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from dtensor.dispatch.materialized import settled_spec
from dtensor.placement import Partial
from dtensor.spec import Distributed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["chunk_list", "tensor_shard", "write_items"]

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offset in the global tensor, offset in the local one, sizes."""


def _boxes(x: Distributed, call: str) -> list[Box]:
    """The chunks of this rank's shard, in row-major order; an empty shard is one chunk, at the end of its dims."""
    spec = settled_spec(x, call)
    for axis, p in enumerate(spec.placements):
        if isinstance(p, Partial):
            raise ValueError(
                f"{call}: {spec} is pending on mesh axis {spec.mesh.axis_name(axis)} and cannot be saved or loaded; "
                "use x.redistribute(placements=...) with Replicate() or Shard(dim) there"
            )
    if spec.mesh.coord is None:
        return []
    dims: list[list[tuple[int, int, int]]] = []
    for n, runs in zip(spec.shape, spec.intervals_of(spec.mesh.coord), strict=True):
        local, splits = 0, []
        for start, length in runs or ((n, 0),):
            splits.append((start, local, length))
            local += length
        dims.append(splits)
    return [
        (tuple(c[0] for c in box), tuple(c[1] for c in box), tuple(c[2] for c in box))
        for box in itertools.product(*dims)
    ]


def chunk_list(x: Distributed) -> list[ChunkStorageMetadata]:
    """Offsets and sizes of the chunks that this rank holds. Raises ValueError for a pending tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    own = getattr(x._local_tensor, "__create_chunk_list__", None)
    if own is not None:
        return list(own())
    return [
        ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(sizes))
        for offset, _, sizes in _boxes(x, "__create_chunk_list__")
    ]


def write_items(x: Distributed, fqn: str, obj: object) -> list[WriteItem]:
    """One item a chunk, to be saved under the name `fqn`. Raises ValueError for a pending tensor."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    boxes = _boxes(x, "__create_write_items__")
    own = getattr(x._local_tensor, "__create_write_items__", None)
    if own is not None:
        return list(own(fqn, obj))
    if not boxes:
        return []
    properties = TensorProperties.create_from_tensor(x._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=x._spec.shape),
        )
        for chunk in chunk_list(x)
    ]


def tensor_shard(x: Distributed, index: MetadataIndex) -> torch.Tensor:
    """The chunk at `index.offset`, as a view of the local tensor: the planner reads from it or loads into it.

    What is loaded into a view that had to move data does not reach its base: save and load the base.
    Raises ValueError where this rank holds no chunk there, or the tensor is pending.
    """
    boxes = _boxes(x, "__get_tensor_shard__")
    local = x._local_tensor.detach()
    own = getattr(local, "__get_tensor_shard__", None)
    if own is not None:
        found: torch.Tensor = own(index)
        return found
    if index.offset is None and len(boxes) == 1:
        return local
    for offset, at, sizes in boxes:
        if index.offset is not None and offset == tuple(index.offset):
            for d, (start, length) in enumerate(zip(at, sizes, strict=True)):
                local = local.narrow(d, start, length)
            return local
    raise ValueError(
        f"__get_tensor_shard__: this rank's part of {x._spec} has no chunk at {index.offset}; "
        f"it has chunks at {[offset for offset, _, _ in boxes]}"
    )
