"""Patches of images as columns (`unfold`), and images as sums of patches (`fold`).

    im2col    n c [h] [w] -> n (c [k]) [l]        col2im    n (c [k]) [l] -> n c [h] [w]

`k` counts the places of a window, `l` the windows. Both are linear: im2col writes zeros for the padding.
"""

from __future__ import annotations

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, linear

from .build.empty_shards import zeros_of
from .build.labelled import Labels, labelled


def patches(call: Call) -> Rule:
    """One builder for both ways, with and without a batch."""
    to_columns = call.op._schema.name == "aten::im2col"
    window = int(call["kernel_size"][0]) * int(call["kernel_size"][-1])
    x = call.inputs[0]
    batch = ["n"] if x.ndim - to_columns == 3 else []
    channels = x.shape[len(batch)] if to_columns else x.shape[len(batch)] // window
    image: Labels = [*batch, "c", None, None]
    columns: Labels = [*batch, ("c", "k"), None]
    return labelled(
        call, [image if to_columns else columns], [columns if to_columns else image],
        sizes={"c": channels, "k": window}, whole=["k"], linear=(linear(0),),
        bind=lambda ins, outs: zeros_of(outs) if not ins[0].local_numel else None,
    )  # fmt: skip


register("aten.im2col aten.col2im", patches)
