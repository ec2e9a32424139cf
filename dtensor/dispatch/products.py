"""Linear layers and products of matrices, seen whole: one step where torch makes many.

`linear` and `matmul` are composites: above autograd torch takes them apart into views, transposes, `mm` or `bmm`, and
views again, each of which comes to dispatch, and twice as many in backward. In the layouts of tensor parallelism no op
of the chain moves anything, so that all of it together is the same composite on the local tensors.

    linear(x, w)    x: f32[2,8,32]  w: f32[64@tp,32]     view, t, mm, _unsafe_view     ->  f32[2,8,64@tp]
    here            linear(local x, local w), one wrapper; backward: two local products, two wrappers

What is decided stays what the rules decide. At the first call with such specs the chain is *tried* on specs alone
(`dtensor.dispatch.chains`), and only where every op in it keeps its inputs where they are and runs as it is, on all
ranks, does the product run whole: its result has the layout that the chain gives. All else is torch's chain as ever,
op by
op: layouts that move, kernels, autocast, transforms of functions, tensors without values, tensors of other classes.
Backward is tried likewise, with the layout that the gradient has; gradients of gradients, and whatever a dispatch mode
looks at, run op by op. Whether autograd has one node or a chain of them is a matter of specs, never of local tensors
or of modes: ranks do alike, and so do a forward and its recomputation.

The functions are kernels of the dispatch key `PythonTLSSnapshot`, as those of `dtensor.dispatch.composites`: calls on
plain tensors do not meet them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch

from dtensor.dispatch.call import plain_wrapper
from dtensor.dispatch.chains import HERE, UNSEEN, Results, composite, is_contiguous, is_usual, plans, try_chain
from dtensor.dispatch.decompositions import GaveUp
from dtensor.spec import Spec

__all__ = ["bind", "see_whole"]

aten = torch.ops.aten
Needs = tuple[bool, ...]
"""Of which inputs a gradient is asked for."""

_DTensor: Any = None
_new: Callable[..., Any]
_library: torch.library.Library | None = None
_grad_enabled = torch.is_grad_enabled
_requires_grad: Callable[[Any], bool] = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]
_watching = torch._C._len_torch_dispatch_stack
_ABLE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Before, what is dispatched further by a kernel of this key may meet torch's own check that its own was run."""
_local_linear: Callable[..., torch.Tensor] = torch._C._nn.linear


def bind(cls: type, new: Callable[..., Any]) -> None:
    """Told by `dtensor.tensor` what a DTensor is and how one is made; from then on products are seen whole."""
    global _DTensor, _new
    _DTensor, _new = cls, new
    see_whole(True)


def see_whole(on: bool) -> None:
    """Put the kernels in, or take them out: then torch's chain runs, on tensors of any class as if they never were."""
    global _library
    if _library is not None:
        _library._destroy()
    _library = torch.library.Library("aten", "IMPL") if on and _ABLE else None
    if _library is not None:
        _library.impl("linear", _linear, "PythonTLSSnapshot", with_keyset=True)
        _library.impl("matmul", _matmul, "PythonTLSSnapshot", with_keyset=True)


# ------------------------------------------------------------ linear
def _linear_chain(x: Any, w: Any, b: Any) -> Results:
    """torch's own chain."""
    if x.ndim not in (2, 3) or w.ndim != 2 or not (is_contiguous(x._spec) and is_contiguous(w._spec)):
        raise GaveUp("no chain that is known here")
    return (composite(aten.linear.default, x, w, b),)


def _linear_grads_chain(x: Any, w: Any, g: Any, of_x: Spec, of_w: Spec, needs: Needs) -> Results:
    """The gradients of a linear layer, as autograd has them of the ops that it is made of."""
    out, shape = of_w.shape[0], of_x.shape
    flat = len(shape) > 2
    rows = shape[0] * shape[1]
    g = g.reshape(rows, out) if flat else g
    dx = dw = db = None
    if needs[0]:
        dx = torch.mm(g, w)
        dx = dx.view(shape) if flat else dx
    if needs[1]:
        dw = torch.mm(g.t(), x.reshape(rows, shape[2]) if flat else x)
    if needs[2]:
        db = g.sum(0, keepdim=True).view(out)
    return dx, dw, db


def _kept(*tensors: Any) -> tuple[Any, ...]:
    """What tells in backward whether tensors have their data still. That of leaves is held, else a hook may free it."""
    return tuple(
        None if t is None
        else (t._spec, ref(t), t._local_tensor if t.is_leaf and _requires_grad(t) else ref(t._local_tensor))
        for t in tensors
    )  # fmt: skip


def _as_kept(saved: tuple[Any, ...], kept: tuple[Any, ...]) -> tuple[Any, ...]:
    """The saved tensors with the data that they had: one that was given other data since (`x.data = y`) has it no more.

    A tensor that a hook has put in the place of the saved one is as the hook made it.
    """
    return tuple(t if k is None else _unchanged(t, *k) for t, k in zip(saved, kept, strict=True))


def _unchanged(t: Any, spec: Spec, whose: Any, local: Any) -> Any:
    then = local() if type(local) is ref else local
    if whose() is not t or t._local_tensor is then:
        return t
    if then is None or _grad_enabled():
        raise RuntimeError(
            f"a tensor of {spec} that is needed for a gradient was given other data after the forward\n"
            "  rule: the gradient is that of the data which the forward saw\n"
            "  fix: set x.data before the forward or after the backward"
        )
    return plain_wrapper(then, spec)


def _is(t: Any, spec: Spec) -> bool:
    """Whether a tensor is a DTensor of this spec, or was not needed."""
    return t is None or (type(t) is _DTensor and t._spec is spec)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, b: Any, spec: Spec) -> Any:
        needs = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        saved = x if needs[1] else None, w if needs[0] else None
        ctx.save_for_backward(*saved)
        ctx.specs, ctx.kept = (x._spec, w._spec), _kept(*saved)
        return _linear_here(x, w, b, spec)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        if g is None:
            return None, None, None, None
        x, w = _as_kept(ctx.saved_tensors, ctx.kept)
        of_x, of_w = ctx.specs
        needs = ctx.needs_input_grad
        D = _DTensor
        if type(g) is D and _is(x, of_x) and _is(w, of_w) and not _grad_enabled() and not _watching():
            key = (_Linear, of_x, of_w, g._spec, needs)
            specs = plans.get(key, UNSEEN)
            if specs is UNSEEN:
                chain = partial(_linear_grads_chain, of_x=of_x, of_w=of_w, needs=needs)
                specs = try_chain(key, chain, (x, w, g))
            if specs is not None:
                dx, dw, db = specs
                lg = g._local_tensor
                rows = lg.shape[:-1]  # its own: where `x` is not needed, the gradient may be cut in another way
                if len(rows) == 2:
                    lg = lg.reshape(rows[0] * rows[1], lg.shape[2])
                gx = gw = gb = None
                if dx is not None:
                    lw = w._local_tensor
                    gx = _new(D, torch.mm(lg, lw).view(*rows, lw.shape[1]), dx, requires_grad=False)
                if dw is not None:
                    lx = x._local_tensor
                    lx = lx.reshape(rows[0] * rows[1], lx.shape[2]) if len(rows) == 2 else lx
                    gw = _new(D, torch.mm(lg.t(), lx), dw, requires_grad=False)
                if db is not None:
                    gb = _new(D, lg.sum(0), db, requires_grad=False)
                return gx, gw, gb, None
        return *_linear_grads_chain(x, w, g, of_x, of_w, needs), None


def _linear_here(x: Any, w: Any, b: Any, spec: Spec) -> Any:
    """The result, in a wrapper of its own; op by op where a dispatch mode looks on."""
    if _watching():
        got = composite(aten.linear.default, x, w, b)
        return plain_wrapper(got._local_tensor, got._spec)
    lb = None if b is None else b._local_tensor
    return _new(_DTensor, _local_linear(x._local_tensor, w._local_tensor, lb), spec, requires_grad=False)


def _linear(keys: Any, x: Any, w: Any, b: Any = None) -> Any:
    """`aten::linear` above autograd, on at least one tensor of a Python class."""
    D = _DTensor
    if type(x) is D and type(w) is D and (b is None or type(b) is D) and is_usual(keys):
        key = (x._spec, w._spec, b if b is None else b._spec)
        specs = plans.get(key, UNSEEN)
        if specs is UNSEEN:
            specs = try_chain(key, _linear_chain, (x, w, b))
        if specs is not None:
            return _apply_linear(x, w, b, specs[0]) if _grad_enabled() else _linear_here(x, w, b, specs[0])
    return _redispatch_linear(keys.remove(HERE), x, w, b)


# ------------------------------------------------------------ matmul
def _matmul_chain(x: Any, y: Any) -> Results:
    """torch's own chain: as many matrices as matrices, or rows of three dims by one matrix."""
    alike = x.ndim == y.ndim and x.ndim > 2 and x.shape[:-2] == y.shape[:-2]
    if not alike and not (x.ndim == 3 and y.ndim == 2 and is_contiguous(x._spec)):
        raise GaveUp("no chain that is known here")
    return (composite(aten.matmul.default, x, y),)


def _by_columns(spec: Spec) -> bool:
    """Whether a matrix lies in memory column by column; autograd lets its gradient lie so."""
    return spec.stride[0] == 1 and spec.stride[1] == spec.shape[0]


def _matmul_grads_chain(x: Any, y: Any, g: Any, of_y: Spec, needs: Needs) -> Results:
    """The gradients of a product, as autograd has them of the ops that it is made of: products again."""
    if of_y.ndim > 2:
        dx = composite(aten.matmul.default, g, y.transpose(-2, -1)) if needs[0] else None
        return dx, composite(aten.matmul.default, x.transpose(-2, -1), g) if needs[1] else None
    return _matrix_grads(x, y, g, of_y, needs)


def _matrix_grads(x: Any, y: Any, g: Any, of_y: Spec, needs: Needs) -> Results:
    """The gradients of rows of three dims by a matrix, on DTensors or local tensors; `g` may be cut in its own way."""
    rows = g.shape[:-1]
    g = g.reshape(rows[0] * rows[1], g.shape[2])
    dx = dy = None
    if needs[0]:
        dx = torch.mm(g, y.t()).view(*rows, y.shape[0])
    if needs[1]:
        x = x.reshape(rows[0] * rows[1], x.shape[2])
        dy = torch.mm(g.t(), x).t() if _by_columns(of_y) else torch.mm(x.t(), g)
    return dx, dy


def _matmul_grads_here(x: Any, y: Any, g: Any, of_y: Spec, needs: Needs) -> Results:
    """The same on local tensors, of which those are None that are not needed."""
    if of_y.ndim == 2:
        return _matrix_grads(x, y, g, of_y, needs)
    gx = torch.matmul(g, y.transpose(-2, -1)) if needs[0] else None
    return gx, torch.matmul(x.transpose(-2, -1), g) if needs[1] else None


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any, spec: Spec) -> Any:
        needs = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        saved = x if needs[1] else None, y if needs[0] else None
        ctx.save_for_backward(*saved)
        ctx.specs, ctx.kept = (x._spec, y._spec), _kept(*saved)
        return _matmul_here(x, y, spec)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        if g is None:
            return None, None, None
        x, y = _as_kept(ctx.saved_tensors, ctx.kept)
        of_x, of_y = ctx.specs
        needs = ctx.needs_input_grad
        D = _DTensor
        if type(g) is D and _is(x, of_x) and _is(y, of_y) and not _grad_enabled() and not _watching():
            key = (_Matmul, of_x, of_y, g._spec, needs)
            specs = plans.get(key, UNSEEN)
            if specs is UNSEEN:
                chain = partial(_matmul_grads_chain, of_y=of_y, needs=needs)
                specs = try_chain(key, chain, (x, y, g))
            if specs is not None:
                lx, ly = (None if t is None else t._local_tensor for t in (x, y))
                found = _matmul_grads_here(lx, ly, g._local_tensor, of_y, needs)
                dx, dy = (
                    None if s is None else _new(D, t, s, requires_grad=False)
                    for t, s in zip(found, specs, strict=True)
                )  # fmt: skip
                return dx, dy, None
        return *_matmul_grads_chain(x, y, g, of_y, needs), None


def _matmul_here(x: Any, y: Any, spec: Spec) -> Any:
    """The result, in a wrapper of its own; op by op where a dispatch mode looks on."""
    if _watching():
        got = composite(aten.matmul.default, x, y)
        return plain_wrapper(got._local_tensor, got._spec)
    return _new(_DTensor, torch.matmul(x._local_tensor, y._local_tensor), spec, requires_grad=False)


def _matmul(keys: Any, x: Any, y: Any) -> Any:
    """`aten::matmul` above autograd, on at least one tensor of a Python class.

    Two matrices are one `mm` in torch's chain, and two or four ops in backward: whole they would cost more.
    """
    D = _DTensor
    if type(x) is D and type(y) is D and len(x._spec.shape) > 2 and is_usual(keys):
        key = (x._spec, y._spec)
        specs = plans.get(key, UNSEEN)
        if specs is UNSEEN:
            specs = try_chain(key, _matmul_chain, (x, y))
        if specs is not None:
            return _apply_matmul(x, y, specs[0]) if _grad_enabled() else _matmul_here(x, y, specs[0])
    return _redispatch_matmul(keys.remove(HERE), x, y)


# Without a frame of torch's, which would look like a caller to `dtensor.dispatch.plain_origin`.
_redispatch_linear: Callable[..., Any] = aten.linear.default._handle.redispatch_boxed
_redispatch_matmul: Callable[..., Any] = aten.matmul.default._handle.redispatch_boxed
# `Function.apply` without its look at torch.func, which `is_usual` has had.
_apply_linear: Callable[..., Any] = super(torch.autograd.Function, _Linear).apply
_apply_matmul: Callable[..., Any] = super(torch.autograd.Function, _Matmul).apply
