"""Pools: batch and channels are free, batched or not; so are, by a kernel, the spatial dims of plain windows.

    avg_pool2d      ... [h] [w] -> ... [h'] [w']            linear
    max_pool2d      ... [h] [w] -> ... [h'] [w'] twice      values, and where in the plane they were

Where windows lie side by side, and shards hold whole ones, a cut spatial dim costs nothing; elsewhere rows of the
neighbours are brought in (`pool_halo`). Adaptive and fractional pools, whose windows differ, keep them whole.

Every tensor of these ops, gradients and indices too, has the same leading dims and as many spatial ones as the
op's name says, so one builder serves all. Indices count places in one plane, which no cut of leading dims changes.
Torch refuses planes without channels: an empty shard gives zeros of the promised shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, linear_groups, register
from dtensor.rules.rule import Dims, Kernel, Linear, Rule
from dtensor.spec import Spec, TensorMeta

from .build.dtypes import is_exact
from .build.empty_shards import zeros_of
from .build.labelled import labelled
from .build.pool_halo import run_average, run_average_backward, run_largest, run_largest_backward, windows

__all__ = ["planes"]

Run = Callable[[KernelContext], object]


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
            [[] if m is None else labels("", m) for m in call.outputs], linear=self._groups(call),
            bind=lambda ins, outs: zeros_of(outs) if any(not s.local_numel for s in ins) else None,
            localize=_input_size if "input_size" in call.arguments else None,
        )  # fmt: skip
        return rule

    def _groups(self, call: Call) -> tuple[Linear, ...]:
        """None where integers are averaged, and so rounded; what only moves elements passes all the same."""
        exact = is_exact(call.inputs[0].dtype) and not self.linear.startswith("any")
        return () if exact else linear_groups(self.linear)

    @property
    def text_form(self) -> str:
        """Printed form."""
        space = " ".join(f"[s{i}]" for i in range(self.spatial))
        return f"planes ... {space}" + (f"   linear {self.linear}" if self.linear else "")


def _input_size(_: Sequence[Spec], outs: Sequence[Spec | None]) -> dict[str, object]:
    return {} if outs[0] is None else {"input_size": list(outs[0].local_shape)}


def windowed(spatial: int, linear: str, run: Run, collectives: int) -> Callable[[Call], Rule]:
    """`planes` with a kernel for the spatial dims, which brings in neighbours' rows `collectives` times."""
    whole = planes(spatial, linear)

    def build(call: Call) -> Rule:
        rule = whole(call)
        x = call["self"]
        y = call["grad_output"].shape if "grad_output" in call.names else call.outputs[0].shape  # type: ignore[union-attr]
        lead = x.ndim - spatial
        dims: Dims = tuple((d,) for d in range(x.ndim))
        found = windows(call, x.shape, y)
        ranks = math.prod(x.mesh.shape)
        aligned = all(
            w.reach <= w.stride and not w.padding and w.size == w.count * w.stride and w.count % ranks == 0
            for w in found
        )
        halo = max(x.numel // max(w.size, 1) * max(w.reach - w.stride, 1) for w in found)
        kernel = Kernel(
            "halo", frozenset(range(lead, x.ndim)), ("shard",) * len(call.outputs), run, halo,
            0 if aligned else collectives, "all_to_all",
        )  # fmt: skip
        if is_exact(x.dtype):  # averages are rounded, each window by itself
            return rule
        return replace(
            rule, inputs=(dims,) * len(call.inputs), outputs=(dims,) * len(call.outputs), sizes=tuple(x.shape),
            whole=frozenset(range(lead, x.ndim)), kernels=(kernel,),
        )  # fmt: skip

    build.text_form = f"{whole.text_form}   kernel halo"  # type: ignore[attr-defined]
    return build


for n in (2, 3):
    register(f"aten.avg_pool{n}d", windowed(n, "0", run_average, 1))
    register(f"aten.avg_pool{n}d_backward", windowed(n, "0", run_average_backward, 1))
    register(f"aten.max_pool{n}d_with_indices", windowed(n, "", run_largest, 1))
    register(f"aten.max_pool{n}d_with_indices_backward", windowed(n, "0", run_largest_backward, 1))
    register(f"aten._adaptive_avg_pool{n}d aten._adaptive_avg_pool{n}d_backward", planes(n, "0"))
    register(f"aten.adaptive_max_pool{n}d aten.fractional_max_pool{n}d", planes(n))
    register(f"aten.adaptive_max_pool{n}d_backward aten.fractional_max_pool{n}d_backward", planes(n, "0"))
    register(f"aten.max_unpool{n}d", planes(n, "0"))
