"""Parts of a tensor and their backwards: dims that are sliced are exchanged by a kernel, the others are free.

    x[2:6] of 8 rows on 2 ranks     rank 0 gets row 3's neighbours from itself, rank 1 row 4 and 5: see `exchange`
    x[5]                            the rank that holds row 5 sends it to all
    x[:4] of 8@x:2                  the dim is two parts of 4, each sharded alike: nothing moves

A slice that keeps its whole dim keeps the dim's shard. All of these only move elements (and zeros), so every
pending reduction passes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch

from dtensor.placement import StridedShard
from dtensor.redistribute.executor.run import resolved
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, is_inplace, register
from dtensor.rules.rule import Kernel, Rule, passes
from dtensor.spec import Spec, in_order

from .build.exchange import Places, Run, axes_of, backwards, divides, exchange, places
from .build.exchange_rules import MOVES, exchanged, exchanging, rearranged, traffic
from .build.gathered import output_spec
from .build.labelled import but, every_dim, labelled, local_size


def _runs(size: int, start: int | None, end: int | None, step: int) -> tuple[Run, ...]:
    """What a slice takes of a dim of `size`."""
    low, high, _ = slice(start, end, step).indices(size)
    return (Run(0, low, max(-((low - high) // step), 0), step),)


def _packed(x: Spec, dim: int, runs: Sequence[Run]) -> int:
    """Where the dim is a row of equal parts, each sharded evenly, and runs take some whole: a part's size; else 0."""
    splits = {p.split_factor if isinstance(p, StridedShard) else 0 for p in (x.placements[a] for a in axes_of(x, dim))}
    split = splits.pop() if len(splits) == 1 else 0
    if not split or not x.shape[dim] or not divides(x, dim, split):
        return 0
    part = x.shape[dim] // split
    return part if all(r.step == 1 and r.length and not (r.start % part or r.length % part) for r in runs) else 0


def _parts(call: Call, dim: int, part: int, names: Sequence[str]) -> Rule:
    """Inputs and outputs are (parts, part) with the part sharded; the arguments `names` count elements of the dim."""
    size = call.inputs[0].shape[dim]
    at = lambda label: [(label, "part") if d == dim else d for d in range(call.inputs[0].ndim)]  # noqa: E731
    outs = [m.shape[dim] // part for m in call.outputs if m is not None]
    sizes: dict[Hashable, int] = {"part": part, "all": size // part} | {("some", n): n for n in outs}

    def localize(ins: Sequence[Spec], _: Sequence[Spec | None]) -> Mapping[str, object]:
        own = ins[0].local_shape[dim]
        scaled = lambda v: None if v is None else min(v, size) * own // size  # noqa: E731
        return {
            n: [scaled(v) for v in call[n]] if isinstance(call[n], (list, tuple)) else scaled(call[n]) for n in names
        }

    return labelled(
        call, [at("all")], [at(("some", n)) for n in outs], sizes=sizes, whole=[k for k in sizes if k != "part"],
        linear=MOVES, localize=localize,
    )  # fmt: skip


def _all_of(size: int, runs: tuple[Run, ...]) -> bool:
    """True when a slice takes its whole dim."""
    return runs == (Run(0, 0, size),)


# ------------------------------------------------------------ select
def select(call: Call) -> Rule:
    """The dim goes; where it is sharded, the rank that holds the index sends it to all."""
    n, dim = call.inputs[0].ndim, call.dim()
    free = every_dim(n)
    row = math.prod(m for d, m in enumerate(call.inputs[0].local_shape_of([0] * call.inputs[0].mesh.ndim)) if d != dim)
    kernel = Kernel("select", frozenset({dim}), ("replicate",), _run_select, row, 1, "broadcast")
    return labelled(call, [free], [free[:dim] + free[dim + 1 :]], whole=(dim,), linear=MOVES, kernels=(kernel,))


def _owner(ctx: KernelContext, dim: int, held: Places) -> tuple[int, int]:
    """Position that holds index `index` of `dim` of the first input, and where in its part; IndexError beyond."""
    size, index = ctx.in_specs[0].shape[dim], int(str(ctx.arguments["index"]))
    if not -size <= index < size:
        raise IndexError(f"select(): index {index} out of range for dimension {dim} of {ctx.in_specs[0]}")
    index %= size
    for p, runs in enumerate(held):
        before = 0
        for start, length in runs:
            if start <= index < start + length:
                return p, before + index - start
            before += length
    raise AssertionError(f"no position holds index {index} of {held}")


def _run_select(ctx: KernelContext) -> torch.Tensor:
    x, spec, out, dim = ctx.inputs[0], ctx.in_specs[0], output_spec(ctx), ctx.call.dim()
    axes = axes_of(spec, dim)
    comm = spec.mesh.comm(axes)
    owner, at = _owner(ctx, dim, places(spec, dim))
    row = resolved(x.select(dim, at)) if comm.rank == owner else x.new_empty(out.local_shape)
    return in_order(comm.broadcast(row, owner), out.stride)


def select_backward(call: Call) -> Rule:
    """The gradient among zeros; the dim counts in the input's dims."""
    n = len(call["input_sizes"])
    dim = call["dim"] % n
    kept = but(n, dim)
    return local_size("input_sizes", labelled(call, [kept[:dim] + kept[dim + 1 :]], [kept], linear=MOVES))


def select_scatter(call: Call) -> Rule:
    """The source takes the place of one index of the dim, on the rank that holds it."""
    n, dim = call.inputs[0].ndim, call.dim()
    free = every_dim(n)
    kernel = Kernel("select_scatter", frozenset({dim}), ("shard",), _run_select_scatter)
    return labelled(
        call, [free, free[:dim] + free[dim + 1 :]], [free], whole=(dim,), linear=(passes(0, 1),), kernels=(kernel,)
    )  # fmt: skip


def _run_select_scatter(ctx: KernelContext) -> torch.Tensor:
    spec, dim = ctx.in_specs[0], ctx.call.dim()
    axes = axes_of(spec, dim)
    owner, at = _owner(ctx, dim, places(spec, dim))
    out = ctx.inputs[0].clone()
    if spec.mesh.comm(axes).rank == owner:
        out.select(dim, at).copy_(ctx.inputs[1])
    return out


# ------------------------------------------------------------ slice
def slice_(call: Call) -> Rule:
    """The dim is free when the slice takes all of it."""
    size, dim = call.inputs[0].shape, call.dim()
    runs = _runs(size[dim], call["start"], call["end"], call["step"])
    part = _packed(call.inputs[0], dim, runs)
    if part and not _all_of(size[dim], runs):
        return _parts(call, dim, part, ("start", "end"))
    return rearranged(call, {} if _all_of(size[dim], runs) else {dim: runs})


def slice_backward(call: Call) -> Rule:
    """As `slice_`, the other way round."""
    sizes = call["input_sizes"]
    dim = call["dim"] % len(sizes)
    runs = _runs(sizes[dim], call["start"], call["end"], call["step"])
    rule = rearranged(call, {} if _all_of(sizes[dim], runs) else {dim: backwards(runs)})
    return local_size("input_sizes", rule)


def narrow_copy(call: Call) -> Rule:
    """A slice."""
    dim = call.dim()
    start = call["start"] + (call.inputs[0].shape[dim] if call["start"] < 0 else 0)
    return rearranged(call, {dim: (Run(0, start, call["length"]),)})


def slice_scatter(call: Call) -> Rule:
    """The source takes the place of a slice; where the dim is sharded, it is exchanged into a copy of the input."""
    x, dim = call.inputs[0], call.dim()
    runs = _runs(x.shape[dim], call["start"], call["end"], call["step"])
    free = every_dim(x.ndim)
    if _all_of(x.shape[dim], runs):
        return labelled(call, [free, free], [free], linear=(passes(0, 1),))
    back = backwards(runs)

    def run(ctx: KernelContext) -> torch.Tensor:
        spec = output_spec(ctx)
        (out,) = exchange(
            spec.mesh, axes_of(spec, dim), dim, [ctx.inputs[1].to(spec.dtype)], back,
            [places(ctx.in_specs[1], dim)], [places(spec, dim)], into=[ctx.inputs[0].clone()],
        )  # fmt: skip
        return out

    sent = traffic(call, dim, back, [call.inputs[1].shape[dim]], [x.shape[dim]])
    kernels = exchanging(call, [dim], [sent], run)
    return labelled(call, [free, free], [free], resized=(dim,), linear=(passes(0, 1),), kernels=kernels)


def split(call: Call) -> Rule:
    """Consecutive parts of the dim; where it is sharded, one exchange makes all, unless the parts are sharded alike."""
    dim, at, runs = call.dim(), 0, list[Run]()
    for i, m in enumerate(call.outputs):
        assert m is not None
        runs.append(Run(0, at, m.shape[dim], target=i))
        at += m.shape[dim]
    part = _packed(call.inputs[0], dim, runs)
    if part:
        return _parts(call, dim, part, [n for n in ("split_size", "split_sizes") if n in call.arguments])
    return exchanged(call, dim, tuple(runs), [every_dim(call.inputs[0].ndim)])


# ------------------------------------------------------------ triangles
def triangle(call: Call) -> Rule:
    """By hand: rows and columns are sharded by a kernel, which knows where in the matrix its part lies."""
    n = call.inputs[0].ndim
    labels = list(range(n))
    kernel = Kernel("triangle", frozenset({n - 2, n - 1}), ("shard",), _run_triangle)
    return labelled(call, [labels], [labels], whole=(n - 2, n - 1), linear=MOVES, kernels=(kernel,))


def _run_triangle(ctx: KernelContext) -> torch.Tensor:
    x = ctx.inputs[0]
    rows = ctx.indices(0, x.ndim - 2, x.device)[:, None]
    columns = ctx.indices(0, x.ndim - 1, x.device)[None, :]
    name, k = ctx.call.op._schema.name, int(str(ctx.arguments["diagonal"]))
    cleared = columns - rows > k if "tril" in name else columns - rows < k
    if is_inplace(ctx.call.op):
        return x.masked_fill_(cleared, 0)
    return x.masked_fill(cleared, 0)


register("aten.select aten.select_copy", select, values="index")
register("aten.select_backward", select_backward, values="index")
register("aten.slice aten.slice_copy", slice_)
register("aten.slice_backward", slice_backward)
register("aten.narrow_copy", narrow_copy)
register("aten.select_scatter", select_scatter, values="index")
register("aten.slice_scatter", slice_scatter)
register("aten.split aten.split_copy aten.split_with_sizes aten.split_with_sizes_copy", split)
register("aten.unsafe_split aten.unsafe_split_with_sizes aten.chunk aten.unsafe_chunk", split)
register("aten.tril aten.triu", triangle, values="diagonal")
