"""Operations that are not a matter of layouts: values taken out of tensors, comparisons, aliasing tricks.

Each handler gets the whole call. What a program reads from a DTensor is the global value, the same on every
rank of its mesh.
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor import dispatch as hot
from dtensor.dispatch import special
from dtensor.errors import LayoutError, MixedTensorError, explain_error
from dtensor.moved import settled_spec
from dtensor.placement import Partial, Replicate
from dtensor.reshard_run import redistribute_local

aten = torch.ops.aten


def _local_of(x: Any, placements: tuple[Any, ...]) -> torch.Tensor:
    spec = settled_spec(x, "reading values")
    return redistribute_local(x._local_tensor, spec, spec.with_placements(placements))


@special("aten._local_scalar_dense.default")
def _item(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`item()`, `float()`, `bool()`, `int()`: the global value on every rank."""
    x = args[0]
    if x.numel() != 1:
        raise RuntimeError(f"a DTensor with {x.numel()} elements cannot be converted to a scalar")
    return _local_of(x, (Replicate(),) * x._spec.mesh.ndim).item()


@special("aten.equal.default")
def _equal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`torch.equal`: the same answer on every rank of the mesh; only the mesh's own groups are used."""
    a, b = args
    D = hot._DTensor
    if not (isinstance(a, D) and isinstance(b, D)):
        raise MixedTensorError("equal: got mixed torch.Tensor and DTensor; compare x.full_tensor() instead")
    if a._spec.mesh != b._spec.mesh:
        raise LayoutError(f"equal: the tensors live on different meshes, {a._spec.mesh} and {b._spec.mesh}")
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    mesh = a._spec.mesh
    layout = tuple(Replicate() if isinstance(p, Partial) else p for p in a._spec.placements)
    same = torch.equal(_local_of(a, layout), _local_of(b, layout))
    if mesh.coord is None:
        return same
    flag = torch.tensor([int(same)], dtype=torch.int32, device=a._local_tensor.device)
    for axis, p in enumerate(layout):
        if mesh.shape[axis] > 1 and not isinstance(p, Replicate):
            flag = mesh.comm(axis).all_reduce(flag, "min")
    return bool(flag.item())


@special("aten.allclose.default")
def _allclose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`torch.allclose`: the same answer on every rank."""
    return bool(torch.isclose(*args, **kwargs).all())


@special("aten.is_same_size.default")
def _is_same_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


@special("aten.is_pinned.default")
def _is_pinned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0]._local_tensor.is_pinned())


@special("aten.resize_.default", "aten.resize_as_.default")
def _resize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On a replicated tensor: every rank resizes its own copy. A shard of other sizes is not a part of this one."""
    x, size = args[0], args[1]
    spec, local = settled_spec(x, "resize_"), x._local_tensor
    shape = tuple(size.shape if isinstance(size, torch.Tensor) else size)
    if not spec.is_replicated():
        raise LayoutError(
            explain_error(
                f"resize_ to {list(shape)}", str(spec),
                "only a replicated tensor can be resized in place: the parts of another shape lie on other ranks",
                "make a new one: dtensor.empty(shape, device_mesh=x.device_mesh, placements=x.placements)",
            )
        )  # fmt: skip
    local.resize_(shape, **kwargs)
    made = hot._new(
        hot._DTensor, local, spec.with_meta(local.shape, local.stride(), spec.dtype), requires_grad=False
    )  # fmt: skip
    torch._C.TensorBase.data.__set__(x, made)  # type: ignore[attr-defined]
    x._spec = made._spec
    return x


@special("aten.set_.source_Tensor", "aten.set_.default", "aten.set_.source_Storage",
         "aten.set_.source_Storage_storage_offset")  # fmt: skip
def _set(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError("set_ of a DTensor would change the local storage only; make a new DTensor")
