"""An op without a rule, run as the ops that it is made of: torch's Python decompositions.

    aten.logit_backward(g: f32[8@dp,4], x: f32[8@dp,4], eps)      no rule; torch writes it with lt, gt, logical_and,
                                                                  sub, mul, div, where: all of them pointwise
    trial      the decomposition runs on specs alone: every op inside is decided, nothing is computed or sent
    verdict    cost of the decisions <= cost of gathering the inputs: the list of steps is the plan
    replay     later calls run the steps; the decomposition itself is not called again

The trial is a function of the cache key (specs and static arguments), so its verdict is the same on all ranks and
its steps are right for every call of that key: what depended on data would have failed in it. What it cannot
follow (writes, random numbers, results whose shape depends on data, a tensor read by Python) makes it give up, and
the op runs replicated. Tensors that the decomposition makes itself are replicated ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch.call import flat, is_dtensor, make_call, map_args, plain_wrapper, replicated_on
from dtensor.dispatch.hit import Op, OpInfo
from dtensor.dispatch.metadata import output_metas
from dtensor.dispatch.no_rule import replicated_rule, strictness
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Replicate
from dtensor.rules.call import Call
from dtensor.rules.choice import decide
from dtensor.rules.decision import Decision
from dtensor.rules.kernel import traced
from dtensor.rules.registry import rule_of
from dtensor.spec import Spec, TensorMeta

__all__ = ["GaveUp", "Trial", "decomposed", "decomposition_of", "is_composite"]

MAX_STEPS = 256
"""Ops of a decomposition beyond which it is not tried further."""

log = logging.getLogger("dtensor")


@cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    import torch._decomp
    import torch._refs  # puts its functions into the table

    return torch._decomp.decomposition_table


def decomposition_of(op: Op) -> Callable[..., Any] | None:
    """torch's Python decomposition of `op`, or None."""
    return _table().get(op)


def is_composite(op: Op) -> bool:
    """True when `op` is defined by other ops in C++, whatever the tensors are."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


class GaveUp(Exception):
    """Something that a trial cannot follow."""


@dataclass(frozen=True, slots=True)
class _Ref:
    """The value made at place `at` of a trace."""

    at: int


@dataclass(slots=True)
class _Step:
    """One op of a trace: its arguments, with `_Ref` in the tensors' places; `factory`: it makes plain tensors."""

    info: OpInfo
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    factory: bool


class Trial(TorchDispatchMode):
    """Runs a decomposition on specs: notes the steps, what was decided of each op, and what the decisions cost."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__()
        self.mesh, self.device = mesh, device
        self.steps: list[_Step] = []
        self.values: list[Any] = []
        self.made_by: list[OpInfo | None] = []
        self.decisions: list[tuple[Call, Decision]] = []
        self.cost = 0.0

    def tensor(self, spec: Spec, by: OpInfo | None) -> Any:
        """A DTensor without data in this layout: the next value of the trace."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            late.DTensor, spec.shape, strides=spec.stride, dtype=spec.dtype, device=self.device
        )
        made._spec, made._at = spec, len(self.values)
        made._local_tensor = torch.empty(spec.local_shape, dtype=spec.dtype, device="meta")
        self.values.append(made)
        self.made_by.append(by)
        return made

    def refs(self, *what: Any) -> Any:
        """Arguments with `_Ref` for the values of this trace, constants as replicated tensors."""

        def ref(a: Any) -> Any:
            if is_dtensor(a):
                if a._at >= len(self.values) or self.values[a._at] is not a:
                    raise GaveUp("a tensor of elsewhere")
                return _Ref(a._at)
            return a

        return map_args(ref, *what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_args(self._constant, args, kwargs or {})
        info = hot.info_of(func)
        if info.special is not None or info.written or info.kind != "ordinary" or len(self.steps) >= MAX_STEPS:
            raise GaveUp(info.name)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise GaveUp(f"{info.name} draws random numbers")
        tensors = [a for a in flat(args, kwargs) if isinstance(a, torch.Tensor)]
        if not tensors:
            return self._factory(info, args, kwargs)
        metas = output_metas(func, args, kwargs)
        if metas is None:
            raise GaveUp(f"{info.name}: its result depends on data")
        structure, outs = metas
        call = make_call(func, args, kwargs, outs)
        rule = rule_of(info.entry, call)
        if rule is None:
            inner = func.decompose if is_composite(func) else decomposition_of(func)
            if inner is not None:
                with self:
                    return inner(*args, **kwargs)
            if not all(s.is_replicated() for s in call.inputs):
                raise GaveUp(f"{info.name} has no rule either")
            rule = replicated_rule(call)
        decision = decide(info.name, rule, call.inputs, outs, self.mesh)
        if decision is None or structure == "none":
            raise GaveUp(info.name)
        self.cost += decision.cost
        self.decisions.append((call, decision))
        new_args, new_kwargs = self.refs(args, kwargs)
        self.steps.append(_Step(info, new_args, new_kwargs, False))
        made = [None if s is None else self.tensor(s, info) for s in decision.outputs]
        return made[0] if structure == "one" else made if structure == "list" else tuple(made)

    def _constant(self, a: Any) -> Any:
        """A plain tensor made from Python values inside the decomposition: a step that gives it, replicated."""
        if not isinstance(a, torch.Tensor) or is_dtensor(a):
            return a
        if a.device.type == "meta" or traced(a):  # a plan that is kept must not hold a tensor of a trace
            raise GaveUp("a tensor without data")
        value = a.detach().clone()
        spec = Spec.make(self.mesh, (Replicate(),) * self.mesh.ndim, value.shape, value.stride(), value.dtype)
        self.steps.append(_Step(hot.info_of(torch.ops.aten.alias.default), (value,), {}, True))
        return self.tensor(spec, None)

    def _factory(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        got = info.func(*args, **{**kwargs, "device": torch.device("meta")})
        if not isinstance(got, torch.Tensor):
            raise GaveUp(info.name)
        self.steps.append(_Step(info, args, {**kwargs, "device": self.device}, True))
        spec = Spec.make(self.mesh, (Replicate(),) * self.mesh.ndim, got.shape, got.stride(), got.dtype)
        return self.tensor(spec, info)


def decomposed(
    info: OpInfo, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """What a plan runs for a call without a rule that torch can take apart at no more cost than gathering; or None."""
    function = None if strictness() > 1 else decomposition_of(info.func)
    if function is None or info.written or info.is_view or all(s.is_replicated() for s in call.inputs):
        return None
    if info.value_names:  # arguments that are not in the cache key, and would be in the trace
        return None
    mesh = call.inputs[0].mesh
    gathered = decide(info.name, replicated_rule(call), call.inputs, call.outputs, mesh)
    device = next(a for a in flat(args, kwargs) if is_dtensor(a))._local_tensor.device
    trial = Trial(mesh, device)
    places: list[tuple[Any, int | None]] = []
    try:
        new_args, new_kwargs = _inputs(trial, places, args, kwargs)
        with trial:
            result = function(*new_args, **new_kwargs)
        many = list(result) if isinstance(result, (list, tuple)) else [result]
        refs = [_result(trial, r, m) for r, m in zip(many, call.outputs, strict=True)]
    except Exception as e:  # whatever a decomposition does with tensors that have no data
        log.debug("%s: its decomposition was tried and left: %s", info.name, e)
        return None
    if gathered is None or trial.cost > gathered.cost:
        return None
    kind = type(result) if isinstance(result, (list, tuple)) else None
    return _replay(mesh, trial.steps, places, list(call.inputs), refs, kind)


def _inputs(
    trial: Trial, places: list[tuple[Any, int | None]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with values of the trace; `places` gets where each came from."""

    def one(at: Any, a: Any) -> Any:
        if isinstance(a, (list, tuple)) and any(is_dtensor(x) for x in a):
            out = []
            for i, x in enumerate(a):
                places.append((at, i)) if is_dtensor(x) else None
                out.append(trial.tensor(x._spec, None) if is_dtensor(x) else x)
            return out
        if is_dtensor(a):
            places.append((at, None))
            return trial.tensor(a._spec, None)
        return a

    return tuple(one(i, a) for i, a in enumerate(args)), {k: one(k, a) for k, a in kwargs.items()}


def _result(trial: Trial, value: Any, meta: TensorMeta | None) -> _Ref | None:
    """The reference of a result, a copy where it would share memory that the op's own result would not."""
    if value is None and meta is None:
        return None
    if meta is None or not is_dtensor(value) or (value.shape, value.dtype) != (torch.Size(meta.shape), meta.dtype):
        raise GaveUp(f"the decomposition gives {value!r}, the op {meta}")
    by = trial.made_by[value._at]
    if by is None or by.is_view:
        with trial:
            value = value.clone()
    return _Ref(value._at)


def _replay(
    mesh: DeviceMesh, steps: Sequence[_Step], places: Sequence[tuple[Any, int | None]], specs: Sequence[Spec],
    refs: Sequence[_Ref | None], kind: type | None,
) -> Callable[..., Any]:  # fmt: skip
    """The function that runs a trace: `execute(local, named, args)`, as plans are."""
    def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        values: list[Any] = []
        for (at, sub), spec in zip(places, specs, strict=True):
            box = local[at] if isinstance(at, int) else named[at]
            values.append(plain_wrapper(box if sub is None else box[sub], spec))
        given = lambda a: values[a.at] if type(a) is _Ref else a  # noqa: E731
        for step in steps:
            a, k = map_args(given, step.args, step.kwargs)
            if step.factory:
                values.append(replicated_on(mesh, step.info.func(*a, **k)))
                continue
            got = hot.dispatch(step.info.func, a, k)
            values += got if isinstance(got, (list, tuple)) else [got]
        made = [None if r is None else values[r.at] for r in refs]
        return made[0] if kind is None else list(made) if kind is list else tuple(made)

    return execute
