"""Numbers that enter a pending tensor: `x + 1`, `masked_fill(x, mask, 1)`, `fill_(x, 1)`.

Averages, maxima and minima take the number on every rank: avg(a + 1, b + 1) = avg(a, b) + 1. In a pending sum
it may count only once, so the first position of the pending axes takes it and the others a zero (a one in
`fill_` of a pending product):

    x: f32[8]{P:tp} on 4 ranks     x + 1     rank 0 adds 1, ranks 1 to 3 add 0; the result stays pending

Nothing is sent, and such ops work in place: `x.mean(-1).add_(eps)` over a sharded dim does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtensor.placement import Partial
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Linear, Rule
from dtensor.spec import Spec

from .build.dtypes import is_exact
from .pointwise import NUMBERS, broadcast_rule, is_list_op, pointwise

__all__ = ["with_number"]

Local = Callable[..., object]

ONCE: Mapping[str, int] = {"sum": 0, "bxor": 0, "product": 1}
"""Reductions in which a number counts once -> what the other positions take."""


@dataclass(frozen=True, slots=True)
class with_number:  # noqa: N801 - used as a function
    """Builder of ops that put the number `name` into the pending `self`.

    Where `name` is a tensor in this call, the groups `tensors` hold (as in `pointwise`).

    Args:
        name: the argument.
        passes: reductions of `self` that pass.
        tensors: linear groups of the forms in which `name` is a tensor.
    """

    name: str
    passes: str
    tensors: str = ""

    def __call__(self, call: Call) -> Rule:
        if call.index(self.name) is not None:
            return pointwise(self.tensors)(call)
        target = call.index("self")
        if is_list_op(call) or target is None:
            return broadcast_rule(call)
        drop = {"avg"} if is_exact(call.inputs[target].dtype) else set()
        ops = tuple((op, op) for op in self.passes.split() if op not in drop)
        rule = broadcast_rule(call, (Linear(frozenset({target}), ops),))
        at = next(i for i, a in enumerate(call.op._schema.arguments) if a.name == self.name)

        def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Local | None:
            out = outs[0] if outs else ins[target]
            other = None if out is None else _taken_elsewhere(out)
            return None if other is None else _with_constant(call.op, at, self.name, other)

        return replace(rule, bind=bind)

    @property
    def text_form(self) -> str:
        """Printed form."""
        return f"pointwise, number {self.name} in {self.passes}" + (f"   linear {self.tensors}" if self.tensors else "")


def _taken_elsewhere(spec: Spec) -> int | None:
    """What this rank takes in place of the number; None where it takes the number itself."""
    coord = spec.mesh.coord
    for p, r in zip(spec.placements, coord or (), strict=False):
        if isinstance(p, Partial) and p.reduce_op in ONCE and r > 0:
            return ONCE[p.reduce_op]
    return None


def _with_constant(op: torch._ops.OpOverload, at: int, name: str, constant: int) -> Local:
    """`op` with `constant`, in the type of the number, as argument number `at`."""

    def run(*args: object, **kwargs: object) -> object:
        if name in kwargs:
            kwargs[name] = type(kwargs[name])(constant)  # type: ignore[call-arg]
        else:
            args = (*args[:at], type(args[at])(constant), *args[at + 1 :])  # type: ignore[call-arg]
        return op(*args, **kwargs)

    return run


_AFFINE = "sum avg max min"
for _name in ("add", "sub"):
    register(f"aten.{_name} aten._foreach_{_name}", with_number("other", _AFFINE, "0+1|max:0"), values=NUMBERS)
register("aten.rsub", with_number("other", "sum avg", "0+1|max:1"), values=NUMBERS)
register("aten.masked_fill.Scalar", with_number("value", "sum avg max min product"), values=NUMBERS)
register("aten.fill.Scalar", with_number("value", "sum avg max min product band bor bxor"), values=NUMBERS)
register("aten.fill.Tensor", pointwise("any:0+1"))
