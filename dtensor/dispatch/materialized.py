"""Views that had to move data: copies that behave like views.

Such a view is a copy. It carries a spec of its own kind, `MovedSpec`, that remembers the tensor it is a view of, the
calls that lead from that tensor to it, and how often that tensor's memory had been written by then:

    d: f32[8@x,4]     v = d[2:5]     v._spec = MovedSpec(f32[3,4], base d, calls (slice 0, 2, 5), version)

Reading compares the count and takes the view again where its base was written since; writing into it carries what
was written back into the base (`dtensor.dispatch.views`). Ordinary tensors pay nothing: the spec is never interned,
so it never hits a cached plan, and writes are counted only while some such view is alive.

Writes are counted per storage of the local tensor, which all aliases of a DTensor share (`detach()`, `.data`, views
that shared memory); in-place ops, list ops and fused steps report them. These counts are the same on all ranks, so
all ranks take a view again together. Writes that go past the engine, to `x.to_local()`, may happen on one rank only:
they are seen by the local tensor's own version, and refused; and what is written to the local tensor of the view
itself does not reach its base.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch

from dtensor.comm.communicator import traced
from dtensor.dispatch import late
from dtensor.dispatch.call import plain_wrapper
from dtensor.errors import LayoutError, explain_error
from dtensor.spec import LateSpec, Spec

__all__ = [
    "GivenSpec", "MovedSpec", "ViewCall", "ViewOf", "Watch", "memory_version",
    "note_input", "note_view", "note_writes", "note_written", "settled_spec", "spec_to_compile",
]  # fmt: skip

_alive = 0
_counts: dict[int, int] = {}
_fresh = itertools.count(1)
_given: weakref.WeakValueDictionary[tuple[Spec, bool], GivenSpec] = weakref.WeakValueDictionary()
_moved_of: dict[int, weakref.WeakSet[MovedSpec]] = {}
"""Of each memory, the views of it that had to move data."""
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
                _moved_of.clear()


class MovedSpec(LateSpec):
    """Spec of a view that had to move data: `calls` lead to it from `base`, which was at `version` then.

    `local` is the view's value on this rank as of `version`. Never interned. `given`: in a trace, to which the view was
    given; there it is a copy, that neither sees what is written to its base nor can be written to.
    """

    __slots__ = ("base", "calls", "given", "local", "version", "watch")
    given: bool
    base: Any
    calls: tuple[ViewCall, ...]
    local: torch.Tensor
    version: tuple[int, int]
    watch: Watch

    @classmethod
    def of(cls, spec: Spec, local: torch.Tensor, origin: Any, call: ViewCall | None) -> MovedSpec:
        """`spec` of the view that `call` takes of the DTensor `origin`; of its own base where it is such a view.

        Without a call nothing is known of where the view comes from.
        """
        calls: tuple[ViewCall, ...] = ()
        given = call is None or (traced(local) and _becoming_an_input())
        if call is None:
            base = None
        elif isinstance(origin._spec, MovedSpec):
            base, calls, given = origin._spec.base, origin._spec.calls, given or origin._spec.given
        else:  # a wrapper of its own, so that a new shape or new data of `origin` do not matter
            base = plain_wrapper(origin._local_tensor, origin._spec)
            if hasattr(origin, "_looked_at"):
                base._looked_at = True
        made = cls._new(spec.mesh, spec.placements, tuple(spec.shape), spec.stride, spec.dtype)
        if not isinstance(made, MovedSpec):
            raise TypeError("MovedSpec was made as another class")
        made.watch = Watch()
        made.base, made.local, made.given = base, local, given
        made.version = version(base)
        if given and base is not None:  # which may have been written before this trace came to the view
            made.version = (0, 0)
        if base is not None:
            _moved_of.setdefault(storage_of(base), weakref.WeakSet()).add(made)
        made.calls = calls if call is None else (*calls, call)
        return made

    def settle(self, x: Any, call: str) -> Spec:
        """LayoutError where the base was written past the engine."""
        now = version(self.base)
        if self.given and (call == "__tensor_flatten__" or self.version == now):
            return self.settled()
        if self.given:
            self.refuse(call, "a graph that is given such a view does not see in it what is written to its base")
        if self.version[0] != now[0]:
            with _mode_of(self.local):
                self.local, self.version = late.retake(self), now
        elif self.version != now:
            raise LayoutError(
                explain_error(
                    call, str(self), "a view that had to move data does not see what is written to local tensors",
                    "write to the DTensor, or take the view again after writing",
                )
            )  # fmt: skip
        x._local_tensor = self.local
        return self.settled()

    def refuse(self, call: str, rule: str) -> NoReturn:
        """Make `torch.compile` leave `call` to the program; with `fullgraph=True` this is an error."""
        raise _left_out(call, f"{self}, a view that had to move data, as an input of a graph", rule)

    def settled(self) -> Spec:
        """The ordinary spec of the same value."""
        return Spec.make(self.mesh, self.placements, self.shape, self.stride, self.dtype)


class GivenSpec(Spec):
    """What a compiler is told of a view that had to move data, or of the base of one, which goes into a graph.

    `plain` is its ordinary spec. One object for each of those, as a compiler compares what it is given with what it was
    given before.
    """

    __slots__ = ("is_view", "plain")
    is_view: bool
    plain: Spec

    @classmethod
    def like(cls, spec: Spec, is_view: bool) -> GivenSpec:
        """That of a view, or of a base, whose value has the ordinary spec `spec`."""
        made = _given.get((spec, is_view))
        if made is None:
            new = cls._new(spec.mesh, spec.placements, tuple(spec.shape), spec.stride, spec.dtype)
            assert isinstance(new, GivenSpec)
            new.plain, new.is_view, made = spec, is_view, new
            _given[spec, is_view] = made
        return made

    def stands_for(self, t: Any) -> None:
        """Make the DTensor `t` of a trace what this says."""
        if self.is_view:
            t._spec = MovedSpec.of(self.plain, t._local_tensor, None, None)
        else:
            t._spec, t._looked_at = self.plain, True


def spec_to_compile(t: Any, spec: Spec) -> Spec:
    """What a compiler is told of the DTensor `t`, whose ordinary spec is `spec`."""
    if traced(t._local_tensor):
        calls = getattr(t, "_calls", ())
        return ViewOf.like(spec, calls) if calls else spec
    if type(t._spec) is MovedSpec:
        return GivenSpec.like(spec, True)
    return GivenSpec.like(spec, False) if _moved_of and _moved_of.get(storage_of(t)) else spec


class ViewOf(Spec):
    """What a compiler is told of a view that leaves a graph: `calls` lead to it from an input.

    The compiled function gives, when it is called, a view of its argument that is taken by these calls.
    """

    __slots__ = ("calls",)
    calls: tuple[ViewCall, ...]

    @classmethod
    def like(cls, spec: Spec, calls: tuple[ViewCall, ...]) -> ViewOf:
        """That of a view whose value has the ordinary spec `spec`."""
        made = cls._new(spec.mesh, spec.placements, tuple(spec.shape), spec.stride, spec.dtype)
        assert isinstance(made, ViewOf)
        made.calls = calls
        return made


def note_view(view: Any, base: Any, call: ViewCall) -> None:
    """Note in a trace that `call` took `view` of `base`, where that is an input of the graph or a view of one."""
    calls = getattr(base, "_calls", None)
    if calls is not None and view is not base:
        view._calls = (*calls, call)
        view._memory = getattr(base, "_memory", None)
    if hasattr(base, "_looked_at"):
        view._looked_at = True
    if calls is not None or (not isinstance(view._spec, MovedSpec) and _becoming_an_input()):
        torch._functionalize_unsafe_set(view, base)


_inputs: dict[int, list[tuple[weakref.ref[torch.Tensor], object]]] = {}
"""Of each memory, tensors without values that stand for it in a graph's inputs, and how they lie in it."""


def note_input(t: Any) -> None:
    """Note that the DTensor `t` of a trace is an input of its graph: views of it are followed, writes looked at."""
    fake = torch._from_functional_tensor(t._local_tensor.elem)
    lies = fake.storage_offset(), tuple(fake.shape), tuple(fake.stride())
    t._calls, t._memory = (), int(fake.untyped_storage()._cdata)
    known = _inputs.setdefault(t._memory, [])
    known[:] = [(ref, other) for ref, other in known if ref() is not None and other != lies]
    known.append((weakref.ref(fake), lies))
    if len(known) > 1:
        t._watch = Watch()


def _refuse_shared(t: Any) -> None:
    """Make `torch.compile` leave a write in a graph to the program where another input of it has to see it."""
    memory = getattr(t, "_memory", None)
    several = memory is not None and len([ref for ref, _ in _inputs.get(memory, ()) if ref() is not None]) > 1
    if several or hasattr(t, "_looked_at") or any(view.given for view in _moved_of.get(storage_of(t), ())):
        raise _left_out(
            "torch.compile", f"{t._spec}, which is written and shares memory with another input of the graph",
            "a graph takes its inputs for memory of their own",
        )  # fmt: skip


def _left_out(call: str, got: str, rule: str) -> Exception:
    """What makes `torch.compile` leave a call to the program; with `fullgraph=True` it is an error."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    error = UnsupportedOperatorException(torch.ops.aten.copy_.default)
    fix = "take views inside of the function; or torch.compile without fullgraph=True, which leaves this part out"
    error.__cause__ = LayoutError(explain_error(call, got, rule, fix))
    return error


def _becoming_an_input() -> bool:
    """Whether torch is taking a view of a tensor without values to stand for one that a graph is given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("meta_utils.py"):
        frame = frame.f_back
    return frame is not None


def _mode_of(local: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The mode that a compiler's tensors need, which it leaves before it looks at what a function gives."""
    if type(local).__name__ != "FunctionalTensor":
        return contextlib.nullcontext()
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None:
        return contextlib.nullcontext()
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    return FunctionalTensorMode()


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
            if traced(t._local_tensor):
                _refuse_shared(t)
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
    """How often the memory of a DTensor was written: by the engine while watching, and by anyone; None: any memory."""
    return (max(_counts.values(), default=0), 0) if base is None else memory_version(base._local_tensor)


def memory_version(local: torch.Tensor) -> tuple[int, int]:
    """How often the memory of a local tensor was written: by the engine while some `Watch` is alive, and by anyone."""
    own = 0 if local.is_inference() else int(local._version)
    return _counts.get(_storage(local), 0), own
