"""Whole layers that torch fuses when nothing is trained: the batch is free, weights are replicated.

    _native_multi_head_attention     b [q] [e], b [k] [e], b [k] [e], ... -> b [q] [e], b [q] [k]
    _transformer_encoder_layer_fwd   b [t] [e], ... -> b [t] [e]

A mask of kind 0 belongs to positions alone, of kind 1 to samples and their positions, of kind 2 to samples first.
Encoders turn padded batches into nested tensors, which have no layout here: that is refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from dtensor.dispatch.hit import special
from dtensor.errors import LayoutError, explain_error
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule

from .build.labelled import labelled

BATCHED = ("src", "query", "key", "value")


def fused_layer(call: Call) -> Rule:
    """Tensors are known by their names; weights that are not asked for are an output without elements."""
    batch = call.inputs[0].shape[0]

    def labels(name: str, ndim: int) -> list[Hashable]:
        batched = name in BATCHED or (name == "mask" and call["mask_type"] in (1, 2))
        return ["b" if batched and d == 0 else None for d in range(ndim)]

    return labelled(
        call, [labels(n, s.ndim) for n, s in zip(call.names, call.inputs, strict=True)],
        [[] if m is None else ["b" if d == 0 and m.shape[0] == batch else None for d in range(len(m.shape))]
         for m in call.outputs], filled=True,
    )  # fmt: skip


@special("aten._nested_tensor_from_mask.default", "aten._nested_tensor_from_mask_left_aligned.default")
def _nested(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise LayoutError(
        explain_error(
            "aten._nested_tensor_from_mask", str(args[0]._spec if hasattr(args[0], "_spec") else args[0].shape),
            "a nested tensor has no layout: padded batches cannot be packed into one",
            "torch.nn.TransformerEncoder(layer, n, enable_nested_tensor=False), or model.enable_nested_tensor = False",
        )
    )  # fmt: skip


register("aten._native_multi_head_attention aten._transformer_encoder_layer_fwd", fused_layer)
