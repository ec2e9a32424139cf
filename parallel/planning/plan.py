"""parallelize_module: apply a plan, path pattern -> style, to a module.

The whole plan is checked before anything is changed: every pattern must name a module, every style must fit
its modules, no module may be laid out twice, and a parameter that several modules share must get one layout.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from dtensor.distribute import Owned, guard_state, owned_parameters, replacing
from dtensor.errors import expect, listed, short
from dtensor.mesh import DeviceMesh
from dtensor.mesh.device_mesh import as_mesh
from dtensor.placement import Placement, Replicate
from dtensor.tensor import DTensor

from ..styles.axis import Others
from ..styles.compare import Checks, check_mode
from ..styles.shared_input import share_inputs
from ..styles.style import ParallelStyle
from .outside import explain_errors
from .undo import STYLES, hook_ids, note_applied

__all__ = ["Plan", "find", "parallelize_module"]

Plan = ParallelStyle | Mapping[str, ParallelStyle]
Step = tuple[str, nn.Module, ParallelStyle]
Tie = list[tuple[nn.Module, str]]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
    axis: str | int | None = None,
    others: Others = None,
    check_inputs: Checks = False,
) -> nn.Module:
    """Lay `module` out over `device_mesh` as `parallelize_plan` says, in place, and return it.

    Args:
        device_mesh: a mesh of one axis, e.g. `mesh["tp"]`; by default the one of the enclosing `with mesh:`.
        parallelize_plan: a style for `module` itself, or a mapping from dotted paths to styles. Each part of a
            path may hold `*`, `?` and `[...]`, matched against the names of children; "" is `module` itself. A path
            to a child that was set to None, as pipeline stages do with what they lack, is passed over.
        src_data_rank: position on the mesh whose parameter values count; None: every rank shards its own values
            and nothing is sent.
        axis, others: for a mesh of several axes: the axis that the styles work on, by name or number, and how plain
            tensors lie over the other ones: one placement, or a mapping from axes to placements. Parameters are
            replicated over the other axes, and their gradients are reduced over them. Without `others` the module
            takes DTensors only.
        check_inputs: "first": in the first call with inputs of a shape the ranks compare their plain inputs, which
            costs a small gather each: replicas must be equal and pieces even, else ValueError on all ranks. True: in
            every call, for finding mistakes. `set_check_inputs` and the environment variable DTENSOR_CHECK_INPUTS say
            so for all modules.

    Raises, before anything is changed: ValueError for a path that names no module, a mesh of several axes without
    `axis`, a parameter that is a DTensor of another mesh, or a shared parameter that would get two layouts;
    NotImplementedError for a style that does not know its module; RuntimeError for a module that would be laid out
    twice; TypeError for a plan of another type.

    Example:
        >>> parallelize_module(mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    """
    expect("parallelize_module", "module", module, nn.Module, "a module", "parallelize_module(net, mesh, plan)")
    if src_data_rank is not None:
        expect("parallelize_module", "src_data_rank", src_data_rank, int, "a position on the mesh, or None", "0")
    mesh = as_mesh(device_mesh)
    if parallelize_plan is None:
        warnings.warn("parallelize_module: parallelize_plan is None, so the module is left as it is", stacklevel=2)
        return module
    check_inputs = check_mode(check_inputs, "parallelize_module(check_inputs=)")
    steps = list(_steps(module, parallelize_plan))
    for _, _, style in steps:
        style.src_data_rank, style.axis, style.others, style.check_inputs = src_data_rank, axis, others, check_inputs
    _check(steps, mesh)
    ties = _shared_parameters(module)
    _check_ties(module, steps, ties)
    with replacing(_replaced(module, steps, mesh), module, "parallelize_module"):
        for path, target, style in steps:
            module = _apply(module, path, target, style, mesh)
        for tie in ties:
            _tie_again(tie)
    share_inputs(module, [part for part in module.modules() if STYLES in part.__dict__])
    explain_errors(module)
    guard_state(module)
    return module


def _apply(module: nn.Module, path: str, target: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> nn.Module:
    """Apply one style; where it gives another module back, that takes the target's place. Gives the root."""
    style.path, before = path, hook_ids(target)
    done = style._apply(target, mesh)
    note_applied(target if done is None else done, style, before)
    if done is None or done is target:
        return module
    if not path:
        return done
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent).register_module(name, done)
    return module


# ------------------------------------------------------------ reading the plan
def _steps(module: nn.Module, plan: Plan) -> Iterator[Step]:
    for path, style in entries(plan).items():
        found = list(find(module, path.split(".") if path else [], ""))
        if not found and not _removed(module, path.split(".")):
            raise ValueError(_no_match(module, path))
        for name, target in found:
            yield name, target, style


def entries(plan: object, call: str = "parallelize_module") -> Mapping[str, ParallelStyle]:
    """A plan as a mapping from paths to styles. TypeError for anything else."""
    if isinstance(plan, ParallelStyle):
        return {"": plan}
    if not isinstance(plan, Mapping):
        raise TypeError(f"{call}: a plan is a ParallelStyle or a mapping from paths to styles, got {_plan_told(plan)}")
    for path, style in plan.items():
        if not isinstance(path, str) or not isinstance(style, ParallelStyle):
            told = f"{short(path)}: {_plan_told(style)}"
            raise TypeError(f"{call}: a plan maps paths (str) to ParallelStyle objects, got {told}")
    return cast(Mapping[str, ParallelStyle], plan)


def _plan_told(plan: object) -> str:
    told = _told(plan)
    return told if "  fix: " in told else f'{told}\n  fix: {{"layers.*.up": ColwiseParallel()}}'


def _told(style: object) -> str:
    """What stands where a style should; with the fix for a class in the place of an object of it."""
    if not (isinstance(style, type) and issubclass(style, ParallelStyle)):
        return short(style)
    needs = any(p.default is p.empty for p in list(inspect.signature(style).parameters.values()))
    return (
        f"{short(style)}\n  rule: a style is an object, made with the layouts it is to have; this is its class\n"
        f"  fix: {style.__name__}({'...' if needs else ''})"
    )


def find(module: nn.Module, tokens: list[str], at: str) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of every module that a path's parts name, below the one at `at`."""
    if not tokens:
        yield at, module
        return
    # _modules, not named_children: a module that sits under two names is found under both
    for name, child in module._modules.items():
        if child is not None and fnmatchcase(name, tokens[0]):
            yield from find(child, tokens[1:], f"{at}.{name}" if at else name)


def _removed(module: nn.Module, tokens: list[str]) -> bool:
    """Whether a path ends, early or not, at a child that was set to None."""
    children = [child for name, child in module._modules.items() if tokens and fnmatchcase(name, tokens[0])]
    return any(child is None or _removed(child, tokens[1:]) for child in children)


def _no_match(module: nn.Module, path: str) -> str:
    here, good = [module], 0
    tokens = path.split(".")
    for good in range(len(tokens)):
        below = [c for m in here for n, c in m.named_children() if fnmatchcase(n, tokens[good])]
        if not below:
            break
        here = below
    names = sorted({n for m in here for n, _ in m.named_children()})
    where = f"below {'.'.join(tokens[:good])!r}" if good else "of the module"
    return (
        f"parallelize_module: the plan names {short(path)}, but no module matches {short(tokens[good])}\n"
        f"  got: the children {where} are {listed(names, 20) or '(none)'}\n"
        "  rule: every path in a plan must name at least one module; nothing was changed\n"
        "  fix: correct the path; print([n for n, _ in module.named_modules()]) lists all"
    )


# ------------------------------------------------------------ checks
def _check(steps: list[Step], mesh: DeviceMesh) -> None:
    seen: dict[int, str] = {}
    for path, target, style in steps:
        style.path = path
        style._check(target, mesh)
        if not style.lays_out_parameters:
            continue
        if id(target) in seen:
            raise RuntimeError(
                f"parallelize_module: the plan lays out one {type(target).__name__} twice\n"
                f"  got: {seen[id(target)]!r} and {path!r}\n  rule: a module is laid out once; nothing was changed\n"
                "  fix: make the paths name it once"
            )
        seen[id(target)] = path


def _replaced(module: nn.Module, steps: list[Step], mesh: DeviceMesh) -> list[Owned]:
    """The parameters that get another layout than they have."""
    layouts: dict[int, tuple[Placement, ...]] = {}
    for _, target, style in steps:
        if style.lays_out_parameters:
            own, over = style._layouts(target), style.over(mesh)
            for _, part, name in owned_parameters(target):
                placed = own.get(name, Replicate()) if part is target else Replicate()
                layouts[id(part._parameters[name])] = tuple(over.parameter(placed))
    out = []
    for owned in owned_parameters(module):
        param = owned[1]._parameters[owned[2]]
        now = param.placements if isinstance(param, DTensor) else None
        if layouts.get(id(param), now) != now:
            out.append(owned)
    return out


def _shared_parameters(module: nn.Module) -> list[Tie]:
    """Groups of (owner, name) that hold one and the same parameter."""
    groups: dict[int, Tie] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                groups.setdefault(id(param), []).append((owner, name))
    return [g for g in groups.values() if len(g) > 1]


def followers(module: nn.Module, plan: object) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """Parameters of modules that `plan` leaves out and that are shared with a module it lays out.

    As (owner, name, planned owner, its name). Nothing for a plan that is no mapping: it has one module.
    """
    if not isinstance(plan, Mapping):
        return []
    planned = {id(target) for _, target, style in _steps(module, plan) if style.lays_out_parameters}
    out = []
    for tie in _shared_parameters(module):
        leaders = [owned for owned in tie if id(owned[0]) in planned]
        out += [(*owned, *leaders[0]) for owned in tie if leaders and id(owned[0]) not in planned]
    return out


def _check_ties(module: nn.Module, steps: list[Step], ties: list[Tie]) -> None:
    planned = {
        id(target): style._layouts(target) for _, target, style in steps if style.lays_out_parameters
    }
    names = {id(m): n for n, m in module.named_modules()}
    alone = {id(target) for _, target, style in steps if not style.keeps_ties}
    for tie in ties:
        if any(id(owner) in alone for owner, _ in tie):
            raise ValueError(
                f"parallelize_module: {names.get(id(tie[0][0]), '?')}.{tie[0][1]} is shared with another module, and "
                "the plan would keep it in parts\n  rule: a shared parameter stays one; nothing was changed\n"
                "  fix: parts of equal size, or another style for this module"
            )
        layouts = [planned.get(id(owner), {}).get(name) for owner, name in tie]
        if len(set(layouts)) > 1 and not isinstance(getattr(*tie[0]), DTensor):
            raise ValueError(_untied(tie, layouts, names))


def _untied(tie: Tie, layouts: list[Placement | None], names: dict[int, str]) -> str:
    told = listed(
        f"{names.get(id(owner), '?')}.{name}: {layout if layout is not None else 'not in the plan'}"
        for (owner, name), layout in zip(tie, layouts, strict=True)
    )
    return (
        f"parallelize_module: one shared parameter would get several layouts, which would untie it\n  got: {told}\n"
        "  rule: modules that share a parameter must agree on its layout; nothing was changed\n"
        "  fix: for a tied embedding and head: RowwiseParallel for the Embedding with ColwiseParallel for the Linear"
    )


def _tie_again(tie: Tie) -> None:
    """Make the owners share one parameter again, when all now hold one of the same layout."""
    params = [cast(nn.Parameter, getattr(owner, name)) for owner, name in tie]
    first = params[0]
    if not isinstance(first, DTensor):
        return
    if all(isinstance(p, DTensor) and p.placements == first.placements for p in params):
        for owner, name in tie[1:]:
            owner.register_parameter(name, first)
