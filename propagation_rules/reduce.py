"""Reductions: the reduced dims are factors that the output lacks, so sharding them leaves a pending reduction.

    sum, nansum, count_nonzero    P(sum)          amax, amin, max, min    P(max), P(min)
    prod                          P(product)      any, all                P(bor), P(band)
    vector norms of order p       P(norm<p>); of order inf P(max), -inf P(min), 0 P(sum)

The mean of a shard is its sum divided by the count of the whole, so uneven and empty shards need no care:

    x: [5 rows] over 2 ranks, mean(0)     rank 0: (x0 + x1 + x2) / 5     rank 1: (x3 + x4) / 5     P(sum)

What an empty shard holds of a maximum is the least number of its dtype. Norms of norms pass: a norm of parts
that are pending in norm<p> is pending in norm<p>, so the total norm of many shards is reduced once.

Where the largest and smallest elements are: argmax, argmin, max and min along a dim.

Indices are not a matter of local op plus reduction: a shard's index is local, and the winner is on one rank only.
Each rank sends its best value and the global index of it; all ranks choose alike. As torch does, the first of
equals wins and NaN beats everything:

    rank 0 holds [3, 7]: (7, 1)      rank 1 holds [7, 5]: (7, 2)      argmax = 1
    an empty shard sends the least number and an index beyond all others

Variance and standard deviation, alone and with the mean; log of a sum of exponentials.

Over sharded dims each rank sends count, mean and the sum of squared deviations from its own mean; they are
combined as Chan, Golub and LeVeque do, which loses no digits when the mean is large:

    n = sum n_i      mean = sum n_i mean_i / n      M = sum M_i + n_i (mean_i - mean)^2      var = M / (n - correction)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtensor.placement import Shard, StridedShard
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Bind, Dims, Kernel, Linear, Rule
from dtensor.spec import Spec

from .build.dtypes import accumulation_dtype, cast_passes, is_exact
from .build.empty_shards import is_empty_shard, zeros_of
from .build.gathered import as_bits, from_bits, gather_stacked, output_spec
from .pointwise import broadcast_rule, is_list_op

__all__ = ["combined_moments", "least", "reduced_dims", "reduced_rule", "reduction"]


def reduced_dims(call: Call, of: int = 0) -> tuple[int, ...]:
    """The dims of input `of` that `call` reduces: its `dim` argument, all where it has none.

    An empty list stands for all dims, but for none in `any` and `all`.
    """
    if call.op._schema.name in ("aten::any", "aten::all") and call.get("dim", 0) in ([], ()):
        return ()
    return call.dims(of=of) if "dim" in call.arguments else tuple(range(call.inputs[of].ndim))


def reduced_rule(call: Call, of: int = 0) -> Rule:
    """One factor a dim of the input; outputs lack the factors of reduced dims, or keep them as dims of size 1."""
    x = call.inputs[of]
    gone = reduced_dims(call, of)
    keep = bool(call.get("keepdim", False))
    out: Dims = tuple(() if d in gone else (d,) for d in range(x.ndim) if keep or d not in gone)
    return Rule(
        (tuple((d,) for d in range(x.ndim)),), tuple(() if m is None else out for m in call.outputs), tuple(x.shape)
    )


def least(dtype: torch.dtype, of: str) -> float | int | bool:
    """What an empty shard contributes to a reduction `of` "max" or "min"."""
    if dtype == torch.bool:
        return of == "min"
    if dtype.is_floating_point:
        return math.inf if of == "min" else -math.inf
    info = torch.iinfo(dtype)
    return info.max if of == "min" else info.min


def _output(outs: Sequence[Spec | None]) -> Spec:
    spec = outs[0]
    assert spec is not None
    return spec


# ------------------------------------------------------------ one reduction
@dataclass(frozen=True, slots=True)
class reduction:  # noqa: N801 - used as a function
    """Builder of a reduction.

    Args:
        reduce: the reduction of factors that the output lacks.
        passes: reductions of the input that pass; casts on the way are taken care of.
        empty: makes `bind` for calls where a shard may be empty and the op would raise.
    """

    reduce: str
    passes: tuple[str, ...] = ()
    empty: Callable[[Call], Bind] | None = None

    def __call__(self, call: Call) -> Rule:
        rule = reduced_rule(call)
        src, out = call.inputs[0].dtype, call.outputs[0]
        assert out is not None
        ops = tuple((op, op) for op in self.passes if _passes(op, src, out.dtype))
        rule = replace(
            rule,
            reduce=dict.fromkeys(range(len(rule.sizes)), self.reduce),
            linear=(Linear(frozenset({0}), ops),) if ops else (),
        )
        if self.empty is None:
            return rule
        if is_list_op(call):
            return replace(rule, nonempty=frozenset(range(len(rule.sizes))))
        return replace(rule, bind=self.empty(call))

    @property
    def text_form(self) -> str:
        """Printed form."""
        passes = f"   passes {', '.join(self.passes)}" if self.passes else ""
        return f"reduction, {self.reduce}{passes}"


def _passes(op: str, src: torch.dtype, dst: torch.dtype) -> bool:
    if op == "avg" and is_exact(src):
        return False
    if src == torch.bool and op == "sum":
        return False
    if src != torch.bool and op == "band":  # 1 and 2 both count as true, 1 & 2 does not
        return False
    ops = cast_passes(src, dst)
    return any(given in (op, "*") for given, _ in ops)


def _empty_extreme(of: str) -> Callable[[Call], Bind]:
    """Maximum or minimum whose empty shards give the least number instead of an error."""

    def build(call: Call) -> Bind:
        gone = reduced_dims(call)

        def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
            if all(ins[0].local_shape[d] for d in gone) or not all(ins[0].shape[d] for d in gone):
                return None
            spec = _output(outs)
            value = least(spec.dtype, of)
            return lambda x, *_, **__: x.new_full(spec.local_shape, value)

        return bind

    return build


# ------------------------------------------------------------ mean
def mean(call: Call) -> Rule:
    """Local sum over global count: the op on a shard would divide by the shard's count."""
    rule = reduction("sum", ("sum", "avg"))(call)
    gone = reduced_dims(call)
    count = math.prod(call.inputs[0].shape[d] for d in gone)

    def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
        spec = _output(outs)
        if not any(ins[0].is_sharded_on(d) for d in gone):
            return None
        acc = accumulation_dtype(spec.dtype)

        def run(x: torch.Tensor, dim: object = None, keepdim: bool = False, dtype: object = None) -> torch.Tensor:
            return (x.sum(gone, keepdim, dtype=acc) / count).to(spec.dtype)

        return run

    return replace(rule, bind=bind)


# ------------------------------------------------------------ norms
FEW = 1 << 12
"""Elements of a pending tensor that is small enough to be reduced before its norm is taken."""


def vector_norm(call: Call) -> Rule:
    """The reduction depends on the order: P(norm<p>), or what stands for it at 0 and the infinities.

    The norm of a few pending numbers, such as the total of the norms of many gradients, is taken after their
    reduction: it costs the same, and the result can be used many times.
    """
    p = _order(call)
    rule = reduced_rule(call)
    every = range(len(rule.sizes))
    spec, out = call.inputs[0], call.outputs[0]
    if out is not None and math.prod(out.shape) == 1 and spec.numel <= FEW and spec.has_partial():
        if not any(isinstance(q, (Shard, StridedShard)) for q in spec.placements):
            return replace(rule, whole=frozenset(every))
    if math.isinf(p):
        rule = replace(rule, reduce=dict.fromkeys(every, "max" if p > 0 else "min"))
        if is_list_op(call):
            return replace(rule, nonempty=frozenset(every))
        return replace(rule, bind=_empty_norm(call, 0.0 if p > 0 else math.inf))
    if p == 0:
        return rule
    kind = _pending_norm(p)
    if kind is None:
        return replace(rule, whole=frozenset(reduced_dims(call)))
    return replace(rule, reduce=dict.fromkeys(every, kind), linear=(Linear(frozenset({0}), ((kind, kind),)),))


def _order(call: Call) -> float:
    p = call.get("ord", call.get("p"))
    return 2.0 if p is None else float(p)


def _pending_norm(p: float) -> str | None:
    """The reduction of a norm of finite order; None for orders that no placement stands for."""
    name = f"norm{p:g}"
    return name if 0 < p < math.inf and "e" not in name and float(name[4:]) == p else None


def _empty_norm(call: Call, value: float) -> Bind:
    gone = reduced_dims(call)

    def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
        if all(ins[0].local_shape[d] for d in gone) or not all(ins[0].shape[d] for d in gone):
            return None
        spec = _output(outs)
        return lambda x, *_, **__: x.new_full(spec.local_shape, value, dtype=spec.dtype)

    return bind


def dist(call: Call) -> Rule:
    """The norm of a difference: all dims reduced, after broadcasting. Infinity is `dtensor.dispatch.composites`'."""
    p = _order(call)
    rule = broadcast_rule(call)
    every = range(len(rule.sizes))
    rule = replace(rule, outputs=((),))
    kind = "sum" if p == 0 else _pending_norm(p)
    if kind is None:
        return replace(rule, whole=frozenset(every))
    return replace(rule, reduce=dict.fromkeys(every, kind))


# ------------------------------------------------------------ two results at once
def aminmax(call: Call) -> Rule:
    """Its outputs are pending in different reductions, which only a kernel can say; it sends nothing."""
    rule = reduced_rule(call)
    gone = reduced_dims(call)
    kernel = Kernel("aminmax", frozenset(gone), ("min", "max"), _run_aminmax)
    return replace(rule, whole=frozenset(gone), kernels=(kernel,))


def _run_aminmax(ctx: KernelContext) -> tuple[torch.Tensor, torch.Tensor]:
    x = ctx.inputs[0]
    gone = reduced_dims(ctx.call)
    low, high = (output_spec(ctx, i) for i in (0, 1))
    if not all(x.shape[d] for d in gone):
        return (
            x.new_full(low.local_shape, least(x.dtype, "min")),
            x.new_full(high.local_shape, least(x.dtype, "max")),
        )
    keep = bool(ctx.call["keepdim"])
    return x.amin(gone, keep), x.amax(gone, keep)


_SUMS: Mapping[str, reduction] = {
    "aten.sum": reduction("sum", ("sum", "avg")),
    "aten.nansum aten.count_nonzero": reduction("sum"),
    "aten.prod": reduction("product", ("product",)),
    "aten.any": reduction("bor", ("bor", "max")),
    "aten.all": reduction("band", ("band", "min")),
    "aten.amax aten.max.default aten._foreach_max": reduction("max", ("max",), _empty_extreme("max")),
    "aten.amin aten.min.default": reduction("min", ("min",), _empty_extreme("min")),
}
for _names, _build in _SUMS.items():
    register(_names, _build)
register("aten.mean", mean)
register("aten.linalg_vector_norm aten.norm aten._foreach_norm", vector_norm)
register("aten.dist", dist)
register("aten.aminmax", aminmax)


BEYOND = torch.iinfo(torch.int64).max


def extreme(call: Call) -> Rule:
    """Reduced dims are replicated; a kernel compares the shards' candidates."""
    gone = reduced_dims(call)
    n = len(call.outputs)
    kernel = Kernel("extreme", frozenset(gone), ("replicate",) * n, _run_extreme)
    return replace(reduced_rule(call), whole=frozenset(gone), kernels=(kernel,))


def _candidates(ctx: KernelContext, of: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Best value and its global index of this shard, reduced dims kept with size 1."""
    x, gone = ctx.inputs[0], reduced_dims(ctx.call)
    x = x.to(torch.uint8) if x.dtype == torch.bool else x  # argmax takes no booleans
    kept = [1 if d in gone else n for d, n in enumerate(x.shape)]
    if not all(x.shape[d] for d in gone):
        return x.new_full(kept, least(x.dtype, of)), torch.full(kept, BEYOND, dtype=torch.int64, device=x.device)
    pick = torch.argmax if of == "max" else torch.argmin
    if len(gone) == 1:
        at = pick(x, gone[0], keepdim=True)
        return x.gather(gone[0], at), ctx.indices(0, gone[0], x.device)[at]
    flat = pick(x)
    value = x.reshape(-1)[flat].reshape(kept)
    index, size = torch.zeros_like(flat), 1
    for d in reversed(range(x.ndim)):
        index = index + ctx.indices(0, d, x.device)[flat % x.shape[d]] * size
        flat, size = flat // x.shape[d], size * ctx.in_specs[0].shape[d]
    return value, index.reshape(kept)


def _run_extreme(ctx: KernelContext) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    of = "max" if "max" in ctx.call.op._schema.name else "min"
    value, index = _candidates(ctx, of)
    sent = gather_stacked(ctx, torch.stack((as_bits(value), index)))
    values, indices = from_bits(sent[:, 0], value.dtype), sent[:, 1]
    best = values.amax(0) if of == "max" else values.amin(0)
    wins = (values == best) | ((values != values) & (best != best))
    first = torch.where(wins, indices, BEYOND).amin(0)
    out = output_spec(ctx)
    if len(ctx.out_specs) == 1:
        return first.reshape(out.local_shape)
    return best.reshape(out.local_shape).to(out.dtype), first.reshape(out.local_shape)


register("aten.argmax aten.argmin aten.max.dim aten.min.dim", extreme)


def combined_moments(
    ctx: KernelContext, x: torch.Tensor, dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean and sum of squared deviations over `dims`, of all positions of the kernel's axes; dims kept."""
    x = x.to(accumulation_dtype(x.dtype))
    count = 1
    for d in dims:
        count *= x.shape[d]
    mean = x.sum(dims, keepdim=True) / max(count, 1)
    squares = (x - mean).square().sum(dims, keepdim=True)
    sent = gather_stacked(ctx, torch.stack((torch.full_like(mean, count), mean, squares)))
    counts, means, parts = sent.unbind(1)
    total = counts.sum(0)
    whole = (counts * means).sum(0) / total
    return total, whole, (parts + counts * (means - whole).square()).sum(0)


def variance(call: Call) -> Rule:
    """Reduced dims are replicated; a kernel combines the shards' moments. No rows give no warning."""
    gone = reduced_dims(call)
    rule = replace(
        reduced_rule(call),
        whole=frozenset(gone),
        bind=lambda ins, outs: zeros_of(outs) if is_empty_shard(ins[0]) else None,
    )
    if call.inputs[0].dtype.is_complex or not gone:
        return rule
    n = len(call.outputs)
    return replace(rule, kernels=(Kernel("moments", frozenset(gone), ("replicate",) * n, _run_moments),))


def _run_moments(ctx: KernelContext) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    out = output_spec(ctx)
    name = ctx.call.op._schema.name
    given = ctx.call["correction"]
    correction = 1.0 if given is None else float(given)
    count, mean, squares = combined_moments(ctx, ctx.inputs[0], reduced_dims(ctx.call))
    var = squares / (count - correction).clamp(min=0)
    first = (var.sqrt() if "std" in name else var).reshape(out.local_shape).to(out.dtype)
    if len(ctx.out_specs) == 1:
        return first
    return first, mean.reshape(out.local_shape).to(out.dtype)


def logsumexp(call: Call) -> Rule:
    """Reduced dims are replicated; a kernel takes the log-sum-exp of the shards' ones."""
    gone = reduced_dims(call)
    rule = replace(reduced_rule(call), whole=frozenset(gone))
    kernel = Kernel("logsumexp", frozenset(gone), ("replicate",), _run_logsumexp)
    return replace(rule, kernels=(kernel,))


def _run_logsumexp(ctx: KernelContext) -> torch.Tensor:
    out = output_spec(ctx)
    local = ctx.inputs[0].logsumexp(reduced_dims(ctx.call), bool(ctx.call["keepdim"]))
    return gather_stacked(ctx, local.to(accumulation_dtype(out.dtype))).logsumexp(0).to(out.dtype)


register("aten.std.correction aten.std_mean.correction aten.var.correction aten.var_mean.correction", variance)
register("aten.logsumexp", logsumexp)
