"""What a trace meets outside of torch's dispatcher: communicators, generators, the table of plans.

Inside `recording(recorder)`, in its thread, methods of communicators that call no functional ops tell the recorder what
they would do, and give fake results of the right shapes; what `dtensor.dispatch.random` does to generators becomes a
call before and one after the draw; states of generators that are read and set, as activation checkpointing
does, are calls too; and plans are not kept, as they may hold tensors of the trace.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dtensor.comm.communicator import Communicator
from dtensor.comm.fake import FakeCommunicator
from dtensor.comm.observers import received
from dtensor.comm.pending import Pending
from dtensor.debug.collectives import Collective
from dtensor.dispatch import hit as hot
from dtensor.dispatch import plain as dispatch_plain
from dtensor.dispatch import random as rng
from dtensor.lowering.record import Recorder, tensors_in
from dtensor.simulation.communicator import SimulatedCommunicator
from dtensor.spec import Spec

__all__ = ["recording"]

_active = threading.local()
_CONTEXTS = ("_common_stream", "_seeded")
"""What `dtensor.dispatch.random` does to generators."""
_METHODS = ("_all_reduce", "_all_gather", "_reduce_scatter", "_all_to_all", "_broadcast", "_scatter")
_patched = 0
_originals: list[tuple[type, str, Any]] = []
_lock = threading.RLock()


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside, in this thread, communicators that call no functional ops tell `recorder` what they would do."""
    global _patched
    with _lock:
        _patched += 1
        if _patched == 1:
            _patch()
    outer, _active.recorder = getattr(_active, "recorder", None), recorder
    try:
        yield
    finally:
        _active.recorder = outer
        with _lock:
            _patched -= 1
            if _patched == 0:
                for cls, name, original in _originals:
                    setattr(cls, name, original)
                _originals.clear()


def _patch() -> None:
    for name in _CONTEXTS:
        _replace_context(name)
    _patch_store()
    _patch_agreement()
    for module in _GENERATORS:
        for name in _STATES:
            _replace_state(module, name)
    for cls in (SimulatedCommunicator, FakeCommunicator):
        for name in _METHODS:
            _replace(cls, name)


_GENERATORS = (torch, torch.random, torch.cuda)
_STATES = ("get_rng_state", "set_rng_state", "manual_seed")
"""What a program, or activation checkpointing for it, does to generators."""


def _replace_state(module: Any, name: str) -> None:
    original = getattr(module, name)
    _originals.append((module, name, original))

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder: Recorder | None = getattr(_active, "recorder", None)
        if recorder is None:
            return original(*args, **kwargs)
        out = None
        if name == "get_rng_state":
            with _disable_current_modes():
                size = original(*args, **kwargs).shape
                with recorder.fake:
                    out = torch.empty(size, dtype=torch.uint8)
        recorder.add(original, args, kwargs, out).meta["kept"] = True
        return out

    setattr(module, name, call)


def _patch_agreement() -> None:
    """Zeros, which autograd makes for parts that are not used, are the same on all ranks: no comparison.

    Of other plain tensors that formulas of autograd use, only those are that no input of the program is in.
    """
    check, same = dispatch_plain._check, dispatch_plain._same_on_all
    _originals.append((dispatch_plain, "_check", check))  # type: ignore[arg-type]
    _originals.append((dispatch_plain, "_same_on_all", same))  # type: ignore[arg-type]

    def unless_zero(info: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        recorder: Recorder | None = getattr(_active, "recorder", None)
        if recorder is not None:
            plain = [t for t in tensors_in((*args, *kwargs.values())) if not isinstance(t, hot._DTensor)]
            if all(map(recorder.is_zero, plain)):
                return None
        return check(info, args, kwargs, *rest)

    def known(t: torch.Tensor) -> bool:
        recorder: Recorder | None = getattr(_active, "recorder", None)
        return same(t) if recorder is None else recorder.is_constant(t)

    dispatch_plain._check = unless_zero  # type: ignore[assignment]
    dispatch_plain._same_on_all = known


def _patch_store() -> None:
    """Plans made in a trace are not kept: they may hold tensors of it."""
    store = hot.store
    _originals.append((hot, "store", store))  # type: ignore[arg-type]

    def keep(*args: Any) -> None:
        if getattr(_active, "recorder", None) is None:
            store(*args)

    hot.store = keep  # type: ignore[assignment]


def _replace_context(name: str) -> None:
    original = getattr(rng, name)
    _originals.append((rng, name, original))  # type: ignore[arg-type]

    def context(spec: Spec, generator: torch.Generator, *device: torch.device) -> Any:
        recorder: Recorder | None = getattr(_active, "recorder", None)
        make = lambda: original(spec, generator, *device)  # noqa: E731
        return make() if recorder is None else recorder.bracket(name.removeprefix("_"), make)

    setattr(rng, name, context)


def _replace(cls: type, name: str) -> None:
    original = getattr(cls, name)
    _originals.append((cls, name, original))

    def method(self: Communicator, *args: Any) -> Pending[Any]:
        recorder: Recorder | None = getattr(_active, "recorder", None)
        if recorder is None:
            found: Pending[Any] = original(self, *args)
            return found
        return Pending(_recorded(recorder, self, original, name, args))

    setattr(cls, name, method)


def _recorded(recorder: Recorder, comm: Communicator, original: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Record one call of a communicator's method, and give fake results of the right shapes."""
    kind = name.removeprefix("_")
    tensors = [a for a in args if isinstance(a, torch.Tensor) or (isinstance(a, (list, tuple)) and list(tensors_in(a)))]
    places = [i for i, a in enumerate(args) if any(a is t for t in tensors)]

    def run(*given: Any) -> Any:
        call = list(args)
        for i, value in zip(places, given, strict=True):
            call[i] = value
        return original(comm, *call).wait()

    first = next(tensors_in(tensors))
    new = lambda shape: torch.empty(tuple(shape), dtype=first.dtype, device=first.device)  # noqa: E731
    with _disable_current_modes(), recorder.fake:
        out: Any
        count = first.numel()
        if kind in ("all_gather", "all_to_all"):
            into = args[2] if kind == "all_gather" and len(args) > 2 else None
            out = [new(s) for s in args[1]] if into is None else list(into)
            count = received(kind, comm.size, comm.rank, args[1])
        elif kind == "reduce_scatter":
            out = new(args[0][comm.rank].shape)
            count = received(kind, comm.size, comm.rank, [p.shape for p in args[0]])
        elif kind == "scatter":
            out = new(args[1].shape)
        else:
            out = new(first.shape)
            count = received(kind, comm.size, comm.rank, first.numel()) if kind == "all_reduce" else count
    fx_args = [list(a) if isinstance(a, tuple) else a for a in tensors]
    return recorder.collective(kind, run, fx_args, out, Collective(kind, comm.size, float(count), first.itemsize))
