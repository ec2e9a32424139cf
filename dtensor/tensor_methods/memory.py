"""What goes to a tensor's memory by itself: a DTensor's own is empty, so it gets the part's, or is refused.

torch's versions read, move or hand out the memory of the wrapper, of which there is none: a null pointer, whatever lies
near it, the end of the process. What asks for an address or a storage gets the part's. What reads by the tensor's
shape and strides (DLPack, the CUDA array interface) would read past the part's end, and is refused. The methods here
are `DTensor`'s; the rest of the class is in `dtensor.tensor`. `refuse_dlpack` is for functions that ask no method.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
import torch.utils.dlpack

from dtensor.dispatch import late
from dtensor.dispatch.call import plain_wrapper
from dtensor.dispatch.materialized import settled_spec
from dtensor.errors import LayoutError, explain_error
from dtensor.spec import Distributed
from dtensor.torch_changes import replace

__all__ = [
    "apply_", "cuda_array", "data_ptr", "is_shared", "map_", "no_dlpack", "refuse_dlpack",
    "share_memory_", "storage", "typed_storage", "untyped_storage",
]  # fmt: skip


D = TypeVar("D", bound=Distributed)


def _part(x: Distributed, call: str) -> torch.Tensor:
    """This rank's part, up to date, as a tensor that has memory."""
    settled_spec(x, call)
    local: Any = x._local_tensor
    part: torch.Tensor = local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local
    return part


def data_ptr(self: Distributed) -> int:
    """Address of this rank's part: tells shared parameters apart, as for plain tensors."""
    return _part(self, "data_ptr").data_ptr()


def untyped_storage(self: Distributed) -> torch.UntypedStorage:
    """The storage of this rank's part. torch's compiler, which tells tensors apart by theirs, gets the wrapper's."""
    if str(sys._getframe(1).f_globals.get("__name__")).startswith("torch._"):
        return torch.Tensor.untyped_storage(self)  # type: ignore[arg-type]
    return _part(self, "untyped_storage").untyped_storage()


def storage(self: Distributed) -> Any:
    """As `torch.Tensor.storage`, of this rank's part."""
    return _part(self, "storage").storage()


def typed_storage(self: Distributed) -> Any:
    """As `torch.Tensor._typed_storage`, of this rank's part."""
    return _part(self, "_typed_storage")._typed_storage()


def no_dlpack(self: Distributed, *args: object, **kwargs: object) -> NoReturn:
    """For `__dlpack__` and `__dlpack_device__`. Raises BufferError, as the protocol asks for."""
    raise BufferError(_outside("DLPack", self))


def cuda_array(self: Distributed) -> NoReturn:
    """For `__cuda_array_interface__`. Raises AttributeError, by which callers see that there is none."""
    raise AttributeError(_outside("__cuda_array_interface__", self))


def _outside(call: str, x: Distributed) -> str:
    return explain_error(
        call, f"a DTensor {x._spec}", "whoever takes the memory reads it by the shape of the whole, of which this rank "
        "has a part", "x.full_tensor() for the whole, x.to_local() for the part",
    )  # fmt: skip


def refuse_dlpack() -> None:
    """Make torch's functions that give a DLPack capsule, and ask no method of the tensor, refuse DTensors."""
    kind = late.DTensor
    for home, name in ((torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch._C, "_to_dlpack")):
        replace(home, name, _refusing(getattr(home, name), kind))
    versioned = getattr(torch._C, "_to_dlpack_versioned", None)
    if versioned is not None:
        replace(torch._C, "_to_dlpack_versioned", _refusing(versioned, kind))


def _refusing(make: Callable[..., object], kind: type) -> Callable[..., object]:
    @functools.wraps(make)
    def to_dlpack(*args: Any, **kwargs: Any) -> object:
        for t in (*args, *kwargs.values()):
            if isinstance(t, kind):
                no_dlpack(t)  # type: ignore[arg-type]
        return make(*args, **kwargs)

    return to_dlpack


def share_memory_(self: D) -> D:
    """As `torch.Tensor.share_memory_`, for this rank's part."""
    _part(self, "share_memory_").share_memory_()
    return self


def is_shared(self: Distributed) -> bool:
    """As `torch.Tensor.is_shared`, for this rank's part."""
    return bool(self._local_tensor.is_shared())


def apply_(self: D, callable: Callable[[Any], Any]) -> D:
    """As `torch.Tensor.apply_`: every element becomes `callable(element)`. Not for pending reductions."""
    if self._spec.has_partial():
        raise LayoutError(_elementwise("apply_", self))
    _write(self, self._local_tensor.clone().apply_(callable))
    return self


def map_(self: D, other: torch.Tensor, callable: Callable[..., Any]) -> D:
    """As `torch.Tensor.map_`: every element becomes `callable(element, its partner in other)`; equal layouts only."""
    if self._spec.has_partial() or getattr(other, "_spec", None) is not self._spec:
        raise LayoutError(_elementwise("map_", self))
    theirs: torch.Tensor = getattr(other, "_local_tensor")  # noqa: B009 - a DTensor, by its spec
    _write(self, self._local_tensor.clone().map_(theirs, callable))
    return self


def _write(x: Distributed, local: torch.Tensor) -> None:
    target: Any = x
    target.copy_(plain_wrapper(local, x._spec))


def _elementwise(call: str, x: Distributed) -> str:
    return explain_error(
        call, str(x._spec), "a Python function of single elements needs their values, in one layout",
        "x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) first",
    )  # fmt: skip
