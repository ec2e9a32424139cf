"""Views that had to move data: copies that behave like views.

Such a view is a copy. It carries a spec of its own kind, `MovedSpec`, that remembers the tensor it is a view of, the
calls that lead from that tensor to it, and how often that tensor's memory had been written by then:

    d: f32[8@x,4]     v = d[2:5]     v._spec = MovedSpec(f32[3,4], base d, calls (slice 0, 2, 5), version)

Reading compares the count and takes the view again where its base was written since; writing into it carries what
was written back into the base (`dtensor.dispatch_views`). Ordinary tensors pay nothing: the spec is never interned,
so it never hits a cached plan, and writes are counted only while some such view is alive.

Writes are counted per storage of the local tensor, which all aliases of a DTensor share (`detach()`, `.data`, views
that shared memory); in-place ops, list ops and fused steps report them. These counts are the same on all ranks, so
all ranks take a view again together. Writes that go past the engine, to `x.to_local()`, may happen on one rank only:
they are seen by the local tensor's own version, and refused; and what is written to the local tensor of the view
itself does not reach its base.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.errors import LayoutError, explain_error
from dtensor.spec import Spec

__all__ = [
    "LateSpec", "MovedSpec", "ViewCall", "Watch", "bind_replay", "memory_version", "note_writes", "note_written",
    "settled_spec",
]  # fmt: skip

_alive = 0
_counts: dict[int, int] = {}
_fresh = itertools.count(1)
_lock = threading.RLock()  # a view may be collected while another is made


@dataclass(frozen=True, slots=True)
class ViewCall:
    """A call that takes a view: `func(x, *args, **kwargs)`, output `index` where it gives several."""

    func: torch._ops.OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    index: int | None = None


class Watch:
    """While one is alive, writes are counted. For others who must know whether memory was written meanwhile."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        global _alive
        with _lock:
            _alive += 1

    def __del__(self) -> None:
        global _alive
        with _lock:
            _alive -= 1
            if _alive == 0:
                _counts.clear()


class LateSpec(Spec):
    """Spec of a DTensor whose local tensor may have to be brought up to date before it is read. Never interned."""

    __slots__ = ()

    def settle(self, x: Any, call: str) -> Spec:
        """Bring `x`, which has this spec, up to date for `call`; gives the ordinary spec of its value."""
        raise NotImplementedError


class MovedSpec(LateSpec):
    """Spec of a view that had to move data: `calls` lead to it from `base`, which was at `version` then.

    `local` is the view's value on this rank as of `version`. Never interned.
    """

    __slots__ = ("base", "calls", "local", "version", "watch")
    base: Any
    calls: tuple[ViewCall, ...]
    local: torch.Tensor
    version: tuple[int, int]
    watch: Watch

    @classmethod
    def of(cls, spec: Spec, local: torch.Tensor, origin: Any, call: ViewCall) -> MovedSpec:
        """`spec` of the view that `call` takes of the DTensor `origin`; of its own base where it is such a view."""
        calls: tuple[ViewCall, ...] = ()
        if isinstance(origin._spec, MovedSpec):
            base, calls = origin._spec.base, origin._spec.calls
        else:  # a wrapper of its own, so that a new shape or new data of `origin` do not matter
            base = _wrap(origin._local_tensor, origin._spec)
        made = cls._new(spec.mesh, spec.placements, tuple(spec.shape), spec.stride, spec.dtype)
        if not isinstance(made, MovedSpec):
            raise TypeError("MovedSpec was made as another class")
        made.watch = Watch()
        made.base, made.calls, made.local, made.version = base, (*calls, call), local, version(base)
        return made

    def settle(self, x: Any, call: str) -> Spec:
        """LayoutError where the base was written past the engine."""
        now = version(self.base)
        if self.version[0] != now[0]:
            self.local, self.version = _replay(self), now
        elif self.version != now:
            raise LayoutError(
                explain_error(
                    call, str(self), "a view that had to move data does not see what is written to local tensors",
                    "write to the DTensor, or take the view again after writing",
                )
            )  # fmt: skip
        x._local_tensor = self.local
        return self.settled()

    def settled(self) -> Spec:
        """The ordinary spec of the same value."""
        return Spec.make(self.mesh, self.placements, self.shape, self.stride, self.dtype)


def _unbound(*_: Any) -> Any:
    raise RuntimeError("dtensor.moved is used before dtensor.dispatch_views was imported")


_replay: Callable[[MovedSpec], torch.Tensor] = _unbound
_wrap: Callable[[torch.Tensor, Spec], Any] = _unbound


def bind_replay(replay: Callable[[MovedSpec], torch.Tensor], wrap: Callable[[torch.Tensor, Spec], Any]) -> None:
    """Told by `dtensor.dispatch_views` how to take a view again, and how to make a DTensor."""
    global _replay, _wrap
    _replay, _wrap = replay, wrap


def settled_spec(x: Any, call: str) -> Spec:
    """The ordinary spec of a DTensor that is about to be read by `call`.

    Brings `x._local_tensor` up to date where `x` is a view that had to move data, or waits for a collective: read the
    local tensor afterwards. LayoutError where the base of a view was written past the engine.
    """
    spec: Spec = x._spec
    return spec.settle(x, call) if isinstance(spec, LateSpec) else spec


def note_writes(*written: Any) -> None:
    """Count a write to each of these DTensors, and to those in lists; anything else is passed over."""
    for t in written:
        if isinstance(t, (list, tuple)):
            note_writes(*t)
        elif hasattr(t, "_local_tensor"):
            _counts[storage_of(t)] = next(_fresh)


def note_written(args: Sequence[Any], at: Sequence[int]) -> None:
    """`note_writes` for the arguments in these positions, where it matters."""
    if _alive:
        note_writes(*(args[i] for i in at if i < len(args)))


def storage_of(t: Any) -> int:
    """What tells the local memory of a DTensor from others'."""
    return _storage(t._local_tensor)


def _storage(local: Any) -> int:
    if type(local) is not torch.Tensor and hasattr(local, "wait"):  # the unwaited result of a collective
        local = local.wait()
    return int(local.untyped_storage()._cdata)


def version(base: Any) -> tuple[int, int]:
    """How often the memory of a DTensor was written: by the engine while watching, and by anyone."""
    return memory_version(base._local_tensor)


def memory_version(local: torch.Tensor) -> tuple[int, int]:
    """How often the memory of a local tensor was written: by the engine while some `Watch` is alive, and by anyone."""
    own = 0 if local.is_inference() else int(local._version)
    return _counts.get(_storage(local), 0), own
