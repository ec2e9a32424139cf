"""What dispatch does at the first call of a kind: check, find the rule, decide, make the plan.

All checks come before anything is moved or written, and read global facts only, so a refusal is the same on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor.dispatch import hit as hot
from dtensor.dispatch.call import common_mesh, is_dtensor, make_call, metas_by_running, output_metas, plain_wrapper
from dtensor.dispatch.fallback import run_replicated
from dtensor.dispatch.functional import rewritten
from dtensor.dispatch.hit import OpInfo, Plan
from dtensor.dispatch.in_place import check_written, kept, run_inplace_view, run_out
from dtensor.dispatch.materialized import MovedSpec
from dtensor.dispatch.no_rule import guarded, is_of_torch, no_rule, notice, refuse_strict, replicated_rule, strictness
from dtensor.dispatch.plain import in_composite, with_plain
from dtensor.dispatch.views import late, with_deferred, with_moved
from dtensor.errors import LayoutError
from dtensor.placement import Shard, StridedShard
from dtensor.redistribute.executor.coalescing import may_meet, redistribute_together
from dtensor.rules.call import Call
from dtensor.rules.choice import decide
from dtensor.rules.decision import Decision
from dtensor.rules.deferred import DeferredSpec
from dtensor.rules.registry import rule_of
from dtensor.spec import Spec, may_be_empty

__all__ = ["miss"]


# ------------------------------------------------------------ the miss
def miss(
    info: OpInfo, key: tuple[Any, ...], local: list[Any], named: dict[str, Any], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """First call with this key: checks, decision, plan; runs it and caches it."""
    inplace_view = torch.Tag.inplace_view in info.func.tags
    kinds = late(args, kwargs)
    if DeferredSpec in kinds:
        return with_deferred(info, args, kwargs)
    if kinds and not inplace_view and info.kind != "out":
        return with_moved(info, args, kwargs)
    if info.kind != "foreach":  # whose elements may each have a mesh of their own
        common_mesh(info, args, kwargs)
    if info.kind == "out":
        return run_out(info, args, kwargs)
    if inplace_view:
        return run_inplace_view(info, args, kwargs)
    if info.kind == "foreach":
        from dtensor.dispatch.lists import miss_lists

        return miss_lists(info, key, local, named, args, kwargs)
    metas = output_metas(info.func, args, kwargs)
    if metas is None and info.entry is not None and is_of_torch(info.name):
        metas = metas_by_running(info.func, args, kwargs)
    if metas is None:
        return run_replicated(info, args, kwargs)
    structure, outs = metas
    call = make_call(info.func, args, kwargs, outs)
    rule = rule_of(info.entry, call)
    found = rule is not None
    if rule is None:
        from dtensor.dispatch.decompositions import decomposed, is_composite

        if is_composite(info.func):
            return in_composite(info.func, args, kwargs)
        if not is_of_torch(info.name):
            raise no_rule(info, call, "the operator has no sharding rule")
        execute = None if strictness() > 1 else decomposed(info, call, args, kwargs)
        if execute is not None:
            result = execute(local, named, args)
            hot.store(info, key, guarded(execute, info, call, 2))
            return result
        refuse_strict(info, call, 1)
        notice(info, call)
        rule = replicated_rule(call)
    keep = kept(info, call)
    if keep:
        check_written(info, call, outs)
    decision = decide(info.name, rule, call.inputs, outs, call.inputs[0].mesh, keep)
    if decision is None:
        execute = rewritten(info, args, kwargs)
        result = execute(local, named, args)
        hot.store(info, key, execute)
        return result
    names = [a.name for a in info.func._schema.arguments][: len(args)]
    kind = GroupedPlan if meets(call, decision) else Plan
    plan = kind(info, call, decision, structure, names)
    result = plan.execute(local, named, args)
    if not info.written:
        own = plan.kernel is None and plan.run is info.run and (rule.bind is None or not may_be_empty(decision.inputs))
        actual = actual_outputs(decision, result) if own else decision
        if actual is not decision:
            plan = kind(info, call, actual, structure, names)
            result = _rewrapped(result, actual)
        check_locals(actual, result, info)
    hot.store(info, key, plan.execute if found else guarded(plan.execute, info, call, 1))
    return result


class GroupedPlan(Plan):
    """A plan whose inputs move at once: on an accelerator their collectives may be one launch."""

    __slots__ = ()

    def move(self, local: list[Any], named: dict[str, Any]) -> None:
        """As a plan's, all at once."""
        boxes: list[tuple[Any, Any]] = []
        for i, _, _ in self.moves:
            at, sub = self.places[i]
            box: Any = local if isinstance(at, int) else named
            boxes.append((box, at) if sub is None else (box[at], sub))
        jobs = [(box[at], src, dst) for (box, at), (_, src, dst) in zip(boxes, self.moves, strict=True)]
        for (box, at), moved in zip(boxes, redistribute_together(jobs), strict=True):
            box[at] = moved


def meets(call: Call, decision: Decision) -> bool:
    """True where several inputs move whose collectives may be one launch."""
    return may_meet([s for s, d in zip(call.inputs, decision.inputs, strict=True) if s is not d])


def actual_outputs(decision: Decision, result: Any) -> Decision:
    """The decision with the metadata that the local op really gave, where torch's shape function says otherwise.

    Kernels of one device may give statistics of another dtype, or empty ones. Dtypes, and the shapes of results
    that nothing cuts, are the same on all ranks, so this is a global fact.
    """
    many = result if isinstance(result, (list, tuple)) else [result]
    outs = list(decision.outputs)
    for i, (t, spec) in enumerate(zip(many, outs, strict=False)):
        if spec is None or not is_dtensor(t) or spec.mesh.coord is None:
            continue
        got = t._local_tensor
        if got.shape == spec.local_shape and got.dtype == spec.dtype:
            continue
        shape: Sequence[int] = spec.shape
        stride: Sequence[int] = spec.stride
        if not any(isinstance(p, (Shard, StridedShard)) for p in spec.placements):
            shape, stride = got.shape, got.stride()
        outs[i] = Spec.make(spec.mesh, spec.placements, shape, stride, got.dtype)
    return decision if outs == list(decision.outputs) else replace(decision, outputs=tuple(outs))


def _rewrapped(result: Any, decision: Decision) -> Any:
    """`result` with the specs of `decision`; views that had to move data keep their mark."""

    def again(t: Any, spec: Spec | None) -> Any:
        if spec is None or not is_dtensor(t) or isinstance(t._spec, MovedSpec):
            return t
        return plain_wrapper(t._local_tensor, spec)

    if isinstance(result, (list, tuple)):
        return type(result)(again(t, s) for t, s in zip(result, decision.outputs, strict=True))
    return again(result, decision.outputs[0])


def check_locals(decision: Decision, result: Any, info: OpInfo) -> None:
    """The local results have the shapes and dtypes that the decision promises: an error of ours otherwise."""
    many = result if isinstance(result, (list, tuple)) else [result]
    for t, spec in zip(many, decision.outputs, strict=False):  # fewer where the op gives nothing
        if spec is None or not is_dtensor(t):
            continue
        got = t._local_tensor
        if got.shape != spec.local_shape or got.dtype != spec.dtype:
            entry = info.entry
            rule = "rule" if entry is None or not entry.where else f"rule {entry.text[:200]!r} of {entry.where}"
            raise LayoutError(
                f"{decision.op}: the {rule} promised a local {spec.dtype} of {list(spec.local_shape)} for {spec}, "
                f"the local op gave {got.dtype} of {list(got.shape)}; this is a fault of the rule.\n  {decision}"
            )


hot.bind_miss(miss, with_plain)
