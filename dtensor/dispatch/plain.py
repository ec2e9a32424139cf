"""Plain tensors among DTensors: which count as replicated, which are refused.

    0-d, or of one element                         replicated: a number in all but type
    inside `implicit_replication()`                replicated
    made by a composite of torch that is listed    replicated (`dtensor.dispatch.constants`)
    met by a formula of autograd                   replicated, when all ranks hold the same bytes
    anything else                                  MixedTensorError

What a formula of autograd meets is a constant that it makes itself, or a tensor that the forward was given under
`implicit_replication()`. A backward that is a Python function is the user's: its plain tensors are refused, unless
they are zeros on all ranks, which autograd gives for an unused output. Where the ranks have to compare, they do so by
one reduction of a digest per mesh axis and decide alike.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import FrameType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from dtensor.comm.communicator import traced
from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch.call import (
    common_mesh,
    flat,
    is_dtensor,
    layouts,
    map_args,
    plain_wrapper,
    replicated_on,
    some_elements,
)
from dtensor.dispatch.decompositions import is_composite
from dtensor.dispatch.hit import OpInfo
from dtensor.dispatch.materialized import settled_spec
from dtensor.errors import MixedTensorError, explain_error
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.per_thread import PerThread
from dtensor.redistribute.executor.run import redistribute_local

__all__ = ["COMPARED", "CONSTANT", "NOTHING", "granted", "only_numbers", "with_plain"]

NOTHING, COMPARED, CONSTANT = range(3)
granted = PerThread(NOTHING)
"""What the composite of torch that is running may do with plain tensors: they are refused, are compared over the ranks,
or are constants.
"""

_torch_implicit = getattr(torch._C, "_get_dtensor_allow_implicit_replication", lambda: False)
"""Set by torch's composites around plain tensors that they make themselves."""

log = logging.getLogger("dtensor")
_noticed: set[str] = set()


def with_plain(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with plain tensors among DTensors, run with those that may count as replicated."""
    apart = _by_kinds(info, args, kwargs) if info.kind == "lists" else _number_written(info, args, kwargs)
    if apart is not None:
        return apart[0]
    mesh = common_mesh(info.name, args, kwargs)
    if info.entry is None and is_composite(info.func):  # comes here in inference mode; else torch takes it apart
        return info.func.decompose(*args, **kwargs)
    _refuse_written(info, args, kwargs)
    if not (hot.replicates_implicitly() or _torch_implicit() or granted.value == CONSTANT):
        _check(info, args, kwargs, mesh)

    def convert(a: Any) -> Any:
        if _is_plain(a):
            return replicated_on(mesh, a)
        if type(a) is not late.DTensor and is_dtensor(a):
            return plain_wrapper(a._local_tensor, a._spec)
        return a

    new_args, new_kwargs = map_args(convert, args, kwargs)
    result = hot.dispatch(info.func, new_args, new_kwargs)
    return args[0] if info.gives_target else result


def only_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether what is plain among arguments are numbers in all but type."""
    return all(t.numel() <= 1 and not _like_a_part(t, args, kwargs) for _, t in _plain(args, kwargs))


def _check(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """MixedTensorError, on all ranks, unless every plain tensor may count as replicated."""
    plain = _plain(args, kwargs)
    tensors = [t for _, t in plain]
    parts = [_like_a_part(t, args, kwargs) for t in tensors]
    numbers = [t.numel() <= 1 for t in tensors]
    if all(number and not part for number, part in zip(numbers, parts, strict=True)):
        return
    formula = _in_formula()
    if any(map(traced, tensors)):
        for (place, t), number, part in zip(plain, numbers, parts, strict=True):
            if not (number and not part) and not late.is_constant(t, formula):
                raise _mixed(info, args, kwargs, place)
        return
    if formula and all(t.is_meta for t in tensors):
        return  # on meta torch asks for the shape of a sum with zeros
    good = [number or formula or granted.value == COMPARED for number in numbers]
    if torch._C._current_graph_task_id() >= 0 or forward_ad._current_level >= 0:
        good = [known or not t.any() for known, t in zip(good, tensors, strict=True)]
    else:
        for (place, _), known, part in zip(plain, good, parts, strict=True):
            if not known and not part:
                raise _mixed(info, args, kwargs, place)
    if not _agreed(tensors, all(good), mesh):
        at = good.index(False) if False in good else 0
        raise _mixed(info, args, kwargs, plain[at][0], differ=all(good) and not any(parts))
    if info.name not in _noticed:
        _noticed.add(info.name)
        log.info("%s: plain tensors of torch's own code count as replicated, after a check over the ranks", info.name)


def _in_formula() -> bool:
    """Whether autograd runs the backward of an op of torch's, not of a function in Python."""
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


Place = tuple[int | str, int | None]
"""Where an argument is: position or name, and position in a list."""


def _plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Place, torch.Tensor]]:
    """The plain tensors of a call that have dims, and where they are."""
    return [(place, t) for place, t in _places(args, kwargs) if _is_plain(t) and t.ndim]


def _places(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    boxes: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for where, box in boxes:
        if isinstance(box, (list, tuple)):
            yield from (((where, i), x) for i, x in enumerate(box))
        else:
            yield (where, None), box


def _is_plain(x: object) -> bool:
    return isinstance(x, torch.Tensor) and not is_dtensor(x)


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


# ------------------------------------------------------------ both kinds that do not meet
def _by_kinds(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """A list op whose elements are of one kind each: (its result,). None where some element mixes kinds."""
    schema = info.func._schema
    named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    lists = [named[a.name] for a in schema.arguments if str(a.type) == "List[Tensor]" and a.name in named]
    count = len(lists[0]) if lists else 0
    if any(len(x) != count for x in lists):
        return None
    plain = [i for i in range(count) if not any(is_dtensor(x[i]) for x in lists)]
    ours = [i for i in range(count) if i not in plain and all(is_dtensor(x[i]) or x[i].ndim == 0 for x in lists)]
    if len(plain) + len(ours) != count or not plain:
        return None
    if any(isinstance(a, torch.Tensor) and a.ndim for a in named.values()):
        return None
    results: dict[int, Any] = {}
    if ours:  # first: what these are refused for comes before anything is written
        some, named = some_elements(info.func, ours, count, args, kwargs)
        results.update(zip(ours, hot.dispatch(info.func, some, named) or ()))
    some, named = map_args(_value, *some_elements(info.func, plain, count, args, kwargs))
    results.update(zip(plain, info.func(*some, **named) or ()))
    if info.written:
        increment_version([args[0][i] for i in plain])  # as the plain op does, above what comes here
        return (args[0] if schema.returns else None,)
    return ([results[i] for i in range(count)],)


def _number_written(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """A write into a plain tensor with nothing but numbers as DTensors: (its result,); None for any other call."""
    if not info.written or info.kind != "ordinary" or not args or is_dtensor(args[0]) or info.written_at != (0,):
        return None
    if any(t.ndim for t in flat(args, kwargs) if is_dtensor(t)):
        return None
    local, named = map_args(_value, args, kwargs)
    return (info.func(*local, **named),)


def _value(a: Any) -> Any:
    """The local tensor of a DTensor, replicated."""
    if not is_dtensor(a):
        return a
    spec = settled_spec(a, "a number")
    with torch.no_grad():
        return redistribute_local(a._local_tensor, spec, spec.replicated())


# ------------------------------------------------------------ the error
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
    info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], place: Place, differ: bool = False
) -> MixedTensorError:
    """The error for the plain tensor at `place`; `differ`: it would pass, but the ranks' values differ."""
    where, sub = place
    name = info.func._schema.arguments[where].name if isinstance(where, int) else where
    at = f"argument {name!r}" if sub is None else f"item {sub} of argument {name!r}"
    if differ:
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
        box = args[where] if isinstance(where, int) else kwargs[where]
        owner = _owner(box if sub is None else box[sub])
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
                fix = f"with dtensor.loss.loss_parallel(): around the loss, whose logits are sharded by class; or {fix}"
    return MixedTensorError(explain_error(info.name, layouts(args, kwargs), rule, fix))


_LOSSES = ("aten.cross_entropy_loss", "aten.nll_loss")


late.give(with_plain=with_plain)
