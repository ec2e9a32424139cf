"""What dispatch does at the first call of a kind: check, find the rule, decide, make the plan.

All checks come before anything is moved or written, and read global facts only, so a refusal is the same on
every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtensor import dispatch as hot
from dtensor.device_mesh import DeviceMesh
from dtensor.dispatch import OpInfo, Plan
from dtensor.dispatch_call import flat, is_dtensor, layouts, make_call, map_args, output_metas
from dtensor.dispatch_writes import cannot_keep, check_written, kept, run_inplace_view, run_out
from dtensor.errors import LayoutError, MeshError, MixedTensorError, NoRuleError, explain_error
from dtensor.factors import Rule
from dtensor.moved import MovedSpec, settled_spec
from dtensor.placement import Replicate, Shard, StridedShard
from dtensor.propagate import Decision, decide
from dtensor.registry import Call, Entry
from dtensor.spec import Spec

__all__ = ["miss", "notice", "replicated_rule", "rule_of"]

_WITH_ZEROS = frozenset(
    f"aten.{op}" if "." in op else f"aten.{op}.default"
    for op in (
        "cat stack index_put _index_put_impl_ select_scatter slice_scatter diagonal_scatter as_strided_scatter "
        "where.self put index_fill.int_Tensor"
    ).split()
)
_torch_implicit: Callable[[], bool] = getattr(torch._C, "_get_dtensor_allow_implicit_replication", lambda: False)
"""Set by torch's composites around plain tensors that they make themselves."""

log = logging.getLogger("dtensor")
_noticed: set[str] = set()


# ------------------------------------------------------------ plain tensors
def with_plain(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with plain tensors among DTensors: those of at most one element and, if asked, all count as replicated.

    So do plain zeros inside a backward: torch's own formulas make them.
    """
    mesh = common_mesh(info, args, kwargs)
    implicit = getattr(hot._flags, "implicit", False) or _autograd_zeros(info) or _torch_implicit()
    schema = info.func._schema.arguments

    def convert(a: Any) -> Any:
        if isinstance(a, torch.Tensor) and not is_dtensor(a):
            if not implicit and a.numel() > 1 and not (torch._C._current_graph_task_id() >= 0 and not a.any()):
                raise MixedTensorError(
                    explain_error(
                        f"{info.name}", layouts(args, kwargs),
                        "got mixed torch.Tensor and DTensor; every tensor of one operation must be a DTensor",
                        "distribute_tensor(x, mesh, placements) for the plain tensor, "
                        "or run inside dtensor.experimental.implicit_replication()",
                    )
                )  # fmt: skip
            spec = Spec.make(mesh, (Replicate(),) * mesh.ndim, a.shape, a.stride(), a.dtype)
            return hot._new(hot._DTensor, a, spec, requires_grad=False)
        if type(a) is not hot._DTensor and is_dtensor(a):
            return hot._new(hot._DTensor, a._local_tensor, a._spec, requires_grad=False)
        return a

    given = [*zip((x.name for x in schema), args, strict=False), *kwargs.items()]
    for name, a in given:
        if name in info.written and isinstance(a, torch.Tensor) and not is_dtensor(a):
            raise MixedTensorError(
                explain_error(
                    info.name, layouts(args, kwargs), f"argument {name!r}, which is written, is a plain tensor",
                    "write into a DTensor, or use x.full_tensor() / x.to_local() for the other arguments",
                )
            )  # fmt: skip
    new_args, new_kwargs = map_args(convert, args, kwargs)
    result = hot.dispatch(info.func, new_args, new_kwargs)
    if info.written and info.func._schema.returns:
        return args[0]
    return result


def _autograd_zeros(info: OpInfo) -> bool:
    """Inside a backward, autograd's own formulas put plain zeros beside gradients, e.g. for unused outputs of split."""
    return info.name in _WITH_ZEROS and torch._C._current_graph_task_id() >= 0


def common_mesh(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceMesh:
    """The mesh of all DTensor arguments. MeshError when there are two."""
    mesh: DeviceMesh | None = None
    for a in flat(args, kwargs):
        if is_dtensor(a):
            if mesh is None:
                mesh = a._spec.mesh
            elif a._spec.mesh is not mesh and a._spec.mesh != mesh:
                raise MeshError(
                    explain_error(
                        info.name, layouts(args, kwargs) + f"; meshes {mesh} and {a._spec.mesh}",
                        "all DTensors of one operation must live on the same mesh",
                        "bring one over: distribute_tensor(x.full_tensor(), mesh, placements)",
                    )
                )  # fmt: skip
    if mesh is None:
        raise LayoutError(f"{info.name}: no DTensor among the arguments")
    return mesh


# ------------------------------------------------------------ the miss
def miss(
    info: OpInfo, key: tuple[Any, ...], local: list[Any], named: dict[str, Any], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """First call with this key: checks, decision, plan; runs it and caches it."""
    if any(is_dtensor(a) and isinstance(a._spec, MovedSpec) for a in flat(args, kwargs)):
        return _settle(info, args, kwargs)
    if info.kind != "foreach":  # whose elements may each have a mesh of their own
        common_mesh(info, args, kwargs)
    if info.kind == "out":
        return run_out(info, args, kwargs)
    if torch.Tag.inplace_view in info.func.tags:
        return run_inplace_view(info, args, kwargs)
    if info.kind == "foreach":
        from dtensor.dispatch_lists import miss_lists

        return miss_lists(info, key, local, named, args, kwargs)
    metas = output_metas(info.func, args, kwargs)
    if metas is None:
        return run_replicated(info, args, kwargs)
    structure, outs = metas
    call = make_call(info.func, args, kwargs, outs)
    rule = rule_of(info.entry, call)
    if rule is None:
        done = _decompose(info, args, kwargs)
        if done is not NotImplemented:
            return done
        if not info.name.startswith(("aten.", "prims.")):
            raise NoRuleError(
                explain_error(
                    info.name, layouts(args, kwargs), "the operator has no sharding rule",
                    f"dtensor.registry.register({info.name.rpartition('.')[0]!r}, pattern(...)), "
                    f"or dtensor.experimental.register_sharding(torch.ops.{info.name})",
                )
            )  # fmt: skip
        notice(info, call)
        rule = replicated_rule(call)
    keep = kept(info, call)
    if keep:
        check_written(info, call, outs)
    decision = decide(info.name, rule, call.inputs, outs, call.inputs[0].mesh, keep)
    if decision is None:
        raise cannot_keep(info, args, kwargs)
    names = [a.name for a in info.func._schema.arguments][: len(args)]
    plan = Plan(info, call, decision, structure, names)
    result = plan.execute(local, named, args)
    if not info.written:
        own = plan.kernel is None and plan.run is info.run and (rule.bind is None or not _may_be_empty(decision))
        actual = actual_outputs(decision, result) if own else decision
        if actual is not decision:
            plan = Plan(info, call, actual, structure, names)
            result = _rewrapped(result, actual)
        check_locals(actual, result)
    hot.store(info, key, plan.execute)
    return result


def _may_be_empty(decision: Decision) -> bool:
    """True when some rank's shard of some input has no elements: there a rule may run something else."""
    last = [k - 1 for k in decision.inputs[0].mesh.shape]
    return any(0 in s.local_shape_of(last) for s in decision.inputs)


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
        return hot._new(hot._DTensor, t._local_tensor, spec, requires_grad=False)

    if isinstance(result, (list, tuple)):
        return type(result)(again(t, s) for t, s in zip(result, decision.outputs, strict=True))
    return again(result, decision.outputs[0])


def check_locals(decision: Decision, result: Any) -> None:
    """The local results have the shapes and dtypes that the decision promises: an error of ours otherwise."""
    many = result if isinstance(result, (list, tuple)) else [result]
    for t, spec in zip(many, decision.outputs, strict=False):  # fewer where the op gives nothing
        if spec is None or not is_dtensor(t):
            continue
        got = t._local_tensor
        if got.shape != spec.local_shape or got.dtype != spec.dtype:
            raise LayoutError(
                f"{decision.op}: the rule promised a local {spec.dtype} of {list(spec.local_shape)} for {spec}, "
                f"the local op gave {got.dtype} of {list(got.shape)}; this is a fault of the rule.\n  {decision}"
            )


def rule_of(entry: Entry | None, call: Call) -> Rule | None:
    """The rule that the entry builds for this call."""
    return None if entry is None else entry.build(call)


def replicated_rule(call: Call) -> Rule:
    """The rule of an op about which nothing is known: all inputs and outputs replicated."""
    return Rule(
        tuple(((),) * s.ndim for s in call.inputs),
        tuple(() if m is None else ((),) * len(m.shape) for m in call.outputs),
        (),
    )


def notice(info: OpInfo, call: Call) -> None:
    """Say once per op that it runs replicated, when that moves anything."""
    if info.name not in _noticed and not all(s.is_replicated() for s in call.inputs):
        _noticed.add(info.name)
        total = sum(s.numel * s.dtype.itemsize for s in call.inputs if not s.is_replicated())
        log.warning("%s has no sharding rule and runs replicated; its inputs (%d bytes) are gathered", info.name, total)


def run_replicated(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op whose output shapes depend on the data: every rank gathers the inputs and computes the same."""
    first = next(a for a in flat(args, kwargs) if is_dtensor(a))
    mesh = first._spec.mesh
    if info.written and not all(a._spec.is_replicated() for a in flat(args, kwargs) if is_dtensor(a)):
        raise cannot_keep(info, args, kwargs)
    if not info.name.startswith(("aten.", "prims.")):
        raise NoRuleError(f"{info.name}: the operator has no sharding rule, and its output cannot be predicted")

    def whole(a: Any) -> Any:
        if not is_dtensor(a):
            return a
        return hot.redistribute_local(a._local_tensor, a._spec, a._spec.with_placements((Replicate(),) * mesh.ndim))

    largs, lkwargs = map_args(whole, args, kwargs)
    got = info.run(*largs, **lkwargs)

    def wrap(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        spec = Spec.make(mesh, (Replicate(),) * mesh.ndim, t.shape, t.stride(), t.dtype)
        return hot._new(hot._DTensor, t, spec, requires_grad=False)

    if info.written:
        return args[0]
    return type(got)(wrap(t) for t in got) if isinstance(got, (list, tuple)) else wrap(got)


def _decompose(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch._C._dispatch_has_kernel_for_dispatch_key(info.func.name(), "CompositeImplicitAutograd"):
        return info.func.decompose(*args, **kwargs)
    return NotImplemented


# ------------------------------------------------------------ views that moved
def _settle(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with views that had to move data: they may be read while their base is as it was, not written."""
    origin: list[Any] = []

    def settle(a: Any) -> Any:
        if not is_dtensor(a) or not isinstance(a._spec, MovedSpec):
            return a
        origin.append(a._spec.base)
        return hot._new(hot._DTensor, a._local_tensor, settled_spec(a, info.name), requires_grad=False)

    params = info.func._schema.arguments
    for name, a in [*zip((p.name for p in params), args, strict=False), *kwargs.items()]:
        if name in info.written and any(is_dtensor(x) and isinstance(x._spec, MovedSpec) for x in flat((a,), {})):
            raise LayoutError(
                explain_error(
                    info.name, layouts(args, kwargs),
                    "writing into a view that had to move data would not reach its base",
                    "redistribute the base first so that the view is local, or write through the whole tensor",
                )
            )  # fmt: skip
    new_args, new_kwargs = map_args(settle, args, kwargs)
    result = hot.dispatch(info.func, new_args, new_kwargs)
    if info.is_view:  # also of the first base, if it has moved again: the temporary wrapper above is never written
        for t in result if isinstance(result, (list, tuple)) else [result]:
            if is_dtensor(t):
                t._spec = MovedSpec.of(t._spec, origin[0])
    return result


hot.bind_miss(miss, with_plain)
