"""Operations that are not a matter of layouts: values taken out of tensors, comparisons, aliasing tricks.

Each handler gets the whole call. What a program reads from a DTensor is the global value, the same on every
rank of its mesh.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch.call import plain_wrapper
from dtensor.dispatch.hit import special
from dtensor.dispatch.in_place import laid_out_like, take_over
from dtensor.dispatch.materialized import MovedSpec, settled_spec
from dtensor.errors import LayoutError, MixedTensorError, explain_error
from dtensor.placement import Partial, Replicate, Shard, StridedShard
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.deferred import finish
from dtensor.spec import Spec

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
    D = late.DTensor
    if not (isinstance(a, D) and isinstance(b, D)):
        raise MixedTensorError("equal: got mixed torch.Tensor and DTensor; compare x.full_tensor() instead")
    finish(args)
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


@special("aten.__lshift__.Scalar", "aten.__lshift__.Tensor")
def _shift_left(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same op by its other name: torch's meta kernel of this one refuses bool, which its kernels take."""
    return torch.bitwise_left_shift(*args, **kwargs)


@special("aten.__rshift__.Scalar", "aten.__rshift__.Tensor")
def _shift_right(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.bitwise_right_shift(*args, **kwargs)


@special("aten._pin_memory.default")
def _pin_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spec = settled_spec(args[0], "pin_memory")
    return plain_wrapper(args[0]._local_tensor.pin_memory(), spec)


@special("aten._has_compatible_shallow_copy_type.default")
def _compatible(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Asked when `x.data = y` is set."""
    return all(isinstance(t, late.DTensor) for t in args)


@special("aten.is_same_size.default")
def _is_same_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


@special("aten.is_pinned.default")
def _is_pinned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0]._local_tensor.is_pinned())


@special("aten.resize_.default", "aten.resize_as_.default")
def _resize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """To no more elements: the first ones, in any layout. To more: on a replicated tensor, where every rank resizes."""
    x, size = args[0], args[1]
    shape = tuple(size.shape if isinstance(size, torch.Tensor) else size)
    if not isinstance(x, late.DTensor):
        return x.resize_(shape, **kwargs)
    if shape == tuple(x.shape):
        return x
    spec, local = x._spec, x._local_tensor
    if not isinstance(spec, MovedSpec) and spec.is_replicated():
        local.resize_(shape, **kwargs)
        take_over(x, plain_wrapper(local, spec.with_meta(local.shape, local.stride(), spec.dtype)))
    elif math.prod(shape) <= x.numel() and x.is_contiguous():
        flat = hot.dispatch(aten.view.default, (x, [-1]))
        first = hot.dispatch(aten.slice.Tensor, (flat, 0, 0, math.prod(shape)))
        take_over(x, hot.dispatch(aten.view.default, (first, list(shape))))
    else:
        raise LayoutError(
            explain_error(
                f"resize_ to {list(shape)}", str(spec),
                "only a replicated tensor can grow in place: the parts of another shape lie on other ranks",
                "make a new one: dtensor.empty(shape, device_mesh=x.device_mesh, placements=x.placements)",
            )
        )  # fmt: skip
    return x


@special("aten.addbmm_.default")
def _addbmm_in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch broadcasts the target of this one, which then has the result's shape."""
    x, result = args[0], hot.dispatch(aten.addbmm.default, args, kwargs)
    if result.shape == x.shape:
        return hot.dispatch(aten.copy_.default, (x, result))
    take_over(x, laid_out_like(result, x._spec))
    return x


@special("aten.set_.source_Tensor", "aten.set_.default", "aten.set_.source_Storage",
         "aten.set_.source_Storage_storage_offset")  # fmt: skip
def _set(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.set_(y)` of another DTensor: its shape, layout and memory. There is no single storage to be set."""
    if len(args) < 2 or not all(isinstance(t, late.DTensor) for t in args):
        raise MixedTensorError("set_: a DTensor can share memory with another DTensor only; make a new one instead")
    if args[0].dtype != args[1].dtype:
        raise RuntimeError(f"set_: the tensors have dtypes {args[0].dtype} and {args[1].dtype}")
    take_over(*args)
    return args[0]


# ------------------------------------------------------------ places in memory
@special("aten.as_strided.default")
def _as_strided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An offset in memory is made one from the tensor's first element, where the rule counts from.

    `x.storage_offset()` is that of this rank's part. In a view of a sharded tensor it may differ between ranks, so
    there only the view's own offset is understood (`fill_diagonal_` passes it), and the ranks make sure that all do.
    """
    func = aten.as_strided.default
    given = dict(zip((p.name for p in func._schema.arguments), args, strict=False)) | kwargs
    x, offset = given["self"], given.get("storage_offset")
    own = x._local_tensor.storage_offset()
    ahead = 0 if offset is None else int(offset) - own
    if offset is not None and _astray(x._spec, ahead != 0, own != 0):
        raise LayoutError(
            explain_error(
                "aten.as_strided", f"{x._spec}, a view, with storage_offset {int(offset)}",
                "an offset in the memory of a sharded tensor means another element on every rank",
                "leave storage_offset out to start at the view's first element, or slice x first",
            )
        )  # fmt: skip
    call = (x, *(tuple(map(int, given[n])) for n in ("size", "stride")), *((ahead,) if ahead else ()))
    info, key, local = hot.info_of(func), (x._spec, *call[1:]), [x._local_tensor, *call[1:]]
    execute = info.plans.get(key)
    return late.miss(info, key, local, {}, call, {}) if execute is None else execute(local, {}, call)


def _astray(spec: Spec, ahead: bool, inside: bool) -> bool:
    """True, on all ranks, where on some an offset is not the tensor's own though the tensor starts inside a memory."""
    if isinstance(spec, MovedSpec):
        inside = True
    elif not any(isinstance(p, (Shard, StridedShard)) for p in spec.placements):
        return False
    flags = torch.tensor([ahead, inside], dtype=torch.int32, device=spec.mesh.device_type)
    for axis, size in enumerate(spec.mesh.shape if spec.mesh.coord is not None else ()):
        if size > 1:
            flags = spec.mesh.comm(axis).all_reduce(flags, "max")
    return bool(flags.all())
