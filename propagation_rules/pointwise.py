"""Pointwise ops: every output dim is a factor, inputs broadcast to it.

Any op with torch's `pointwise` tag uses the default entry, without linearity. What is listed here says what
pending inputs pass through: `0+1` is linear in both together (add), `0|1` in either (mul), `max:0` monotone,
`neg:0` antitone, `any:0` only moves elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dtensor.factors import Dims, Rule
from dtensor.registry import Call, present_groups, register


@dataclass(frozen=True, slots=True)
class pointwise:  # noqa: N801 - used as a function
    """Builder of a pointwise rule; `linear` as in `dtensor.registry.linear_groups`."""

    linear: str = ""

    def __call__(self, call: Call) -> Rule:
        shape = torch.broadcast_shapes(*(s.shape for s in call.inputs))
        n = len(shape)

        def dims(t: torch.Size) -> Dims:
            first = n - len(t)
            return tuple((first + i,) if size == shape[first + i] else () for i, size in enumerate(t))

        return Rule(
            tuple(dims(s.shape) for s in call.inputs),
            tuple(() if m is None else dims(m.shape) for m in call.outputs),
            tuple(shape),
            linear=present_groups(self.linear, call),
        )

    @property
    def text_form(self) -> str:
        """Printed form."""
        return "pointwise" + (f"   linear {self.linear}" if self.linear else "")


def _to_copy(call: Call) -> Rule:
    """Casting keeps pending sums only where rounding cannot change them: not to integers, not to bool."""
    src, dst = call.inputs[0].dtype, call.outputs[0].dtype  # type: ignore[union-attr]
    floats = (src.is_floating_point, dst.is_floating_point, src.is_complex, dst.is_complex)
    exact = src == dst or (dst.is_floating_point and not src.is_complex) or dst.is_complex
    widening = not any(floats) and dst != torch.bool and src != torch.bool and dst.itemsize >= src.itemsize
    groups = "any:0" if src == dst else "0|max:0" if exact and src != torch.bool else "0" if widening else ""
    return pointwise(groups)(call)


register("aten.<pointwise>", pointwise(), values="*")
register("aten.add aten.sub aten.rsub", pointwise("0+1"), values="* alpha")
register("aten.mul", pointwise("0|1"), values="*")
register("aten.div.Tensor aten.div.Scalar", pointwise("0"), values="*")
register("aten.div.Tensor_mode aten.div.Scalar_mode", pointwise(), values="*")
register("aten.neg", pointwise("0|neg:0"), values="*")
register("aten.positive aten.conj_physical aten._conj_physical aten.real aten.imag aten._neg_view", pointwise("0"), values="*")
register("aten._conj", pointwise("0"), values="*")
register("aten.clone aten.alias aten.detach aten.lift_fresh aten._conj_copy aten.contiguous", pointwise("any:0"))
register("aten._to_copy", _to_copy)
register("aten.lerp", pointwise("0+1"), values="*")
register("aten.where.self", pointwise("any:1+2"), values="*")
register("aten.where.ScalarSelf aten.where.ScalarOther aten.where.Scalar", pointwise(), values="*")
register("aten.maximum aten.fmax", pointwise("max:0+1"), values="*")
register("aten.minimum aten.fmin", pointwise("max:0+1"), values="*")
register(
    "aten.relu aten.exp aten.sigmoid aten.tanh aten.floor aten.ceil aten.round aten.trunc aten.sign aten.sqrt aten.log "
    "aten.log1p aten.expm1 aten.erf aten.clamp_min.default aten.clamp_max.default",
    pointwise("max:0"), values="*",
)  # fmt: skip
register("aten.copy", pointwise("any:0+1"))
