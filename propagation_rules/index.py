"""Reading and writing at indices: the dims that indices point into stay replicated, the others are free.

    index_select(dim=0)   [n] b, i -> i b                 indices may be sharded, then the output is
    gather(dim=1)         b [n], b i -> b i               b only where index and input have the same size there
    scatter_add(dim=1)    b [n], b i, b i -> b [n]        i is summed: sharding it leaves a pending sum
    index                 [n] [m] b, i, i -> i b          indices broadcast; together, they take the first one's place
    index_put             [n] b, i, i b -> [n] b          with accumulate i is summed, else it stays replicated

Reading moves elements, so the pending reductions of what is read pass. Indices are never pending. A dim that
indices point into is written, `[n]`, not sharded by plain strategies; kernels shard it.

Reading and writing at indices along a dim that is sharded: each rank does what falls into its shard, nothing is sent.

    x: f32[8@tp] on 2 ranks, i = 1 6 3      rank 0 holds [0, 4), rank 1 [4, 8)
    x[i]            rank 0  x1 0 x3         rank 1  0 x6 0        the result is a pending sum
    x[i] = v        rank 0  v0 . v2         rank 1  . v1 .        what lies elsewhere goes to a spare row

The indices are replicated on these axes, the dims that they point into may have any intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Kernel, Rule, linear, passes
from dtensor.spec import Spec

from .build.classes import check_indices, local_slots
from .build.empty_shards import is_empty_shard
from .build.gathered import output_spec
from .build.labelled import every_dim, labelled, share_of, shares_value
from .scatter import put_at_mask

__all__ = ["checked", "reading", "writing"]

READS = (passes(0),)
I, N = "i", "n"  # noqa: E741 - the factors of the indices and of the dim that they point into


def _at(n: int, dim: int, label: Hashable) -> list[Hashable]:
    """Labels of `n` dims with `label` at `dim`."""
    return [label if d == dim else d for d in range(n)]


def _pointed(call: Call, rule: Rule) -> list[int]:
    """The whole factors of the first input: those that indices point into."""
    return [f for dims in rule.inputs[0] for f in dims if f in rule.whole]


def _reads(call: Call, rule: Rule) -> Rule:
    out, rule = call.outputs[0], checked(call, rule)
    if out is None:
        return rule
    how = "bor" if out.dtype == torch.bool else "sum"
    return replace(rule, kernels=reading(_pointed(call, rule), max(math.prod(out.shape), 1), how))


def _writes(call: Call, rule: Rule) -> Rule:
    return replace(checked(call, rule), kernels=writing(_pointed(call, rule)))


# ------------------------------------------------------------ one dim, a 1-d index
def index_select(call: Call) -> Rule:
    """0-d tensors count as 1-d ones."""
    x, index = call.inputs
    i = [I] * index.ndim
    if x.ndim == 0:
        return labelled(call, [[], i], [[]], whole=(I,), linear=READS)
    dim = call.dim()
    entry = I if index.ndim else None
    return _reads(call, labelled(call, [_at(x.ndim, dim, N), i], [_at(x.ndim, dim, entry)], whole=(N,), linear=READS))


def _index_write(call: Call, adds: bool) -> Rule:
    x, index, source = call.inputs
    dim, i = call.dim(), [I] * index.ndim
    from_source = _at(source.ndim, dim, I if index.ndim else None) if x.ndim else i[: source.ndim]
    target = _at(x.ndim, dim, N) if x.ndim else []
    group = linear(0, 2) if adds else passes(0, 2)
    rule = labelled(
        call, [target, i, from_source], [target], whole=(N,) if adds and x.ndim else (I, N), linear=(group,),
        addends=frozenset({0} if adds else ()),
    )  # fmt: skip
    return _writes(call, rule)


def index_add(call: Call) -> Rule:
    """Rows of the source are summed into the target."""
    return _index_write(call, adds=True)


def index_copy(call: Call) -> Rule:
    """Rows of the source replace those of the target."""
    return _index_write(call, adds=False)


def index_reduce(call: Call) -> Rule:
    """Other reductions than sums: nothing pending passes."""
    return replace(_index_write(call, adds=False), linear=())


def index_fill(call: Call) -> Rule:
    """A number, or a 0-d tensor, is written."""
    x, index = call.inputs[:2]
    target = _at(x.ndim, call.dim(), N) if x.ndim else []
    if len(call.inputs) == 3:
        rule = labelled(call, [target, [None] * index.ndim, []], [target], whole=(N,), linear=(passes(0, 2),))
        return _writes(call, rule)
    rule = labelled(call, [target, [None] * index.ndim], [target], whole=(N,))
    return _writes(call, shares_value(call, rule, "value"))


# ------------------------------------------------------------ one dim, an index of the same rank
def _aligned(call: Call, others: Sequence[Spec]) -> tuple[list[Hashable], list[Hashable]] | None:
    """Labels of the target and of index and source; None where ranks differ (an index without elements).

    Along a dim where the index is shorter than the target only kernels shard the target.
    """
    x = call.inputs[0]
    if any(s.ndim != x.ndim for s in others):
        return None
    same = [all(s.shape[d] == x.shape[d] for s in others) for d in range(x.ndim)]
    dim = call.dim()
    target: list[Hashable] = [N if d == dim else d if same[d] else (N, d) for d in range(x.ndim)]
    return target, [I if d == dim else d if same[d] else None for d in range(x.ndim)]


def gather(call: Call) -> Rule | None:
    """Along the other dims the index may be smaller than the input."""
    labels = _aligned(call, call.inputs[1:2])
    if labels is None:
        return None
    return _reads(call, labelled(call, [*labels], [labels[1]], whole=_kept(labels[0]), linear=READS))


def _kept(target: Sequence[Hashable]) -> list[Hashable]:
    return [label for label in target if not isinstance(label, int)]


def _scatter(call: Call, adds: bool) -> Rule | None:
    labels = _aligned(call, call.inputs[1:])
    if labels is None:
        return None
    target, at = labels
    x = call.inputs[0]
    if x.ndim and len({s.shape[call.dim()] for s in call.inputs[1:]}) > 1:
        at = [None if label == I else label for label in at]
    rest = [at] * (len(call.inputs) - 1)
    rule = labelled(
        call, [target, *rest], [target], whole=[*_kept(target), *([] if adds else [I])],
        addends=frozenset({0} if adds else ()),
    )  # fmt: skip
    return _writes(call, rule)


def scatter_add(call: Call) -> Rule | None:
    """Sums into the target."""
    rule = _scatter(call, adds=True)
    return None if rule is None else replace(rule, linear=(linear(0, 2),))


def scatter(call: Call) -> Rule | None:
    """Sources, or a number, replace entries of the target, or are added; multiplied, nothing pending passes."""
    if call.get("reduce") == "add" and len(call.inputs) == 3:
        return scatter_add(call)
    rule = _scatter(call, adds=False)
    if rule is None or call.get("reduce") is not None:
        return rule
    if len(call.inputs) == 3:
        return replace(rule, linear=(passes(0, 2),))
    return shares_value(call, rule, "value")


def scatter_reduce(call: Call) -> Rule | None:
    """Sums that include the target are as `scatter_add`; other reductions keep the indices whole."""
    if call["reduce"] == "sum" and call["include_self"]:
        return scatter_add(call)
    return _scatter(call, adds=False)


# ------------------------------------------------------------ several dims at once
def _layout(
    shape: Sequence[int], indices: Sequence[Spec | None]
) -> tuple[list[Hashable], list[list[Hashable]], list[Hashable]]:
    """Labels of the indexed tensor, of each given index, and of what indexing gives."""
    given = [(d, s) for d, s in enumerate(indices) if s is not None]
    wide = _broadcast([s.shape for _, s in given])
    x: list[Hashable] = [(N, d) if d < len(indices) and indices[d] is not None else d for d in range(len(shape))]
    at = [
        [(I, len(wide) - s.ndim + j) if n == wide[len(wide) - s.ndim + j] else None for j, n in enumerate(s.shape)]
        for _, s in given
    ]
    entries: list[Hashable] = [(I, j) for j in range(len(wide))]
    dims = [d for d, _ in given]
    together = dims == list(range(dims[0], dims[0] + len(dims))) if dims else True
    first = dims[0] if dims and together else 0
    before = [label for label in x[:first] if isinstance(label, int)]
    after = [label for label in x[first:] if isinstance(label, int)]
    return x, [list(labels) for labels in at], [*before, *entries, *after]


def _broadcast(shapes: Sequence[torch.Size]) -> tuple[int, ...]:
    """The common shape; the shapes are known to fit."""
    n = max((len(s) for s in shapes), default=0)
    sizes = [[s[d - n] for s in shapes if n - d <= len(s)] for d in range(n)]
    return tuple(next((v for v in many if v != 1), 1) for many in sizes)


def _masks(indices: Sequence[Spec | None]) -> bool:
    return any(s is not None and s.dtype in (torch.bool, torch.uint8) for s in indices)


def index(call: Call) -> Rule | None:
    """By hand: where the dims of the output come from depends on which dims are indexed."""
    indices = call["indices"]
    if _masks(indices):
        return None
    x, at, result = _layout(call.inputs[0].shape, indices)
    into = [label for label in x if isinstance(label, tuple)]
    return _reads(call, labelled(call, [x, *at], [result], whole=into, linear=READS))


def index_put(call: Call) -> Rule | None:
    """By hand, as `index`; the values broadcast to what indexing would give."""
    indices, adds = call["indices"], bool(call["accumulate"])
    x, values = call.inputs[0], call.inputs[-1]
    if _masks(indices):
        return _mask_put(call)
    target, at, result = _layout(x.shape, indices)
    sizes = _sizes_of(call, [target, *at])
    first = len(result) - values.ndim
    from_values = [
        result[first + j] if first + j >= 0 and n == sizes[result[first + j]] else None
        for j, n in enumerate(values.shape)
    ]
    kept = [label for t in (target, [] if adds else result) for label in t if isinstance(label, tuple)]
    last = len(call.inputs) - 1
    rule = labelled(
        call, [target, *at, from_values], [target], whole=kept,
        linear=(linear(0, last) if adds else passes(0, last),), addends=frozenset({0} if adds else ()),
    )  # fmt: skip
    return _writes(call, rule)


def _sizes_of(call: Call, labels: Sequence[Sequence[Hashable]]) -> dict[Hashable, int]:
    return {
        label: n for t, s in zip(labels, call.inputs, strict=False) for label, n in zip(t, s.shape, strict=True)
        if label is not None
    }  # fmt: skip


def _mask_put(call: Call) -> Rule | None:
    """One mask; masks beside indices have no rule."""
    masks = [(d, s) for d, s in enumerate(call["indices"]) if s is not None]
    return put_at_mask(call, *masks[0]) if len(masks) == 1 else None


# ------------------------------------------------------------ membership
def isin(call: Call) -> Rule:
    """Every element for itself, against all of the tested ones."""
    elements = call.index("elements")
    labels = every_dim(len(call.outputs[0].shape)) if call.outputs[0] is not None else []
    inputs = [labels if i == elements else [None] * call.inputs[i].ndim for i in range(len(call.inputs))]
    return labelled(call, inputs, [labels])


register("aten.index_select", index_select)
register("aten.index_add", index_add, values="alpha")
register("aten.index_copy", index_copy)
register("aten.index_reduce", index_reduce)
register("aten.index_fill", index_fill, values="value")
register("aten.gather", gather)
register("aten.scatter", scatter, values="value")
register("aten.scatter_add", scatter_add)
register("aten.scatter_reduce", scatter_reduce)
register("aten.index aten._unsafe_index", index)
register("aten.index_put aten._unsafe_index_put aten._index_put_impl", index_put)
register("aten.isin", isin)


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
    check_indices(str(call.op), index, n, f"out of bounds for dim {dim} of size {n}", -n)


def _call(ctx: KernelContext, given: Mapping[str, Any]) -> torch.Tensor:
    params = ctx.call.op._schema.arguments
    args = [given[a.name] for a in params if not a.kwarg_only]
    result = ctx.call.op(*args, **{a.name: given[a.name] for a in params if a.kwarg_only})
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"{ctx.call.op} gave {type(result).__name__}, not a tensor")
    return result


def _indices_of(ctx: KernelContext) -> dict[int, torch.Tensor]:
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
    """Sharded dims of the first input along which the index is shorter -> the entries of the index that are here."""
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
    for d, index in _indices_of(ctx).items():
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
    x, out = ctx.inputs[0], output_spec(ctx)
    arguments, short = _entries_here(ctx)
    ctx = replace(ctx, arguments=arguments)
    pointed = _indices_of(ctx)
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
