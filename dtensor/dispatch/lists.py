"""Ops on lists of tensors that work element by element, such as `_foreach_add`.

Every element is decided like the op it stands for (equal elements once), the inputs that have to move are
moved, and the list op runs once on the local lists. Elements that are written and that no strategy keeps go by the
functional form of the op and are written back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import increment_version

from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch.call import flat, is_dtensor, make_call, map_named, plain_wrapper, some_elements
from dtensor.dispatch.hit import OpInfo
from dtensor.dispatch.in_place import functional_form, with_kwargs
from dtensor.dispatch.materialized import note_written, storage_of
from dtensor.dispatch.metadata import output_metas
from dtensor.dispatch.no_rule import guarded, notice, refuse_strict, replicated_rule, run_on_copies
from dtensor.dispatch.plan import Execute
from dtensor.dispatch.views import write_local
from dtensor.errors import MeshError
from dtensor.placement import Shard, StridedShard
from dtensor.redistribute.executor.coalescing import may_meet, redistribute_together
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.call import Call, flat_inputs
from dtensor.rules.choice import decide
from dtensor.rules.decision import Decision
from dtensor.rules.registry import find, rule_of
from dtensor.rules.rule import Entry
from dtensor.spec import Spec, TensorMeta, in_order

__all__ = ["base_entry", "plan_lists"]


Move = tuple[Any, int, Spec, Spec]
"""Argument (position or name), element, layout it comes in, layout it goes to."""

BUCKET = 1 << 20
"""Elements of the largest pending tensor that is reduced together with others."""


class ListPlan:
    """A plan for a list op: which elements of which argument move, then one local call."""

    __slots__ = ("execute",)

    def __init__(self, info: OpInfo, moves: Sequence[Move], outs: Sequence[Spec | None]) -> None:
        run, new, D = info.run, late.new, late.DTensor
        returns = bool(info.func._schema.returns) and not info.written
        groups = list(_grouped(moves))
        together = may_meet([group[0][2] for group in groups])

        def execute(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
            if groups:
                local, named = [list(x) if isinstance(x, list) else x for x in local], dict(named)
                if together:
                    _move_all(groups, local, named)
                for group in groups if not together else ():
                    boxes = [local[at] if isinstance(at, int) else named[at] for at, *_ in group]
                    parts = [box[i] for box, (_, i, _, _) in zip(boxes, group, strict=True)]
                    for box, (_, i, _, _), moved in zip(boxes, group, _moved(parts, group), strict=True):
                        box[i] = moved
            got = run(*local, **named)
            if not returns:
                note_written(args, info.written_at)
                return args[0] if info.func._schema.returns else None
            if groups:
                got = [g if s is None else in_order(g, s.stride) for g, s in zip(got, outs, strict=True)]
            return [None if s is None else new(D, g, s, requires_grad=False) for g, s in zip(got, outs, strict=True)]

        self.execute: Callable[..., Any] = execute


def _grouped(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """The moves, small pending sums of one layout that become replicated together, the others one by one."""
    together: dict[tuple[Any, ...], list[Move]] = {}
    for move in moves:
        _, _, src, dst = move
        whole = not any(isinstance(p, (Shard, StridedShard)) for p in (*src.placements, *dst.placements))
        sums = all(p.is_replicate() or p.is_partial("sum") for p in src.placements)
        if whole and sums and not dst.has_partial() and src.numel <= BUCKET:
            together.setdefault((src.mesh, src.placements, dst.placements, src.dtype), []).append(move)
        else:
            yield [move]
    yield from together.values()


def _moved(parts: Sequence[torch.Tensor], group: Sequence[Move]) -> list[torch.Tensor]:
    """The local tensors of a group in their new layouts, by one redistribution."""
    return _apart([redistribute_local(*move) for move in _in_one(parts, group)], parts)


def _in_one(parts: Sequence[torch.Tensor], group: Sequence[Move]) -> list[tuple[torch.Tensor, Spec, Spec]]:
    """The redistributions of a group: one, of all parts in a row, except on ranks outside the mesh."""
    _, _, src, dst = group[0]
    if len(group) == 1 or src.mesh.coord is None:
        return [(t, s, d) for t, (_, _, s, d) in zip(parts, group, strict=True)]
    flat = torch.cat([t.reshape(-1) for t in parts])
    as_one = Spec.make(src.mesh, src.placements, flat.shape, (1,), src.dtype)
    return [(flat, as_one, as_one.with_placements(dst.placements))]


def _apart(moved: list[torch.Tensor], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `_in_one` made one, once it has moved, as the tensors it was made of."""
    if len(moved) == len(parts):
        return moved
    return [f.view(t.shape) for f, t in zip(moved[0].split([t.numel() for t in parts]), parts, strict=True)]


def _move_all(groups: Sequence[Sequence[Move]], local: list[Any], named: dict[str, Any]) -> None:
    """All groups at once, where several collectives can be one launch; into the lists `local` and `named` hold."""
    named.update((name, list(x)) for name, x in named.items() if isinstance(x, list))
    boxes = [[local[at] if isinstance(at, int) else named[at] for at, *_ in group] for group in groups]
    parts = [[box[i] for box, (_, i, _, _) in zip(b, g, strict=True)] for b, g in zip(boxes, groups, strict=True)]
    jobs = [_in_one(p, g) for p, g in zip(parts, groups, strict=True)]
    moved = iter(redistribute_together([move for job in jobs for move in job]))
    for group, some, of, job in zip(groups, boxes, parts, jobs, strict=True):
        for box, (_, i, _, _), new in zip(some, group, _apart([next(moved) for _ in job], of), strict=True):
            box[i] = new


def base_entry(info: OpInfo) -> Entry | None:
    """The entry of the op that the list op applies to each element."""
    packet = info.name.split(".")[1].rstrip("_").removeprefix("_foreach_")
    found = [e for e in (info.entry, *(find(f"aten.{packet}.{o}") for o in ("Tensor", "default", "Scalar"))) if e]
    if found:  # a program's rule of the op that the list op stands for comes before the engine's own of the list op
        return next((e for e in found if e.where), found[0])
    base = getattr(torch.ops.aten, packet, None)
    if base is not None and any(torch.Tag.pointwise in getattr(base, o).tags for o in base.overloads()):
        return find("aten.<pointwise>")
    return None


def plan_lists(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Execute:
    """What runs a list op on such arguments: every element is decided, equal elements once."""
    metas = output_metas(info.func, args, kwargs)
    outs: tuple[TensorMeta | None, ...] = () if metas is None or info.written else metas[1]
    if info.written and info.written_at == (0,):  # what an element becomes is in its layout the result of the op
        outs = tuple(t._spec.tensor_meta if is_dtensor(t) else None for t in args[0])
    whole = make_call(info.func, args, kwargs, outs)
    params = info.func._schema.arguments
    lists = [a.name for a in params if isinstance(whole[a.name], (list, tuple)) and str(a.type).startswith("List[")]
    count = max((len(whole[n]) for n in lists), default=0)
    positions = {a.name: i for i, a in enumerate(params[: len(args)])}
    shared = [a.name for a in params if a.name not in lists and isinstance(whole[a.name], Spec)]
    if not all(whole[name].is_replicated() for name in shared):
        return with_whole(info, shared, kwargs)
    entry = base_entry(info)
    moves: list[Move] = []
    results: list[Spec | None] = []
    lost: list[int] = []
    decided: dict[tuple[Any, ...], Decision | None] = {}
    gathered: list[Call] = []
    for i in range(count):
        call = _element(whole, lists, i, outs)
        what = (call.inputs, call.names, call.outputs)
        if what not in decided:
            decided[what] = _decide(info, entry, call, gathered)
        decision = decided[what]
        if decision is None:
            lost.append(i)
            continue
        for name, src, dst in zip(call.names, call.inputs, decision.inputs, strict=True):
            if src is not dst:
                moves.append((positions.get(name, name), i, src, dst))
        results += () if info.written else decision.outputs
    execute = in_parts(info, kwargs, lost, count) if lost else ListPlan(info, moves, results).execute
    if info.written:
        execute = counted(execute)
    return guarded(execute, info, gathered[0], 1) if gathered else execute


def with_whole(info: OpInfo, shared: Sequence[str], kwargs: dict[str, Any]) -> Execute:
    """What runs a list op after the arguments `shared`, which all elements read, are gathered."""

    def whole(name: str, a: Any) -> Any:
        if name not in shared or not is_dtensor(a):
            return a
        return plain_wrapper(redistribute_local(a._local_tensor, a._spec, a._spec.replicated()), a._spec.replicated())

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return hot.dispatch(info.func, *map_named(whole, info.func, args, kwargs))

    return with_kwargs(kwargs, run)


def counted(execute: Execute) -> Execute:
    """A write that autograd learns of: views of what is written, and values saved for a backward.

    It counts writes per tensor, in the ops that plain torch makes of the list.
    """

    def run(local: list[Any], named: dict[str, Any], args: tuple[Any, ...]) -> Any:
        result = execute(local, named, args)
        increment_version(args[0])
        return result

    return run


def _element(whole: Call, lists: Sequence[str], i: int, outs: Sequence[TensorMeta | None]) -> Call:
    arguments: dict[str, Any] = dict(whole.arguments)
    for name in lists:
        values = arguments[name]
        arguments[name] = values[i] if i < len(values) else None
    inputs, names = flat_inputs(list(arguments.items()))
    return Call(whole.op, arguments, inputs, names, (outs[i],) if outs else ())


def in_parts(info: OpInfo, kwargs: dict[str, Any], lost: Sequence[int], count: int) -> Execute:
    """What runs a list op that writes where no strategy keeps the elements `lost`.

    The others run together in place, these together by the functional form. Where elements share memory with what
    others read or write, one after the other.
    """
    form = functional_form(info.func) if info.written_at == (0,) else None
    kept = [i for i in range(count) if i not in set(lost)]

    def write(elements: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = some_elements(info.func, elements, count, args, kwargs)
        if form is None:
            run_on_copies(info, args, kwargs)
            return
        for target, new in zip(args[0], hot.dispatch(form, args, kwargs), strict=True):
            write_local(target, new)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        groups = [[i] for i in range(count)] if _shared(args, kwargs) else [kept, list(lost)]
        for group in filter(None, groups):
            if group[0] in lost:
                write(group, args, kwargs)
            else:
                hot.dispatch(info.func, *some_elements(info.func, group, count, args, kwargs))
        return args[0] if info.func._schema.returns else None

    return with_kwargs(kwargs, run)


def _shared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True where two tensors of the call share memory."""
    found = [storage_of(t) for t in flat(args, kwargs) if is_dtensor(t)]
    return len(found) != len(set(found))


def _decide(info: OpInfo, entry: Entry | None, call: Call, gathered: list[Call]) -> Decision | None:
    """The strategy of one element; None where none keeps what is written. `gathered`: what moves for want of a rule."""
    mesh = call.inputs[0].mesh
    for spec in call.inputs:
        if spec.mesh != mesh:
            raise MeshError(
                f"{info.name}: an element mixes tensors of {mesh} and {spec.mesh}; all tensors of one element must "
                "live on the same mesh"
            )
    rule = rule_of(entry, call)
    if rule is None or rule.local is not None or rule.bind is not None:
        refuse_strict(info, call, 1)
        notice(info, call)
        gathered += [] if all(s.is_replicated() for s in call.inputs) else [call]
        rule = replicated_rule(call)
    rule = replace(rule, kernels=())
    keep = {call.names.index(n): 0 if call.outputs else -1 for n in info.written if n in call.names}
    return decide(info.name, rule, call.inputs, call.outputs, mesh, keep)
