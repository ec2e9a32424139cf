"""Convolutions: the batch is free, and without groups so are the channels. Spatial dims stay whole.

    convolution              n c [h] [w], o c [kh] [kw], o -> n o [h'] [w']       the bias is an addend where c is cut
    its backward             n o .., n c .., o c .. -> n c .., o c .., o          gradients lacking n are pending sums

A transposed convolution has its weight as c o. With the batch missing, or with groups, only the batch is free. The
gradient of the bias lacks the input's channels without being a sum over them, so they are whole when it is asked
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtensor.factors import Dims, Linear, Rule, linear
from dtensor.registry import Call, present_groups, register
from dtensor.spec import Spec
from propagation_rules.pointwise import sound_groups

N, C, O = range(3)


def _layout(call: Call, like: str) -> tuple[dict[str, Dims], tuple[int, ...], frozenset[int]] | None:
    """Dims of the tensors by name, the factors' sizes, those that are whole; None without a batch dim."""
    x, weight = call["input"], call["weight"]
    out = call[like] if like in call.arguments else call.outputs[0]
    spatial = len(call["stride"])
    if out is None or x.ndim != spatial + 2 or weight.ndim != spatial + 2:
        return None
    o_at, c_at = (1, 0) if call["transposed"] else (0, 1)
    kernel: list[tuple[int, ...]] = [()] * weight.ndim
    grouped = int(call["groups"]) != 1
    if not grouped:
        kernel[o_at], kernel[c_at] = (O,), (C,)
    rest: Dims = ((),) * spatial
    channels_in: Dims = ((),) if grouped else ((C,),)
    channels_out: Dims = ((),) if grouped else ((O,),)
    dims: dict[str, Dims] = {
        "input": ((N,), *channels_in, *rest),
        "weight": tuple(kernel),
        "bias": channels_out,
        "grad_output": ((N,), *channels_out, *rest),
        "output": ((N,), *channels_out, *rest),
    }
    return dims, (x.shape[0], x.shape[1], out.shape[1]), frozenset({C, O})


def convolution(call: Call) -> Rule | None:
    """Linear in the input, and in weight and bias together with the addend."""
    found = _layout(call, "")
    if found is None:
        return None
    dims, sizes, nonempty = found
    bias = call.index("bias")
    return Rule(
        tuple(dims[n] for n in call.names),
        (dims["output"],),
        sizes,
        nonempty=nonempty,
        addends=frozenset() if bias is None else frozenset({bias}),
        linear=sound_groups(call, present_groups("0+2|1+2", call)),
    )


def convolution_backward(call: Call) -> Rule | None:
    """Linear in the gradient."""
    found = _layout(call, "grad_output")
    if found is None:
        return None
    dims, sizes, nonempty = found
    outs = tuple(
        () if m is None else dims[n] for n, m in zip(("input", "weight", "bias"), call.outputs, strict=True)
    )  # fmt: skip
    whole = frozenset({C}) if call["output_mask"][2] else frozenset()
    groups: tuple[Linear, ...] = (linear(0),)
    return Rule(tuple(dims[n] for n in call.names), outs, sizes, whole, nonempty, linear=groups, localize=_bias_sizes)


def _bias_sizes(_: Sequence[Spec], outs: Sequence[Spec | None]) -> Mapping[str, object]:
    """The bias that the local op sees is this rank's part."""
    bias = outs[2]
    return {} if bias is None else {"bias_sizes": list(bias.local_shape)}


register("aten.convolution", convolution)
register("aten.convolution_backward", convolution_backward)
