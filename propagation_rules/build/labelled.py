"""Rules written by naming dims: dims of the same label are one factor.

    labelled(call, [["b", "n"], ["n"]], [["b", None]])      b is free, n is reduced

None stands for a dim that must stay replicated (or that nothing can shard, such as one that an expand made). A tuple is
a dim of several factors, major to minor, whose sizes come from `sizes`. Factor numbers follow first appearance.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtensor.placement import Partial
from dtensor.rules.registry import Call
from dtensor.rules.rule import Dims, Linear, Rule
from dtensor.spec import Spec

__all__ = ["CONSTANT_OPS", "Labels", "but", "every_dim", "labelled", "local_size", "share_of", "shares_value"]

Labels = Sequence[Hashable]
"""Per dim a label, a tuple of labels, or None."""

CONSTANT_OPS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
"""Reductions under which a constant can be written as local parts, see `share_of`."""


def every_dim(ndim: int) -> list[Hashable]:
    """Labels 0, 1, ... of a tensor whose dims are all free."""
    return list(range(ndim))


def but(n: int, *whole: int) -> list[Hashable]:
    """Labels of `n` dims, None for those in `whole`."""
    return [None if d in whole else d for d in range(n)]


def labelled(
    call: Call, inputs: Sequence[Labels], outputs: Sequence[Labels], *, sizes: Mapping[Hashable, int] | None = None,
    whole: Iterable[Hashable] = (), resized: Iterable[Hashable] = (), filled: bool = False, **more: Any,
) -> Rule:  # fmt: skip
    """The rule with these labels; `more` goes to `Rule` as it is. `whole` lists labels that must not be sharded.

    `resized`: whole labels, each alone in its dims, whose dims may have different sizes (a slice and what it is
    taken from): only kernels shard them, and they know what goes where. `filled`: the local op refuses shards
    without elements.
    """
    numbers: dict[Hashable, int] = {}
    extent: list[int] = []
    other = frozenset(resized)

    def number(label: Hashable, size: int) -> int:
        if label not in numbers:
            numbers[label] = len(extent)
            extent.append(size)
        elif label in other:
            extent[numbers[label]] = max(extent[numbers[label]], size)
        elif extent[numbers[label]] != size:
            raise ValueError(f"{call.op}: dims labelled {label!r} have sizes {extent[numbers[label]]} and {size}")
        return numbers[label]

    def dims(labels: Labels, shape: Sequence[int]) -> Dims:
        if len(labels) != len(shape):
            raise ValueError(f"{call.op}: {len(labels)} labels for a tensor of shape {list(shape)}")
        out: list[tuple[int, ...]] = []
        for label, n in zip(labels, shape, strict=True):
            if label is None:
                out.append(())
            elif isinstance(label, tuple) and sizes is not None:
                if other.intersection(label):
                    raise ValueError(f"{call.op}: resized labels must be alone in their dims, got {label!r}")
                out.append(tuple(number(part, sizes[part]) for part in label))
            else:
                out.append((number(label, n),))
        return tuple(out)

    ins = tuple(dims(t, s.shape) for t, s in zip(inputs, call.inputs, strict=True))
    outs = tuple(() if m is None else dims(t, m.shape) for t, m in zip(outputs, call.outputs, strict=True))
    free = frozenset(numbers[w] for w in other if w in numbers)
    kept = frozenset(numbers[w] for w in whole if w in numbers) | free
    nonempty = frozenset(numbers.values()) - free if filled else frozenset[int]()
    return Rule(ins, outs, tuple(extent), kept, nonempty, **more)


def local_size(name: str, rule: Rule) -> Rule:
    """`rule` whose static argument `name`, the shape of the (first) output, becomes the local shape."""

    def localize(_: Sequence[Spec], outs: Sequence[Spec | None]) -> Mapping[str, object]:
        return {} if outs[0] is None else {name: list(outs[0].local_shape)}

    return replace(rule, localize=localize)


# ------------------------------------------------------------ constants in pending tensors
def share_of(value: Any, spec: Spec) -> Any:
    """This rank's part of a constant in a layout with pending axes, such that the parts reduce to `value`.

    A sum (or xor) has the value on the first position and 0 elsewhere, a product 1 elsewhere; averages, maxima,
    minima, and, or have it everywhere.
    """
    for p, r in zip(spec.placements, spec.mesh.coord or (0,) * spec.mesh.ndim, strict=True):
        if isinstance(p, Partial) and r and p.reduce_op in ("sum", "bxor", "product"):
            value = type(value)(1 if p.reduce_op == "product" else 0)
    return value


def shares_value(call: Call, rule: Rule, name: str) -> Rule:
    """`rule`, for an op that moves elements of its first input and writes the number `name` among them.

    Where that input is pending the op runs on this rank's share of the number.
    """
    if not call.inputs[0].has_partial():
        return rule
    at = next(i for i, a in enumerate(call.op._schema.arguments) if a.name == name)

    def bind(ins: Sequence[Spec], _: Sequence[Spec | None]) -> Callable[..., object] | None:
        if not ins[0].has_partial():
            return None

        def run(*args: Any, **kwargs: Any) -> object:
            if len(args) > at:
                args = (*args[:at], share_of(args[at], ins[0]), *args[at + 1 :])
            elif name in kwargs:
                kwargs[name] = share_of(kwargs[name], ins[0])
            return call.op(*args, **kwargs)

        return run

    group = Linear(frozenset({0}), tuple((op, op) for op in CONSTANT_OPS))
    return replace(rule, linear=(*rule.linear, group), bind=bind)
