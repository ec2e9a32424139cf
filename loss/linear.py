"""linear_cross_entropy: the loss of a linear layer over many classes, whose logits never exist.

    loss = linear_cross_entropy(hidden, head.weight, labels)     # as F.cross_entropy(F.linear(hidden, weight), labels)

Layouts. An axis that shards the weight's classes is a *class axis*; on it hidden states and targets are replicated. On
the other axes the weight is replicated, and rows may be sharded:

                    class axis        other axes
    hidden          R                 R, or S(d) of a row dim
    weight, bias    S(0)              R
    target          R                 as hidden
    loss            R                 none: as target; sum, mean: Partial("sum") where rows are sharded, else R

Inputs in other layouts are brought into these first, with their gradients: hidden states sharded by sequence over a
class axis are gathered, and their gradient is reduce-scattered. Where an axis shards both the classes and the rows, it
is a class axis unless another axis is one already.

Sent: forward one small gather over the class axes, and for a mean over sharded rows the all-reduce of two numbers.
Backward nothing: the gradient of `hidden` is a pending sum over the class axes, those of weight and bias pending sums
over the axes that shard rows, as of any linear layer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from dtensor.errors import short
from dtensor.mesh import DeviceMesh
from dtensor.placement import Placement, Replicate, Shard, StridedShard
from dtensor.propagation_rules.build import accumulation_dtype
from dtensor.tensor import DTensor

from . import linear_kernels as _kernels
from .cross_entropy import autocast_dtype, in_parts, mean_of, settled_total
from .layouts import (
    check_index_dtype,
    check_options,
    check_weight,
    distributed,
    known_totals,
    moved,
    shards,
)

__all__ = ["linear_cross_entropy"]

_ops = torch.ops.shardwright
_registered = _kernels
_CALL = "linear_cross_entropy"


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    class_weight: torch.Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, chunk_rows: int | None = None, chunk_classes: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """`F.cross_entropy(F.linear(hidden, weight, bias), target)` without the logits; plain tensors or DTensors.

    Args:
        hidden: [rows..., features]; sums over lower precisions than float32 are taken in float32.
        weight: [classes, features], as `nn.Linear` and `nn.Embedding` hold it; may be tied to other uses.
        target: class indices, [rows...].
        bias: [classes].
        class_weight: [classes], what a row of each class weighs; has no gradient.
        ignore_index, reduction, label_smoothing: as in `F.cross_entropy`.
        chunk_rows, chunk_classes: logits are made for so many rows and classes (of one rank) at a time; by default
            some 2 million of them, on accelerators 64 million.

    Among DTensors a plain target, bias or class weight counts as replicated, plain hidden states do so where every
    mesh axis shards the classes.

    Raises ValueError, TypeError or RuntimeError for arguments that do not fit together, NotImplementedError for class
    probabilities as targets, and IndexError, on all ranks, for a target that names no class (where rows are sharded
    and the loss is no mean, only on the ranks that hold it).

    Example:
        >>> loss = linear_cross_entropy(hidden, model.head.weight, labels)      # weight: f32[50257@tp,512]
        >>> loss.backward()
    """
    check_options(_CALL, reduction, label_smoothing)
    _check_shapes(hidden, weight, target, bias)
    if class_weight is not None:
        check_weight(_CALL, class_weight, weight.shape[0])
        if class_weight.requires_grad:
            raise RuntimeError(f"{_CALL}: class_weight has no gradient; detach() it")
    tile = _chunk("chunk_rows", chunk_rows), _chunk("chunk_classes", chunk_classes)
    hidden, weight, bias, low = _under_autocast(hidden, weight, bias)
    totals = None
    if isinstance(hidden, DTensor) or isinstance(weight, DTensor):
        mesh, classes, rows = _layout(hidden, weight)
        given = _given_target(target, mesh, rows)
        h, w = distributed(_CALL, hidden, mesh), distributed(_CALL, weight, mesh)
        b = None if bias is None else distributed(_CALL, bias, mesh)
        c = None if class_weight is None else distributed(_CALL, class_weight, mesh)
        # Nothing has been sent so far, and no error follows but for a target that names no class.
        hidden, weight, bias = moved(h, rows), moved(w, classes), None if b is None else moved(b, classes)
        class_weight = c = None if c is None else moved(c, [Replicate()] * mesh.ndim)
        totals = known_totals(given, rows, c, weight.shape[0], weight.dtype, ignore_index)
        target = moved(given, rows)
    elif any(isinstance(t, DTensor) for t in (target, bias, class_weight)):
        raise TypeError(f"{_CALL}: a DTensor among the targets, bias or class weights of a plain hidden and weight")
    loss: torch.Tensor = _Linear.apply(
        hidden, weight, target.long(), bias, class_weight, totals, reduction, ignore_index, label_smoothing, *tile
    )
    return loss.to(low)


# ------------------------------------------------------------ arguments
def _check_shapes(hidden: object, weight: object, target: object, bias: object) -> None:
    named = {"hidden": hidden, "weight": weight, "target": target, **({} if bias is None else {"bias": bias})}
    for name, t in named.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{_CALL}: {name} must be a tensor, got {short(t)}\n  fix: torch.as_tensor({name})")
    h, w, t, b = (cast(torch.Tensor, x) for x in (hidden, weight, target, bias))
    if h.ndim == 0 or w.ndim != 2 or h.shape[-1] != w.shape[1]:
        raise RuntimeError(
            f"{_CALL}: hidden and weight do not fit\n  got: hidden {tuple(h.shape)}, weight {tuple(w.shape)}\n"
            "  rule: hidden is [rows..., features], weight [classes, features]\n"
            "  fix: weight.T, where it lies the other way"
        )
    if t.is_floating_point():
        raise NotImplementedError(
            f"{_CALL}: targets that are class probabilities are not supported\n"
            "  fix: F.cross_entropy(F.linear(hidden, weight, bias), target), inside loss_parallel() for DTensors"
        )
    check_index_dtype(_CALL, t)
    if t.shape != h.shape[:-1]:
        raise ValueError(
            f"{_CALL}: the target's shape does not fit hidden\n  got: target {tuple(t.shape)}, hidden "
            f"{tuple(h.shape)}\n  rule: one class index a row, {tuple(h.shape[:-1])}"
        )
    if bias is not None and b.shape != w.shape[:1]:
        raise RuntimeError(f"{_CALL}: bias must have shape {tuple(w.shape[:1])}, got {tuple(b.shape)}")


def _chunk(name: str, n: int | None) -> int:
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        raise ValueError(f"{_CALL}: {name} must be a positive int or None, got {n!r}")
    return n or 0


def _under_autocast(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype]:
    """The inputs as a linear layer takes them under autocast, and the dtype of the loss."""
    low = autocast_dtype(hidden.device)
    if low is not None:
        return hidden.to(low), weight.to(low), None if bias is None else bias.to(low), accumulation_dtype(low)
    dtypes = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        raise RuntimeError(
            f"{_CALL}: hidden, weight and bias must be of one floating-point dtype, got {hidden.dtype}, "
            f"{weight.dtype}{'' if bias is None else f', {bias.dtype}'}"
        )
    return hidden, weight, bias, hidden.dtype


# ------------------------------------------------------------ layouts
def _layout(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[DeviceMesh, list[Placement], list[Placement]]:
    """The mesh, and the layouts of weight and hidden that the operators take; ValueError for plain tensors among them.

    The last also is the target's, as row dims have the same numbers there.
    """
    if not isinstance(weight, DTensor):
        raise ValueError(
            f"{_CALL}: hidden is a DTensor, but weight is plain\n"
            "  fix: distribute_tensor(weight, mesh, [Shard(0)]), or parallelize the layer that holds it"
        )
    mesh = weight.device_mesh
    cut = [a for a, p in enumerate(weight.placements) if shards(p, 0)]
    if not isinstance(hidden, DTensor):
        if len(cut) < mesh.ndim:
            raise ValueError(
                f"{_CALL}: plain hidden states count as replicated only where every mesh axis shards the classes\n"
                f"  got: weight with placements {tuple(weight.placements)}\n"
                "  fix: DTensor.from_local(hidden, mesh, placements), with Shard(0) where it is this rank's piece"
            )
        return mesh, list(weight.placements), [Replicate()] * mesh.ndim
    if hidden.device_mesh != mesh:
        raise ValueError(f"{_CALL}: hidden and weight must be on one mesh\n  got: {hidden.device_mesh!r} and {mesh!r}")
    rows = [_of_rows(p, hidden.ndim) for p in hidden.placements]
    free = [a for a in cut if rows[a] == Replicate()]
    on = free or cut[-1:]
    return (
        mesh,
        [p if a in on else Replicate() for a, p in enumerate(weight.placements)],
        [Replicate() if a in on else p for a, p in enumerate(rows)],
    )


def _of_rows(p: Placement, ndim: int) -> Placement:
    """`p` where it shards a row dim, else replicated."""
    return p if isinstance(p, (Shard, StridedShard)) and p.dim < ndim - 1 else Replicate()


def _given_target(target: torch.Tensor, mesh: DeviceMesh, goal: list[Placement]) -> DTensor:
    if not isinstance(target, DTensor) and any(p != Replicate() for p in goal):
        raise ValueError(
            f"{_CALL}: a plain target counts as replicated, but rows are sharded, so it is not clear whether it is "
            f"this rank's piece\n  fix: distribute_tensor(target, mesh, {goal}) for a whole target, or "
            f"DTensor.from_local(target, mesh, {goal}) for this rank's piece"
        )
    return distributed(_CALL, target, mesh)


# ------------------------------------------------------------ autograd
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None,
        class_weight: torch.Tensor | None, totals: torch.Tensor | None, reduction: str, ignore_index: int,
        smoothing: float, rows: int, columns: int,
    ) -> torch.Tensor:  # fmt: skip
        ctx.rest = (ignore_index, smoothing)
        ctx.tile, ctx.reduction = (rows, columns), reduction
        loss, top, log_sum, counted = _ops.linear_cross_entropy(
            hidden, weight, target, bias, class_weight, reduction == "none", *ctx.rest, *ctx.tile
        )
        totals = counted if totals is None else totals
        total = settled_total(totals, reduction, target, weight.shape[0], ignore_index)
        ctx.save_for_backward(hidden, weight, target, bias, class_weight, top, log_sum, total)
        return loss if total is None else mean_of(loss, total, smoothing)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, target, bias, class_weight, top, log_sum, total = ctx.saved_tensors
        of_hidden, of_weight, _, of_bias, *_ = ctx.needs_input_grad
        wanted = of_hidden, of_weight, of_bias
        if torch.is_grad_enabled():
            inputs = tuple(t for t, on in zip((hidden, weight, bias), wanted, strict=True) if on)
            logits = F.linear(hidden, weight, bias).movedim(-1, 1 if hidden.ndim > 1 else 0)
            found = iter(in_parts(inputs, logits, target, class_weight, ctx.reduction, grad, *ctx.rest))
            of = [next(found) if on else None for on in wanted]
        else:
            grad = grad.to(top.dtype)
            grad = grad if total is None else grad / total
            of = _ops.linear_cross_entropy_backward(
                grad, hidden, weight, target, bias, class_weight, top, log_sum, *ctx.rest, *ctx.tile, *wanted
            )
        return of[0], of[1], None, of[2], *(None,) * 7
