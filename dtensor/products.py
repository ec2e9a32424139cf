"""Linear layers and products of matrices, seen whole: one step where torch makes many.

`linear` and `matmul` are composites: above autograd torch takes them apart into views, transposes, `mm` or `bmm`, and
views again, each of which comes to dispatch, and twice as many in backward. In the layouts of tensor parallelism no op
of the chain moves anything, so that all of it together is the same composite on the local tensors.

    linear(x, w)    x: f32[2,8,32]  w: f32[64@tp,32]     view, t, mm, _unsafe_view     ->  f32[2,8,64@tp]
    here            linear(local x, local w), one wrapper; backward: two local products, two wrappers

What is decided stays what the rules decide. At the first call with such specs the chain is *tried* on specs alone
(`dtensor.chains`), and only where every op in it keeps its inputs where they are and runs as it is, on all ranks,
does the product run whole: its result has the layout that the chain gives. All else is torch's chain as ever, op by
op: layouts that move, kernels, autocast, transforms of functions, tensors without values, tensors of other classes.
Backward is tried likewise, with the layout that the gradient has; gradients of gradients, and whatever a dispatch mode
looks at, run op by op. Whether autograd has one node or a chain of them is a matter of specs, never of local tensors
or of modes: ranks do alike, and so do a forward and its recomputation.

The functions are kernels of the dispatch key `PythonTLSSnapshot`, as those of `dtensor.composites`: calls on plain
tensors do not meet them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dtensor.chains import HERE, UNSEEN, Results, composite, is_contiguous, is_usual, plans, try_chain
from dtensor.decompositions import GaveUp
from dtensor.dispatch_call import plain_wrapper
from dtensor.spec import Spec

__all__ = ["bind", "see_whole"]

aten = torch.ops.aten
_DTensor: Any = None
_new: Callable[..., Any]
_library: torch.library.Library | None = None
_grad_enabled = torch.is_grad_enabled
_watching = torch._C._len_torch_dispatch_stack
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
    _library = torch.library.Library("aten", "IMPL") if on else None
    if _library is not None:
        _library.impl("linear", _linear, "PythonTLSSnapshot", with_keyset=True)
        _library.impl("matmul", _matmul, "PythonTLSSnapshot", with_keyset=True)


# ------------------------------------------------------------ linear
def _linear_chain(x: Any, w: Any, b: Any) -> Results:
    """torch's own chain."""
    if x.ndim not in (2, 3) or w.ndim != 2 or not (is_contiguous(x._spec) and is_contiguous(w._spec)):
        raise GaveUp("no chain that is known here")
    return (composite(aten.linear.default, x, w, b),)


def _linear_grads_chain(x: Any, w: Any, g: Any, need_x: bool, need_w: bool, need_b: bool) -> Results:
    """The gradients of a linear layer, as autograd has them of the ops that it is made of."""
    out, width = w.shape
    flat = x.ndim > 2
    g2 = g.reshape(g.numel() // out, out) if flat else g
    dx = dw = db = None
    if need_x:
        dx = torch.mm(g2, w)
        dx = dx.view(x.shape) if flat else dx
    if need_w:
        dw = torch.mm(g2.t(), x.reshape(x.numel() // width, width) if flat else x)
    if need_b:
        db = g2.sum(0, keepdim=True).view(out)
    return dx, dw, db


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, b: Any, spec: Spec) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return _linear_here(x, w, b, spec)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        if g is None:
            return None, None, None, None
        x, w = ctx.saved_tensors
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        D = _DTensor
        if type(g) is D and type(x) is D and type(w) is D and not _grad_enabled() and not _watching():
            key = (_Linear, x._spec, w._spec, g._spec, need_x, need_w, need_b)
            specs = plans.get(key, UNSEEN)
            if specs is UNSEEN:
                needs = {"need_x": need_x, "need_w": need_w, "need_b": need_b}
                specs = try_chain(key, partial(_linear_grads_chain, **needs), (x, w, g))
            if specs is not None:
                dx, dw, db = specs
                lx, lw, lg = x._local_tensor, w._local_tensor, g._local_tensor
                shape = lx.shape
                if len(shape) == 3:
                    rows = shape[0] * shape[1]
                    lx, lg = lx.reshape(rows, shape[2]), lg.reshape(rows, lw.shape[0])
                return (
                    None if dx is None else _new(D, torch.mm(lg, lw).view(shape), dx, requires_grad=False),
                    None if dw is None else _new(D, torch.mm(lg.t(), lx), dw, requires_grad=False),
                    None if db is None else _new(D, lg.sum(0), db, requires_grad=False),
                    None,
                )
        return *_linear_grads_chain(x, w, g, need_x, need_w, need_b), None


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
    """torch's own chain: as many matrices as matrices, or two, or rows of three dims by one matrix."""
    alike = x.ndim == y.ndim and x.ndim >= 2 and x.shape[:-2] == y.shape[:-2]
    if not alike and not (x.ndim == 3 and y.ndim == 2 and is_contiguous(x._spec)):
        raise GaveUp("no chain that is known here")
    return (composite(aten.matmul.default, x, y),)


def _by_columns(spec: Spec) -> bool:
    """Whether a matrix lies in memory column by column; autograd lets its gradient lie so."""
    return spec.stride[0] == 1 and spec.stride[1] == spec.shape[0]


def _matmul_grads_chain(x: Any, y: Any, g: Any, need_x: bool, need_y: bool) -> Results:
    """The gradients of a product, as autograd has them of the ops that it is made of: products again."""
    if y.ndim > 2:
        dx = composite(aten.matmul.default, g, y.transpose(-2, -1)) if need_x else None
        return dx, composite(aten.matmul.default, x.transpose(-2, -1), g) if need_y else None
    shape = x.shape
    x_columns, y_columns = x.ndim == 2 and _by_columns(x._spec), _by_columns(y._spec)
    if x.ndim == 3:
        rows = shape[0] * shape[1]
        x, g = x.reshape(rows, shape[2]), g.reshape(rows, y.shape[1])
    return _matrix_grads(x, y, g, shape, x_columns if need_x else None, y_columns if need_y else None)


def _matrix_grads(x: Any, y: Any, g: Any, shape: Any, x_columns: bool | None, y_columns: bool | None) -> Results:
    """The gradients of a product of two matrices, the first one in `shape`; None for those that are not needed."""
    dx = dy = None
    if x_columns is not None:
        dx = torch.mm(y, g.t()).t() if x_columns else torch.mm(g, y.t())
        dx = dx if len(shape) == 2 else dx.view(shape)
    if y_columns is not None:
        dy = torch.mm(g.t(), x).t() if y_columns else torch.mm(x.t(), g)
    return dx, dy


def _matmul_grads_here(x: Any, y: Any, g: Any, dx: Spec | None, dy: Spec | None) -> Results:
    """The same on local tensors, in wrappers of these specs."""
    D, lx, ly, lg = _DTensor, x._local_tensor, y._local_tensor, g._local_tensor
    if ly.ndim > 2:
        gx = None if dx is None else torch.matmul(lg, ly.transpose(-2, -1))
        gy = None if dy is None else torch.matmul(lx.transpose(-2, -1), lg)
    else:
        shape = lx.shape
        columns = len(shape) == 2 and _by_columns(x._spec), _by_columns(y._spec)
        if len(shape) == 3:
            rows = shape[0] * shape[1]
            lx, lg = lx.reshape(rows, shape[2]), lg.reshape(rows, ly.shape[1])
        needs = [None if s is None else c for s, c in zip((dx, dy), columns, strict=True)]
        gx, gy = _matrix_grads(lx, ly, lg, shape, *needs)
    return (
        None if dx is None else _new(D, gx, dx, requires_grad=False),
        None if dy is None else _new(D, gy, dy, requires_grad=False),
    )


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any, spec: Spec) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return _matmul_here(x, y, spec)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        if g is None:
            return None, None, None
        x, y = ctx.saved_tensors
        need_x, need_y, _ = ctx.needs_input_grad
        D = _DTensor
        if type(g) is D and type(x) is D and type(y) is D and not _grad_enabled() and not _watching():
            key = (_Matmul, x._spec, y._spec, g._spec, need_x, need_y)
            specs = plans.get(key, UNSEEN)
            if specs is UNSEEN:
                specs = try_chain(key, partial(_matmul_grads_chain, need_x=need_x, need_y=need_y), (x, y, g))
            if specs is not None:
                return *_matmul_grads_here(x, y, g, *specs), None
        return *_matmul_grads_chain(x, y, g, need_x, need_y), None


def _matmul_here(x: Any, y: Any, spec: Spec) -> Any:
    """The result, in a wrapper of its own; op by op where a dispatch mode looks on."""
    if _watching():
        got = composite(aten.matmul.default, x, y)
        return plain_wrapper(got._local_tensor, got._spec)
    return _new(_DTensor, torch.matmul(x._local_tensor, y._local_tensor), spec, requires_grad=False)


def _matmul(keys: Any, x: Any, y: Any) -> Any:
    """`aten::matmul` above autograd, on at least one tensor of a Python class."""
    D = _DTensor
    if type(x) is D and type(y) is D and is_usual(keys):
        key = (x._spec, y._spec)
        specs = plans.get(key, UNSEEN)
        if specs is UNSEEN:
            specs = try_chain(key, _matmul_chain, (x, y))
        if specs is not None:
            return _apply_matmul(x, y, specs[0]) if _grad_enabled() else _matmul_here(x, y, specs[0])
    return _redispatch_matmul(keys.remove(HERE), x, y)


# Without a frame of torch's, which would look like a caller to `dtensor.plain_origin`.
_redispatch_linear: Callable[..., Any] = aten.linear.default._handle.redispatch_boxed
_redispatch_matmul: Callable[..., Any] = aten.matmul.default._handle.redispatch_boxed
# `Function.apply` without its look at torch.func, which `is_usual` has had.
_apply_linear: Callable[..., Any] = super(torch.autograd.Function, _Linear).apply
_apply_matmul: Callable[..., Any] = super(torch.autograd.Function, _Matmul).apply
