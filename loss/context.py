"""loss_parallel: cross entropy over class-sharded logits, with its layouts guaranteed.

The engine computes log_softmax and nll_loss right in any layout, by itself. Inside `loss_parallel()`

- `F.cross_entropy` on DTensors is one operator: one small collective forward (one more for the mean where
  another axis shards the rows), none backward, no log-probabilities kept;
- plain targets and weights count as replicated;
- the layouts below hold, and inputs for which they cannot raise.

logits: the class dim sharded on exactly one mesh axis, on the others replicated or another dim sharded.

    target   replicated on the class axis, elsewhere sharded as the logits' rows are
    none     the layout of the target
    sum      replicated on the class axis, Partial("sum") on axes that shard rows
    mean     the same, divided by what all rows of all ranks weigh

It is a `TorchFunctionMode`: per thread, nestable, gone after an exception; backward may run outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn import _reduction as _Reduction
from torch.overrides import TorchFunctionMode

from dtensor import DTensor, Partial, Placement, Replicate, Shard
from dtensor.placement import StridedShard
from propagation_rules.loss import accumulation_dtype

__all__ = ["loss_parallel"]


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, `F.cross_entropy` (and `F.nll_loss`) take class-sharded DTensor logits without gathering them.

    Raises, from the loss: ValueError when the class dim is not sharded on exactly one mesh axis or when a plain
    target meets logits whose rows are sharded too; TypeError when the target is no tensor.

    Example:
        >>> with loss_parallel():
        ...     F.cross_entropy(logits, labels).backward()      # logits: f32[8,50257@tp]
    """
    with _LossParallel():
        yield


class _LossParallel(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy or func is F.nll_loss:
            logits = args[0] if args else kwargs.get("input")
            if isinstance(logits, DTensor):
                return (_cross_entropy if func is F.cross_entropy else _nll_loss)(*args, **kwargs)
        return func(*args, **kwargs)


def _cross_entropy(
    input: DTensor, target: object, weight: object = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    from loss.cross_entropy import cross_entropy, totals_of

    reduction = _reduction(size_average, reduce, reduction)
    if not 0.0 <= label_smoothing <= 1.0:
        raise RuntimeError(f"cross_entropy: label_smoothing must be between 0.0 and 1.0, got {label_smoothing}")
    logits, axis = _settled("cross_entropy", input)
    goal = _check_target("cross_entropy", logits, axis, target)
    given, scale = _distributed("cross_entropy", target, logits), _replicated("cross_entropy", weight, logits)
    there = _moved(given, goal)
    totals = None
    if there is not given and there.ndim < logits.ndim and all(isinstance(p, Replicate) for p in given.placements):
        # all targets are here: what they weigh together need not be summed over the ranks
        acc = accumulation_dtype(logits.dtype)
        totals = totals_of(given, scale, logits.shape[_class_dim(logits)], acc, ignore_index)
    return cross_entropy(logits, there, scale, reduction, ignore_index, label_smoothing, totals)


def _nll_loss(
    input: DTensor, target: object, weight: object = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    reduction = _reduction(size_average, reduce, reduction)
    scores, axis = _settled("nll_loss", input)
    goal = _check_target("nll_loss", scores, axis, target)
    there = _moved(_distributed("nll_loss", target, scores), goal)
    loss = F.nll_loss(
        scores, there, _replicated("nll_loss", weight, scores), ignore_index=ignore_index, reduction=reduction
    )
    if not isinstance(loss, DTensor) or not isinstance(loss.placements[axis], Partial):
        return loss
    want = [Replicate() if a == axis else p for a, p in enumerate(loss.placements)]
    return loss.redistribute(placements=want)


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is not a valid value for reduction; use 'none', 'mean' or 'sum'")
    return reduction


# ------------------------------------------------------------ layouts
def _class_dim(logits: torch.Tensor) -> int:
    return 1 if logits.ndim > 1 else 0


def _settled(call: str, logits: DTensor) -> tuple[DTensor, int]:
    """`logits` with nothing pending, and the mesh axis that shards the class dim; ValueError when not one."""
    c = _class_dim(logits)
    axes = [
        a for a, p in enumerate(logits.placements) if isinstance(p, (Shard, StridedShard)) and p.dim % logits.ndim == c
    ]
    if len(axes) != 1:
        raise ValueError(
            f"{call} inside loss_parallel(): the class dim (dim {c}) must be sharded on exactly one mesh axis\n"
            f"  got: logits of shape {tuple(logits.shape)} with placements {tuple(logits.placements)}\n"
            f"  fix: logits.redistribute(placements=[Shard({c})]) on one axis, e.g. by ColwiseParallel("
            "use_local_output=False), or leave the context"
        )
    if any(isinstance(p, Partial) for p in logits.placements):
        kept = [Replicate() if isinstance(p, Partial) else p for p in logits.placements]
        logits = logits.redistribute(placements=kept)
    return logits, axes[0]


def _check_target(call: str, logits: DTensor, axis: int, target: object) -> list[Placement]:
    """The layout the target must have; TypeError, RuntimeError or ValueError when it cannot be one."""
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"{call} inside loss_parallel(): target must be a tensor or a DTensor, got {target!r}")
    c, shape = _class_dim(logits), tuple(logits.shape)
    rows = (*shape[:c], *shape[c + 1 :])
    if tuple(target.shape) == shape and call == "cross_entropy":
        if not target.is_floating_point():
            raise RuntimeError(
                f"{call}: a target of the logits' shape holds class probabilities and must be floating point, "
                f"got {target.dtype}"
            )
        goal = list(logits.placements)
    elif tuple(target.shape) == rows:
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise RuntimeError(f"{call}: a target of class indices must be of an integer type, got {target.dtype}")
        goal = [_without_dim(p, c) if a != axis else Replicate() for a, p in enumerate(logits.placements)]
    else:
        raise ValueError(
            f"{call}: the target's shape does not fit the logits\n"
            f"  got: target {tuple(target.shape)}, logits {shape}\n"
            f"  rule: class indices have shape {rows}, class probabilities {shape}"
        )
    if not isinstance(target, DTensor) and any(not isinstance(p, Replicate) for a, p in enumerate(goal) if a != axis):
        raise ValueError(
            f"{call} inside loss_parallel(): a plain target counts as replicated, but the logits' rows are sharded, so "
            "it is not clear whether it is this rank's piece\n"
            f"  got: logits with placements {tuple(logits.placements)}\n"
            f"  fix: distribute_tensor(target, mesh, {goal}) for a whole target, or "
            f"DTensor.from_local(target, mesh, {goal}) for this rank's piece"
        )
    return goal


def _without_dim(p: Placement, c: int) -> Placement:
    """A placement of the logits, for a tensor that lacks dim `c`."""
    if isinstance(p, Shard) and p.dim > c:
        return Shard(p.dim - 1)
    if isinstance(p, StridedShard) and p.dim > c:
        return StridedShard(p.dim - 1, split_factor=p.split_factor)
    return p


def _distributed(call: str, x: object, like: DTensor) -> DTensor:
    """`x`, a target or weight, as a DTensor on the mesh of `like`; a plain tensor counts as replicated."""
    assert isinstance(x, torch.Tensor)
    mesh = like.device_mesh
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    elif x.device_mesh != mesh:
        raise ValueError(
            f"{call} inside loss_parallel(): target, weight and logits must be on one mesh\n"
            f"  got: {x.device_mesh!r} and {mesh!r}"
        )
    if not x.is_floating_point() and x.dtype != torch.int64:
        x = cast(DTensor, x.long())
    return x


def _moved(x: DTensor, goal: list[Placement]) -> DTensor:
    return x if list(x.placements) == goal else x.redistribute(placements=goal)


def _replicated(call: str, weight: object, like: DTensor) -> DTensor | None:
    if weight is None:
        return None
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{call} inside loss_parallel(): weight must be a tensor, a DTensor or None, got {weight!r}")
    if tuple(weight.shape) != (like.shape[_class_dim(like)],):
        raise RuntimeError(
            f"{call}: weight must have one value for each of the {like.shape[_class_dim(like)]} classes, "
            f"got shape {tuple(weight.shape)}"
        )
    return _moved(_distributed(call, weight, like), [Replicate()] * like.device_mesh.ndim)
