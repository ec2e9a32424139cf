"""Deferred results: their collective is sent when something reads them.

A kernel that ends in a small all-reduce may hand on what this rank has, and how to finish. Its results carry a spec of
their own kind, `DeferredSpec`, which says pending; the first call that reads one of them sends the collective, for
all of them at once, and they are ordinary DTensors from then on:

    mean of a loss     forward    this rank's sum and count              placements (Partial(weighted avg),)
                       backward   one all-reduce of the sums and counts  placements (Replicate(),)

So a forward pass sends nothing, and the loss costs one collective wherever it is read first. Every rank of the mesh
has to read it, as with any pending tensor. `to_local()` reads nothing: it gives this rank's own mean.

The pending average is weighted by numbers that only the results know, so no other tensor can be laid out like that:
`Partial(weighted avg)` is found on them alone, and a reduction that is asked for it by name is refused. These specs
are never interned, so they hit no cached plan, and ordinary tensors pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dtensor.errors import LayoutError, explain_error
from dtensor.placement import Partial
from dtensor.spec import WEIGHTED, LateSpec, Spec

__all__ = ["Deferred", "DeferredSpec", "Deferral", "finish"]


def _weighted() -> Partial:
    """The placement of what is pending here: not among the reductions that can be asked for."""
    made: Partial = object.__new__(Partial)
    object.__setattr__(made, "reduce_op", WEIGHTED)
    return made


PENDING = _weighted()


class Deferred:
    """A collective that several results wait for: `finish()` sends it and gives all their local tensors.

    It runs once. What it raises is raised again at every later reading, without another collective.
    """

    __slots__ = ("_error", "_finish", "_inference", "_parts", "_values", "_versions")

    def __init__(self, parts: Sequence[torch.Tensor], finish: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._finish: Callable[[], Sequence[torch.Tensor]] | None = finish
        self._parts, self._versions = parts, _versions(parts)
        self._inference = torch.is_inference_mode_enabled()
        self._values: Sequence[torch.Tensor] = ()
        self._error: Exception | None = None

    def value(self, index: int) -> torch.Tensor:
        """Local tensor of result `index`; sends the collective."""
        if self._finish is not None:
            try:
                self._check_parts()
                with torch.inference_mode(self._inference), torch.no_grad():
                    self._values = self._finish()
            except Exception as error:
                self._error = error
            self._finish = None
        if self._error is not None:
            raise self._error
        return self._values[index]

    def _check_parts(self) -> None:
        if _versions(self._parts) != self._versions:
            raise LayoutError(
                explain_error(
                    "finishing a result that waits for a collective", "a part that was written to since, by to_local()",
                    "what is written there does not reach the result", "write to the DTensor",
                )
            )  # fmt: skip
        self._parts = ()


def _versions(parts: Sequence[torch.Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in parts]


class DeferredSpec(LateSpec):
    """Spec of a result that waits: pending on `axes`, laid out as `final` once it is read. Never interned."""

    __slots__ = ("final", "index", "shared")
    final: Spec
    shared: Deferred
    index: int

    @classmethod
    def of(cls, final: Spec, axes: Sequence[int], shared: Deferred, index: int) -> DeferredSpec:
        """The spec of result `index` of what `shared` defers."""
        made: DeferredSpec = object.__new__(cls)
        for name in ("mesh", "shape", "stride", "dtype", "tensor_meta", "local_shape", "_bound"):
            setattr(made, name, getattr(final, name))
        made.placements = tuple(PENDING if i in axes else p for i, p in enumerate(final.placements))
        made.final, made.shared, made.index = final, shared, index
        return made

    def settle(self, x: Any, call: str) -> Spec:
        """Make `x` an ordinary DTensor of its value; the same collective on all ranks of the mesh."""
        x._local_tensor, x._spec = self.shared.value(self.index), self.final
        return self.final


class Deferral:
    """What a kernel returns to put its collective off: `parts`, this rank's results meanwhile, and `finish`."""

    __slots__ = ("finish", "parts")

    def __init__(self, parts: Sequence[torch.Tensor], finish: Callable[[], Sequence[torch.Tensor]]) -> None:
        self.parts, self.finish = parts, finish

    def specs(self, outs: Sequence[Spec | None], axes: Sequence[int]) -> list[Spec | None]:
        """The specs of the results, where `outs` are those they will have."""
        shared = Deferred(self.parts, self.finish)
        return [None if s is None else DeferredSpec.of(s, axes, shared, i) for i, s in enumerate(outs)]


def finish(tensors: Iterable[Any]) -> None:
    """Send what these wait for, in their order; anything else among them is passed over."""
    for t in tensors:
        spec = getattr(t, "_spec", None)
        if isinstance(spec, DeferredSpec):
            spec.settle(t, "finish")
