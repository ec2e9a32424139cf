"""Linear layers and products of matrices, seen whole: one step where torch makes many.

`linear` and `matmul` are composites: above autograd torch takes them apart into views, transposes, `mm` or `bmm`, and
views again, each of which comes to dispatch, and twice as many in backward. In the layouts of tensor parallelism no op
of the chain moves anything, so that all of it together is the same composite on the local tensors.

    linear(x, w)    x: f32[2,8,32]  w: f32[64@tp,32]     view, t, mm, _unsafe_view     ->  f32[2,8,64@tp]
    here            linear(local x, local w), one wrapper; backward: two local products, two wrappers

What is decided stays what the rules decide. At the first call with such specs the chain is *tried* on specs alone
(`dtensor.decompositions`), and only where every op in it keeps its inputs where they are and runs as it is, on all
ranks, does the product run whole: its result has the layout that the chain gives. All else is torch's chain as ever,
op by op: layouts that move, kernels, autocast, transforms of functions, tensors without values, tensors of other
classes. Backward is tried likewise, with the layout that the gradient has; gradients of gradients, and whatever a
dispatch mode looks at, run op by op. Whether autograd has one node or a chain of them is a matter of specs, never of
local tensors or of modes: ranks do alike, and so do a forward and its recomputation.

The functions are kernels of the dispatch key `PythonTLSSnapshot`, as those of `dtensor.composites`: calls on plain
tensors do not meet them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from dtensor import dispatch as hot
from dtensor.decompositions import GaveUp, Trial
from dtensor.dispatch_call import plain_wrapper
from dtensor.propagate import Decision
from dtensor.registry import Call, on_clear, op_name
from dtensor.spec import Spec, contiguous_stride

__all__ = ["bind", "see_whole"]

aten = torch.ops.aten
Results = tuple[Any, ...]
Specs = tuple[Spec | None, ...]

_MOST = 16384
_UNSEEN: Any = object()
_DTensor: Any = None
_new: Callable[..., Any]
_library: torch.library.Library | None = None
_plans: dict[tuple[Any, ...], Specs | None] = {}
"""By function and specs: the specs of the results where the chain is local, None where it is not."""
_usual: dict[int, bool] = {}
"""Dispatch keys of a call, as a number: True where nothing but autograd stands between the call and dispatch."""

_KEY = torch._C.DispatchKey
_HERE = _KEY.PythonTLSSnapshot
_MODES = torch._C._TorchDispatchModeKey
_INFRA = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)
_grad_enabled = torch.is_grad_enabled
_watching = torch._C._len_torch_dispatch_stack
_local_linear: Callable[..., torch.Tensor] = torch._C._nn.linear
_local_matmul: Callable[..., torch.Tensor] = torch.matmul


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


on_clear(_plans.clear)


# ------------------------------------------------------------ what is local
def _is_usual(keys: Any) -> bool:
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


def _try(key: tuple[Any, ...], chain: Callable[..., Results], tensors: Sequence[Any]) -> Specs | None:
    """The specs that a chain gives where all of it is local; remembered by `key`."""
    specs = [None if t is None else t._spec for t in tensors]
    if any(s is not None and type(s) is not Spec for s in specs):
        return None  # a view that had to move data: its spec is of one tensor, not of a kind of tensors
    first = tensors[0]
    found = _tried(chain, specs, first._local_tensor.device)
    if len(_plans) >= _MOST:
        _plans.clear()
    _plans[key] = found
    return found


def _tried(chain: Callable[..., Results], specs: Sequence[Spec | None], device: torch.device) -> Specs | None:
    mesh = next(s for s in specs if s is not None).mesh
    given = [s for s in specs if s is not None]
    if mesh.coord is None or any(s.mesh is not mesh or s.dtype is not given[0].dtype for s in given):
        return None
    last = [k - 1 for k in mesh.shape]
    if not given[0].dtype.is_floating_point or any(0 in s.local_shape_of(last) for s in given):
        return None  # rules may do something else where a shard is empty, and all ranks must do alike
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


def _contiguous(spec: Spec) -> bool:
    return tuple(spec.stride) == contiguous_stride(spec.shape)


# ------------------------------------------------------------ linear
def _linear_chain(x: Any, w: Any, b: Any) -> Results:
    """torch's own chain."""
    if x.ndim not in (2, 3) or w.ndim != 2 or not (_contiguous(x._spec) and _contiguous(w._spec)):
        raise GaveUp("no chain that is known here")
    return (_composite(aten.linear.default, x, w, b),)


def _composite(op: hot.Op, *args: Any) -> Any:
    """What torch makes of a composite, which the kernels below do not see."""
    return op._op_dk(_KEY.CompositeImplicitAutograd, *args)


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
            specs = _plans.get(key, _UNSEEN)
            if specs is _UNSEEN:
                needs = {"need_x": need_x, "need_w": need_w, "need_b": need_b}
                specs = _try(key, partial(_linear_grads_chain, **needs), (x, w, g))
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
        got = _composite(aten.linear.default, x, w, b)
        return plain_wrapper(got._local_tensor, got._spec)
    lb = None if b is None else b._local_tensor
    return _new(_DTensor, _local_linear(x._local_tensor, w._local_tensor, lb), spec, requires_grad=False)


def _linear(keys: Any, x: Any, w: Any, b: Any = None) -> Any:
    """`aten::linear` above autograd, on at least one tensor of a Python class."""
    D = _DTensor
    if type(x) is D and type(w) is D and (b is None or type(b) is D) and _is_usual(keys):
        key = (x._spec, w._spec, b if b is None else b._spec)
        specs = _plans.get(key, _UNSEEN)
        if specs is _UNSEEN:
            specs = _try(key, _linear_chain, (x, w, b))
        if specs is not None:
            return _apply_linear(x, w, b, specs[0]) if _grad_enabled() else _linear_here(x, w, b, specs[0])
    return _redispatch_linear(keys.remove(_HERE), x, w, b)


# ------------------------------------------------------------ matmul
def _matmul_chain(x: Any, y: Any) -> Results:
    """torch's own chain."""
    if x.ndim < 3 or x.ndim != y.ndim or x.shape[:-2] != y.shape[:-2]:
        raise GaveUp("no chain that is known here")
    return (_composite(aten.matmul.default, x, y),)


def _matmul_grads_chain(x: Any, y: Any, g: Any, need_x: bool, need_y: bool) -> Results:
    """The gradients of a product of as many matrices as matrices: products again."""
    dx = _composite(aten.matmul.default, g, y.transpose(-2, -1)) if need_x else None
    return dx, _composite(aten.matmul.default, x.transpose(-2, -1), g) if need_y else None


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
            specs = _plans.get(key, _UNSEEN)
            if specs is _UNSEEN:
                specs = _try(key, partial(_matmul_grads_chain, need_x=need_x, need_y=need_y), (x, y, g))
            if specs is not None:
                dx, dy = specs
                lx, ly, lg = x._local_tensor, y._local_tensor, g._local_tensor
                return (
                    None if dx is None else _new(D, torch.matmul(lg, ly.transpose(-2, -1)), dx, requires_grad=False),
                    None if dy is None else _new(D, torch.matmul(lx.transpose(-2, -1), lg), dy, requires_grad=False),
                    None,
                )
        return *_matmul_grads_chain(x, y, g, need_x, need_y), None


def _matmul_here(x: Any, y: Any, spec: Spec) -> Any:
    """The result, in a wrapper of its own; op by op where a dispatch mode looks on."""
    if _watching():
        got = _composite(aten.matmul.default, x, y)
        return plain_wrapper(got._local_tensor, got._spec)
    return _new(_DTensor, _local_matmul(x._local_tensor, y._local_tensor), spec, requires_grad=False)


def _matmul(keys: Any, x: Any, y: Any) -> Any:
    """`aten::matmul` above autograd, on at least one tensor of a Python class."""
    D = _DTensor
    if type(x) is D and type(y) is D and _is_usual(keys):
        key = (x._spec, y._spec)
        specs = _plans.get(key, _UNSEEN)
        if specs is _UNSEEN:
            specs = _try(key, _matmul_chain, (x, y))
        if specs is not None:
            return _apply_matmul(x, y, specs[0]) if _grad_enabled() else _matmul_here(x, y, specs[0])
    return _redispatch_matmul(keys.remove(_HERE), x, y)


_redispatch_linear: Callable[..., Any] = aten.linear.default.redispatch
_redispatch_matmul: Callable[..., Any] = aten.matmul.default.redispatch
# `Function.apply` without its look at torch.func, which `_is_usual` has had.
_apply_linear: Callable[..., Any] = super(torch.autograd.Function, _Linear).apply
_apply_matmul: Callable[..., Any] = super(torch.autograd.Function, _Matmul).apply
