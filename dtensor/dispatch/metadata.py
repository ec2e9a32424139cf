"""Metadata of a call's outputs before it runs: structure, and global shape, stride and dtype of every tensor.

Three ways, in this order:

    known_metas       the plain case of common ops, told without asking torch, whose shape functions are slow Python:
                      every result is like the first tensor (floating, contiguous tensors of one shape and dtype, or
                      the second one spread over the first's leading dims, and numbers)
    output_metas      torch's own shape function: the op runs on meta tensors of the global shapes, so that its own
                      shape errors reach the user as they are
    metas_by_running  an op of torch without a shape function runs once, on ones

    gelu, add(x, y), mul(x, 2.0), _foreach_sqrt([x, ...])     like x
    native_layer_norm(x, [n], w, b)                           like x, and statistics of shape [..., 1]
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._meta_registrations
from torch.utils._python_dispatch import _disable_current_modes

from dtensor.dispatch import late
from dtensor.dispatch.call import Op, flat, is_dtensor, map_args
from dtensor.rules.call import op_name
from dtensor.rules.faults import depends_on_data
from dtensor.spec import Spec, TensorMeta, contiguous_stride
from dtensor.torch_changes import replace

__all__ = ["Metas", "known_metas", "metas_by_running", "output_metas"]

log = logging.getLogger("dtensor")

Metas = tuple[str, tuple[TensorMeta | None, ...]]

_UNARY = (
    "abs", "ceil", "cos", "erf", "exp", "floor", "gelu", "log", "neg", "reciprocal", "relu", "round", "rsqrt",
    "sigmoid", "silu", "sin", "sqrt", "square", "tanh",
)  # fmt: skip
_BACKWARD = ("gelu_backward", "sigmoid_backward", "silu_backward", "tanh_backward", "threshold_backward")
_BINARY = ("add.Tensor", "div.Tensor", "mul.Tensor", "sub.Tensor")
_LISTS = tuple(f"_foreach_{op}.{kind}" for op in ("add", "sub", "mul", "div") for kind in ("Scalar", "List"))
_LISTS += tuple(f"_foreach_{op}.default" for op in ("sqrt", "neg", "reciprocal", "exp", "abs"))
_LIKE_FIRST = frozenset(
    f"aten.{name}" for name in (*(f"{n}.default" for n in (*_UNARY, *_BACKWARD)), *_BINARY)
)  # fmt: skip
_SPREAD = frozenset(f"aten.{name}" for name in _BINARY)
_LIKE_FIRSTS = frozenset(f"aten.{name}" for name in _LISTS)
_NUMBERS = (float, int, bool)


def known_metas(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Metas | None:
    """Structure and metadata of the results, as `output_metas` gives them; None where torch must be asked."""
    if name in _LIKE_FIRST:
        first = _plain(args[0])
        if first is None or not all(map(_harmless, kwargs.items())):
            return None
        if not all(_fits(a, first) for a in args[1:]):
            spread = name in _SPREAD and len(args) == 2 and _broadcasts(args[1], first)
            if not spread:
                return None
        return "one", (first.tensor_meta,)
    if name in _LIKE_FIRSTS:
        return None if kwargs else _lists(args)
    return _layer_norm(args) if name == "aten.native_layer_norm.default" and not kwargs else None


def _plain(x: Any) -> Spec | None:
    """The spec of a contiguous DTensor of floats."""
    spec: Spec | None = getattr(x, "_spec", None)
    if spec is None or type(x) is not late.DTensor or not spec.dtype.is_floating_point:
        return None
    return spec if spec.stride == contiguous_stride(spec.shape) else None


def _fits(a: Any, first: Spec) -> bool:
    if type(a) in _NUMBERS:
        return True
    other = _plain(a)
    return other is not None and other.tensor_meta == first.tensor_meta


def _broadcasts(a: Any, first: Spec) -> bool:
    """True for a tensor that is spread over the leading dims of `first`, as a bias is."""
    other = _plain(a)
    if other is None or other.dtype is not first.dtype or 1 in first.shape or not other.ndim:
        return False
    return other.ndim < first.ndim and first.shape[-other.ndim :] == other.shape


def _harmless(named: tuple[str, Any]) -> bool:
    return named[0] in ("alpha", "approximate", "beta", "grad_input") and not isinstance(named[1], torch.Tensor)


def _lists(args: Sequence[Any]) -> Metas | None:
    firsts = [_plain(x) for x in args[0]]
    others = list(args[1]) if len(args) > 1 and isinstance(args[1], (list, tuple)) else [1.0] * len(firsts)
    if len(others) != len(firsts) or not all(isinstance(a, (list, tuple)) or type(a) in _NUMBERS for a in args[1:]):
        return None
    if any(f is None or not _fits(o, f) for f, o in zip(firsts, others, strict=True)):
        return None
    return "list", tuple(f.tensor_meta for f in firsts if f is not None)


def _layer_norm(args: Sequence[Any]) -> Metas | None:
    x, normal = _plain(args[0]), tuple(args[1])
    n = len(normal)
    if x is None or x.dtype not in (torch.float32, torch.float64) or not n or tuple(x.shape[-n:]) != normal:
        return None
    for p in args[2:4]:
        spec = _plain(p)
        if p is not None and (spec is None or tuple(spec.shape) != normal or spec.dtype != x.dtype):
            return None
    kept = (*x.shape[: len(x.shape) - n], *(1,) * n)
    statistics = TensorMeta(torch.Size(kept), contiguous_stride(kept), x.dtype)
    return "tuple", (x.tensor_meta, statistics, statistics)


# ------------------------------------------------------------ asking torch
_call = threading.local()
_device_hint = torch._meta_registrations.device_hint


def _device_of_call(tensor: Any) -> str:
    """Torch's shape functions take a bare meta tensor for one of CUDA, whose results lie otherwise in memory."""
    return str(getattr(_call, "device", None) or _device_hint(tensor))


def say_devices() -> None:
    """Have torch's shape functions ask which device a call is for."""
    replace(torch._meta_registrations, "device_hint", _device_of_call)


def output_metas(func: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Metas | None:
    """Structure ("one", "tuple", "list", "none") and global metadata of the outputs; None if not known before running.

    Raises what torch's shape function does: its own shape errors are the user's.
    """
    known = known_metas(op_name(func), args, kwargs)
    if known is not None:
        return known

    def meta(a: Any) -> Any:
        if is_dtensor(a):
            s = a._spec
            return torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta")
        return None if isinstance(a, torch.Generator) else a

    margs, mkwargs = map_args(meta, args, kwargs)
    params = func._schema.arguments
    if any(a.name == "device" for a in params):
        at = next((i for i, a in enumerate(params) if a.name == "device" and not a.kwarg_only), len(margs))
        if at < len(margs):
            margs = (*margs[:at], torch.device("meta"), *margs[at + 1 :])
        else:
            mkwargs["device"] = torch.device("meta")
        mkwargs.pop("pin_memory", None)
    devices = [a._local_tensor.device.type for a in flat(args, kwargs) if is_dtensor(a)]
    _call.device = devices[0] if devices and devices[0] != "meta" else None
    try:
        got = func(*margs, **mkwargs)
    except (NotImplementedError, ZeroDivisionError):  # the latter where torch's own shape functions average nothing
        return None
    except RuntimeError as e:
        unknown = type(e).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException")
        # What the op allows and torch's shape function does not: a power of bools in place, an extreme of empty rows.
        strict = "dtype torch.bool, but this can't be cast" in str(e) or "does not have an identity" in str(e)
        if unknown or strict or any(text in str(e) for text in ("meta tensor", "INTERNAL ASSERT", "no fake impl")):
            return None
        raise
    finally:
        _call.device = None
    return _structure(got)


def metas_by_running(func: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Metas | None:
    """As `output_metas`, for an op of torch without a meta kernel: it runs once, on ones (integers: on zeros).

    The tensors have the global shapes and lie where the DTensors do, so all ranks find the same. None where it fails.
    """
    if depends_on_data(func):
        return None

    def made(a: Any) -> Any:
        if not is_dtensor(a):
            return a
        s, value = a._spec, int(a._spec.dtype.is_floating_point or a._spec.dtype.is_complex)
        room = 1 + sum((n - 1) * k for n, k in zip(s.shape, s.stride, strict=True)) if s.numel else 0
        memory = torch.full((room,), value, dtype=s.dtype, device=a._local_tensor.device)
        return memory.as_strided(tuple(s.shape), s.stride)

    device = next(a._local_tensor.device for a in flat(args, kwargs) if is_dtensor(a))
    draws = torch.Tag.nondeterministic_seeded in func.tags
    with _disable_current_modes(), torch.random.fork_rng([] if device.type == "cpu" else [device], enabled=draws):
        try:
            new_args, new_kwargs = map_args(made, args, kwargs)
            got = func(*new_args, **new_kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            log.debug("%s: it was run for the shapes of its results, and failed: %s", op_name(func), error)
            return None
    return _structure(got)


def _structure(got: Any) -> Metas | None:
    if got is None:
        return "none", ()
    if isinstance(got, torch.Tensor):
        return ("one", (_meta_of(got),)) if got.layout is torch.strided else None
    if isinstance(got, (list, tuple)) and all(t is None or isinstance(t, (torch.Tensor, int)) for t in got):
        if not got:
            return "none", ()
        metas = tuple(_meta_of(t) if isinstance(t, torch.Tensor) else None for t in got)
        return "list" if isinstance(got, list) else "tuple", metas
    return None


def _meta_of(t: torch.Tensor) -> TensorMeta:
    return TensorMeta(t.shape, tuple(t.stride()), t.dtype)
