"""Methods of `torch.Tensor` that go to memory by themselves: a DTensor's own is empty, so they go to the part's.

torch's versions read or move the memory of the wrapper, of which there is none, and end the process. They are
replaced here for all ways to call them as a method; the rest of the class is in `dtensor.tensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dtensor.deferred import finish
from dtensor.errors import LayoutError, explain_error

if TYPE_CHECKING:
    from dtensor.tensor import DTensor

__all__ = ["apply_", "is_shared", "map_", "refuse_layout", "share_memory_"]


def share_memory_(self: DTensor) -> DTensor:
    """As `torch.Tensor.share_memory_`, for this rank's part."""
    finish((self,))
    self._local_tensor.share_memory_()
    return self


def is_shared(self: DTensor) -> bool:
    """As `torch.Tensor.is_shared`, for this rank's part."""
    return bool(self._local_tensor.is_shared())


def apply_(self: DTensor, callable: Callable[[Any], Any]) -> DTensor:
    """As `torch.Tensor.apply_`: every element becomes `callable(element)`. Not for pending reductions."""
    if self._spec.has_partial():
        raise LayoutError(_elementwise("apply_", self))
    self.copy_(_with_local(self, self._local_tensor.clone().apply_(callable)))
    return self


def map_(self: DTensor, other: torch.Tensor, callable: Callable[..., Any]) -> DTensor:
    """As `torch.Tensor.map_`: every element becomes `callable(element, its partner in other)`; equal layouts only."""
    if self._spec.has_partial() or getattr(other, "_spec", None) is not self._spec:
        raise LayoutError(_elementwise("map_", self))
    theirs: torch.Tensor = getattr(other, "_local_tensor")  # noqa: B009 - a DTensor, by its spec
    self.copy_(_with_local(self, self._local_tensor.clone().map_(theirs, callable)))
    return self


def _with_local(x: DTensor, local: torch.Tensor) -> DTensor:
    return type(x)(local, x._spec, requires_grad=False)


def _elementwise(call: str, x: DTensor) -> str:
    return explain_error(
        call, str(x._spec), "a Python function of single elements needs their values, in one layout",
        "x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) first",
    )  # fmt: skip


def refuse_layout(call: str, t: torch.Tensor, fix: str = "t.to_dense()") -> None:
    """RuntimeError for tensors that are no dense block of numbers: sparse, nested, opaque to torch."""
    if t.layout is not torch.strided or t.is_nested:
        kind = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        raise RuntimeError(
            explain_error(
                call, f"a {kind} tensor of {list(t.shape) if not t.is_nested else 'several shapes'}",
                "only dense tensors can be distributed", "t.to_padded_tensor(0)" if t.is_nested else fix,
            )
        )  # fmt: skip
