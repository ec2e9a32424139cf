"""Views: the dims of the output are dims of the input, in another order, merged, split, or of size 1.

    view      (a b) c -> a b c        the common factors of both shapes, `common_factors`
    permute   a b c -> c a b
    expand    a -> . a                what an expand makes carries no factor
    squeeze   a 1 -> a                a shard of the dim that goes away is gathered

They only move elements, so every pending reduction passes. Sizes among the arguments become local ones.

The common factors of two shapes of the same number of elements: what a view is made of.

From the left, dims of both shapes give off their greatest common divisor as a factor, as long as it is not 1:

    (6, 4) -> (24,)      factors 6 4          (a b) of the output
    (12,)  -> (3, 4)     factors 3 4
    (8, 5) -> (2, 20)    factors 2 4 5        input (a b) c, output a (b c)

Where it is 1 the rest is tried from the right; what is left in the middle has no common factor and stays replicated:

    (2, 3, 4, 7) -> (2, 4, 3, 7)     2 and 7 are factors, 3 4 and 4 3 whole

Dims of size 1 that face each other are one factor (so that a shard of such a dim stays), others carry none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, linear, passes
from dtensor.spec import Spec, contiguous_stride

from .build.labelled import every_dim, labelled, local_size

__all__ = ["common_factors"]

MOVES = (passes(0),)
Local = Callable[..., object]
SQUEEZE, ALIAS, VIEW = torch.ops.aten.squeeze.dims, torch.ops.aten.alias.default, torch.ops.aten.view.default


# ------------------------------------------------------------ reshapes
def reshape(call: Call) -> Rule:
    """By hand: the factors come from comparing two shapes."""
    out = call.outputs[0]
    assert out is not None
    first, second, sizes, whole = common_factors(call.inputs[0].shape, out.shape)
    rule = Rule((tuple(first),), (tuple(second),), tuple(sizes), frozenset(whole), linear=MOVES)
    return replace(rule, bind=_bind_reshape(call))


def _bind_reshape(call: Call) -> Callable[[Sequence[Spec], Sequence[Spec | None]], Local | None]:
    """The local part of a reshape: a view, or a copy where the local strides do not allow one.

    Global and local strides may differ in order, for instance after a transposed tensor was gathered.
    """
    op = call.op._op if "stride" not in call.arguments else VIEW
    is_view = call.op._schema.returns[0].alias_info is not None

    def bind(_: Sequence[Spec], outs: Sequence[Spec | None]) -> Local | None:
        out = outs[0]
        size = [] if out is None else list(out.local_shape)

        def run(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            try:
                return op(x, size)
            except RuntimeError:
                return x.reshape(size)

        def by_rows(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            got = run(x)
            return got if got.is_contiguous() else got.contiguous()

        if out is None or is_view or tuple(out.stride) != contiguous_stride(out.shape):
            return run
        by_rows.in_order = True  # type: ignore[attr-defined]  # as the spec says, so that dispatch need not look
        return by_rows

    return bind


def expand(call: Call) -> Rule:
    """Dims that grow carry no factor: a shard of a dim of size 1 is gathered."""
    out = call.outputs[0]
    assert out is not None
    shape, wide = call.inputs[0].shape, out.shape
    first = len(wide) - len(shape)
    kept: list[Hashable] = [d if shape[d] == wide[first + d] else None for d in range(len(shape))]
    return local_size("size", labelled(call, [kept], [[*[None] * first, *kept]], linear=MOVES))


# ------------------------------------------------------------ orders
def permute(call: Call) -> Rule:
    """The output's dims name the input's."""
    n = call.inputs[0].ndim
    return labelled(call, [every_dim(n)], [[d % n for d in call["dims"]]], linear=MOVES)


def transpose(call: Call) -> Rule:
    """Two dims change places; `t` has no arguments, its dims are 0 and 1."""
    n = call.inputs[0].ndim
    order = every_dim(n)
    if n:
        a, b = (call["dim0"] % n, call["dim1"] % n) if "dim0" in call.arguments else (0, n - 1)
        order[a], order[b] = order[b], order[a]
    return labelled(call, [every_dim(n)], [order], linear=MOVES)


# ------------------------------------------------------------ dims of size 1
def unsqueeze(call: Call) -> Rule:
    """The new dim carries no factor."""
    n = call.inputs[0].ndim
    at = call["dim"] % (n + 1)
    order = every_dim(n)
    return labelled(call, [order], [[*order[:at], None, *order[at:]]], linear=MOVES)


def squeeze(call: Call) -> Rule:
    """By hand: which dims go is a matter of the global sizes, a local size may be 1 by chance."""
    shape = call.inputs[0].shape
    named = call.get("dim")  # an int, or a list, of which the empty one names nothing
    asked = set(range(len(shape))) if named is None else set() if named in ([], ()) else set(call.dims("dim"))
    gone = [d for d in range(len(shape)) if d in asked and shape[d] == 1]
    kept = [None if d in gone else d for d in range(len(shape))]
    rule = labelled(call, [kept], [[d for d in kept if d is not None]], linear=MOVES)

    run: Local = (lambda x, *_: SQUEEZE(x, gone)) if gone else lambda x, *_: ALIAS(x)
    return replace(rule, bind=lambda *_: run)


# ------------------------------------------------------------ parts of a tensor, one each
def unbind(call: Call) -> Rule:
    """The dim that is taken apart stays replicated."""
    n, dim = call.inputs[0].ndim, call.dim()
    kept = [None if d == dim else d for d in range(n)]
    return labelled(call, [kept], [kept[:dim] + kept[dim + 1 :]] * len(call.outputs), linear=MOVES)


# ------------------------------------------------------------ other types
def view_dtype(call: Call) -> Rule:
    """By hand: the last dim splits or merges by the ratio of the widths.

    Bits are not numbers: nothing pending passes.
    """
    out, spec = call.outputs[0], call.inputs[0]
    assert out is not None
    lead, a, b = every_dim(spec.ndim), spec.dtype.itemsize, out.dtype.itemsize
    if a == b or not lead:
        return labelled(call, [lead], [lead], linear=MOVES if spec.dtype == out.dtype else ())
    ratio = max(a, b) // min(a, b)
    few, many = ["last"], [("last", "part")]
    sizes: dict[Hashable, int] = {"last": min(spec.shape[-1], out.shape[-1]), "part": ratio}
    ends = (few, many) if a > b else (many, few)
    return labelled(call, [lead[:-1] + ends[0]], [lead[:-1] + ends[1]], sizes=sizes, whole=("part",))


def view_as_real(call: Call) -> Rule:
    """A new last dim of real and imaginary parts."""
    order = every_dim(call.inputs[0].ndim)
    return labelled(call, [order], [[*order, None]], linear=(linear(0),))


def view_as_complex(call: Call) -> Rule:
    """The last dim, of real and imaginary parts, goes."""
    order = every_dim(call.inputs[0].ndim - 1)
    return labelled(call, [[*order, None]], [order], linear=(linear(0),))


register("aten.view aten.view_copy aten._unsafe_view aten._reshape_alias aten._reshape_copy", reshape)
register("aten.expand aten.expand_copy", expand)
register("aten.permute aten.permute_copy", permute)
register("aten.transpose aten.transpose_copy aten.t aten.t_copy", transpose)
register("aten.unsqueeze aten.unsqueeze_copy", unsqueeze)
register("aten.squeeze aten.squeeze_copy", squeeze)
register("aten.unbind aten.unbind_copy", unbind)
register("aten.view.dtype aten.view_copy.dtype", view_dtype)
register("aten.view_as_real aten.view_as_real_copy", view_as_real)
register("aten.view_as_complex aten.view_as_complex_copy", view_as_complex)


class _Side:
    """One shape while factors are taken off it."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, self.rest = list(shape), list(shape)
        self.major: list[list[int]] = [[] for _ in shape]
        self.minor: list[list[int]] = [[] for _ in shape]

    def take(self, d: int, n: int, factor: int, left: bool) -> None:
        self.rest[d] //= n
        if left:
            self.major[d].append(factor)
        else:
            self.minor[d].insert(0, factor)


def common_factors(
    a: Sequence[int], b: Sequence[int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int], set[int]]:
    """Factors of each dim of `a` and of `b`, the factors' sizes, and which of them must stay replicated."""
    if 0 in a:
        return _empty(a, b)
    x, y = _Side(a), _Side(b)
    sizes: list[int] = []
    i, j = _peel(x, y, sizes, left=True, stop=(0, 0))
    if i < len(a) and j < len(b):
        _peel(x, y, sizes, left=False, stop=(i, j))
    whole: set[int] = set()
    for side in (x, y):
        for d, n in enumerate(side.rest):
            if n > 1:
                side.major[d].append(len(sizes))
                whole.add(len(sizes))
                sizes.append(n)
    dims = [[tuple(p + q) for p, q in zip(side.major, side.minor, strict=True)] for side in (x, y)]
    return dims[0], dims[1], sizes, whole


def _peel(x: _Side, y: _Side, sizes: list[int], left: bool, stop: tuple[int, int]) -> tuple[int, int]:
    """Take factors off from one end until the facing dims have none in common; returns where that is."""
    step = 1 if left else -1
    i, j = (0, 0) if left else (len(x.shape) - 1, len(y.shape) - 1)
    low, high = (stop, (len(x.shape), len(y.shape)))
    while low[0] <= i < high[0] and low[1] <= j < high[1]:
        p, q = x.rest[i], y.rest[j]
        if p == 1 and x.shape[i] != 1:
            i += step
        elif q == 1 and y.shape[j] != 1:
            j += step
        elif (p == 1) != (q == 1):
            i, j = (i + step, j) if p == 1 else (i, j + step)
        else:
            n = math.gcd(p, q)
            if n == 1 and p != 1:
                break
            x.take(i, n, len(sizes), left)
            y.take(j, n, len(sizes), left)
            sizes.append(n)
            if p == 1:
                i, j = i + step, j + step
    return i, j


def _empty(
    a: Sequence[int], b: Sequence[int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int], set[int]]:
    """Tensors without elements: dims that agree from either end are factors, the others whole."""
    n, m = len(a), len(b)
    lead = next((d for d in range(min(n, m)) if a[d] != b[d]), min(n, m))
    most = min(n, m) - lead
    trail = next((d for d in range(most) if a[n - 1 - d] != b[m - 1 - d]), most)
    sizes = [*a[:lead], *a[n - trail :], *a[lead : n - trail], *b[lead : m - trail]]
    shared, middle = lead + trail, n - lead - trail
    head, tail = list(range(lead)), list(range(lead, shared))
    first = [*head, *range(shared, shared + middle), *tail]
    second = [*head, *range(shared + middle, len(sizes)), *tail]
    return [(f,) for f in first], [(f,) for f in second], sizes, set(range(shared, len(sizes)))
