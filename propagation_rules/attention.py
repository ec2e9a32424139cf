"""Scaled dot-product attention: batch and heads are free, sequences and widths stay replicated.

    query  b (g r) [q] [e]     key  b g [k] [e]     value  b g [k] [v]      ->  output  b (g r) [q] [v]

`g` counts the heads of key and value, `r` the query heads that share one (1 without grouped queries); `r` is
whole, for a kernel pairs query head i with head i // r of what it was given. A mask broadcasts to b (g r) q k.
Attention is linear in the value, and its backward in the gradient.

Every backend is an op of its own with the same first outputs. The rest of what the accelerators' ops return
(seeds of the dropout, cumulated lengths) belongs to no factor and is each rank's own: it goes back to the same
rank in backward. No shard may be empty: on such input some kernels divide by zero. Without a fused kernel torch
takes attention apart into matmul and softmax (`_safe_softmax`), which have rules of their own.

Whole layers that torch fuses when nothing is trained: the batch is free, weights are replicated.

    _native_multi_head_attention     b [q] [e], b [k] [e], b [k] [e], ... -> b [q] [e], b [q] [k]
    _transformer_encoder_layer_fwd   b [t] [e], ... -> b [t] [e]

A mask of kind 0 belongs to positions alone, of kind 1 to samples and their positions, of kind 2 to samples first.
Encoders turn padded batches into nested tensors, which have no layout here: that is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from dtensor.dispatch import random as rng
from dtensor.dispatch.hit import special
from dtensor.errors import LayoutError, explain_error
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Kernel, Linear, Rule, linear
from dtensor.spec import Spec, TensorMeta

from .build.labelled import labelled

B, G, Q, K, E, V, REPEAT = range(7)
"""The factors; REPEAT exists with grouped queries only."""

_MASKS = ("attn_mask", "attn_bias")
_OUTPUTS = ("output", "out", "grad_out", "grad_out_")
_SUMS = ("logsumexp", "log_sumexp")


class _Layout:
    """Factors and dims of one call's tensors."""

    def __init__(self, query: Spec, key: Spec, value: Spec) -> None:
        b, heads, q, e = query.shape
        g, k = key.shape[1], key.shape[2]
        self.grouped = g != heads
        repeat = heads // g if g else 1
        self.sizes = (b, g, q, k, e, value.shape[3], *((repeat,) if self.grouped else ()))
        self.heads = (G, REPEAT) if self.grouped else (G,)
        self.whole = frozenset(range(Q, len(self.sizes)))

    def of(self, name: str, t: Spec | TensorMeta) -> Dims:
        """Dims of the tensor that an argument or output of this name is."""
        n = len(t.shape)
        if name == "query":
            return ((B,), self.heads, (Q,), (E,))
        if name == "key":
            return ((B,), (G,), (K,), (E,))
        if name == "value":
            return ((B,), (G,), (K,), (V,))
        if name in _OUTPUTS:
            return ((B,), self.heads, (Q,), (V,))
        if name in _SUMS:
            return ((B,), self.heads, *((),) * (n - 2))
        if name in _MASKS:
            target: Dims = ((B,), self.heads, (Q,), (K,))
            return tuple(() if size == 1 else target[4 - n + d] for d, size in enumerate(t.shape))
        return ((),) * n


def _layout(call: Call) -> _Layout | None:
    """None where the call is not the usual one of four dims, all batches equal, heads dividing."""
    query, key, value = call["query"], call["key"], call["value"]
    ok = all(isinstance(t, Spec) and t.ndim == 4 for t in (query, key, value))
    if not ok or not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        return None
    heads, g = query.shape[1], key.shape[1]
    if heads != g and (g == 0 or heads % g):
        return None
    return _Layout(query, key, value)


def _inputs(call: Call, layout: _Layout) -> tuple[Dims, ...]:
    return tuple(layout.of(name, s) for name, s in zip(call.names, call.inputs, strict=True))


def attention(call: Call) -> Rule | None:
    """One kernel for both factors, since the side outputs lack them without being sums."""
    layout = _layout(call)
    if layout is None:
        return None
    names = [r.name for r in call.op._schema.returns]
    outs = tuple(() if m is None else layout.of(n, m) for n, m in zip(names, call.outputs, strict=True))
    kinds = tuple("shard" if any(dims) else "replicate" for dims in outs)
    value = call.index("value")
    assert value is not None
    groups = (Linear(frozenset({value}), (("sum", "sum"), ("avg", "avg")), frozenset(range(1, len(outs)))),)
    free = frozenset({B, G})
    if not call["dropout_p"] and all(kind == "shard" for kind in kinds):
        return Rule(_inputs(call, layout), outs, layout.sizes, layout.whole, free, linear=groups)
    kernel = Kernel("attention", free, kinds, _run)
    return Rule(
        _inputs(call, layout), outs, layout.sizes, layout.whole | free, free, linear=groups, kernels=(kernel,),
        local=(lambda ins, outs: _run) if call["dropout_p"] else None,
    )  # fmt: skip


def _run(ctx: KernelContext) -> object:
    """The op itself, seeded where it drops out."""
    schema, op, query, out = ctx.call.op._schema.arguments, ctx.call.op, ctx.tensor("query"), ctx.out_specs[0]
    at = [ctx.arguments[a.name] for a in schema if not a.kwarg_only]
    named = {a.name: ctx.arguments[a.name] for a in schema if a.kwarg_only}
    if not ctx.call["dropout_p"] or out is None:
        return op(*at, **named)
    return rng.run_seeded(lambda: op(*at, **named), out, None, query.device)


def attention_backward(call: Call) -> Rule | None:
    """Outputs are the gradients of query, key, value and, with some backends, of the mask."""
    layout = _layout(call)
    if layout is None:
        return None
    outs = tuple(
        () if m is None else layout.of(n, m)
        for n, m in zip(_gradients(call.outputs), call.outputs, strict=True)
    )  # fmt: skip
    return Rule(_inputs(call, layout), outs, layout.sizes, layout.whole, frozenset({B, G}), linear=(linear(0),))


def _gradients(outputs: Sequence[object]) -> tuple[str, ...]:
    return ("query", "key", "value", "attn_bias")[: len(outputs)]


_FORWARD = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
).split()

register([f"aten.{name}" for name in _FORWARD], attention, values="scale")
register([f"aten.{name}_backward" for name in _FORWARD], attention_backward, values="scale")


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
