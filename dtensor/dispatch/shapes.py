"""Shapes of results that can be told without asking torch, whose shape functions for these ops are slow Python.

Only the plain case of each op, in which every result is like the first tensor: floating, contiguous tensors of one
shape (or the second one spread over the first's leading dims) and dtype, and numbers. Anything else, and every error,
is left to torch's own functions.

    gelu, add(x, y), mul(x, 2.0), _foreach_sqrt([x, ...])     like x
    native_layer_norm(x, [n], w, b)                           like x, and statistics of shape [..., 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtensor.dispatch import hit as hot
from dtensor.spec import Spec, TensorMeta, contiguous_stride

__all__ = ["known_metas"]

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
    if spec is None or type(x) is not hot._DTensor or not spec.dtype.is_floating_point:
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
