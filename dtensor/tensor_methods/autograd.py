"""The autograd functions of a DTensor: `from_local`, `to_local`, `redistribute`, and the hook of its leaves.

Each gradient has the layout of what it is the gradient of; what is pending may stay so where the tensor is replicated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from dtensor.comm.reduce_ops import power, root
from dtensor.dispatch import late
from dtensor.dispatch.materialized import settled_spec
from dtensor.errors import MixedTensorError, explain_error, refuse_layout
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.redistribute.executor.run import Move, redistribute_local
from dtensor.rules.deferred import DeferredSpec
from dtensor.spec import Spec, contiguous_stride, dense, stride_like

__all__ = [
    "FromLocal", "Redistribute", "ToLocal", "apply_move", "check_parts", "read_part", "redistributed", "transformed",
    "unreduced", "watch",
]  # fmt: skip


def read_part(x: Any) -> Spec:
    """The spec of this rank's part, which is then up to date. What waits for a collective goes on waiting."""
    spec = x._spec
    return spec.final if type(spec) is DeferredSpec else settled_spec(x, "to_local")


def redistributed(
    x: Any, placed: tuple[Placement, ...], async_op: bool = False, dtype: torch.dtype | None = None,
    mesh: DeviceMesh | None = None,
) -> Any:  # fmt: skip
    """Layout change without autograd, to another `mesh` where one is given."""
    spec = settled_spec(x, "redistribute")
    local = x._local_tensor
    if dtype is not None and dtype is not spec.dtype:
        local = local.to(dtype)
        spec = spec.with_meta(spec.shape, spec.stride, dtype)
    if mesh is not None and mesh != spec.mesh:
        from dtensor.redistribute.cross_mesh import redistribute_between

        target = Spec.make(mesh, placed, spec.shape, contiguous_stride(spec.shape), spec.dtype)
        moved = redistribute_between(local, spec, target, async_op=async_op)
        return late.new(late.DTensor, moved.contiguous(), target, requires_grad=False)
    if placed == spec.placements:
        return late.new(late.DTensor, local, spec, requires_grad=False)
    target = spec.with_placements(placed)
    moved = redistribute_local(local, spec, target, async_op=async_op)
    # What has moved lies contiguous in memory, so the global strides say so: views are decided by them.
    stride = contiguous_stride(spec.shape)
    if stride != target.stride:
        target = target.with_meta(spec.shape, stride, spec.dtype)
    return late.new(late.DTensor, moved.contiguous(), target, requires_grad=False)


def unreduced(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The layout with everything pending reduced."""
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)


# ------------------------------------------------------------ autograd
def _share(spec: Spec, grads: Sequence[Placement]) -> float:
    """What a part's gradient is of the whole's, laid out as `grads`: of an average of k parts one k-th."""
    both = zip(spec.placements, grads, spec.mesh.shape, strict=True)
    return 1 / math.prod(k for p, g, k in both if p.is_partial("avg") and not g.is_partial("sum"))


def _reduced_axes(spec: Spec) -> list[int]:
    """The axes on which a part's gradient depends on what the others hold: all reductions but sums and averages."""
    sums = ("sum", "avg", "norm0")
    return [a for a, p in enumerate(spec.placements) if isinstance(p, Partial) and p.reduce_op not in sums]


def _gradient_of_part(part: torch.Tensor, grad: torch.Tensor, spec: Spec, axes: Sequence[int]) -> torch.Tensor:
    """The gradient of this rank's part of a pending maximum, product, ...: that of the reduction of all parts.

    The parts are gathered along `axes`; `grad` is the gradient of what they reduce to, the same on all of these.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a second derivative through from_local of {spec}: the gradient of a part of a pending "
            f"{cast(Partial, spec.placements[axes[0]]).reduce_op} is not differentiable\n"
            "  fix: reduce the parts before from_local, with a differentiable collective"
        )
    mesh, many = spec.mesh, math.prod(spec.mesh.shape[a] for a in axes)
    if mesh.coord is None:
        return grad
    behind = lambda p: (  # noqa: E731
        Shard(p.dim + 1) if isinstance(p, Shard)
        else StridedShard(p.dim + 1, split_factor=p.split_factor) if isinstance(p, StridedShard) else p
    )  # fmt: skip
    shape = (many, *spec.shape)
    apart = [Shard(0) if a in axes else behind(p) for a, p in enumerate(spec.placements)]
    stacked = Spec.make(mesh, tuple(apart), shape, contiguous_stride(shape), spec.dtype)
    whole = stacked.with_placements(tuple(Replicate() if a in axes else p for a, p in enumerate(apart)))
    parts = redistribute_local(part.detach().unsqueeze(0).contiguous(), stacked, whole).detach()
    mine = 0
    for a in axes:
        mine = mine * mesh.shape[a] + mesh.coord[a]
    kind = cast(Partial, spec.placements[axes[0]])
    if kind.norm:
        parts = parts.double()
        norm = root(power(parts, kind.norm).sum(0), kind.norm)
        share = torch.where(norm == 0, norm, (parts[mine] / norm).abs() ** (kind.norm - 1))
        return (grad * share).to(grad.dtype)
    with torch.enable_grad():
        parts.requires_grad_()
        reduced = parts.prod(0) if kind.is_partial("product") else getattr(parts, f"a{kind.reduce_op}")(0)
        (found,) = torch.autograd.grad(reduced, parts, grad)
    return found[mine]


class FromLocal(torch.autograd.Function):
    """`DTensor.from_local`; the part's gradient is what the reduction makes of it."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec, grads: tuple[Placement, ...] | None) -> Any:
        ctx.set_materialize_grads(False)
        placed, axes = grads if grads is not None else unreduced(spec.placements), _reduced_axes(spec)
        if axes:
            placed = tuple(Replicate() if a in axes else p for a, p in enumerate(placed))
            ctx.save_for_backward(local)
        ctx.placements, ctx.spec, ctx.axes, ctx.share = placed, spec, axes, _share(spec, placed)
        return late.new(late.DTensor, local.detach(), spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None
        grad = _ours(grad, ctx.spec)
        if grad._spec.placements != ctx.placements:
            grad = _internal(grad, ctx.placements)
        local = grad.to_local()
        if ctx.axes:
            local = _gradient_of_part(ctx.saved_tensors[0], local, ctx.spec, ctx.axes)
        return local if ctx.share == 1 else local * ctx.share, None, None


class ToLocal(torch.autograd.Function):
    """`DTensor.to_local`; the gradient comes back as a part."""

    @staticmethod
    def forward(ctx: Any, x: Any, grads: tuple[Placement, ...] | None) -> torch.Tensor:
        ctx.spec = read_part(x)
        ctx.set_materialize_grads(False)
        ctx.placements = grads if grads is not None else unreduced(ctx.spec.placements)
        ctx.share = _share(ctx.spec, ctx.placements)
        local = x._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None
        spec: Spec = ctx.spec
        if ctx.share != 1:
            grad = grad / ctx.share
        if not dense(grad):
            grad = grad.contiguous()
        stride = stride_like(grad, spec.shape)
        made = late.DTensor.from_local(grad, spec.mesh, ctx.placements, shape=spec.shape, stride=stride)
        return made, None


def check_parts(spec: Spec, grads: tuple[Placement, ...], call: str) -> None:
    """The gradient's part has the local tensor's shape on every rank; ValueError, on all of them, otherwise."""
    other = spec.with_placements(grads)
    shapes = [(spec.local_shape, other.local_shape)]
    if math.prod(spec.mesh.shape) <= 1024:  # else too many ranks to look at all
        coords = itertools.product(*map(range, spec.mesh.shape))
        shapes = [(spec.local_shape_of(c), other.local_shape_of(c)) for c in coords]
    for mine, its in shapes:
        if mine != its:
            raise ValueError(
                f"{call}: grad_placements={list(grads)} give the gradient of {spec} a part of {list(its)} where the "
                f"tensor's is {list(mine)}; use placements that shard the same dims"
            )


class Redistribute(torch.autograd.Function):
    """`DTensor.redistribute`; the gradient goes back into the layout of the input."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, placed: tuple[Placement, ...], async_op: bool,
        forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None, mesh: DeviceMesh | None,
    ) -> Any:  # fmt: skip
        ctx.placements, ctx.dtype, ctx.wire = unreduced(x._spec.placements), x.dtype, backward_dtype
        ctx.spec = x._spec
        ctx.set_materialize_grads(False)
        return redistributed(x, placed, async_op, forward_dtype, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None, None, None, None
        grad = _ours(grad, ctx.spec)
        if ctx.wire is not None and ctx.wire is not grad.dtype:
            grad = grad.to(ctx.wire)
        if grad._spec.mesh != ctx.spec.mesh or grad._spec.placements != ctx.placements:
            grad = _internal(grad, ctx.placements, ctx.spec.mesh)
        if grad.dtype is not ctx.dtype:
            grad = grad.to(ctx.dtype)
        return grad, None, None, None, None, None


class _KnownMove(torch.autograd.Function):
    """`Redistribute` on the tensor's own mesh, where it was made before."""

    @staticmethod
    def forward(ctx: Any, x: Any, move: Move) -> Any:
        ctx.spec = x._spec
        ctx.set_materialize_grads(False)
        return late.new(late.DTensor, move.run(x._local_tensor, False), move.target, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None
        spec: Spec = ctx.spec
        grad = _ours(grad, spec)
        target = unreduced(spec.placements)
        own = grad._spec
        if (own.mesh is not spec.mesh and own.mesh != spec.mesh) or own.placements != target:
            grad = _internal(grad, target, spec.mesh)
        if grad.dtype is not spec.dtype:
            grad = grad.to(spec.dtype)
        return grad, None


# `Function.apply` without its look at torch.func, which is asked before.
apply_move: Callable[..., Any] = super(torch.autograd.Function, _KnownMove).apply
transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


def _internal(x: Any, placed: tuple[Placement, ...], mesh: DeviceMesh | None = None) -> Any:
    """Redistribute to any layout, Partial included; differentiable."""
    if torch.is_grad_enabled() and x.requires_grad:
        return Redistribute.apply(x, placed, False, None, None, mesh)
    return redistributed(x, placed, mesh=mesh)


def watch(leaf: Any) -> None:
    """Bring the gradients of a leaf into its layout; on replicated axes they may stay pending."""
    if not leaf.is_leaf or getattr(leaf, "_watched", None) is leaf._spec:
        return
    leaf._watched = spec = leaf._spec

    def hook(grad: Any) -> Any:
        if grad is None:  # an op without a derivative there, such as a norm of order 0
            return None
        if type(grad) is late.DTensor and grad._spec is spec:
            return grad
        if type(grad) is not late.DTensor or grad._spec.mesh != spec.mesh or grad.ndim != spec.ndim:
            return _zeros_on(spec, grad) if type(grad) is torch.Tensor and _all_zero(grad) else grad
        own, got = spec.placements, grad._spec.placements
        if own is got or own == got:
            return grad
        target = tuple(
            g if isinstance(o, Replicate) and isinstance(g, Partial) else Replicate() if isinstance(o, Partial) else o
            for o, g in zip(own, got, strict=True)
        )
        if target == got:
            return grad
        if grad._local_tensor.layout is not torch.strided or grad._local_tensor.is_nested:
            call = f"the gradient of a leaf laid out as {spec}"
            refuse_layout(call, grad._local_tensor, "embedding(..., sparse=False)")
        return _internal(grad, target)

    leaf.register_hook(hook)


def _ours(grad: torch.Tensor, spec: Spec) -> Any:
    """The gradient of what is laid out as `spec`; torch's formulas may give plain zeros. MixedTensorError otherwise."""
    if isinstance(grad, late.DTensor):
        return grad
    if _all_zero(grad):
        return _zeros_on(spec, grad)
    got, rule = f"a plain tensor of shape {list(grad.shape)}", "the gradient of a DTensor is a DTensor"
    fix = "distribute_tensor(grad, mesh, placements) for what backward starts from or a hook returns"
    raise MixedTensorError(explain_error(f"backward of a redistribution of {spec}", got, rule, fix))


def _all_zero(grad: torch.Tensor) -> bool:
    return bool(grad._is_zerotensor()) or not grad.any()


def _zeros_on(spec: Spec, zeros: torch.Tensor) -> Any:
    """Zeros in the layout of `spec` for those that autograd's formulas give, plain, e.g. for `sgn` or `repeat(0)`."""
    target = spec.with_placements(unreduced(spec.placements)).with_meta(spec.shape, spec.stride, zeros.dtype)
    local = torch.zeros(target.local_shape, dtype=zeros.dtype, device=zeros.device)
    return late.new(late.DTensor, local, target, requires_grad=False)
