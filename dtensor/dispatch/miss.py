"""What dispatch does with a call that has no cached plan, in order.

    1  arguments that are not up to date (deferred results, views that had to move data): made so, and called again
    2  the kinds of ops that go their own way: lists, `out=`, views in place (`OpInfo.kind`)
    3  metadata of the outputs; where they depend on data the call runs on gathered inputs
    4  the rule of the call; without one torch takes the op apart, or it runs on gathered inputs
    5  the decision: which strategy on which mesh axis; where none keeps what is written, the call is rewritten
    6  the plan, which runs; its results are held to what was promised, and it is cached

All checks come before anything is moved or written, and read global facts only, so a refusal is the same on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch.call import common_mesh, is_dtensor, make_call, plain_wrapper
from dtensor.dispatch.decompositions import decomposed, is_composite
from dtensor.dispatch.hit import OpInfo
from dtensor.dispatch.in_place import check_written, kept, rewritten, run_inplace_view, run_out
from dtensor.dispatch.lists import plan_lists
from dtensor.dispatch.materialized import MovedSpec
from dtensor.dispatch.metadata import metas_by_running, output_metas
from dtensor.dispatch.no_rule import guarded, is_of_torch, rule_to_gather, run_gathered
from dtensor.dispatch.plan import Execute, Plan
from dtensor.dispatch.views import late_specs, with_deferred, with_moved
from dtensor.errors import LayoutError
from dtensor.placement import Shard, StridedShard
from dtensor.rules.choice import decide
from dtensor.rules.decision import Decision
from dtensor.rules.deferred import DeferredSpec
from dtensor.rules.registry import rule_of
from dtensor.rules.rule import Rule
from dtensor.spec import Spec, may_be_empty

__all__ = ["actual_outputs", "miss"]


def miss(
    info: OpInfo, key: tuple[Any, ...], local: list[Any], named: dict[str, Any], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Run a call for which nothing is cached under `key`, and cache what runs the next one."""
    specs = late_specs(args, kwargs)
    if DeferredSpec in specs:
        return with_deferred(info, args, kwargs)
    if specs and info.kind not in ("out", "inplace view"):
        return with_moved(info, args, kwargs)

    if info.kind == "lists":  # whose elements may each have a mesh of their own
        return _run(info, key, plan_lists(info, args, kwargs), local, named, args)
    common_mesh(info.name, args, kwargs)
    if info.kind == "out":
        return run_out(info, args, kwargs)
    if info.kind == "inplace view":
        return run_inplace_view(info, args, kwargs)

    metas = output_metas(info.func, args, kwargs)
    if metas is None and info.entry is not None and is_of_torch(info.name):
        metas = metas_by_running(info.func, args, kwargs)
    if metas is None:
        return run_gathered(info, args, kwargs)
    structure, outputs = metas

    call = make_call(info.func, args, kwargs, outputs)
    rule = rule_of(info.entry, call)
    found = rule is not None
    if rule is None:
        if is_composite(info.func):
            return info.func.decompose(*args, **kwargs)
        execute = decomposed(info, call, args, kwargs) if is_of_torch(info.name) else None
        if execute is not None:
            return _run(info, key, guarded(execute, info, call, 2), local, named, args)
        rule = rule_to_gather(info, call)

    keep = kept(info, call)
    if keep:
        check_written(info, call, outputs)
    decision = decide(info.name, rule, call.inputs, outputs, call.inputs[0].mesh, keep)
    if decision is None:
        return _run(info, key, rewritten(info, args, kwargs), local, named, args)

    names = [a.name for a in info.func._schema.arguments][: len(args)]
    plan = Plan(info, call, decision, structure, names)
    result = plan.execute(local, named, args)
    if not info.written:
        plan, result = _as_promised(info, plan, result, rule, structure, names)
    hot.store(info, key, plan.execute if found else guarded(plan.execute, info, call, 1))
    return result


def _run(
    info: OpInfo, key: tuple[Any, ...], execute: Execute, local: list[Any], named: dict[str, Any], args: tuple[Any, ...]
) -> Any:
    """Run what is cached then."""
    result = execute(local, named, args)
    hot.store(info, key, execute)
    return result


# ------------------------------------------------------------ results and what was promised
def _as_promised(
    info: OpInfo, plan: Plan, result: Any, rule: Rule, structure: str, names: Sequence[str]
) -> tuple[Plan, Any]:
    """The plan and its result, with the metadata that the local op really gave; LayoutError for a faulty rule."""
    decision = plan.decision
    own = plan.kernel is None and plan.run is info.run and (rule.bind is None or not may_be_empty(decision.inputs))
    actual = actual_outputs(decision, result) if own else decision
    if actual is not decision:
        plan = Plan(info, plan.call, actual, structure, names)
        result = _rewrapped(result, actual)
    _check_locals(actual, result, info)
    return plan, result


def actual_outputs(decision: Decision, result: Any) -> Decision:
    """The decision with the metadata that the local op really gave, where torch's shape function says otherwise.

    Kernels of one device may give statistics of another dtype, or empty ones. Dtypes, and the shapes of results
    that nothing shards, are the same on all ranks, so this is a global fact.
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


def _check_locals(decision: Decision, result: Any, info: OpInfo) -> None:
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


late.give(miss=miss)
