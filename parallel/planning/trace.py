"""A trace of a model's forward: which layers feed which, where packed outputs are taken apart, what else is computed.

Every storage carries the *origins* of its values: the layers whose outputs it was computed from without another
layer in between, parameters used outside of layers, and the model's inputs.

    x = norm(h)              {norm}
    q, k, v = wq(x), ...     {wq}, {wk}, {wv}
    y = attention(q, k, v)   {wq, wk, wv}
    o = wo(y)                wo's input has origins {wq, wk, wv}: they meet nowhere else, so wo may be sharded by rows

A layer is a module that multiplies by a weight, a lookup, or any other module with parameters and no children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dtensor.tensor import DTensor

from ..styles.kinds import kind_of
from .rehearsal import leaves

__all__ = ["INPUT", "Layer", "Trace", "called"]

INPUT = "<input>"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear")
VIEWS = ("aten::view", "aten::_unsafe_view", "aten::_reshape_alias", "aten::reshape")
SAME = ("aten::detach", "aten::alias", "aten::clone", "aten::lift_fresh", "aten::contiguous")
"""Operators that give what they are given; whether they run depends on strides and on gradients."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Layer:
    """A layer that ran. `ins`, `outs`: its features; `sizes`: of the parts that its output was taken apart into.

    Attributes:
        role: "linear", "lookup" or "other".
        weight_dims: (output, input) dim of the weight of a "linear" that is no nn.Linear.
        unit: width of the last dim when its output was viewed with one dim more, e.g. that of a head.
        origins: of its inputs, in all its calls.
    """

    path: str
    role: str
    ins: int = 0
    outs: int = 0
    weight_dims: tuple[int, int] | None = None
    sizes: tuple[int, ...] = ()
    unit: int = 1
    origins: set[str] = field(default_factory=set)


class Trace(TorchDispatchMode):
    """Follow one forward of `model`, inside `with trace.following(model)`.

    Attributes:
        layers: by path, in the order of their first calls.
        ops: what ran outside of layers: operators with their numbers that are no sizes.
        shapes: of what each operator outside of layers gave, in order; of a DTensor, its local shape.
        outputs: origins of the model's outputs, after `finish`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, Layer] = {}
        self.ops: set[tuple[object, ...]] = set()
        self.shapes: list[tuple[str, Shapes]] = []
        self.outputs: frozenset[str] = frozenset()
        self._origins: dict[int, frozenset[str]] = {}
        self._alive: list[object] = []
        self._inside: list[tuple[Layer, nn.Module]] = []

    @contextmanager
    def following(self, model: nn.Module, inputs: object) -> Iterator[None]:
        """Follow `model` inside the `with`."""
        handles = []
        for path, module in model.named_modules():
            for name, p in module.named_parameters(recurse=False):
                self._set(p, {f"parameter {path}.{name}"})
            if not list(module.children()) and list(module.parameters()):
                handles.append(module.register_forward_pre_hook(self._enter(path), prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
        for x in leaves(inputs):
            self._set(x, {INPUT})
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, output: object) -> None:
        """Note where the outputs come from."""
        self.outputs = self._of(output)

    def difference(self, other: Trace) -> str:
        """The first operator outside of layers that gave other local shapes in `other`, told; "" where none did.

        One number in the code can mean two things: `view(b, t, heads, -1)` of a sharded tensor gives a DTensor
        heads / k heads on each rank, and of that rank's piece it makes all `heads`, each of a k-th of the width.
        """
        for (name, mine), (theirs, shapes) in zip(self.shapes, other.shapes, strict=False):
            if name != theirs:
                return f"{theirs} would run where {name} is meant"
            if mine != shapes:
                got, want = (" and ".join(str(list(x)) for x in y) for y in (shapes, mine))
                return f"{name} would give {got} where {want} is meant"
        return "" if len(self.shapes) == len(other.shapes) else "other operators would run"

    def viewed_otherwise(self, other: Trace) -> str:
        """The first operator that made as many elements into other shapes in `other`, told; "" where none did."""
        for (name, mine), (theirs, shapes) in zip(self.shapes, other.shapes, strict=False):
            if name != theirs:
                return ""
            if mine != shapes and list(map(prod, mine)) == list(map(prod, shapes)):
                got, want = (" and ".join(str(list(x)) for x in y) for y in (shapes, mine))
                return f"{name} would give {got} where {want} is meant"
        return ""

    # ------------------------------------------------------------ layers
    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, kwargs: object) -> None:
            layer = self.layers.setdefault(path, _layer(path, module))
            layer.origins |= self._of((args, kwargs))
            self._inside.append((layer, module))

        return hook

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        layer, _ = self._inside.pop()
        for x in leaves(output):
            self._set(x, {layer.path})

    # ------------------------------------------------------------ operators
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._inside:
            self._product(func, args)
            return out
        self._note(func, args, kwargs, out)
        origins = self._of((args, kwargs))
        for x in leaves(out):
            self._set(x, origins | self._of(x))
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            self._set(args[0], origins)
        if len(origins) == 1 and args and isinstance(args[0], torch.Tensor):
            self._taken_apart(func, args[0], out, next(iter(origins)))
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.name()
        self.ops.add((name, *(_constant(args[0]) if name == "aten::lift_fresh" else _numbers(func, args, kwargs))))
        if name in SAME or name.startswith("prim::"):
            return
        local = (x._local_tensor if isinstance(x, DTensor) else x for x in leaves(out))
        self.shapes.append((called(name), tuple(tuple(x.shape) for x in local)))

    def _product(self, func: Any, args: Any) -> None:
        """A module that is none of torch's: does it multiply by its weight, and which way does that lie?"""
        layer, module = self._inside[-1]
        weight = getattr(module, "weight", None)
        if layer.role != "other" or weight is None or weight.ndim != 2 or func.name() not in PRODUCTS:
            return
        for x in leaves(args):
            if _storage(x) == _storage(weight) and x.ndim == 2:
                straight = x.stride() == weight.stride() and x.shape == weight.shape
                transposed = func.name() == "aten::linear"
                out = 1 if straight != transposed else 0
                layer.role, layer.weight_dims = "linear", (out, 1 - out)
                layer.outs, layer.ins = weight.shape[out], weight.shape[1 - out]

    def _taken_apart(self, func: Any, x: torch.Tensor, out: Any, origin: str) -> None:
        layer = self.layers.get(origin)
        if layer is None or layer.role != "linear" or x.ndim == 0 or x.shape[-1] not in (layer.outs, *layer.sizes):
            return
        parts = [y.shape[-1] for y in leaves(out) if y.ndim]
        viewed = len(parts) == 1 and isinstance(out, torch.Tensor) and out.ndim > x.ndim and out.numel() == x.numel()
        if viewed and len(out.shape[x.ndim - 1 :]) == 2:
            layer.unit = max(layer.unit, out.shape[-1])
        if x.shape[-1] != layer.outs:
            return
        if len(parts) > 1 and sum(parts) == layer.outs:
            layer.sizes = tuple(parts)
        elif func.name() == "aten::slice.Tensor" and 0 < parts[0] < layer.outs and not layer.sizes:
            layer.sizes = (parts[0],) * (layer.outs // parts[0]) if layer.outs % parts[0] == 0 else ()
        elif viewed:
            tail = out.shape[x.ndim - 1 :]
            if len(tail) == 3 and tail.numel() == layer.outs and tail[0] <= 4 and not layer.sizes:
                layer.sizes, layer.unit = (layer.outs // tail[0],) * tail[0], tail[-1]

    # ------------------------------------------------------------ origins
    def _of(self, x: object) -> frozenset[str]:
        return frozenset().union(*(self._origins.get(_storage(t), frozenset()) for t in leaves(x)))

    def _set(self, x: torch.Tensor, origins: set[str] | frozenset[str]) -> None:
        if type(x).__name__ != "DTensor":
            self._origins[_storage(x)] = frozenset(origins)
            self._alive.append(x)


def _layer(path: str, module: nn.Module) -> Layer:
    kind = kind_of(module)
    if isinstance(module, nn.Linear):
        return Layer(path, "linear", module.in_features, module.out_features)
    if isinstance(module, nn.Embedding):
        return Layer(path, "lookup", module.num_embeddings, module.embedding_dim)
    return Layer(path, "other", 0 if kind is None or kind.inputs is None else kind.inputs)


def _storage(x: torch.Tensor) -> int:
    try:
        return int(x.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(x)


def called(operator: str) -> str:
    """The name to tell an operator by; views have one."""
    known = {"aten::lift_fresh": "torch.tensor", **dict.fromkeys(VIEWS, "view")}
    return known.get(operator) or operator.removeprefix("aten::").partition(".")[0]


def _constant(x: torch.Tensor) -> list[object]:
    """The values of a tensor made of numbers, before it becomes one without values."""
    if type(x) is not torch.Tensor or x.is_meta:
        return []
    with _disable_current_modes():
        return x.flatten().tolist()


def _numbers(func: Any, args: Any, kwargs: Any) -> Iterator[object]:
    """The arguments that are numbers and no sizes, which the schema tells apart (SymInt)."""
    for i, a in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(a.name)
        if isinstance(value, (int, float, complex)) and not _is_size(a.real_type):
            yield (a.name, value)


def _is_size(kind: Any) -> bool:
    inner = kind.getElementType() if kind.kind() == "OptionalType" else kind
    return bool(inner.kind() == "SymIntType")
