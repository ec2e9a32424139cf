"""Pools: batch and channels are free, batched or not; the spatial dims stay whole.

    avg_pool2d      ... [h] [w] -> ... [h'] [w']            linear
    max_pool2d      ... [h] [w] -> ... [h'] [w'] twice      values, and where in the plane they were

Every tensor of these ops, gradients and indices too, has the same leading dims and as many spatial ones as the
op's name says, so one builder serves all. Indices count places in one plane, which no cut of leading dims changes.
Torch refuses planes without channels: an empty shard gives zeros of the promised shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from dtensor.factors import Linear, Rule
from dtensor.registry import Call, linear_groups, register
from dtensor.spec import Spec, TensorMeta
from propagation_rules.empty_shards import is_empty_shard, zeros_of
from propagation_rules.labelled import labelled

__all__ = ["planes"]


@dataclass(frozen=True, slots=True)
class planes:  # noqa: N801 - used as a function
    """Builder for ops on planes of `spatial` dims: the dims before them are free. `linear` as in `linear_groups`.

    An argument `input_size` is the shape of the output. `samples` of fractional pools have one dim behind the free
    ones, and a batch dim of 1 where the input has none.
    """

    spatial: int
    linear: str = ""

    def __call__(self, call: Call) -> Rule:
        lead = call.inputs[0].ndim - self.spatial

        def labels(name: str, t: Spec | TensorMeta) -> Sequence[Hashable]:
            if name == "random_samples":
                return [*([None] if lead == 1 else []), *range(lead), None]
            return [*range(lead), *(None,) * self.spatial]

        rule = labelled(
            call, [labels(n, s) for n, s in zip(call.names, call.inputs, strict=True)],
            [[] if m is None else labels("", m) for m in call.outputs], linear=self._groups(),
            bind=lambda ins, outs: zeros_of(outs) if any(map(is_empty_shard, ins)) else None,
            localize=_input_size if "input_size" in call.arguments else None,
        )  # fmt: skip
        return rule

    def _groups(self) -> tuple[Linear, ...]:
        return linear_groups(self.linear)

    @property
    def text_form(self) -> str:
        """Printed form."""
        space = " ".join(f"[s{i}]" for i in range(self.spatial))
        return f"planes ... {space}" + (f"   linear {self.linear}" if self.linear else "")


def _input_size(_: Sequence[Spec], outs: Sequence[Spec | None]) -> dict[str, object]:
    return {} if outs[0] is None else {"input_size": list(outs[0].local_shape)}


for n in (2, 3):
    average = f"avg_pool{n}d _adaptive_avg_pool{n}d avg_pool{n}d_backward _adaptive_avg_pool{n}d_backward"
    register([f"aten.{name}" for name in average.split()], planes(n, "0"))
    register(f"aten.max_pool{n}d_with_indices aten.adaptive_max_pool{n}d aten.fractional_max_pool{n}d", planes(n))
    largest = f"max_pool{n}d_with_indices adaptive_max_pool{n}d fractional_max_pool{n}d"
    register([f"aten.{name}_backward" for name in largest.split()], planes(n, "0"))
    register(f"aten.max_unpool{n}d", planes(n, "0"))
