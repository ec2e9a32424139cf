"""Views that had to move data: taken again when stale, and written through.

Reading takes the calls that lead from the base to the view again, where the base was written since. Writing works
on a copy of the view and then goes the way back, call by call, in the manner of functionalization:

    d: f32[8@x,4]      v = d[2:5].t()          v.mul_(2)
    forward            d ─ slice ─▶ a ─ t ─▶ v          v' = v * 2
    back               d' = slice_scatter(d, a', 2, 5)  ◀─  a' = v'.t()      d.copy_(d')

Calls that have no inverse like that here go back on one device: every rank gathers the base, takes the views of it with
plain torch, where they share memory, writes, and keeps its part. The base keeps its layout. The write counts as
one for all other views of the base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch.call import flat, is_dtensor, map_args, map_named, plain_wrapper, put_back, some_elements
from dtensor.dispatch.hit import OpInfo
from dtensor.dispatch.materialized import MovedSpec, ViewCall, note_writes, settled_spec, version
from dtensor.dispatch.plan import aliasing
from dtensor.placement import Replicate
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.deferred import finish
from dtensor.spec import Spec, in_order

__all__ = [
    "Written", "carry_back", "has_moved", "late_specs", "settled", "whole", "with_deferred", "with_moved", "writable",
    "write_local",
]  # fmt: skip

aten = torch.ops.aten
OVERWRITES = frozenset({"aten.copy_.default", "aten.fill_.Scalar", "aten.fill_.Tensor", "aten.zero_.default"})
"""Ops that do not read what they write."""


# ------------------------------------------------------------ values
def settled(x: Any, call: str) -> Any:
    """`x`, or where it is a view that had to move data an ordinary DTensor of its value, up to date."""
    if not isinstance(x._spec, MovedSpec):
        return x
    spec = settled_spec(x, call)
    return plain_wrapper(x._local_tensor, spec)


def has_moved(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True where some argument is a view that had to move data."""
    return any(is_dtensor(a) and isinstance(a._spec, MovedSpec) for a in flat(args, kwargs))


def late_specs(args: Sequence[Any], kwargs: dict[str, Any]) -> set[type]:
    """The kinds of specs among the arguments that have to be brought up to date."""
    return {type(a._spec) for a in flat(args, kwargs) if is_dtensor(a)} - {Spec}


def with_deferred(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with results among its arguments that wait for a collective: it is sent now.

    Aliases wait as well: autograd takes one of what it keeps for backward.
    """
    if info.name in ("aten.detach.default", "aten.alias.default"):
        (x,) = args
        with torch.inference_mode(torch.is_inference_mode_enabled() and x.is_inference()):
            return plain_wrapper(x._local_tensor, x._spec)
    finish(flat(args, kwargs))
    return hot.dispatch(info.func, args, kwargs)


def whole(x: Any) -> torch.Tensor:
    """The value of an ordinary DTensor as a plain tensor of its own memory and the global strides."""
    spec = x._spec
    local = redistribute_local(x._local_tensor, spec, spec.replicated())
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=local.device).copy_(local)


# ------------------------------------------------------------ the way there
def take(call: ViewCall, x: Any) -> Any:
    """The view of an ordinary DTensor, as an ordinary DTensor."""
    got = hot.dispatch(call.func, (x, *call.args), dict(call.kwargs))
    return settled(got if call.index is None else got[call.index], "view")


def retake(spec: MovedSpec) -> torch.Tensor:
    """The local tensor of a view, taken again from its base."""
    x = spec.base
    for call in spec.calls:
        x = take(call, x)
    local = redistribute_local(x._local_tensor, x._spec, x._spec.with_placements(spec.placements))
    return in_order(local, spec.stride)


# ------------------------------------------------------------ the way back
def _named(call: ViewCall) -> dict[str, Any]:
    params = call.func._schema.arguments
    found = {p.name: p.default_value for p in params}
    found.update(zip([p.name for p in params[1:]], call.args, strict=False))
    return found | dict(call.kwargs)


def _part(call: ViewCall, a: dict[str, Any], x: Any, new: Any) -> Any:
    """Slices, selections and the pieces of a split: the piece in its place."""
    name, index = _packet(call), call.index or 0
    if name == "select":
        return hot.dispatch(aten.select_scatter.default, (x, new, a["dim"], a["index"]))
    if name == "unbind":
        return hot.dispatch(aten.select_scatter.default, (x, new, a["dim"], index))
    if name == "diagonal":
        return hot.dispatch(aten.diagonal_scatter.default, (x, new, a["offset"], a["dim1"], a["dim2"]))
    if name == "slice":
        start, end, step = a["start"], a["end"], a["step"]
    elif name == "split":
        start, step = a["split_size"] * index, 1
        end = start + new.shape[a["dim"]]
    else:
        start, end, step = sum(a["split_sizes"][:index]), sum(a["split_sizes"][: index + 1]), 1
    return hot.dispatch(aten.slice_scatter.default, (x, new, a["dim"], start, end, step))


def _order(call: ViewCall, a: dict[str, Any], x: Any, new: Any) -> Any:
    """Another order of the dims: the inverse order."""
    n = x.ndim
    dims = list(range(n))
    if _packet(call) == "permute":
        dims = [d % n for d in a["dims"]]
    elif n:
        i, j = (0, n - 1) if _packet(call) == "t" else (a["dim0"] % n, a["dim1"] % n)
        dims[i], dims[j] = j, i
    back = sorted(range(n), key=dims.__getitem__)
    return hot.dispatch(aten.permute.default, (new, back))


def _shape(call: ViewCall, a: dict[str, Any], x: Any, new: Any) -> Any:
    """The same elements in the same order in another shape."""
    if new._local_tensor.is_contiguous() and new.is_contiguous():
        return hot.dispatch(aten.view.default, (new, list(x.shape)))
    copy = hot.dispatch(aten.clone.default, (new,), {"memory_format": torch.contiguous_format})
    return hot.dispatch(aten.view.default, (copy, list(x.shape)))


def _same(call: ViewCall, a: dict[str, Any], x: Any, new: Any) -> Any:
    return new


_BACK: dict[str, Callable[[ViewCall, dict[str, Any], Any, Any], Any]] = {
    **dict.fromkeys(("alias", "detach"), _same),
    **dict.fromkeys(("select", "slice", "split", "split_with_sizes", "unbind", "diagonal"), _part),
    **dict.fromkeys(("permute", "t", "transpose"), _order),
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze"), _shape),
}


def _packet(call: ViewCall) -> str:
    return str(call.func._schema.name.rpartition("::")[2])


def _invertible(call: ViewCall) -> bool:
    return _packet(call) in _BACK and call.func._overloadname != "dtype"


def carried_back(spec: MovedSpec, new: Any) -> Any:
    """What the base becomes when the view becomes `new`: an ordinary DTensor of any layout."""
    base = spec.base
    if not all(map(_invertible, spec.calls)):
        return _on_one_device(spec, new)
    befores = [base]
    for call in spec.calls[:-1]:
        befores.append(take(call, befores[-1]))
    for call, x in zip(reversed(spec.calls), reversed(befores), strict=True):
        new = settled(_BACK[_packet(call)](call, _named(call), x, new), "view")
    return new


def _on_one_device(spec: MovedSpec, new: Any) -> Any:
    """As `carried_back`, for any views: on the gathered base, where plain views share memory."""
    base = spec.base
    full = view = whole(base)
    for call in spec.calls:
        got = call.func(view, *call.args, **call.kwargs)
        view = got if call.index is None else got[call.index]
    view.copy_(whole(new))
    return plain_wrapper(full, base._spec.replicated())


def write_local(target: Any, new: Any) -> None:
    """Write the value of the ordinary DTensor `new` to the ordinary DTensor `target`, which keeps its layout.

    A pending target gets shares that reduce to exactly that value. Casts, but only what is not pending.
    """
    local, src, dst = new._local_tensor, new._spec, target._spec
    if src.dtype is not dst.dtype and src.has_partial():
        settled_first = tuple(Replicate() if p.is_partial() else p for p in src.placements)
        reduced = src.with_placements(settled_first)
        local, src = redistribute_local(local, src, reduced), reduced
    if src.dtype is not dst.dtype:
        local, src = local.to(dst.dtype), src.with_meta(src.shape, src.stride, dst.dtype)
    local = redistribute_local(local, src, src.with_placements(dst.placements))
    if dst.mesh.coord is not None:
        target._local_tensor.copy_(local)
    note_writes(target)


def write_through(spec: MovedSpec, new: Any) -> None:
    """Make the view's value that of the ordinary DTensor `new`, and its base's accordingly."""
    write_local(spec.base, carried_back(spec, new))
    spec.local = redistribute_local(new._local_tensor, new._spec, new._spec.with_placements(spec.placements))
    spec.version = version(spec.base)


# ------------------------------------------------------------ calls with such views
def with_moved(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with views that had to move data among its arguments."""
    read = lambda a: settled(a, info.name) if is_dtensor(a) else a  # noqa: E731
    params = info.func._schema.arguments
    given = {**dict(zip((p.name for p in params), args, strict=False)), **kwargs}
    targets = [a for n, a in given.items() if n in info.written and has_moved((a,), {})]
    for t in flat(targets, {}):
        if isinstance(t._spec, MovedSpec) and t._spec.given:
            rule = "what a graph writes to such a view does not reach the tensor that it is a view of"
            t._spec.refuse(info.name, rule)
    if not targets:
        inference = torch.is_inference_mode_enabled()
        ordinary = info.is_view and not args[0].is_inference()  # a view of an ordinary tensor is one, in any mode
        with torch.inference_mode(False) if inference and ordinary else contextlib.nullcontext():
            result = hot.dispatch(info.func, *map_args(read, args, kwargs))
        if info.is_view and is_dtensor(args[0]) and isinstance(args[0]._spec, MovedSpec):
            _mark(info, result, args, kwargs)
            return aliasing(result, args[0], info.func, args, kwargs)
        return result
    if info.kind == "lists" and any(isinstance(a, (list, tuple)) and len(a) > 1 for a in targets):
        return _one_by_one(info, args, kwargs)
    written: Written = []

    def convert(name: str, a: Any) -> Any:
        f = (lambda t: writable(t, info.name, written)) if name in info.written else read
        return [f(x) for x in a] if isinstance(a, (list, tuple)) else f(a)

    new_args, new_kwargs = map_named(convert, info.func, args, kwargs)
    result = hot.dispatch(info.func, new_args, new_kwargs)
    carry_back(written)
    if info.kind == "lists":
        increment_version([view for view, _ in written])
    return args[0] if isinstance(result, list) and result is new_args[0] else put_back(result, written)


Written = list[tuple[Any, Any]]
"""Views that had to move data, and the ordinary DTensors that are written in their place."""


def writable(t: Any, call: str, written: Written) -> Any:
    """`t`, or where it is a view that had to move data a copy to be written in its place, noted in `written`."""
    if not is_dtensor(t) or not isinstance(t._spec, MovedSpec):
        return t
    spec = t._spec.settled() if call in OVERWRITES else settled_spec(t, call)
    made = plain_wrapper(torch.empty_like(t._local_tensor).copy_(t._local_tensor), spec)
    written.append((t, made))
    return made


def carry_back(written: Written) -> None:
    """Write what the copies became into the views, and into their bases."""
    for view, made in written:
        write_through(view._spec, made)
        view._local_tensor = view._spec.local


def _mark(info: OpInfo, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Views of a view that had to move data are views of its base, one call further."""
    many = isinstance(result, (list, tuple))
    for i, t in enumerate(result if many else [result]):
        if is_dtensor(t):
            call = ViewCall(info.func, args[1:], dict(kwargs), i if many else None)
            spec = t._spec.settled() if isinstance(t._spec, MovedSpec) else t._spec
            t._spec = MovedSpec.of(spec, t._local_tensor, args[0], call)


def _one_by_one(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A list op that writes views which may overlap: its elements in their order."""
    count = len(args[0])
    for i in range(count):
        hot.dispatch(info.func, *some_elements(info.func, [i], count, args, kwargs))
    return args[0] if info.func._schema.returns else None


late.give(retake=retake)
