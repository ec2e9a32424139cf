"""Views that had to move data: computed all the same, never written in silence, never read when stale.

Such a view is a copy. It carries a spec of its own kind, `MovedSpec`, that remembers the tensor it is a view of and
how often that tensor's memory had been written by then. Reading the view compares the count; writing into it is
an error. Ordinary tensors pay nothing: the spec is never interned, so it never hits a cached plan, and writes are
counted only while some such view is alive.

Writes are counted per storage of the local tensor, which all aliases of a DTensor share (`detach()`, `.data`, views
that shared memory); in-place ops, list ops and fused steps report them. Writes that go past the engine, to
`x.to_local()`, are seen by that local tensor's own version, not through other aliases of it.
"""

from __future__ import annotations

from typing import Any

import torch

from dtensor.errors import LayoutError, explain_error
from dtensor.spec import Spec

__all__ = ["MovedSpec", "note_writes", "settled_spec", "watching"]

_alive = 0
_counts: dict[int, int] = {}


class MovedSpec(Spec):
    """Spec of a view that had to move data: `base` was at `version` then. Never interned."""

    __slots__ = ("base", "version")
    base: Any
    version: tuple[int, int]

    @classmethod
    def of(cls, spec: Spec, base: Any) -> MovedSpec:
        """`spec`, marked; of the base's own base when that is such a view itself."""
        global _alive
        if isinstance(base._spec, MovedSpec):
            base = base._spec.base
        made = cls._new(spec.mesh, spec.placements, tuple(spec.shape), spec.stride, spec.dtype)
        if not isinstance(made, MovedSpec):
            raise TypeError("MovedSpec was made as another class")
        made.base, made.version = base, _version(base)
        _alive += 1
        return made

    def __del__(self) -> None:
        global _alive
        if hasattr(self, "version"):
            _alive -= 1
            if _alive == 0:
                _counts.clear()

    def settled(self) -> Spec:
        """The ordinary spec of the same value."""
        return Spec.make(self.mesh, self.placements, self.shape, self.stride, self.dtype)


def settled_spec(x: Any, call: str) -> Spec:
    """The ordinary spec of a DTensor that is about to be read by `call`; LayoutError when it is a stale view."""
    spec: Spec = x._spec
    if not isinstance(spec, MovedSpec):
        return spec
    if spec.version != _version(spec.base):
        raise LayoutError(
            explain_error(
                call, str(spec), "a view that had to move data does not see the writes that its base got since",
                "take the view again after writing, or clone() the base before",
            )
        )  # fmt: skip
    return spec.settled()


def watching() -> bool:
    """True while a view that had to move data is alive, so that writes matter."""
    return _alive > 0


def note_writes(*written: Any) -> None:
    """Count a write to each of these DTensors, and to those in lists; anything else is passed over."""
    for t in written:
        if isinstance(t, (list, tuple)):
            note_writes(*t)
        elif hasattr(t, "_local_tensor"):
            key = _storage(t)
            _counts[key] = _counts.get(key, 0) + 1


def _storage(t: Any) -> int:
    local = t._local_tensor
    if type(local) is not torch.Tensor and hasattr(local, "wait"):  # the unwaited result of a collective
        local = local.wait()
    return int(local.untyped_storage()._cdata)


def _version(base: Any) -> tuple[int, int]:
    local = base._local_tensor
    own = 0 if local.is_inference() else int(local._version)
    return _counts.get(_storage(base), 0), own
