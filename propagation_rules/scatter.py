"""Flat indices and masks on shards: each rank works on the elements of its own shard, nothing is sent.

    take, put        an index points into the flattened tensor; it is taken apart into one index a dim
    x[mask] = v      the values go, in order, to the places where the mask holds; so does masked_scatter

Which value goes to which place follows from the whole mask, which is gathered:

    mask: 1 0 1 1 on 2 ranks      rank 0 takes value 0      rank 1 takes values 1 and 2
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Kernel, Rule, linear, passes
from dtensor.spec import Spec

from .build.classes import check_indices, local_slots
from .build.labelled import every_dim, labelled
from .pointwise import broadcast_rule

__all__ = ["put_at_mask"]

X = "x"
READS = (passes(0),)


def _cut(rule: Rule, name: str, run: object, how: str = "shard", elements: int = 0) -> Rule:
    """`rule` whose first input is sharded by a kernel on any dim, if it has dims."""
    factors = frozenset(f for dims in rule.inputs[0] for f in dims)
    if not factors:
        return rule
    kernel = Kernel(name, factors, (how,), run, elements, 1 if elements else 0)  # type: ignore[arg-type]
    return replace(rule, whole=rule.whole | factors, kernels=(kernel,))


# ------------------------------------------------------------ flat indices
def take(call: Call) -> Rule:
    """The index points into the flattened input; what lies elsewhere is a zero of a pending sum."""
    x, index = call.inputs
    labels = every_dim(index.ndim)
    rule = labelled(call, [[(X, d) for d in range(x.ndim)], labels], [labels], linear=READS)
    return _cut(rule, "take", _take, "bor" if x.dtype == torch.bool else "sum", max(index.numel, 1))


def put(call: Call) -> Rule:
    """The index points into the flattened target; with accumulate the entries are summed."""
    x, index, source = call.inputs
    adds, same = bool(call["accumulate"]), index.shape == source.shape
    at: list[Hashable] = every_dim(index.ndim) if same else [None] * index.ndim
    target: list[Hashable] = [(X, d) for d in range(x.ndim)]
    rule = labelled(
        call, [target, at, at if same else [None] * source.ndim], [target], whole=() if adds else every_dim(index.ndim),
        linear=(linear(0, 2) if adds else passes(0, 2),), addends=frozenset({0} if adds else ()),
    )  # fmt: skip
    return _cut(rule, "put", _put)


def _flat_slots(ctx: KernelContext, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each global flat index the local one, 0 where it lies elsewhere, and whether it lies here."""
    spec, n = ctx.in_specs[0], ctx.in_specs[0].numel
    check_indices(str(ctx.call.op), index, n, f"out of range for {n} elements", -n)
    rest, flat, step = torch.where(index < 0, index + n, index), torch.zeros_like(index), 1
    mine = torch.ones_like(index, dtype=torch.bool)
    for d in reversed(range(spec.ndim)):
        slot, here = local_slots(rest % spec.shape[d], ctx.intervals(0, d))
        rest, flat, mine, step = rest // spec.shape[d], flat + slot * step, mine & here, step * ctx.inputs[0].shape[d]
    return flat.where(mine, 0), mine


def _take(ctx: KernelContext) -> torch.Tensor:
    x, index = ctx.inputs
    flat, mine = _flat_slots(ctx, index.long())
    return torch.where(mine, x.take(flat), x.new_zeros(())) if x.numel() else x.new_zeros(index.shape)


def _put(ctx: KernelContext) -> torch.Tensor:
    x, index, source = ctx.inputs
    flat, mine = _flat_slots(ctx, index.long())
    spare = torch.cat([x.reshape(-1), x.new_zeros(1)])
    return spare.put(flat.where(mine, x.numel()), source, bool(ctx.call["accumulate"]))[:-1].reshape(x.shape)


# ------------------------------------------------------------ masks
def _order(mask: torch.Tensor) -> torch.Tensor:
    """For each place where the mask holds the number of places before it."""
    return mask.reshape(-1).cumsum(0).sub_(1).clamp_(min=0).view(mask.shape)


def _own(ctx: KernelContext, t: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The part of `t`, whose dims are `dims` of the first input or 1, that belongs to this rank's shard."""
    for e, d in enumerate(dims):
        if t.shape[e] == ctx.in_specs[0].shape[d] and t.shape[e] != ctx.inputs[0].shape[d]:
            t = t.index_select(e, ctx.indices(0, d, t.device))
    return t


def masked_scatter(call: Call) -> Rule:
    """The mask broadcasts to the target."""
    rule = replace(broadcast_rule(call), linear=(passes(0, 2),))
    x, mask, source = call.inputs
    out = call.outputs[0]
    dims = (rule.inputs[0], ((),) * mask.ndim, ((),) * source.ndim)
    if out is None or out.shape != x.shape:
        return replace(_gathered(call), linear=(passes(0, 2),))
    return _cut(replace(rule, inputs=dims, outputs=dims[:1], sizes=tuple(x.shape)), "masked scatter", _masked_scatter)


def _masked_scatter(ctx: KernelContext) -> torch.Tensor:
    x, mask, source = ctx.inputs
    spec = ctx.in_specs[0]
    mask = mask.expand(spec.shape)
    _enough(ctx, int(mask.sum()), source.numel())
    every = range(spec.ndim)
    own = _own(ctx, mask, every)
    if not source.numel() or not x.numel():
        return x.clone()
    return torch.where(own, source.reshape(-1)[_own(ctx, _order(mask), every)], x)


def _enough(ctx: KernelContext, wanted: int, given: int) -> None:
    if given < wanted:
        raise RuntimeError(f"{ctx.call.op}: the mask holds at {wanted} places, the source has {given} elements")


def put_at_mask(call: Call, dim: int, mask: Spec) -> Rule:
    """`index_put` with one mask, over the dims of the target from `dim` on."""
    x, values = call.inputs[0], call.inputs[-1]
    labels = every_dim(x.ndim)
    group = linear(0, 2) if call["accumulate"] else passes(0, 2)
    if values.numel == 1:  # every element for itself, so the masked dims are free as well
        return labelled(call, [labels, labels[dim : dim + mask.ndim], [None] * values.ndim], [labels], linear=(group,))
    rule = labelled(call, [labels, [None] * mask.ndim, [None] * values.ndim], [labels], linear=(group,))
    return _cut(rule, "put at mask", lambda ctx: _put_at_mask(ctx, dim))


def _put_at_mask(ctx: KernelContext, dim: int) -> torch.Tensor:
    x, mask, values = ctx.inputs
    spec, last = ctx.in_specs[0], dim + mask.ndim
    count = int(mask.sum())
    given = values.expand((*spec.shape[:dim], count, *spec.shape[last:]))
    given = given.movedim(dim, 0)
    for e, d in enumerate([*range(dim), *range(last, spec.ndim)], start=1):
        if given.shape[e] != x.shape[d]:
            given = given.index_select(e, ctx.indices(0, d, x.device))
    own = _own(ctx, mask.bool(), range(dim, last))
    if not count or not own.numel():
        return x.clone()
    places = _own(ctx, _order(mask.bool()), range(dim, last))
    placed = given[places.reshape(-1)].movedim(0, dim).reshape(x.shape)
    here = own.view([1] * dim + list(own.shape) + [1] * (spec.ndim - last))
    if ctx.call["accumulate"]:
        return x + torch.where(here, placed, torch.zeros_like(placed))
    return torch.where(here, placed, x)


def masked_scatter_backward(call: Call) -> Rule:
    """Gathered: which element goes where depends on the whole mask; linear in the gradient."""
    return replace(_gathered(call), linear=(linear(0),))


def _gathered(call: Call) -> Rule:
    """Everything replicated."""
    outs = tuple(() if m is None else ((),) * len(m.shape) for m in call.outputs)
    return Rule(tuple(((),) * s.ndim for s in call.inputs), outs, ())


register("aten.masked_scatter", masked_scatter)
register("aten.masked_scatter_backward", masked_scatter_backward)
register("aten.put", put)
register("aten.take", take)
