"""Elements in another order, with padding, or repeated: a kernel rearranges dims that are sharded, the others are free.

    flip(dims=1)       a [b] -> a [b]                   [b] sharded: the parts are exchanged, see `exchange`
    pad of dim 1       a [b] -> a [b']                  the same
    repeat(2, 1)       a b -> (copies a) b              a may be sharded: its copies are sharded alike
    pixel_shuffle      b (c r s) h w -> b c (h r) (w s)

All of these only move elements, so pending reductions pass; the backward of an edge pad adds some.

cat and stack: the joined dim is exchanged by a kernel where it is sharded, the others are free.

    cat of 4@x and 4@x on 2 ranks     8@x:2     equal sizes that divide: (inputs, part), part sharded, nothing moves
    cat of 4@x and 2@x                6@x       the parts are exchanged, see `exchange`

Pending inputs pass together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, register
from dtensor.rules.rule import Rule, linear, passes

from .build.exchange import Run, axes_of, backwards, divides, exchange, places
from .build.exchange_rules import MOVES, exchanged, exchanging, rearranged, traffic
from .build.gathered import output_spec
from .build.labelled import Labels, every_dim, labelled, shares_value


def _reversed(call: Call, *dims: int) -> dict[int, tuple[Run, ...]]:
    n = call.inputs[0].ndim
    return {d % n: (Run(0, call.inputs[0].shape[d] - 1, call.inputs[0].shape[d], -1),) for d in dims} if n else {}


def flip(call: Call) -> Rule:
    """The flipped dims run backwards."""
    return rearranged(call, _reversed(call, *call["dims"]))


def rot90(call: Call) -> Rule:
    """Two dims are flipped, or one and then they change places."""
    a, b = (d % call.inputs[0].ndim for d in call["dims"])
    turns = int(call["k"]) % 4
    runs = _reversed(call, *((), (b,), (a, b), (a,))[turns])
    return rearranged(call, runs, swap=(a, b) if turns % 2 else None)


def roll(call: Call) -> Rule:
    """The rolled dims go round; without dims the flattened tensor does, which is one of dim 0 sharded or of none."""
    x, shifts = call.inputs[0], call["shifts"]
    if not call["dims"] and x.ndim > 1:
        free = every_dim(x.ndim)
        runs = _round(x.numel, shifts[0])
        kernels = exchanging(call, [0], [traffic(call, 0, _round(x.shape[0], 1), x.shape[:1], x.shape[:1])], _roll_flat)
        return labelled(call, [free], [free], whole=free, linear=MOVES, kernels=kernels if runs else ())
    moved: dict[int, int] = {}
    for d, by in zip(call["dims"] or range(x.ndim), shifts, strict=True) if x.ndim else ():
        moved[d % x.ndim] = moved.get(d % x.ndim, 0) + by
    return rearranged(call, {d: _round(x.shape[d], by) for d, by in moved.items()})


def _round(n: int, by: int) -> tuple[Run, ...]:
    """A dim of `n` that goes round `by` places."""
    s = by % n if n else 0
    return (Run(s, 0, n - s), Run(0, n - s, s))


def _roll_flat(ctx: KernelContext) -> torch.Tensor:
    """Dim 0 is sharded: the parts are runs of the flattened tensor."""
    x, spec, n = ctx.inputs[0], ctx.in_specs[0], ctx.in_specs[0].numel
    row = n // max(spec.shape[0], 1)
    held = [tuple(tuple((a * row, m * row) for a, m in runs) for runs in places(spec, 0))]
    by = ctx.call["shifts"][0]
    (out,) = exchange(spec.mesh, axes_of(spec, 0), 0, [x.reshape(-1)], _round(n, by), held, held)
    return out.view(x.shape)


# ------------------------------------------------------------ padding
def pad(call: Call) -> Rule:
    """Padded dims get a number at their ends, or lose some; the number is shared out among pending parts."""
    return shares_value(call, rearranged(call, _padded(call, "pad", "constant"), fill="value", linear=()), "value")


def edge_pad(call: Call) -> Rule:
    """Reflection and replication: the ends are elements of the dim."""
    return rearranged(call, _padded(call, "padding", _kind(call)), filled=True)


def edge_pad_backward(call: Call) -> Rule:
    """Gradients of what was read twice add up; of the input only the shape counts."""
    runs = {d: backwards(r) for d, r in _padded(call, "padding", _kind(call), of=1).items()}
    return rearranged(call, runs, adds=True, filled=True, linear=(linear(0),))


def _kind(call: Call) -> str:
    return str(call.op._schema.name).rpartition("::")[2].partition("_")[0]


def _padded(call: Call, name: str, kind: str, of: int = 0) -> dict[int, tuple[Run, ...]]:
    """Runs of the padded dims, given last dim first; `of` is the input that has the sizes before padding."""
    shape, given = call.inputs[of].shape, call[name]
    runs = dict[int, tuple[Run, ...]]()
    for i in range(len(given) // 2):
        (left, right), d = given[2 * i : 2 * i + 2], len(shape) - 1 - i
        if left or right:
            n, cut = shape[d], max(-left, 0)
            runs[d] = (Run(max(left, 0), cut, max(n - cut - max(-right, 0), 0)),)
            if kind != "constant":
                ends = ((left, -1), (n - 2, -1)) if kind == "reflection" else ((0, 0), (n - 1, 0))
                runs[d] += (Run(0, ends[0][0], max(left, 0), ends[0][1]),)
                runs[d] += (Run(left + n, ends[1][0], max(right, 0), ends[1][1]),)
    return runs


# ------------------------------------------------------------ copies
def repeat(call: Call) -> Rule:
    """By hand: a repeated dim is (copies, part), of which the part may be sharded; new dims are nobody's.

    Where the part does not divide by the axes that shard it, a kernel makes a plain shard.
    """
    x, times = call.inputs[0], call["repeats"]
    shape, new = x.shape, len(times) - x.ndim
    count = {d: int(times[new + d]) for d in range(len(shape))}
    moved = [d for d, c in count.items() if c > 1 and not divides(x, d)]
    ins = [d if d in moved else (("part", d),) if count[d] else None for d in range(len(shape))]
    outs = [
        None if d < new or not times[d] else d - new if d - new in moved else (("part", d - new),) if times[d] == 1
        else (("times", d - new), ("part", d - new))
        for d in range(len(times))
    ]  # fmt: skip
    sizes: dict[Hashable, int] = {("part", d): n for d, n in enumerate(shape)}
    sizes |= {("times", d): n for d, n in count.items()}
    rule = labelled(
        call, [ins], [outs], sizes=sizes, whole=[("times", d) for d in count], resized=moved, linear=MOVES
    )  # fmt: skip
    runs = {d: tuple(Run(j * shape[d], 0, shape[d]) for j in range(count[d])) for d in moved}
    sent = [traffic(call, d, r, [shape[d]], [shape[d] * count[d]]) for d, r in runs.items()]
    run = partial(_repeat, runs=runs, times=[1 if d - new in moved else int(t) for d, t in enumerate(times)])
    return replace(rule, kernels=exchanging(call, [rule.inputs[0][d][0] for d in moved], sent, run))


def _repeat(ctx: KernelContext, runs: Mapping[int, tuple[Run, ...]], times: Sequence[int]) -> torch.Tensor:
    x, spec, out = ctx.inputs[0], ctx.in_specs[0], output_spec(ctx)
    for d, copies in runs.items():
        wanted = places(out, d + out.ndim - spec.ndim)
        (x,) = exchange(out.mesh, axes_of(spec, d), d, [x], copies, [places(spec, d)], [wanted])
    return x.repeat(times)


# ------------------------------------------------------------ shuffles
def _shuffle(call: Call, inputs: Labels, output: Labels, sizes: Mapping[Hashable, int]) -> Rule:
    lead = every_dim(call.inputs[0].ndim - len(inputs))
    alone = [(label,) for label in lead]
    every = dict(sizes) | {d: call.inputs[0].shape[d] for d in range(len(lead))}
    return labelled(
        call, [[*alone, *inputs]], [[*alone, *output]], sizes=every, whole=("r", "s"), filled=True, linear=MOVES
    )  # fmt: skip


def pixel_shuffle(call: Call) -> Rule:
    """Channels become pixels."""
    r, (c, h, w) = int(call["upscale_factor"]), call.inputs[0].shape[-3:]
    sizes: dict[Hashable, int] = {"c": c // (r * r), "r": r, "s": r, "h": h, "w": w}
    return _shuffle(call, [("c", "r", "s"), ("h",), ("w",)], [("c",), ("h", "r"), ("w", "s")], sizes)


def pixel_unshuffle(call: Call) -> Rule:
    """Pixels become channels."""
    r, (c, h, w) = int(call["downscale_factor"]), call.inputs[0].shape[-3:]
    sizes: dict[Hashable, int] = {"c": c, "r": r, "s": r, "h": h // r, "w": w // r}
    return _shuffle(call, [("c",), ("h", "r"), ("w", "s")], [("c", "r", "s"), ("h",), ("w",)], sizes)


def channel_shuffle(call: Call) -> Rule:
    """Groups of channels are interleaved; the dims after them are free."""
    shape, r = call.inputs[0].shape, int(call["groups"])
    after: list[Hashable] = [(d,) for d in range(2, len(shape))]
    sizes: dict[Hashable, int] = {d: n for d, n in enumerate(shape) if d != 1} | {"r": r, "c": shape[1] // r}
    return labelled(
        call, [[(0,), ("r", "c"), *after]], [[(0,), ("c", "r"), *after]], sizes=sizes, whole=("r",), filled=True,
        linear=MOVES,
    )  # fmt: skip


_EDGES = [f"aten.{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)]

register("aten.flip", flip)
register("aten.roll", roll)
register("aten.rot90", rot90)
register("aten.constant_pad_nd", pad, values="value")
register("aten.repeat", repeat)
register(_EDGES, edge_pad)
register([f"{name}_backward" for name in _EDGES], edge_pad_backward)
register("aten.pixel_shuffle", pixel_shuffle)
register("aten.pixel_unshuffle", pixel_unshuffle)
register("aten.channel_shuffle aten.native_channel_shuffle", channel_shuffle)


def cat(call: Call) -> Rule:
    """By hand: any number of inputs, among them 1-d tensors without elements, which count for nothing."""
    out = call.outputs[0]
    assert out is not None
    n = len(out.shape)
    dim, at, runs = int(call["dim"]) % n, 0, list[Run]()
    groups = (passes(*range(len(call.inputs))),) if all(s.dtype == out.dtype for s in call.inputs) else ()
    if len(call.inputs) == 1:
        return labelled(call, [every_dim(n)], [every_dim(n)], linear=groups)
    first = next((s for s in call.inputs if s.ndim == n and axes_of(s, dim)), None)
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
