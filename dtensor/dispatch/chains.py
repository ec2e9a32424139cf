"""Chains of ops that are local as a whole: the verdict, by specs.

A composite of torch is a chain of ops on DTensors, of which each is decided by its rule. Where every op of a chain
keeps its inputs where they are and runs as it is, on all ranks, all of it together is the same composite on the local
tensors, and has the layout that the chain gives. This is found by a trial on specs alone
(`dtensor.dispatch.decompositions`) at the first call with such specs, and remembered.

The verdict depends on global facts only, so that all ranks come to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from dtensor.comm.world import kept
from dtensor.dispatch import hit as hot
from dtensor.dispatch.decompositions import GaveUp, Trial
from dtensor.rules.call import Call, op_name
from dtensor.rules.decision import Decision
from dtensor.spec import Spec, contiguous_stride, may_be_empty

__all__ = ["HERE", "UNSEEN", "Results", "Specs", "composite", "is_contiguous", "is_usual", "plans", "try_chain"]

Results = tuple[Any, ...]
"""Tensors that a chain gives, None for those that are not asked for."""

Specs = tuple[Spec | None, ...]
"""Their specs."""

UNSEEN: Any = object()
plans: dict[tuple[Any, ...], Specs | None] = kept({})
"""By function and specs: the specs of the results where the chain is local, None where it is not."""

HERE = torch._C.DispatchKey.PythonTLSSnapshot
"""The dispatch key of kernels that see composites of DTensors whole."""

_MOST = 16384
_usual: dict[int, bool] = {}
"""Dispatch keys of a call, as a number: True where nothing but autograd stands between the call and dispatch."""

_MODES = torch._C._TorchDispatchModeKey
_INFRA = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)
_watching = torch._C._len_torch_dispatch_stack


def is_usual(keys: Any) -> bool:
    """Whether autograd is next, and no autocast, transform or tracer between."""
    number: int = keys.raw_repr()
    known = _usual.get(number)
    if known is None:
        rest = keys.remove(HERE)
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
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = found
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
