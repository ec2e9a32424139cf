"""Linear layers and products of matrices, fused: one step where torch makes many.

`linear` and `matmul` are composites: above autograd torch takes them apart into views, transposes, `mm` or `bmm`, and
views again, each of which comes to dispatch, and twice as many in backward. In the layouts of tensor parallelism no op
of the chain moves anything, so that all of it together is the same composite on the local tensors.

    linear(x, w)    x: f32[2,8,32]  w: f32[64@tp,32]     view, t, mm, _unsafe_view     ->  f32[2,8,64@tp]
    here            linear(local x, local w), one wrapper; backward: two local products, two wrappers

What is decided stays what the rules decide. At the first call with such specs the chain is *tried* on specs alone
and only where every op in it keeps its inputs where they are and runs as it is, on all
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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from dtensor.comm.world import kept
from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch.call import plain_wrapper
from dtensor.dispatch.decompositions import GaveUp, Trial
from dtensor.rules.call import Call, op_name
from dtensor.rules.decision import Decision
from dtensor.spec import Spec, contiguous_stride, may_be_empty
from dtensor.torch_changes import undoing

__all__ = ["install", "see_whole"]

aten = torch.ops.aten
Needs = tuple[bool, ...]
"""Of which inputs a gradient is asked for."""

_library: torch.library.Library | None = None
_grad_enabled = torch.is_grad_enabled
_requires_grad: Callable[[Any], bool] = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]
_watching = torch._C._len_torch_dispatch_stack
_ABLE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Before, what is dispatched further by a kernel of this key may meet torch's own check that its own was run."""
_local_linear: Callable[..., torch.Tensor] = torch._C._nn.linear


def install() -> None:
    """Run them whole from now on."""
    see_whole(True)
    undoing(lambda: see_whole(False))


def see_whole(on: bool) -> None:
    """Put the kernels in, or take them out: then torch's chain runs, on tensors of any class as if they never were."""
    global _library
    if _library is not None:
        _library._destroy()
    _library = torch.library.Library("aten", "IMPL") if on and _ABLE else None
    if _library is not None:
        _library.impl("linear", _linear, "PythonTLSSnapshot", with_keyset=True)
        _library.impl("matmul", _matmul, "PythonTLSSnapshot", with_keyset=True)


# ------------------------------------------------------------ the verdict
Results = tuple[Any, ...]
"""Tensors that a chain gives, None for those that are not asked for."""

Specs = tuple[Spec | None, ...]
"""Their specs."""

_UNSEEN: Any = object()
_plans: dict[tuple[Any, ...], Specs | None] = kept({})
"""By function and specs: the specs of the results where the chain is local, None where it is not."""

_HERE = torch._C.DispatchKey.PythonTLSSnapshot
"""The dispatch key of kernels that see composites of DTensors whole."""

_MOST = 16384
_usual: dict[int, bool] = {}
"""Dispatch keys of a call, as a number: True where nothing but autograd stands between the call and dispatch."""

_MODES = torch._C._TorchDispatchModeKey
_INFRA = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def is_usual(keys: Any) -> bool:
    """Whether autograd is next, and no autocast, transform or tracer between."""
    number: int = keys.raw_repr()
    known = _usual.get(number)
    if known is None:
        rest = keys.remove(_HERE)
        known = str(rest.highestPriorityTypeId()).removeprefix("DispatchKey.").startswith("Autograd")
        _usual[number] = known
    return known and forward_ad._current_level < 0 and not (_watching() and _without_values())


def _without_values() -> bool:
    """Whether a compiler or a tracer follows, or a trial: tensors have no values then."""
    modes = map(torch._C._get_dispatch_stack_at, range(_watching()))
    return any(type(m) is Trial for m in modes) or any(torch._C._get_dispatch_mode(k) is not None for k in _INFRA)


_VIEWS = frozenset(f"aten.{n}" for n in ("view.default", "_unsafe_view.default", "expand.default"))
"""Ops that run locally with the local shape for the global one, as the composite does by itself."""


def _is_local(call: Call, decision: Decision) -> bool:
    """Whether an op runs as it is on inputs as they are."""
    rule, ins, outs = decision.rule, decision.inputs, decision.outputs
    if decision.kernel is not None or any(a is not b for a, b in zip(call.inputs, ins, strict=True)):
        return False
    if op_name(call.op) in _VIEWS:
        return True
    ways = (rule.bind, rule.local, rule.localize)
    return not any(way(ins, outs) for way in ways if way is not None)


def try_chain(key: tuple[Any, ...], chain: Callable[..., Results], tensors: Sequence[Any]) -> Specs | None:
    """The specs that a chain gives where all of it is local; remembered by `key`."""
    specs = [None if t is None else t._spec for t in tensors]
    if any(s is not None and type(s) is not Spec for s in specs):
        return None  # a view that had to move data: its spec is of one tensor, not of a kind of tensors
    device = next(t._local_tensor.device for t in tensors if t is not None)
    found = _tried(chain, specs, device)
    if len(_plans) >= _MOST:
        _plans.clear()
    _plans[key] = found
    return found


def _tried(chain: Callable[..., Results], specs: Sequence[Spec | None], device: torch.device) -> Specs | None:
    mesh = next(s for s in specs if s is not None).mesh
    given = [s for s in specs if s is not None]
    if mesh.coord is None or any(s.mesh is not mesh or s.dtype is not given[0].dtype for s in given):
        return None
    if not given[0].dtype.is_floating_point or may_be_empty(given):
        return None  # all ranks must do alike
    trial = Trial(mesh, device)
    try:
        with _disable_current_modes(), torch.no_grad():  # what a mode of the program looks at is the program alone
            tensors = [None if s is None else trial.tensor(s, None) for s in specs]
            with trial:
                results = chain(*tensors)
    except (GaveUp, RuntimeError, ValueError, IndexError):  # torch's own errors come again, op by op
        return None
    if any(step.factory for step in trial.steps) or not all(_is_local(*made) for made in trial.decisions):
        return None
    return tuple(None if r is None else r._spec for r in results)


def is_contiguous(spec: Spec) -> bool:
    """Whether the global tensor lies in memory row by row."""
    return tuple(spec.stride) == contiguous_stride(spec.shape)


def composite(op: hot.Op, *args: Any) -> Any:
    """What torch makes of a composite, past the kernels that see it whole."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


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
    return t is None or (type(t) is late.DTensor and t._spec is spec)


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
        D = late.DTensor
        if type(g) is D and _is(x, of_x) and _is(w, of_w) and not _grad_enabled() and not _watching():
            key = (_Linear, of_x, of_w, g._spec, needs)
            specs = _plans.get(key, _UNSEEN)
            if specs is _UNSEEN:
                chain = partial(_linear_grads_chain, of_x=of_x, of_w=of_w, needs=needs)
                specs = try_chain(key, chain, (x, w, g))
            if specs is not None:
                dx, dw, db = specs
                lg = g._local_tensor
                rows = lg.shape[:-1]  # its own: where `x` is not needed, the gradient may be sharded in another way
                if len(rows) == 2:
                    lg = lg.reshape(rows[0] * rows[1], lg.shape[2])
                gx = gw = gb = None
                if dx is not None:
                    lw = w._local_tensor
                    gx = late.new(D, torch.mm(lg, lw).view(*rows, lw.shape[1]), dx, requires_grad=False)
                if dw is not None:
                    lx = x._local_tensor
                    lx = lx.reshape(rows[0] * rows[1], lx.shape[2]) if len(rows) == 2 else lx
                    gw = late.new(D, torch.mm(lg.t(), lx), dw, requires_grad=False)
                if db is not None:
                    gb = late.new(D, lg.sum(0), db, requires_grad=False)
                return gx, gw, gb, None
        return *_linear_grads_chain(x, w, g, of_x, of_w, needs), None


def _linear_here(x: Any, w: Any, b: Any, spec: Spec) -> Any:
    """The result, in a wrapper of its own; op by op where a dispatch mode looks on."""
    if _watching():
        got = composite(aten.linear.default, x, w, b)
        return plain_wrapper(got._local_tensor, got._spec)
    lb = None if b is None else b._local_tensor
    return late.new(late.DTensor, _local_linear(x._local_tensor, w._local_tensor, lb), spec, requires_grad=False)


def _linear(keys: Any, x: Any, w: Any, b: Any = None) -> Any:
    """`aten::linear` above autograd, on at least one tensor of a Python class."""
    D = late.DTensor
    if type(x) is D and type(w) is D and (b is None or type(b) is D) and is_usual(keys):
        key = (x._spec, w._spec, b if b is None else b._spec)
        specs = _plans.get(key, _UNSEEN)
        if specs is _UNSEEN:
            specs = try_chain(key, _linear_chain, (x, w, b))
        if specs is not None:
            return _apply_linear(x, w, b, specs[0]) if _grad_enabled() else _linear_here(x, w, b, specs[0])
    return _redispatch_linear(keys.remove(_HERE), x, w, b)


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
    """The gradients of rows of three dims by a matrix, on DTensors or local tensors; `g` may have shards of its own."""
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
        D = late.DTensor
        if type(g) is D and _is(x, of_x) and _is(y, of_y) and not _grad_enabled() and not _watching():
            key = (_Matmul, of_x, of_y, g._spec, needs)
            specs = _plans.get(key, _UNSEEN)
            if specs is _UNSEEN:
                chain = partial(_matmul_grads_chain, of_y=of_y, needs=needs)
                specs = try_chain(key, chain, (x, y, g))
            if specs is not None:
                lx, ly = (None if t is None else t._local_tensor for t in (x, y))
                found = _matmul_grads_here(lx, ly, g._local_tensor, of_y, needs)
                dx, dy = (
                    None if s is None else late.new(D, t, s, requires_grad=False)
                    for t, s in zip(found, specs, strict=True)
                )  # fmt: skip
                return dx, dy, None
        return *_matmul_grads_chain(x, y, g, of_y, needs), None


def _matmul_here(x: Any, y: Any, spec: Spec) -> Any:
    """The result, in a wrapper of its own; op by op where a dispatch mode looks on."""
    if _watching():
        got = composite(aten.matmul.default, x, y)
        return plain_wrapper(got._local_tensor, got._spec)
    return late.new(late.DTensor, torch.matmul(x._local_tensor, y._local_tensor), spec, requires_grad=False)


def _matmul(keys: Any, x: Any, y: Any) -> Any:
    """`aten::matmul` above autograd, on at least one tensor of a Python class.

    Two matrices are one `mm` in torch's chain, and two or four ops in backward: whole they would cost more.
    """
    D = late.DTensor
    if type(x) is D and type(y) is D and len(x._spec.shape) > 2 and is_usual(keys):
        key = (x._spec, y._spec)
        specs = _plans.get(key, _UNSEEN)
        if specs is _UNSEEN:
            specs = try_chain(key, _matmul_chain, (x, y))
        if specs is not None:
            return _apply_matmul(x, y, specs[0]) if _grad_enabled() else _matmul_here(x, y, specs[0])
    return _redispatch_matmul(keys.remove(_HERE), x, y)


_redispatch_linear: Callable[..., Any] = aten.linear.default._handle.redispatch_boxed
_redispatch_matmul: Callable[..., Any] = aten.matmul.default._handle.redispatch_boxed
# `Function.apply` without its look at torch.func, which `is_usual` has had.
_apply_linear: Callable[..., Any] = super(torch.autograd.Function, _Linear).apply
_apply_matmul: Callable[..., Any] = super(torch.autograd.Function, _Matmul).apply
