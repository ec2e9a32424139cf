"""cat and stack: the joined dim is exchanged by a kernel where it is cut, the others are free.

    cat of 4@x and 4@x on 2 ranks     8@x:2     equal sizes that divide: (inputs, part) with the part cut, nothing moves
    cat of 4@x and 2@x                6@x       the parts are exchanged, see `exchange`

Pending inputs pass together.
"""

from __future__ import annotations

from collections.abc import Hashable

from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, passes

from .build.exchange import Run, cutting, divides
from .build.exchange_rules import exchanged
from .build.labelled import every_dim, labelled


def cat(call: Call) -> Rule:
    """By hand: any number of inputs, among them 1-d tensors without elements, which count for nothing."""
    out = call.outputs[0]
    assert out is not None
    n = len(out.shape)
    dim, at, runs = int(call["dim"]) % n, 0, list[Run]()
    groups = (passes(*range(len(call.inputs))),) if all(s.dtype == out.dtype for s in call.inputs) else ()
    if len(call.inputs) == 1:
        return labelled(call, [every_dim(n)], [every_dim(n)], linear=groups)
    first = next((s for s in call.inputs if s.ndim == n and cutting(s, dim)), None)
    if first is not None and divides(first, dim) and all(s.shape == first.shape for s in call.inputs):
        part: list[Hashable] = [("part",) if d == dim else d for d in range(n)]
        whole: list[Hashable] = [("inputs", "part") if d == dim else d for d in range(n)]
        sizes: dict[Hashable, int] = {"part": first.shape[dim], "inputs": len(call.inputs)}
        return labelled(
            call, [part] * len(call.inputs), [whole], sizes=sizes, whole=("inputs",), linear=groups
        )  # fmt: skip
    for s in call.inputs:
        if s.ndim == n:
            runs.append(Run(at, 0, s.shape[dim], source=len(runs)))
            at += s.shape[dim]
    labels: list[list[Hashable]] = [every_dim(n) if s.ndim == n else [None] for s in call.inputs]
    return exchanged(call, dim, tuple(runs), labels, groups)


def stack(call: Call) -> Rule:
    """The new dim carries no factor."""
    n = call.inputs[0].ndim
    dim = int(call["dim"]) % (n + 1)
    order = every_dim(n)
    groups = (passes(*range(len(call.inputs))),) if len({s.dtype for s in call.inputs}) == 1 else ()
    return labelled(call, [order] * len(call.inputs), [[*order[:dim], None, *order[dim:]]], linear=groups)


register("aten.cat aten.concat aten.concatenate", cat)
register("aten.stack aten._stack", stack)
