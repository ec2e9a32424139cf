"""loss_parallel: cross entropy over class-sharded logits, with its layouts guaranteed.

The engine computes log_softmax and nll_loss right in any layout, by itself. Inside `loss_parallel()`

- `F.cross_entropy` on DTensors is one operator: one small collective forward (one more for the mean where
  another axis shards the rows), none backward, no log-probabilities kept;
- `F.linear_cross_entropy`, where torch has it, is `loss.linear_cross_entropy`, which makes no logits;
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
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction as _Reduction
from torch.overrides import TorchFunctionMode

from dtensor.errors import short
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.spec import Spec
from dtensor.tensor import DTensor

from .cross_entropy import cross_entropy
from .layouts import check_index_dtype, check_options, check_weight, distributed, known_totals, moved, shards
from .linear import linear_cross_entropy
from .rows import class_dim

__all__ = ["loss_parallel"]


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, `F.cross_entropy` (and `F.nll_loss`) take class-sharded DTensor logits without gathering them.

    Raises, from the loss: ValueError when the class dim is not sharded on exactly one mesh axis, when a plain target
    meets logits whose rows are sharded too, or where plain logits are this rank's piece of the classes; TypeError when
    the target is no tensor.

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
            if isinstance(logits, torch.Tensor):
                return _of_plain(func, logits, args, kwargs)
        if func is _LINEAR:
            return _linear_cross_entropy(*args, **kwargs)
        return _inner(func)(*args, **kwargs)


_HOMES = (torch.Tensor, F, torch.functional, torch.nn.init)
_TORCHS = {(home, name): f for home in _HOMES for name, f in vars(home).items() if type(f) is FunctionType}
"""torch's functions that ask a mode, by where they lie; a program may put its own in their places."""


def _inner(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func`, or torch's function where a program has put `func` in its place.

    Torch's function, called by the program's, asks the mode under its name, which is the program's now: called by that
    name again, the program's would run twice.
    """
    if torch.compiler.is_compiling() or type(func) is not FunctionType:
        return func
    if func.__globals__["__name__"].startswith("torch."):
        return func
    return next((f for (home, name), f in _TORCHS.items() if vars(home).get(name) is func), func)


_LINEAR: Callable[..., torch.Tensor] | None = getattr(F, "linear_cross_entropy", None)
"""torch's loss of a linear layer; not in older versions."""


def _linear_cross_entropy(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, *, ignore_index: int | None = None,
    linear_bias: torch.Tensor | None = None, weight: torch.Tensor | None = None, options: object = None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """Ours, which is chunked whatever the options, for DTensors and class indices; else torch's."""
    by_class = isinstance(linear_weight, DTensor) and linear_weight.ndim == 2
    if by_class and target.shape == input.shape[:-1] and not target.is_floating_point():
        ignore_index = -100 if ignore_index is None else ignore_index
        return linear_cross_entropy(
            input, linear_weight, target, linear_bias, class_weight=weight, ignore_index=ignore_index, **kwargs
        )
    assert _LINEAR is not None
    return _LINEAR(
        input, linear_weight, target, linear_bias=linear_bias, weight=weight, ignore_index=ignore_index,
        options=options, **kwargs,
    )  # fmt: skip


def _cross_entropy(
    input: DTensor, target: object, weight: object = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    reduction = _reduction(size_average, reduce, reduction)
    check_options("cross_entropy", reduction, label_smoothing)
    given, goal, scale = _checked("cross_entropy", input, target, weight)
    if given.ndim == input.ndim and ignore_index >= 0:
        raise RuntimeError("cross_entropy: ignore_index is for class indices, but the target holds class probabilities")
    logits, scale = _settled(input), _whole(scale)
    totals = None
    if given.ndim < logits.ndim:
        totals = known_totals(given, goal, scale, logits.shape[class_dim(logits.ndim)], logits.dtype, ignore_index)
    return cross_entropy(logits, moved(given, goal), scale, reduction, ignore_index, label_smoothing, totals)


def _nll_loss(
    input: DTensor, target: object, weight: object = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    reduction = _reduction(size_average, reduce, reduction)
    check_options("nll_loss", reduction, 0.0)
    given, goal, scale = _checked("nll_loss", input, target, weight)
    loss = F.nll_loss(
        _settled(input), moved(given, goal), _whole(scale), ignore_index=ignore_index, reduction=reduction
    )
    if not isinstance(loss, DTensor):
        return loss
    axis = _class_axis("nll_loss", input)
    return moved(loss, [Replicate() if a == axis else p for a, p in enumerate(loss.placements)])


def _checked(
    call: str, logits: DTensor, target: object, weight: object
) -> tuple[DTensor, list[Placement], DTensor | None]:
    """The target on the mesh of `logits`, the layout it must have, and the weight; errors before anything moves."""
    where, count = f"{call} inside loss_parallel()", logits.shape[class_dim(logits.ndim)]
    axis = _class_axis(call, logits)
    goal = _check_target(call, logits, axis, target)
    assert isinstance(target, torch.Tensor)
    given, scale = distributed(where, target, logits.device_mesh), None
    if weight is not None:
        scale = distributed(where, check_weight(where, weight, count), logits.device_mesh)
        if scale.requires_grad and given.ndim < logits.ndim:
            raise RuntimeError(f"{where}: weight has no gradient where targets are class indices; detach() it")
    return given, goal, scale


def _settled(logits: DTensor) -> DTensor:
    return moved(logits, list(map(_unless_pending, logits.placements)))


def _unless_pending(p: Placement) -> Placement:
    return Replicate() if isinstance(p, Partial) else p


def _whole(weight: DTensor | None) -> DTensor | None:
    return None if weight is None else moved(weight, [Replicate()] * weight.device_mesh.ndim)


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    legacy = size_average is not None or reduce is not None
    return _Reduction.legacy_get_string(size_average, reduce) if legacy else reduction


# ------------------------------------------------------------ plain logits
def _of_plain(func: Callable[..., Any], logits: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's loss, for logits that are no DTensor. ValueError where they are this rank's piece of the classes.

    That shows where autograd has kept how they came about; without it, by a target that is out of bounds.
    """
    if _is_piece(logits):
        raise ValueError(_plain_text(func, logits, "this rank's piece of class-sharded logits"))
    try:
        return func(*args, **kwargs)
    except (IndexError, RuntimeError) as error:
        if type(error) not in (IndexError, RuntimeError):
            raise
        raise type(error)(_plain_text(func, logits, f"perhaps this rank's piece; torch says: {error}")) from error


def _is_piece(logits: torch.Tensor) -> bool:
    """Whether `logits` come, by ops of one input, from the local tensor of a DTensor whose classes are sharded."""
    node = logits.grad_fn
    while node is not None:
        spec = getattr(node, "spec", None)
        if isinstance(spec, Spec):
            local, c = tuple(spec.local_shape), class_dim(logits.ndim)
            dims = {len(local) - 1} | ({c} if tuple(logits.shape) == local else set())
            cut = {p.dim for p, k in zip(spec.placements, spec.mesh.shape, strict=True) if k > 1 and hasattr(p, "dim")}
            return any(d in cut and local[d] == logits.shape[c] for d in dims)
        before = [n for n, _ in node.next_functions if n is not None]
        node = before[0] if len(before) == 1 else None
    return False


def _plain_text(func: Callable[..., Any], logits: torch.Tensor, what: str) -> str:
    return (
        f"{func.__name__} inside loss_parallel(): the logits are a plain tensor, which is taken as all classes\n"
        f"  got: {str(logits.dtype).removeprefix('torch.')}{list(logits.shape)}, {what}\n"
        "  rule: logits sharded by class must be a DTensor\n"
        "  fix: ColwiseParallel(use_local_output=False) for the layer that gives them, or "
        f"DTensor.from_local(logits, mesh, [Shard({class_dim(logits.ndim)})])"
    )


# ------------------------------------------------------------ layouts
def _class_axis(call: str, logits: DTensor) -> int:
    """The mesh axis that shards the class dim; ValueError when it is not one."""
    c = class_dim(logits.ndim)
    axes = [a for a, p in enumerate(logits.placements) if shards(p, c)]
    if len(axes) != 1:
        raise ValueError(
            f"{call} inside loss_parallel(): the class dim (dim {c}) must be sharded on exactly one mesh axis\n"
            f"  got: logits of shape {tuple(logits.shape)} with placements {tuple(logits.placements)}\n"
            f"  accepted: Shard({c}) on one axis, on the others Replicate() or a shard of another dim\n"
            f"  fix: logits.redistribute(placements=[Shard({c})]) on one axis, e.g. by ColwiseParallel("
            "use_local_output=False), or leave the context"
        )
    return axes[0]


def _check_target(call: str, logits: DTensor, axis: int, target: object) -> list[Placement]:
    """The layout the target must have; TypeError, RuntimeError or ValueError when it cannot be one."""
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"{call} inside loss_parallel(): target must be a tensor or a DTensor, got {short(target)}")
    c, shape = class_dim(logits.ndim), tuple(logits.shape)
    rows = (*shape[:c], *shape[c + 1 :])
    if tuple(target.shape) == shape and call == "cross_entropy":
        if not target.is_floating_point():
            raise RuntimeError(
                f"{call}: a target of the logits' shape holds class probabilities and must be floating point, "
                f"got {target.dtype}"
            )
        goal = list(map(_unless_pending, logits.placements))
    elif tuple(target.shape) == rows:
        check_index_dtype(call, target)
        kept = map(_unless_pending, logits.placements)
        goal = [_without_dim(p, c) if a != axis else Replicate() for a, p in enumerate(kept)]
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
