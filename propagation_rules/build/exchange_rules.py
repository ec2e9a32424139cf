"""Rules of ops that put the elements of a dim at other indices: free elsewhere, a kernel where the dim is sharded.

    slice, flip, roll, pads      one source, one target, runs for each dim        `rearranged`
    split                        one source, many targets                          `exchanged`
    cat                          many sources, one target                          `exchanged`

The kernel shards the dim in the sources and in the targets, whatever their sizes, in even chunks as `torch.chunk` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call
from dtensor.rules.rule import Kernel, Linear, Rule, passes

from .exchange import Run, axes_of, busiest, exchange, places, places_of
from .gathered import output_spec
from .labelled import every_dim, labelled, share_of

__all__ = ["MOVES", "exchanged", "exchanging", "rearranged", "traffic"]

MOVES = (passes(0),)
Runs = tuple[Run, ...]


# ------------------------------------------------------------ what it costs
def traffic(
    call: Call, dim: int, runs: Runs, ins: Sequence[int], outs: Sequence[int], adds: bool = False
) -> int | None:
    """Elements that the busiest rank sends or receives where `dim` is sharded as it is now; None where it is not.

    `ins` and `outs` are the sizes of the dim in the sources and the targets.
    """
    cut = next((s for s in call.inputs if s.ndim > dim and axes_of(s, dim)), None)
    if cut is None:
        return None
    held, wanted = (tuple(places_of(cut, dim, n) for n in sizes) for sizes in (ins, outs))
    rows = math.prod(n for d, n in enumerate(cut.local_shape_of((0,) * cut.mesh.ndim)) if d != dim)
    k = len(held[0])
    return busiest(runs, held, wanted, adds) * rows * k // max(k - 1, 1)


def exchanging(
    call: Call, factors: Iterable[int], sent: Iterable[int | None], run: Callable[[KernelContext], object],
    outputs: int = 1,
) -> tuple[Kernel, ...]:  # fmt: skip
    """The kernel `run` of an exchange that shards these factors and sends as much (see `traffic`), an item a dim."""
    cut = frozenset(factors)
    if not cut:
        return ()
    known = [n for n in sent if n is not None] or [max(s.local_numel_bound for s in call.inputs)]
    calls = sum(n > 0 for n in known)
    return (Kernel("exchange", cut, ("shard",) * outputs, run, max(known), calls, "all_to_all"),)


# ------------------------------------------------------------ one source, one target
def rearranged(
    call: Call, runs: Mapping[int, Runs], *, fill: str = "", adds: bool = False, filled: bool = False,
    linear: tuple[Linear, ...] = MOVES, swap: tuple[int, int] | None = None,
) -> Rule:  # fmt: skip
    """The first input goes to the output by these runs, dim by dim; further inputs of its dims only give shapes.

    Args:
        runs: by dim; the other dims are free.
        fill: the argument whose value fills what no run writes; 0 without.
        adds: what goes to one place is summed.
        filled: the op itself refuses shards without elements.
        linear: what pending inputs pass through.
        swap: two dims of the result change places at the end.
    """
    assert call.outputs[0] is not None
    free = every_dim(call.inputs[0].ndim)
    out = list(free)
    if swap is not None:
        out[swap[0]], out[swap[1]] = out[swap[1]], out[swap[0]]
    run = partial(_rearrange, runs=runs, fill=fill, adds=adds, swap=swap)
    shape = [call.outputs[0].shape[out.index(d)] for d in free]
    sent = [traffic(call, d, along, [call.inputs[0].shape[d]], [shape[d]], adds) for d, along in runs.items()]
    kernels = exchanging(call, runs, sent, run)
    return labelled(
        call, [free] * len(call.inputs), [out], resized=list(runs), filled=filled, linear=linear, kernels=kernels
    )  # fmt: skip


def _rearrange(
    ctx: KernelContext, runs: Mapping[int, Runs], fill: str, adds: bool, swap: tuple[int, int] | None
) -> torch.Tensor:
    x, spec, out = ctx.inputs[0], ctx.in_specs[0], output_spec(ctx)
    value = share_of(ctx.arguments[fill], spec) if fill else 0
    shape, stride = list(out.shape), list(out.stride)
    if swap is not None:
        for t in (shape, stride):
            t[swap[0]], t[swap[1]] = t[swap[1]], t[swap[0]]
    for d, along in runs.items():
        (x,) = exchange(
            out.mesh, axes_of(spec, d), d, [x], along, [places(spec, d)], [places_of(spec, d, shape[d])],
            strides=[stride], fill=value, adds=adds,
        )  # fmt: skip
    return x if swap is None else x.transpose(*swap)


# ------------------------------------------------------------ many sources or targets
def exchanged(
    call: Call, dim: int, runs: Runs, inputs: Sequence[Sequence[Hashable]], linear: tuple[Linear, ...] = MOVES
) -> Rule:  # fmt: skip
    """All inputs of the output's dims go to all outputs by `runs` along `dim`; the other inputs are empty."""
    out = next(m for m in call.outputs if m is not None)
    free = every_dim(len(out.shape))
    rule = labelled(call, inputs, [free] * len(call.outputs), resized=(dim,), linear=linear)
    factor = next(dims[dim][0] for dims in rule.outputs if dims)
    run = partial(_exchange, dim=dim, runs=runs)
    ins = [s.shape[dim] for s in call.inputs if s.ndim == len(free)]
    sent = traffic(call, dim, runs, ins, [m.shape[dim] for m in call.outputs if m is not None])
    return replace(rule, kernels=exchanging(call, [factor], [sent], run, len(call.outputs)))


def _exchange(ctx: KernelContext, dim: int, runs: Runs) -> object:
    outs = [output_spec(ctx, i) for i in range(len(ctx.out_specs))]
    given = [(x, s) for x, s in zip(ctx.inputs, ctx.in_specs, strict=True) if s.ndim == outs[0].ndim]
    made = exchange(
        outs[0].mesh, axes_of(outs[0], dim), dim, [x.to(outs[0].dtype) for x, _ in given], runs,
        [places(s, dim) for _, s in given], [places(s, dim) for s in outs], strides=[s.stride for s in outs],
    )  # fmt: skip
    return made if str(ctx.call.op._schema.returns[0].type) == "List[Tensor]" else made[0]
