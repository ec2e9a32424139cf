"""Whose a plain tensor is that meets DTensors: the user's, or one that torch's own code has just made.

torch's composites make tensors as they go: the mask of an attention, the first state of an RNN, a window, the
identity of `matrix_power(x, 0)`. They are plain, although the user passed none. Nothing marks them, but nobody
holds them: a tensor made in C++ gets its Python object for this very call, so the arguments are its only holder,
while a user's tensor is also held by the variable, or by the stack of the expression, that it comes from. Python
counts references exactly, so the question has an exact answer:

    d + torch.ones(3)           arguments, + the tuple and the stack of the call    the user's
    torch.quantile(d, 0.5)      arguments                                           torch's
    F.linear(d, w.t())          arguments; but a view, whose base `w` is held       the user's
    nn.GRU(...)(d)              arguments; a view, whose base is held by a variable
                                of the frame of `nn.GRU.forward`                    torch's

In the last case the holder is a frame of torch's Python code, called by the user's. Its variables are looked
through, so that what they hold is accounted for; what anything else holds (an attribute, the user's frame, a
tuple) is not, and the tensor is the user's. So is what torch's outermost frame was given as an argument.

What the counts are without a holder, and what a call adds, is measured at first use. Where the two cannot be
told apart, every plain tensor is the user's. The answer decides what is *refused*; what is accepted is compared
over the ranks before it is used (`dtensor.dispatch.plain`), so no value rests on a count.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from inspect import CO_VARARGS, CO_VARKEYWORDS
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["Place", "called_by_autograd", "made_by_torch", "runs_in", "value_at"]

Place = tuple[int | str, int | None]
"""Where an argument is: position or name, and position in a list."""

_HOME = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_KERNELS = str(Path(__file__).parent / "products.py")
_HANDLER = "__torch_dispatch__"
_WRAPPERS = (f"{_TORCH}/_dynamo", f"{_TORCH}/_compile.py")
"""What torch puts around the handlers of its own modes."""
_AROUND = (*_WRAPPERS, *(f"{_TORCH}/{name}" for name in ("_decomp", "_refs", "_prims_common", "_ops.py", "_meta_reg")))
"""And what writes an op by others in a trace."""
_COPIES = 2 if sys.version_info < (3, 13) else 1
"""References by a variable that was looked at: older versions keep a copy of a frame's variables."""


def made_by_torch(args: Sequence[Any], kwargs: Mapping[str, Any], place: Place) -> bool:
    """Whether the plain tensor at `place` of a call was made by torch itself. No caller may hold it in a variable."""
    (fresh, base_fresh), (held, base_held) = _counts()
    inside, kernels, modes, torchs = _frames(sys._getframe(1))
    call = held - fresh if torchs else 0
    t = value_at(args, kwargs, place)
    if call < 0 or held <= fresh or base_held <= base_fresh or type(t) is not torch.Tensor or t.requires_grad:
        return False
    known = _variables(inside, t) + _variables(torchs, t) + _by_modes(modes, t)  # first, as looking leaves references
    known += sum(x is t for a in (*args, *kwargs.values()) for x in (a if isinstance(a, (list, tuple)) else [a])) - 1
    known += _kept_by_calls() * sum(_given(frame, t) for frame in torchs) + _by_kernels(kernels, t)
    unknown = sys.getrefcount(t) - fresh - known - call
    if _passed(torchs, t) or (unknown > 0 and unknown > _packed(torchs, t)):
        return False
    if not t._is_view():  # what is made in inference mode is not known to be a view: one base is let pass
        return _users(t) <= _sole() + t.is_inference()
    base = t._base
    if type(base) is not torch.Tensor or base.requires_grad or _passed(torchs, base):
        return False
    if not torchs and _users(t) > _sole() + 1:  # some other view of the memory may be the user's
        return False
    known = _variables(torchs, base) + _kept_by_calls() * sum(_given(frame, base) for frame in torchs)
    known += _by_kernels(kernels, base)
    return sys.getrefcount(base) <= base_fresh + known + call


def called_by_autograd() -> bool:
    """Whether the call comes from a formula of autograd in C++, not from a function's backward in Python."""
    _, _, _, torchs = _frames(sys._getframe(1))
    if torchs:
        names = (f.f_code.co_name for f in torchs if not f.f_code.co_filename.startswith(_AROUND))
        return next(names, "") == "_engine_run_backward"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _HANDLER:
        frame = frame.f_back
    return frame is None or frame.f_back is None  # a thread of the engine's


def runs_in(functions: Collection[tuple[str, str]]) -> FrameType | None:
    """The frame of the first of torch's Python functions, (file under torch, name), that the call comes from.

    Between them stands no code but torch's and this package's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_HOME, _TORCH)):
        if (frame.f_code.co_filename.removeprefix(f"{_TORCH}/"), frame.f_code.co_name) in functions:
            return frame
        frame = frame.f_back
    return None


def value_at(args: Sequence[Any], kwargs: Mapping[str, Any], place: Place) -> Any:
    """The argument at `place` of a call."""
    where, sub = place
    box = args[where] if isinstance(where, int) else kwargs[where]
    return box if sub is None else box[sub]


def _users(t: torch.Tensor) -> int:
    """How many tensors have the memory of `t`, and a constant; views made where torch keeps no track count too."""
    storage = t.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


@cache
def _sole() -> int:
    return _users(torch.ones(1))


def _variables(frames: Sequence[FrameType], t: torch.Tensor) -> int:
    """References to `t` from variables of these frames."""
    return _COPIES * sum(x is t for frame in frames for x in frame.f_locals.values())


def _packed(frames: Sequence[FrameType], t: torch.Tensor) -> int:
    """References to `t` from packed sequences, which torch makes; looked for where it packs, unpacks or runs an RNN."""
    if not any(frame.f_code.co_filename.endswith("/rnn.py") for frame in frames):
        return 0
    return sum(isinstance(x, PackedSequence) for x in gc.get_referrers(t))


def _passed(frames: Sequence[FrameType], t: torch.Tensor) -> bool:
    """Whether `t` came to the outermost of these frames as an argument, or inside one."""
    return bool(frames) and _given(frames[-1], t, inside=True)


def _given(frame: FrameType, t: torch.Tensor, inside: bool = False) -> bool:
    """Whether `t` is an argument of the function that runs in `frame`; or `inside` one."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    for name in code.co_varnames[: count + bool(code.co_flags & CO_VARKEYWORDS)]:
        given = values.get(name)
        if given is t:
            return True
        box = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else ()
        if inside and not isinstance(given, PackedSequence) and any(x is t for x in box):
            return True
    return False


def _kept_by_calls() -> int:
    """References that a caller in Python keeps to an argument while the function runs.

    None where the interpreter hands its stack over, one where something watches frames: `torch.compile` does, and
    goes on to where compiling has failed.
    """
    return _references(object()) - 2


def _references(x: object) -> int:
    return sys.getrefcount(x)


def _by_modes(frames: Sequence[FrameType], t: torch.Tensor) -> int:
    """References to `t` from dispatch modes of Python that handed the call on: their arguments, in tuples."""
    values = [x for frame in frames for x in frame.f_locals.values()]
    boxes = {id(x) for x in values if isinstance(x, (list, tuple)) and any(y is t for y in x)}
    redispatched = sum(frame.f_code.co_name == _HANDLER for frame in frames)
    return len(boxes) + redispatched + _variables(frames, t)


def _by_kernels(frames: Sequence[FrameType], t: torch.Tensor) -> int:
    """References to `t` from kernels that see a composite whole and let torch take it apart
    (`dtensor.dispatch.products`).
    """
    found = [n for frame in frames if (n := sum(x is t for x in frame.f_locals.values()))]
    return sum(_kernel_adds() + (_COPIES - 1) * n for n in found)


def _frames(frame: FrameType | None) -> tuple[list[FrameType], list[FrameType], list[FrameType], list[FrameType]]:
    """This package's frames down to dispatch, its kernels', those of modes, of torch's Python code that called."""
    inside, kernels, rest = list[FrameType](), list[FrameType](), list[FrameType]()
    while frame is not None and (not inside or inside[-1].f_code.co_name != _HANDLER):
        inside.append(frame)
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_HOME):
        if frame.f_code.co_filename == _KERNELS:
            kernels.append(frame)
        frame = frame.f_back
    while frame is not None and (frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_name == _HANDLER):
        rest.append(frame)
        frame = frame.f_back
    last = max((i for i, f in enumerate(rest) if f.f_code.co_name == _HANDLER), default=-1)
    while 0 <= last < len(rest) - 1 and rest[last + 1].f_code.co_filename.startswith(_WRAPPERS):
        last += 1
    return inside, kernels, rest[: last + 1], rest[last + 1 :]


# ------------------------------------------------------------ what the counts are
class _Probe(torch.Tensor):
    """A tensor that notes how often the second argument of the ops that it meets is held."""

    counts: list[int]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        t = value_at(args, {}, (1, None))
        args[0].counts.append(sys.getrefcount(t))
        return args[0]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@cache
def _counts() -> tuple[tuple[int, int], tuple[int, int]]:
    """References to a tensor that torch made for a call, and to the base of such a view; and to a user's.

    Measured in a thread of its own: there no mode is on, and torch keeps track of views.
    """
    found: list[tuple[tuple[int, int], tuple[int, int]]] = []
    thread = threading.Thread(target=lambda: found.append(_measure()))
    thread.start()
    thread.join()
    return found[0]


@cache
def _kernel_adds() -> int:
    """References that a kernel of `dtensor.dispatch.products` adds to an argument; asked for where one is on the
    stack.
    """
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_measure_kernel()))
    thread.start()
    thread.join()
    return found[0]


def _measure_kernel() -> int:
    probe: Any = torch.Tensor._make_wrapper_subclass(_Probe, (1, 1))
    probe.counts = []
    t = torch.ones(1, 1)
    torch.mm(probe, t)
    torch.matmul(probe, t)
    direct, by_kernel = probe.counts
    return int(by_kernel - direct)


def _measure() -> tuple[tuple[int, int], tuple[int, int]]:
    probe = torch.Tensor._make_wrapper_subclass(_Probe, (1,), dtype=torch.bool)
    probe.counts = []
    torch.where(probe, 1.0, 2.0)
    torch.where(probe, torch.ones(1), torch.ones(1))
    fresh, held = probe.counts
    found = torch.where(torch.ones(1))
    base = found[0]._base
    base_fresh = sys.getrefcount(base)
    user = torch.ones(1)
    view = user[:1]
    base = view._base
    return (fresh, base_fresh), (held, sys.getrefcount(base))
