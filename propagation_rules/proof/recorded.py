"""Calls of aten ops, recorded while torch runs something on plain tensors, forward and backward.

Rules are per overload, so the unit of proof is one call of one overload: the op and its arguments, tensors with
their values. A recorder is a dispatch mode; a call is a value.

    with Recorder() as seen:
        torch.nn.functional.linear(x, w).sum().backward()
    [c.name for c in seen.calls]        # aten.t.default, aten.mm.default, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor.rules.call import op_name

__all__ = ["Recorder", "RecordedCall", "describe", "map_tensors", "plain_result", "tensors_of", "with_nan"]

Op = torch._ops.OpOverload


def map_tensors(f: Callable[[torch.Tensor], Any], x: Any) -> Any:
    """`x`, arguments or results, with `f` of every tensor in its place; lists and tuples keep their kind."""
    if isinstance(x, torch.Tensor):
        return f(x)
    if isinstance(x, (list, tuple)):
        return type(x)(map_tensors(f, y) for y in x)
    return {k: map_tensors(f, v) for k, v in x.items()} if isinstance(x, dict) else x


def tensors_of(x: Any) -> Iterator[torch.Tensor]:
    """The tensors in `x`, arguments or results, in order."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from tensors_of(y)
    elif isinstance(x, dict):
        yield from tensors_of(tuple(x.values()))


def describe(x: Any) -> str:
    """Arguments in short: `f64[5, 3]` for tensors, values for the rest."""
    if isinstance(x, torch.Tensor):
        name = str(x.dtype).removeprefix("torch.")
        return f"{name}{list(x.shape)}"
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(map(describe, x)) + "]"
    if isinstance(x, dict):
        return ", ".join(f"{k}={describe(v)}" for k, v in x.items())
    return repr(x)


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call: `op(*args, **kwargs)` with plain tensors; `origin` says what made it."""

    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    origin: str = ""

    @property
    def name(self) -> str:
        """`aten.mm.default`."""
        return op_name(self.op)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensor arguments in order, those by name last."""
        return list(tensors_of((self.args, self.kwargs)))

    def __str__(self) -> str:
        parts = [describe(a) for a in self.args] + ([describe(dict(self.kwargs))] if self.kwargs else [])
        return f"{self.name}({', '.join(parts)})"

    def kind(self) -> tuple[Any, ...]:
        """What makes calls of one overload different from: ranks and dtypes of tensors, kinds and flags of the rest."""

        def one(a: Any) -> Any:
            if isinstance(a, torch.Tensor):
                return (a.ndim, a.dtype)
            if isinstance(a, (list, tuple)):
                return (len(a), one(a[0])) if a else ()
            return a if isinstance(a, (bool, str)) or a is None else type(a).__name__

        return (self.name, tuple(map(one, self.args)), tuple((k, one(v)) for k, v in self.kwargs.items()))

    def poverty(self) -> int:
        """Dims that say little, being shorter than 3: a sample with fewer of them is a better one."""
        return sum(n < 3 for t in self.tensors for n in t.shape)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> RecordedCall:
        """The same call with other values of its tensors, in the order of `tensors`."""
        left = iter(tensors)
        args, kwargs = map_tensors(lambda _: next(left), (self.args, dict(self.kwargs)))
        return RecordedCall(self.op, args, kwargs, self.origin)

    def with_nan_in(self, i: int) -> RecordedCall:
        """The same call with a NaN in the middle of tensor `i`, where its dtype has one."""
        return self.with_tensors([with_nan(t) if i == j else t for j, t in enumerate(self.tensors)])

    def clone(self) -> RecordedCall:
        """The same call on copies of its tensors."""
        return self.with_tensors([t.clone() for t in self.tensors])


def plain_result(call: RecordedCall) -> tuple[Any, RecordedCall]:
    """Result of the plain op on copies, and the call with the tensors as the op left them."""
    used = call.clone()
    return used.op(*used.args, **used.kwargs), used


def with_nan(t: torch.Tensor) -> torch.Tensor:
    """`t` with a NaN in the middle, where its dtype has one."""
    if not t.is_floating_point() or not t.numel():
        return t
    flat = t.flatten().clone()
    flat[flat.numel() // 2] = float("nan")
    return flat.reshape(t.shape)


class Recorder(TorchDispatchMode):
    """While active, the calls of aten ops on plain dense tensors of at most `most` elements are kept in `calls`."""

    def __init__(self, origin: str = "", most: int = 4096) -> None:
        super().__init__()
        self.origin, self.most = origin, most
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(
        self, func: Op, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = list(tensors_of((args, kwargs)))
        if tensors and func.namespace in ("aten", "prims") and all(map(self._fits, tensors)):
            copy = lambda t: t.detach().resolve_conj().resolve_neg().clone()  # noqa: E731
            held = map_tensors(copy, (args, kwargs))
            self.calls.append(RecordedCall(func, held[0], held[1], self.origin))
        return func(*args, **kwargs)

    def _fits(self, t: torch.Tensor) -> bool:
        dense = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided and not t.is_quantized
        return dense and t.numel() <= self.most and t.device.type == "cpu"
