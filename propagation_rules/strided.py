"""as_strided: a view given by sizes and strides in memory, which only a whole tensor has.

    x: f32[8@dp,100]    as_strided((8, 22, 16), (100, 4, 1))      frames of every row, as in `stft`

Leading dims that the view leaves as they are may be sharded: what follows stays inside one row, and every rank strides
over its own rows. Everything else is gathered. Strides are those of the DTensor (`x.stride()`), the offset counts
from its first element, and the view may not reach beyond its last: memory that is not its own is not distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from dtensor.errors import LayoutError, explain_error
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, passes
from dtensor.spec import Spec, contiguous_stride, dense, in_order

from .build.labelled import labelled

__all__ = ["as_strided"]


def as_strided(call: Call) -> Rule:
    """By hand: which dims are untouched, and whether the view stays inside the tensor, depends on the strides."""
    x = call.inputs[0]
    size, stride = [int(n) for n in call["size"]], [int(n) for n in call["stride"]]
    offset = int(call["storage_offset"] or 0)
    reach = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    layout = torch.empty_strided(x.shape, x.stride, device="meta")
    if 0 not in size and (offset < 0 or reach >= x.numel or not dense(layout)):
        raise LayoutError(
            explain_error(
                "aten.as_strided", f"{x} to size {size}, stride {stride}, storage_offset {offset}",
                "the view reaches memory that is not the tensor's own, or the tensor has gaps",
                "x.contiguous() first, or x.full_tensor().as_strided(...)",
            )
        )  # fmt: skip
    kept = _untouched(x, size, stride, reach)
    before: list[Hashable] = [d if d < kept else None for d in range(x.ndim)]
    after: list[Hashable] = [d if d < kept else None for d in range(len(size))]
    rule = labelled(call, [before], [after], linear=(passes(0),))
    return replace(rule, bind=_local(kept, size, stride, offset))


def _untouched(x: Spec, size: Sequence[int], stride: Sequence[int], reach: int) -> int:
    """How many leading dims of `x` the view leaves as they are."""
    if x.stride != contiguous_stride(x.shape) or 0 in x.shape:
        return 0
    kept = 0
    for n, s, m, t in zip(x.shape, x.stride, size, stride, strict=False):
        if (n, s) != (m, t):
            break
        kept += 1
    while kept and reach - sum((x.shape[d] - 1) * x.stride[d] for d in range(kept)) >= x.stride[kept - 1]:
        kept -= 1
    return kept


def _local(
    kept: int, size: Sequence[int], stride: Sequence[int], offset: int
) -> Callable[[Sequence[Spec], Sequence[Spec | None]], Callable[..., object]]:
    def bind(ins: Sequence[Spec], _: Sequence[Spec | None]) -> Callable[..., object]:
        order = ins[0].stride

        def run(x: torch.Tensor, *_: object, **__: object) -> object:
            x = x.contiguous() if kept else in_order(x, order)
            return x.as_strided(
                [*x.shape[:kept], *size[kept:]], [*x.stride()[:kept], *stride[kept:]], x.storage_offset() + offset
            )

        return run

    return bind


register("aten.as_strided", as_strided)
