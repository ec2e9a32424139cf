"""Gradients that are still pending when somebody needs their values: reduced many at a time, and once.

The gradient of a replicated parameter may stay a pending sum after backward. Clipping reads it (its norm, then the
product), an optimizer's step reads it again, three times over for AdamW. So whoever comes first settles what is
pending: small gradients travel together in one collective, and what is in `.grad` afterwards is the settled one.

    w1, w2, w3: f32[8,8], f32[8], f32[8@dp] on ("dp", "tp")     grads {P:tp}, {P:tp}, 8@dp{P:tp}
    one all-reduce over tp of 64 + 8 + 8/dp elements            then clipping, the step: nothing

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
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad

from dtensor.cost import current_cost_model
from dtensor.placement import Partial, Placement, Replicate
from dtensor.reshard_run import redistribute_local
from dtensor.spec import Spec
from dtensor.strides import in_order
from dtensor.tensor import DTensor

__all__ = ["BUCKET", "settle", "settle_gradients"]

BUCKET = 1 << 24
"""Elements that are settled in one collective, at most (a larger gradient by itself)."""

SUMS = frozenset({"sum", "avg"})


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
    for found in waiting.values():
        for bucket in _buckets(list(found.values())):
            _settle(bucket)


class _Pending(NamedTuple):
    """What is pending in tensors of a spec: per axis the reduction, or None; and their spec when it is settled."""

    axes: tuple[Partial | None, ...]
    settled: Spec


_UNSEEN: Any = object()
_MOST = 65536
_known: dict[Spec, _Pending | None] = {}


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


def _buckets(tensors: Sequence[DTensor]) -> Iterator[list[DTensor]]:
    """The tensors in order, in runs of at most `BUCKET` local elements on any rank."""
    bucket: list[DTensor] = []
    total = 0
    for t in tensors:
        n = t._spec.local_numel_bound
        if bucket and total + n > BUCKET:
            yield bucket
            bucket, total = [], 0
        bucket.append(t)
        total += n
    if bucket:
        yield bucket


def _settle(bucket: Sequence[DTensor]) -> None:
    """One bucket: tensors of one mesh and dtype, pending alike."""
    first = bucket[0]._spec
    ops = {p.reduce_op for p in first.placements if isinstance(p, Partial)}
    rounds = first.dtype.is_floating_point or first.dtype.is_complex
    if len(bucket) == 1 or first.mesh.coord is None or not (ops == {"sum"} or (ops <= SUMS and rounds)):
        for t in bucket:
            whole = t._spec.with_placements(_settled(t._spec.placements))
            reduced = redistribute_local(t._local_tensor, t._spec, whole)
            t._local_tensor, t._spec = in_order(reduced, whole.stride), whole
        return
    locals_ = [t._local_tensor for t in bucket]
    flat = _reduced(torch.cat([x.reshape(-1) for x in locals_]), first)
    split: Callable[..., list[torch.Tensor]] = torch.split_with_sizes_copy  # type: ignore[assignment]
    parts = split(flat, [x.numel() for x in locals_])  # each in memory of its own: the optimizer may keep or write it
    for t, x, part in zip(bucket, locals_, parts, strict=True):
        part = part.view(x.shape)
        t._local_tensor = part if x.is_contiguous() else torch.empty_like(x).copy_(part)
        if (pending := _pending(t._spec)) is not None:
            t._spec = pending.settled


def _reduced(flat: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Local elements summed over the axes where `spec` is pending."""
    axes = tuple(a for a, p in enumerate(spec.placements) if isinstance(p, Partial) and spec.mesh.shape[a] > 1)
    flat = flat.to(current_cost_model().wire.get(spec.dtype, spec.dtype))
    if axes:
        flat = spec.mesh.comm(axes).all_reduce(flat, "sum")
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


clip_grad._group_tensors_by_device_and_dtype = _settling(clip_grad._group_tensors_by_device_and_dtype)
