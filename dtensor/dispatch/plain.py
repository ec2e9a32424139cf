"""Plain tensors among DTensors: which count as replicated, which are refused.

    0-d, or of one element                        replicated: a number in all but type
    inside `implicit_replication()`               replicated
    made by a composite that is on the list       replicated (`dtensor.dispatch.composites.CONSTANTS`)
    made by other code of torch, or its formulas  replicated, when all ranks hold the same bytes
    anything else                                 MixedTensorError

What a formula of autograd reads was let pass in the forward, so it counts as torch's whoever holds it.
For the fourth kind, `dtensor.dispatch.plain_origin` says what is torch's. It is not enough that torch made it: a
composite may have drawn random numbers, or computed from this rank's part. So the ranks compare what they hold, by one
reduction of a digest per mesh axis, every time: a tensor that is the same everywhere means the same whoever made
it, and one that is not is refused on all ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import FrameType
from typing import Any

import torch

from dtensor.comm.communicator import traced
from dtensor.dispatch import hit as hot
from dtensor.dispatch.call import common_mesh, flat, is_dtensor, layouts, map_args, plain_wrapper, replicated_on
from dtensor.dispatch.decompositions import is_composite
from dtensor.dispatch.hit import OpInfo
from dtensor.dispatch.mixed import number_written, run_kinds
from dtensor.dispatch.plain_origin import Place, called_by_autograd, made_by_torch, runs_in, value_at
from dtensor.errors import MixedTensorError, explain_error
from dtensor.mesh.device_mesh import DeviceMesh

__all__ = ["functions", "in_composite", "makes_constants", "with_plain"]

_WITH_ZEROS = frozenset(
    f"aten.{op}" if "." in op else f"aten.{op}.default"
    for op in (
        "cat stack index_put _index_put_impl_ select_scatter slice_scatter diagonal_scatter as_strided_scatter "
        "where.self put index_fill.int_Tensor"
    ).split()
)
_torch_implicit = getattr(torch._C, "_get_dtensor_allow_implicit_replication", lambda: False)
"""Set by torch's composites around plain tensors that they make themselves."""

functions: set[tuple[str, str]] = set()
"""Python functions of torch that are composites on the list, filled in by `dtensor.dispatch.composites`: file and
name.
"""

log = logging.getLogger("dtensor")
_noticed: set[str] = set()


def with_plain(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with plain tensors among DTensors, run with those that may count as replicated."""
    apart = run_kinds(info, args, kwargs) if info.kind == "foreach" else number_written(info, args, kwargs)
    if apart is not None:
        return apart[0]
    mesh = common_mesh(info, args, kwargs)
    if info.entry is None and is_composite(info.func):  # in inference mode they come whole; else torch takes them apart
        plain = [p for p in _places(args, kwargs) if value_at(args, kwargs, p).ndim]
        torchs = _are_constants() or all(made_by_torch(args, kwargs, p) for p in plain)
        return in_composite(info.func, args, kwargs, torchs)
    _refuse_written(info, args, kwargs)
    if not (getattr(hot._flags, "implicit", False) or _torch_implicit() or _are_constants()):
        _check(info, args, kwargs, mesh)

    def convert(a: Any) -> Any:
        if isinstance(a, torch.Tensor) and not is_dtensor(a):
            return replicated_on(mesh, a)
        if type(a) is not hot._DTensor and is_dtensor(a):
            return plain_wrapper(a._local_tensor, a._spec)
        return a

    new_args, new_kwargs = map_args(convert, args, kwargs)
    result = hot.dispatch(info.func, new_args, new_kwargs)
    return args[0] if info.gives_target else result


def in_composite(op: hot.Op, args: tuple[Any, ...], kwargs: dict[str, Any], torchs: bool = True) -> Any:
    """Take `op` apart, in C++; `torchs`: any plain tensor inside is torch's, as its arguments have been looked at."""
    before = getattr(hot._flags, "composite", False)
    hot._flags.composite = before or torchs
    try:
        return op.decompose(*args, **kwargs)
    finally:
        hot._flags.composite = before


def makes_constants(run: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`run()`, a composite of torch called with these arguments, whose own plain tensors are constants.

    They count as replicated, with no question whose they are. Where an argument is a plain tensor, which is the user's,
    nothing is granted: it is refused where it meets a DTensor, or counts as one of torch's, as everywhere.
    """
    before = getattr(hot._flags, "constants", False)
    hot._flags.constants = before or _only_numbers(args, kwargs)
    try:
        return run()
    finally:
        hot._flags.constants = before


def _only_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether what is plain among arguments are numbers in all but type."""
    plain = (value_at(args, kwargs, p) for p in _places(args, kwargs))
    return all(t.numel() <= 1 and not _like_a_part(t, args, kwargs) for t in plain if t.ndim)


def _are_constants() -> bool:
    """Whether plain tensors are constants here: in a composite on the list, or in one of the `functions`."""
    if getattr(hot._flags, "constants", False):
        return True
    frame = runs_in(functions)
    if frame is None:
        return False
    code = frame.f_code
    given = [frame.f_locals.get(n) for n in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    return _only_numbers(given, {})


def _check(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """MixedTensorError, on all ranks, unless every plain tensor may count as replicated."""
    plain = [p for p in _places(args, kwargs) if value_at(args, kwargs, p).ndim]
    if not plain:
        return
    small = [value_at(args, kwargs, p).numel() <= 1 for p in plain]
    in_backward = torch._C._current_graph_task_id() >= 0
    formula = in_backward and called_by_autograd()
    parts = [_like_a_part(value_at(args, kwargs, p), args, kwargs) for p in plain]
    if any(traced(value_at(args, kwargs, p)) for p in plain):
        for p, few, part in zip(plain, small, parts, strict=True):
            if not (few and not part) and not (formula and _same_on_all(value_at(args, kwargs, p))):
                raise _mixed(info, args, kwargs, p)
        return
    given = getattr(hot._flags, "composite", False) or formula
    made = [few or given or made_by_torch(args, kwargs, p) for few, p in zip(small, plain, strict=True)]
    if all(small) and not any(parts):
        return
    if in_backward and all(made) and info.name in _WITH_ZEROS:
        return
    if in_backward and all(value_at(args, kwargs, p).is_meta for p in plain):
        return  # torch asks for the shape of a sum with zeros
    good = made
    if in_backward:  # zeros may come from torch by way of a user's own function: the values decide, on all ranks
        good = [mine or not value_at(args, kwargs, p).any() for mine, p in zip(made, plain, strict=True)]
    else:
        for place, mine, part in zip(plain, made, parts, strict=True):
            if not mine and not part:
                raise _mixed(info, args, kwargs, place)
    if not _agreed([value_at(args, kwargs, p) for p in plain], all(good), mesh):
        at = plain[made.index(False)] if False in made else plain[0]
        raise _mixed(info, args, kwargs, at, by_torch=all(made) and not any(parts))
    if info.name not in _noticed:
        _noticed.add(info.name)
        log.info("%s: tensors that torch made itself count as replicated, after a check over the ranks", info.name)


def _same_on_all(t: torch.Tensor) -> bool:
    """Whether a tensor of a trace that a formula of autograd uses is the same on all ranks, as what it kept is."""
    return True


def _like_a_part(t: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for what may be this rank's part of another argument, where some rank's part has at most one element.

    There the number of elements, which decides elsewhere, could differ from rank to rank.
    """
    for spec in {a._spec for a in flat(args, kwargs) if is_dtensor(a)}:
        shape = spec.mesh.shape
        if spec.is_replicated() or prod(shape) > 1024:
            continue
        parts = [spec.local_shape_of(c) for c in itertools.product(*map(range, shape))]
        if t.shape in parts and min(map(prod, parts)) <= 1:
            return True
    return False


def _places(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Place]:
    """Where the plain tensors of a call are."""
    found: list[Place] = []
    for where in (*range(len(args)), *kwargs):
        box = args[where] if isinstance(where, int) else kwargs[where]
        if isinstance(box, (list, tuple)):
            found += [(where, i) for i in range(len(box)) if _is_plain(box[i])]
        elif _is_plain(box):
            found.append((where, None))
    return found


def _is_plain(x: object) -> bool:
    return isinstance(x, torch.Tensor) and not is_dtensor(x)


def _agreed(tensors: Sequence[torch.Tensor], good: bool, mesh: DeviceMesh) -> bool:
    """True when all ranks of the mesh say `good` and hold the same tensors, bit for bit: one reduction per axis."""
    if mesh.coord is None:
        return good
    digest = hashlib.blake2b(digest_size=16)
    for t in tensors if tensors[0].device.type != "meta" else ():
        digest.update(repr((t.dtype, tuple(t.shape))).encode())
        whole = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        digest.update(whole.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    words = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
    both = torch.cat([words, ~words, words.new_tensor([0 if good else 1])]).to(tensors[0].device)
    for axis, size in enumerate(mesh.shape):
        if size > 1:
            both = mesh.comm(axis).all_reduce(both, "max")
    high, low, bad = both[:2], ~both[2:4], both[4]
    return bool(torch.equal(high, low)) and not bool(bad)


def _refuse_written(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for name, a in [*zip((x.name for x in info.func._schema.arguments), args, strict=False), *kwargs.items()]:
        if name in info.written and _is_plain(a):
            raise MixedTensorError(
                explain_error(
                    info.name, layouts(args, kwargs), f"argument {name!r}, which is written, is a plain tensor",
                    "write into a DTensor, or use x.full_tensor() / x.to_local() for the other arguments",
                )
            )  # fmt: skip


def _owner(t: torch.Tensor) -> str:
    """Which parameter of which module that is running `t` is, or a view of; "" where it is none."""
    frame: FrameType | None = sys._getframe(1)
    name, path, owner = "", "", None
    while frame is not None:
        part = frame.f_locals.get("self")
        if isinstance(part, torch.nn.Module):
            if owner is None:
                own = itertools.chain(part._parameters.items(), part._buffers.items())
                name = next((n for n, p in own if p is not None and (p is t or p is t._base)), "")
                owner = part if name else None
            elif part is not owner:
                path = next((n for n, m in part.named_modules() if m is owner), path)
        frame = frame.f_back
    if owner is None:
        return ""
    return f"it is {name!r} of " + (f"{path!r} ({type(owner).__name__})" if path else type(owner).__name__)


def _mixed(
    info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], place: Place, by_torch: bool = False
) -> MixedTensorError:
    """The error for the plain tensor at `place`; `by_torch`: one of torch's own that the ranks do not agree about."""
    where, sub = place
    name = info.func._schema.arguments[where].name if isinstance(where, int) else where
    at = f"argument {name!r}" if sub is None else f"item {sub} of argument {name!r}"
    if by_torch:
        rule = (
            f"got mixed torch.Tensor and DTensor: {at} is a plain tensor that torch made inside the call, and the "
            "ranks do not hold the same values"
        )
        fix = (
            "torch.manual_seed(0) on every rank if it is drawn at random; "
            "or call it on x.full_tensor(), or on x.to_local() inside local_map"
        )
    else:
        rule = f"got mixed torch.Tensor and DTensor; every tensor of one operation must be a DTensor, {at} is plain"
        owner = _owner(value_at(args, kwargs, place))
        if owner:
            rule = f"{rule}: {owner}"
        fix = (
            ("name that module in the plan, or distribute_module(module, mesh); or " if owner else "")
            + "distribute_tensor(x, mesh, placements) for the plain tensor, "
            "or run inside dtensor.experimental.implicit_replication()"
        )
        logits: Any = args[0] if args else None
        if info.name.startswith(_LOSSES) and is_dtensor(logits):
            c = 1 if logits.ndim > 1 else 0
            if any(getattr(p, "dim", None) == c for p in logits._spec.placements):
                fix = f"with dtensor.loss.loss_parallel(): around the loss, whose logits are cut by class; or {fix}"
    return MixedTensorError(explain_error(info.name, layouts(args, kwargs), rule, fix))


_LOSSES = ("aten.cross_entropy_loss", "aten.nll_loss")
