"""Reductions: the reduced dims are factors that the output lacks, so cutting them leaves a pending reduction.

    sum, nansum, count_nonzero    P(sum)          amax, amin, max, min    P(max), P(min)
    prod                          P(product)      any, all                P(bor), P(band)
    vector norms of order p       P(norm<p>); of order inf P(max), -inf P(min), 0 P(sum)

The mean of a shard is its sum divided by the count of the whole, so uneven and empty shards need no care:

    x: [5 rows] over 2 ranks, mean(0)     rank 0: (x0 + x1 + x2) / 5     rank 1: (x3 + x4) / 5     P(sum)

What an empty shard holds of a maximum is the least number of its dtype. Norms of norms pass: a norm of parts
that are pending in norm<p> is pending in norm<p>, so the total norm of many shards is reduced once.
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
from .pointwise import broadcast_rule, is_list_op

__all__ = ["least", "reduced_dims", "reduced_rule", "reduction"]


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
    low, high = (_output(ctx.out_specs[i : i + 1]) for i in (0, 1))
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
