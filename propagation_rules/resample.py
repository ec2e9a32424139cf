"""Resampling: interpolation, sampling on a grid, grids of affine maps.

    upsample_bilinear2d    ... [h] [w] -> ... [h'] [w']                     linear, as every interpolation
    grid_sampler_2d        n c [h] [w], n y x [2] -> n c y x                linear in the image; points are free
    its backward           n c y x, n c [h] [w], n y x [2] -> n c [h] [w], n y x [2]
    affine_grid_generator  n [2] [3] -> n [h] [w] [2]

The gradient of the image lacks the points, that of the grid lacks the channels: pending sums.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, linear

from .build.empty_shards import zeros_of
from .build.labelled import labelled
from .pool import planes


def grid_sampler(call: Call) -> Rule:
    """Forward and backward, in two and three dims: the tensors are known by their names."""
    points = [f"point{i}" for i in range(call["grid"].ndim - 2)]
    labels: dict[str, list[Hashable]] = {
        "input": ["n", "c", *(None for _ in points)], "grid": ["n", *points, None], "": ["n", "c", *points],
    }  # fmt: skip
    backward = "grad_output" in call.names
    outs = ["input", "grid"] if backward else [""]
    return labelled(
        call, [labels["" if n == "grad_output" else n] for n in call.names], [labels[n] for n in outs],
        linear=(linear(0),), bind=lambda ins, outs: zeros_of(outs) if any(not s.local_numel for s in ins) else None,
    )  # fmt: skip


def affine_grid(call: Call) -> Rule:
    """The batch is free; `size` counts it."""
    rule = labelled(call, [["n", None, None]], [["n", *(None,) * (len(call["size"]) - 1)]], linear=(linear(0),))
    rest = list(call["size"])[1:]
    return replace(rule, localize=lambda ins, outs: {"size": [ins[0].local_shape[0], *rest]})


for n, kinds in (
    (1, "upsample_linear1d"),
    (2, "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa"),
    (3, "upsample_trilinear3d"),
):
    for kind in kinds.split():
        register(f"aten.{kind} aten.{kind}_backward", planes(n, "0"))
    for kind in (f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"):
        register(f"aten.{kind}", planes(n, "any:0"))
        register(f"aten.{kind}_backward", planes(n, "0"))
for n in (2, 3):
    register(f"aten.grid_sampler_{n}d aten.grid_sampler_{n}d_backward", grid_sampler)
register("aten.affine_grid_generator", affine_grid)
