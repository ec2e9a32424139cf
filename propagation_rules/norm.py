"""Layer and RMS normalisation: batch dims are free, the normalised dims have kernels.

    native_layer_norm            b [n], [n], [n] -> b [n], b 1, b 1
    its backward                 b [n], b [n], b 1, b 1, [n], [n] -> b [n], [n], [n]

With a batch dim sharded nothing is sent; the gradients of weight and bias lack `b` and stay pending sums. With a
normalised dim sharded, rows are spread over ranks: forward gathers count, mean and squared deviations of every row
part (as a variance does), backward all-reduces two sums a row, and the parameters' gradients are sharded like
the dim.

Group normalisation: the batch and the groups are free.

    native_group_norm    n (g [q]) [s ...], (g [q]), (g [q]) -> n (g [q]) [s ...], n g, n g
    its backward         ... -> n (g [q]) [s ...], (g [q]), (g [q])

The channels are `g` groups of `q`; sharding groups shards channels, weight and bias along, with nothing sent. The
arguments that count batch, channels and groups become local.

Weight normalisation, g v / |v|, the norm taken over all dims but one: that one is free.

_weight_norm_interface    d [n ...], d 1 ... -> d [n ...], d 1 ...       linear in the lengths g
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Dims, Kernel, Linear, LocalPart, Rule, linear
from dtensor.spec import Spec

from .build.dtypes import accumulation_dtype, separate_statistics
from .build.empty_shards import is_empty_shard, zeros_of
from .build.labelled import labelled
from .reduce import combined_moments

__all__ = ["layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]


def _normalised(call: Call) -> tuple[int, ...]:
    """Dims of the input that are normalised."""
    n = call.inputs[_at(call, "input")].ndim
    return tuple(range(n - len(call["normalized_shape"]), n))


def _at(call: Call, name: str) -> int:
    at = call.names.index(name)
    return at


def _rule(call: Call, outputs: Sequence[str], name: str, run: Callable[[KernelContext], object]) -> Rule:
    """The rule of a norm whose outputs are "input", "row" or "parameter" shaped, with a kernel for the inner dims."""
    x = call.inputs[_at(call, "input")]
    inner = _normalised(call)
    every: Dims = tuple((d,) for d in range(x.ndim))
    dims: dict[str, Dims] = {
        "input": every,
        "row": tuple(() if d in inner else (d,) for d in range(x.ndim)),
        "parameter": tuple((d,) for d in inner),
    }
    shaped = {
        "input": "input", "grad_out": "input", "mean": "row", "rstd": "row", "weight": "parameter", "bias": "parameter",
    }  # fmt: skip
    how = tuple(
        "replicate" if m is None or kind == "row" else "shard" for kind, m in zip(outputs, call.outputs, strict=True)
    )
    kernel = Kernel(name, frozenset(inner), how, run)
    return Rule(
        tuple(dims[shaped[n]] for n in call.names),
        tuple(() if m is None else dims[kind] for kind, m in zip(outputs, call.outputs, strict=True)),
        tuple(x.shape),
        frozenset(inner),
        kernels=(kernel,),
    )


def _floats(ctx: KernelContext, *names: str) -> list[torch.Tensor | None]:
    """Local tensors of these arguments in the dtype sums are taken in."""
    found = (ctx.optional(n) for n in names)
    return [None if t is None else t.to(accumulation_dtype(t.dtype)) for t in found]


def _eps(ctx: KernelContext) -> float:
    """The `eps` of this call (it is not in the cache key); that of the input's dtype where it is None."""
    given = ctx.arguments["eps"]
    return float(given) if isinstance(given, (int, float)) else torch.finfo(ctx.inputs[0].dtype).eps


def _fit(ctx: KernelContext, *results: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Results in the dtypes and local shapes that the outputs promise; None where no output is asked for."""
    return tuple(
        None if spec is None or t is None else t.to(spec.dtype).reshape(spec.local_shape)
        for t, spec in zip(results, ctx.out_specs, strict=True)
    )


# ------------------------------------------------------------ layer norm
def layer_norm(call: Call) -> Rule:
    """Output, mean and reciprocal deviation of every row."""
    return _rule(call, ("input", "row", "row"), "layer_norm", _run_layer_norm)


def _run_layer_norm(ctx: KernelContext) -> tuple[torch.Tensor | None, ...]:
    x, weight, bias = _floats(ctx, "input", "weight", "bias")
    assert x is not None
    count, mean, squares = combined_moments(ctx, x, _normalised(ctx.call))
    rstd = (squares / count + _eps(ctx)).rsqrt()
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return _fit(ctx, y if bias is None else y + bias, mean, rstd)


def layer_norm_backward(call: Call) -> Rule:
    """Linear in the gradient; the parameters' gradients lack the batch dims."""
    rule = _rule(call, ("input", "parameter", "parameter"), "layer_norm backward", _run_layer_norm_backward)
    apart = separate_statistics(call, "mean", "weight", "input")
    local: LocalPart | None = (lambda ins, outs: _run_layer_norm_backward) if apart else None
    return replace(rule, linear=(linear(_at(call, "grad_out")),), local=local)


def _run_layer_norm_backward(ctx: KernelContext) -> tuple[torch.Tensor | None, ...]:
    grad, x, mean, rstd, weight = _floats(ctx, "grad_out", "input", "mean", "rstd", "weight")
    assert grad is not None and x is not None and mean is not None and rstd is not None
    return _fit(ctx, *_norm_gradients(ctx, grad, (x - mean) * rstd, rstd, weight, centred=True))


def _norm_gradients(
    ctx: KernelContext, grad: torch.Tensor, scaled: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None,
    centred: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of input, weight (and bias) of y = scaled * weight + bias, where scaled = (x - mean) * rstd.

    With g = grad * weight: rstd * (g - mean(g) - scaled * mean(g * scaled)); without the second term where no mean
    is taken off.
    """
    inner = _normalised(ctx.call)
    n = 1
    for size in ctx.call["normalized_shape"]:
        n *= size
    g = grad if weight is None else grad * weight
    sums = [(g * scaled).sum(inner, keepdim=True), *([g.sum(inner, keepdim=True)] if centred else [])]
    means = ctx.all_reduce(torch.stack(sums), "sum") / n
    dx = g - scaled * means[0] - (means[1] if centred else 0.0)
    outer = tuple(range(inner[0]))
    parameters = [grad * scaled, *([grad] if centred else [])]
    return (dx * rstd, *(t.sum(outer) if outer else t for t in parameters))


# ------------------------------------------------------------ RMS norm
def rms_norm(call: Call) -> Rule:
    """Output and reciprocal root of the mean square of every row."""
    return _rule(call, ("input", "row"), "rms_norm", _run_rms_norm)


def _run_rms_norm(ctx: KernelContext) -> tuple[torch.Tensor | None, ...]:
    x, weight = _floats(ctx, "input", "weight")
    assert x is not None
    n = 1
    for size in ctx.call["normalized_shape"]:
        n *= size
    squares = ctx.all_reduce(x.square().sum(_normalised(ctx.call), keepdim=True), "sum")
    rstd = (squares / n + _eps(ctx)).rsqrt()
    y = x * rstd
    return _fit(ctx, y if weight is None else y * weight, rstd)


def rms_norm_backward(call: Call) -> Rule:
    """Linear in the gradient; the weight's gradient lacks the batch dims."""
    rule = _rule(call, ("input", "parameter"), "rms_norm backward", _run_rms_norm_backward)
    return replace(rule, linear=(linear(_at(call, "grad_out")),))


def _run_rms_norm_backward(ctx: KernelContext) -> tuple[torch.Tensor | None, ...]:
    grad, x, rstd, weight = _floats(ctx, "grad_out", "input", "rstd", "weight")
    assert grad is not None and x is not None and rstd is not None
    return _fit(ctx, *_norm_gradients(ctx, grad, x * rstd, rstd, weight, centred=False))


register("aten.native_layer_norm", layer_norm, values="eps")
register("aten.native_layer_norm_backward", layer_norm_backward)
register("aten._fused_rms_norm", rms_norm, values="eps")
register("aten._fused_rms_norm_backward", rms_norm_backward)


def group_norm(call: Call) -> Rule:
    """Forward and backward: the tensors are known by their names."""
    at = call.names.index("input")
    x = call.inputs[at]
    groups = call["group"]
    n, g, q = 0, 1, 2
    sizes = (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    whole: Dims = ((n,), (g, q), *((3 + i,) for i in range(x.ndim - 2)))
    dims: dict[str, Dims] = {
        "input": whole, "grad_out": whole, "mean": ((n,), (g,)), "rstd": ((n,), (g,)),
        "weight": ((g, q),), "bias": ((g, q),),
    }  # fmt: skip
    backward = "grad_out" in call.names
    outs = ("input", "weight", "bias") if backward else ("input", "mean", "rstd")

    def localize(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Mapping[str, object]:
        rows, channels = ins[at].local_shape[:2]
        return {"N": rows, "C": channels, "group": groups * channels // x.shape[1] if x.shape[1] else groups}

    return Rule(
        tuple(dims[name] for name in call.names),
        tuple(() if m is None else dims[name] for name, m in zip(outs, call.outputs, strict=True)),
        sizes,
        frozenset({q, *range(3, len(sizes))}),
        # Statistics of another dtype than the input's are unknown to torch's shape function; an empty shard has none.
        nonempty=frozenset({n, g}) if any(s.dtype != x.dtype for s in call.inputs) else frozenset(),
        linear=(linear(0),) if backward else (),
        localize=localize,
        bind=lambda ins, outs: zeros_of(outs) if is_empty_shard(ins[at]) or _no_channels(ins[at]) else None,
    )


def _no_channels(x: Spec) -> bool:
    """Whether this rank has none of the channels that there are; the tensor may have no elements at all."""
    return x.local_shape[1] == 0 < x.shape[1]


register("aten.native_group_norm aten.native_group_norm_backward", group_norm, values="eps")


def weight_norm(call: Call) -> Rule:
    """Forward and backward: every tensor has the free dim, or is one of numbers along it."""
    d = int(call["dim"]) % call.inputs[0].ndim
    n = call.inputs[0].shape[d]

    def labels(shape: Sequence[int]) -> list[Hashable]:
        at = d if len(shape) > d and shape[d] == n else None
        return [i if i == at else None for i in range(len(shape))]

    backward = "grad_w" in call.names
    lengths = Linear(frozenset({1}), (("sum", "sum"), ("avg", "avg")), frozenset({1}))
    return labelled(
        call, [labels(s.shape) for s in call.inputs], [[] if m is None else labels(m.shape) for m in call.outputs],
        linear=(linear(0) if backward else lengths,), filled=True,
    )  # fmt: skip


register("aten._weight_norm_interface aten._weight_norm_interface_backward", weight_norm)
