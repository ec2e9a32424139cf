"""Gradients that are still pending when somebody needs their values: reduced many at a time, and once.

The gradient of a replicated parameter may stay a pending sum after backward. Clipping reads it (its norm, then the
product), an optimizer's step reads it again, three times over for AdamW. So whoever comes first settles what is
pending: small gradients travel together in one collective, and what is in `.grad` afterwards is the settled one.

    w1, w2, w3: f32[8,8], f32[8], f32[8@dp] on ("dp", "tp")     grads {P:tp}, {P:tp}, 8@dp{P:tp}
    one all-reduce over tp of 64 + 8 + 8/dp elements            then clipping, the step: nothing

Gradients of several dtypes, or pending over other axes, travel in a collective each; on an accelerator those of one
group are one launch (`dtensor.redistribute.executor.coalescing`).

A settled gradient is the same tensor object with the same value; only its layout is another, as after
`unscale_`. Its memory is new, so an alias taken before (`g = p.grad.detach()`) is one no longer.

Who comes first: the step of any optimizer (a hook that torch offers), `GradScaler.unscale_` (an op with a handler),
and the functions of `torch.nn.utils` that measure or clip gradients. Those have no hook, but all of them group
their tensors by device and dtype before anything else; the function of their module that does so is wrapped here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.utils import clip_grad

from dtensor.comm.communicator import Communicator
from dtensor.comm.world import kept
from dtensor.placement import Partial, Placement, Replicate
from dtensor.redistribute.cost_model import current_cost_model
from dtensor.redistribute.executor.coalescing import all_reduce_together, redistribute_together
from dtensor.spec import Spec, in_order
from dtensor.tensor import DTensor
from dtensor.torch_changes import replace

__all__ = ["BUCKET", "settle", "settle_gradients"]

BUCKET = 1 << 24
"""Elements that are settled at once, at most (a larger gradient by itself)."""

SUMS = frozenset({"sum", "avg"})

_T = TypeVar("_T")


def settle_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Settle the gradients of DTensors. One that has a graph of its own is replaced, so that its graph stays true."""
    grads = []
    for p in parameters:
        g = p.grad
        if type(g) is not DTensor or _pending(g._spec) is None:
            continue
        if g.requires_grad and isinstance(p, DTensor):
            p.grad = g.detach()
            g = p.grad
        grads.append(g)
    settle(grads)


def settle(tensors: Iterable[Any], tracked: bool = False) -> None:
    """Reduce what is pending in the DTensors among `tensors`, in place; other axes keep their placements.

    Left alone: tensors that autograd tracks (unless `tracked`), and views that had to move data.
    """
    waiting: dict[tuple[object, ...], dict[int, DTensor]] = {}
    for t in tensors:
        if type(t) is not DTensor or (pending := _pending(t._spec)) is None or (t.requires_grad and not tracked):
            continue
        key = (t._spec.mesh, pending.axes, t._spec.dtype, t._local_tensor.device)
        waiting.setdefault(key, {})[id(t)] = t
    buckets = [b for found in waiting.values() for b in _runs(list(found.values()), _elements)]
    for run in _runs(buckets, lambda bucket: sum(map(_elements, bucket))):
        _settle(run)


class _Pending(NamedTuple):
    """What is pending in tensors of a spec: per axis the reduction, or None; and their spec when it is settled."""

    axes: tuple[Partial | None, ...]
    settled: Spec


_UNSEEN: Any = object()
_MOST = 65536
_known: dict[Spec, _Pending | None] = kept({})


def _pending(spec: Spec) -> _Pending | None:
    """What is pending, or None; None for views that had to move data."""
    found: _Pending | None = _known.get(spec, _UNSEEN)
    if found is not _UNSEEN:
        return found
    if type(spec) is not Spec:
        return None
    found = None
    if spec.has_partial():
        axes = tuple(p if isinstance(p, Partial) else None for p in spec.placements)
        found = _Pending(axes, spec.with_placements(_settled(spec.placements)))
    if len(_known) >= _MOST:
        _known.clear()
    _known[spec] = found
    return found


def _elements(t: DTensor) -> int:
    """Those of the largest shard on any rank."""
    return t._spec.local_numel_bound


def _runs(items: Sequence[_T], elements: Callable[[_T], int]) -> Iterator[list[_T]]:
    """The items in order, in runs of at most `BUCKET` elements; an item of more than that is a run by itself."""
    run: list[_T] = []
    total = 0
    for item in items:
        n = elements(item)
        if run and total + n > BUCKET:
            yield run
            run, total = [], 0
        run.append(item)
        total += n
    if run:
        yield run


def _settle(run: Sequence[Sequence[DTensor]]) -> None:
    """Some buckets, each of tensors of one mesh and dtype, pending alike. Nothing is written before all are reduced.

    Sums of several tensors travel flat, a bucket a collective; a single one, and other reductions, by a plan each.
    """
    flat = [bucket for bucket in run if _adds(bucket[0]._spec)]
    if sum(map(len, flat)) == 1:
        flat = []
    joined = {id(t) for bucket in flat if bucket[0]._spec.mesh.coord is not None for t in bucket}
    alone = [t for bucket in run for t in bucket if id(t) not in joined]
    whole = [t._spec.with_placements(_settled(t._spec.placements)) for t in alone]
    moved = redistribute_together([(t._local_tensor, t._spec, w) for t, w in zip(alone, whole, strict=True)])
    flat = [bucket for bucket in flat if id(bucket[0]) in joined]
    sums = _reduced(flat)
    for t, reduced, spec in zip(alone, moved, whole, strict=True):
        t._local_tensor, t._spec = in_order(reduced, spec.stride), spec
    for bucket, total in zip(flat, sums, strict=True):
        _hand_out(bucket, total)


def _adds(spec: Spec) -> bool:
    """True where what is pending is a sum, or an average that is a sum divided by a count."""
    ops = {p.reduce_op for p in spec.placements if isinstance(p, Partial)}
    return ops == {"sum"} or (ops <= SUMS and (spec.dtype.is_floating_point or spec.dtype.is_complex))


def _hand_out(bucket: Sequence[DTensor], flat: torch.Tensor) -> None:
    """To each tensor its part of `flat`, in memory of its own: the optimizer may keep it or write to it."""
    locals_ = [t._local_tensor for t in bucket]
    split: Callable[..., list[torch.Tensor]] = torch.split_with_sizes_copy  # type: ignore[assignment]
    for t, x, part in zip(bucket, locals_, split(flat, [x.numel() for x in locals_]), strict=True):
        part = part.view(x.shape)
        t._local_tensor = part if x.is_contiguous() else torch.empty_like(x).copy_(part)
        if (pending := _pending(t._spec)) is not None:
            t._spec = pending.settled


def _reduced(buckets: Sequence[Sequence[DTensor]]) -> list[torch.Tensor]:
    """Of each bucket the local elements, summed over the axes where it is pending: launched together by group."""
    out: list[torch.Tensor] = []
    late: list[int] = []
    jobs: list[tuple[Communicator, torch.Tensor]] = []
    wires = current_cost_model().wire
    for i, bucket in enumerate(buckets):
        spec = bucket[0]._spec
        axes = tuple(a for a, p in enumerate(spec.placements) if isinstance(p, Partial) and spec.mesh.shape[a] > 1)
        flat = torch.cat([t._local_tensor.reshape(-1) for t in bucket]).to(wires.get(spec.dtype, spec.dtype))
        out.append(flat)
        if axes:
            late.append(i)
            jobs.append((spec.mesh.comm(axes), flat))
    for i, total in zip(late, all_reduce_together(jobs), strict=True):
        out[i] = total
    return [_averaged(flat, bucket[0]._spec) for flat, bucket in zip(out, buckets, strict=True)]


def _averaged(flat: torch.Tensor, spec: Spec) -> torch.Tensor:
    count = math.prod(k for k, p in zip(spec.mesh.shape, spec.placements, strict=True) if p.is_partial("avg"))
    return (flat.div_(count) if count > 1 else flat).to(spec.dtype)


def _settled(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)


def _settling(group: Callable[..., Any]) -> Callable[..., Any]:
    """`group`, the function that groups lists of tensors, after what is pending in them is settled."""

    @functools.wraps(group)
    def first_settle(lists: Any, *args: Any, **kwargs: Any) -> Any:
        for tensors in lists:
            settle(tensors)
        return group(lists, *args, **kwargs)

    return first_settle


def install() -> None:
    """Settle gradients before they are measured or clipped."""
    name = "_group_tensors_by_device_and_dtype"
    replace(clip_grad, name, _settling(getattr(clip_grad, name)))
