"""Reading and writing at indices along a dim that is cut: each rank does what falls into its shard, nothing is sent.

    x: f32[8@tp] on 2 ranks, i = 1 6 3      rank 0 holds [0, 4), rank 1 [4, 8)
    x[i]            rank 0  x1 0 x3         rank 1  0 x6 0        the result is a pending sum
    x[i] = v        rank 0  v0 . v2         rank 1  . v1 .        what lies elsewhere goes to a spare row

The indices are whole on these axes, the dims that they point into may have any intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.rules.kernel import KernelContext, looks_at_values
from dtensor.rules.registry import Call
from dtensor.rules.rule import Kernel, Rule
from dtensor.spec import Spec

from .classes import local_slots
from .empty_shards import is_empty_shard
from .labelled import share_of

__all__ = ["checked", "reading", "writing"]


def writing(factors: Iterable[int]) -> tuple[Kernel, ...]:
    """The kernel of ops that write at indices; `factors` are the dims that indices point into."""
    cut = frozenset(factors)
    return (Kernel("write", cut, ("shard",), _write),) if cut else ()


def reading(factors: Iterable[int], elements: int, how: str = "sum") -> tuple[Kernel, ...]:
    """The kernel of ops that read `elements` at indices; its cost counts the sum (or other reduction) to follow."""
    cut = frozenset(factors)
    return (Kernel("read", cut, (how,), _read, elements, 1),) if cut else ()


def checked(call: Call, rule: Rule) -> Rule:
    """`rule`, whose local op also fails on a bad index where its shard is empty, as it does on the other ranks.

    Of nothing torch reads nothing and looks at no index.
    """
    names = [a.name for a in call.op._schema.arguments]
    at = next(i for i, name in enumerate(names) if name in ("index", "indices"))
    sizes = call.inputs[0].shape

    def bind(ins: Sequence[Spec], outs: Sequence[Spec | None]) -> Callable[..., object] | None:
        inner = rule.bind(ins, outs) if rule.bind else None
        if not is_empty_shard(ins[0]) or ins[0].mesh.device_type != "cpu":
            return inner

        def run(*args: Any, **kwargs: Any) -> object:
            given = args[at] if at < len(args) else kwargs[names[at]]
            many = enumerate(given) if isinstance(given, (list, tuple)) else [(call.dim(), given)]
            for d, index in many:
                if isinstance(index, torch.Tensor) and index.dtype not in (torch.bool, torch.uint8):
                    _check(call, index, d, sizes[d])
            return (inner or call.op)(*args, **kwargs)

        return run

    return replace(rule, bind=bind)


def _check(call: Call, index: torch.Tensor, dim: int, n: int) -> None:
    """IndexError for an index out of range; on accelerators and in graphs a failed assertion."""
    bad = (index >= n) | (index < -n)
    if not looks_at_values(index):
        torch._assert_async(~bad.any(), f"{call.op}: an index is out of bounds for dim {dim} of size {n}")
    elif bool(bad.any()):
        raise IndexError(f"{call.op}: index {int(index[bad][0])} is out of bounds for dim {dim} of size {n}")


def _call(ctx: KernelContext, given: Mapping[str, Any]) -> torch.Tensor:
    params = ctx.call.op._schema.arguments
    args = [given[a.name] for a in params if not a.kwarg_only]
    result = ctx.call.op(*args, **{a.name: given[a.name] for a in params if a.kwarg_only})
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"{ctx.call.op} gave {type(result).__name__}, not a tensor")
    return result


def _pointed(ctx: KernelContext) -> dict[int, torch.Tensor]:
    """Dim of the first input -> the indices into it."""
    many = ctx.arguments.get("indices")
    if isinstance(many, (list, tuple)):
        return {d: t for d, t in enumerate(many) if isinstance(t, torch.Tensor)}
    return {ctx.call.dim(): ctx.tensor("index")}


def _slots(ctx: KernelContext, dim: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `local_slots`; None where this rank holds the whole dim. IndexError for an index out of range."""
    n, runs = ctx.in_specs[0].shape[dim], ctx.intervals(0, dim)
    if runs == ((0, n),):
        return None
    index = index.long()
    _check(ctx.call, index, dim, n)
    return local_slots(torch.where(index < 0, index + n, index), runs)


def _with_slots(ctx: KernelContext, slots: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    """The arguments with these indices."""
    given = dict(ctx.arguments)
    many = given.get("indices")
    if isinstance(many, (list, tuple)):
        given["indices"] = [slots.get(d, t) for d, t in enumerate(many)]
    else:
        given["index"] = next(iter(slots.values()), given["index"])
    return given


def _short(ctx: KernelContext) -> dict[int, torch.Tensor]:
    """Cut dims of the first input along which the index is shorter -> the entries of the index that are here."""
    spec, index = ctx.in_specs[0], ctx.arguments.get("index")
    if not isinstance(index, torch.Tensor) or index.ndim != spec.ndim or "dim" not in ctx.arguments:
        return {}
    found = {}
    for d in range(spec.ndim):
        n = ctx.in_specs[1].shape[d]
        if d != ctx.call.dim() and n != spec.shape[d] and ctx.inputs[0].shape[d] != spec.shape[d]:
            at = ctx.indices(0, d, index.device)
            found[d] = at[at < n]
    return found


def _entries_here(ctx: KernelContext) -> tuple[dict[str, Any], dict[int, torch.Tensor]]:
    """The arguments, index and source with those entries only that are here; and which these are, a dim."""
    given, short = dict(ctx.arguments), _short(ctx)
    for d, at in short.items():
        for name in ("index", "src"):
            t = given.get(name)
            if isinstance(t, torch.Tensor) and t.ndim:
                given[name] = t.index_select(d, at)
    return given, short


def _write(ctx: KernelContext) -> torch.Tensor:
    x = ctx.inputs[0]
    target, slots = x, dict[int, torch.Tensor]()
    ctx = replace(ctx, arguments=_entries_here(ctx)[0])
    for d, index in _pointed(ctx).items():
        found = _slots(ctx, d, index)
        if found is not None:
            slot, mine = found
            slots[d] = torch.where(mine, slot, x.shape[d])
            spare = [1 if e == d else n for e, n in enumerate(target.shape)]
            target = torch.cat([target, target.new_zeros(spare)], d)
    given = _with_slots(ctx, slots)
    given[ctx.call.op._schema.arguments[0].name] = target
    if isinstance(given.get("value"), (bool, int, float, complex)):
        given["value"] = share_of(given["value"], ctx.in_specs[0])
    result = _call(ctx, given)
    for d in slots:
        result = result.narrow(d, 0, x.shape[d])
    return result.contiguous() if slots else result


def _read(ctx: KernelContext) -> torch.Tensor:
    x, out = ctx.inputs[0], ctx.out_specs[0]
    assert out is not None
    arguments, short = _entries_here(ctx)
    ctx = replace(ctx, arguments=arguments)
    pointed = _pointed(ctx)
    slots, here = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    for d, index in pointed.items():
        found = _slots(ctx, d, index)
        if found is not None:
            slots[d], here[d] = found
    if any(x.shape[d] == 0 for d in slots):
        return x.new_zeros(out.local_shape)
    got = _call(ctx, _with_slots(ctx, slots))
    if here:
        mine = torch.stack(torch.broadcast_tensors(*here.values())).all(0)
        got = torch.where(_spread(ctx, mine, got.ndim, list(pointed), pointed), got, torch.zeros_like(got))
    for d, at in short.items():
        wide = got.new_zeros([out.local_shape[d] if e == d else n for e, n in enumerate(got.shape)])
        got = wide.index_copy_(d, at, got)
    return got


def _spread(
    ctx: KernelContext, mine: torch.Tensor, ndim: int, dims: list[int], pointed: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """`mine`, of the shape of the indices, with dims of size 1 for those of the result that come from the input."""
    if mine.ndim == ndim:
        return mine
    wide = max(t.ndim for t in pointed.values())
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    before = dims[0] if together else 0
    shape = [1] * (wide - mine.ndim) + list(mine.shape)
    return mine.reshape([1] * before + shape + [1] * (ndim - before - wide))
