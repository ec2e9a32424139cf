"""Reading and writing at indices: the dims that indices point into stay whole, the others are free.

    index_select(dim=0)   [n] b, i -> i b                 indices may be sharded, then the output is
    gather(dim=1)         b [n], b i -> b i               b only where index and input have the same size there
    scatter_add(dim=1)    b [n], b i, b i -> b [n]        i is summed: sharding it leaves a pending sum
    index                 [n] [m] b, i, i -> i b          indices broadcast; together, they take the first one's place
    index_put             [n] b, i, i b -> [n] b          with accumulate i is summed, else it stays whole

Reading moves elements, so the pending reductions of what is read pass. Indices are never pending. A dim that
indices point into is written, `[n]`, not sharded by plain strategies; kernels shard it (`build.index_kernels`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, linear, passes
from dtensor.spec import Spec

from .build.index_kernels import checked, reading, writing
from .build.labelled import every_dim, labelled, shares_value
from .scatter import put_at_mask

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

    Along a dim where the index is shorter than the target only kernels cut the target.
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
