"""A call as dispatch sees it on a miss: its arguments, their layouts in short, the metadata of its outputs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch._meta_registrations
from torch.utils._python_dispatch import _disable_current_modes

from dtensor.dispatch import hit as hot
from dtensor.dispatch.hit import Op, OpInfo
from dtensor.dispatch.shapes import known_metas
from dtensor.errors import LayoutError, MeshError, explain_error
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Replicate
from dtensor.rules.call import Call, flat_inputs, op_name
from dtensor.rules.faults import depends_on_data
from dtensor.spec import Spec, TensorMeta

__all__ = [
    "common_mesh", "flat", "is_dtensor", "layouts", "make_call", "map_args", "map_named", "metas_by_running",
    "output_metas", "plain_wrapper", "put_back", "replicated_on", "some_elements",
]  # fmt: skip

log = logging.getLogger("dtensor")


def is_dtensor(x: object) -> bool:
    """True for a DTensor, subclasses included."""
    return isinstance(x, hot._DTensor)


def flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """All arguments in order, lists taken apart."""
    for a in (*args, *kwargs.values()):
        if isinstance(a, (list, tuple)):
            yield from a
        else:
            yield a


def map_args(
    f: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `f` to every argument, and to the items of lists."""
    one = lambda a: [f(x) for x in a] if isinstance(a, (list, tuple)) else f(a)  # noqa: E731
    return tuple(one(a) for a in args), {k: one(v) for k, v in kwargs.items()}


def map_named(
    f: Callable[[str, Any], Any], func: Op, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `f` to the name and the value of every argument."""
    names = (p.name for p in func._schema.arguments)
    return tuple(f(n, a) for n, a in zip(names, args, strict=False)), {n: f(n, a) for n, a in kwargs.items()}


def some_elements(
    func: Op, elements: Sequence[int], count: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a list op for some of its `count` elements."""
    lists = frozenset(a.name for a in func._schema.arguments if str(a.type).startswith("List["))

    def some(name: str, a: Any) -> Any:
        return [a[i] for i in elements] if name in lists and isinstance(a, (list, tuple)) and len(a) == count else a

    return map_named(some, func, args, kwargs)


def plain_wrapper(local: torch.Tensor, spec: Spec) -> Any:
    """A DTensor of these parts, no view of anything."""
    return hot._new(hot._DTensor, local.detach() if local.requires_grad else local, spec, requires_grad=False)


def replicated_on(mesh: DeviceMesh, t: torch.Tensor) -> Any:
    """A plain tensor as a DTensor that is replicated on every axis; shares memory."""
    return plain_wrapper(t, Spec.make(mesh, (Replicate(),) * mesh.ndim, t.shape, t.stride(), t.dtype))


def put_back(result: Any, made: Sequence[tuple[Any, Any]]) -> Any:
    """`result`, one or several, with the first of each pair in `made` in the place of the second."""
    back = {id(other): t for t, other in made}
    restored = lambda t: back.get(id(t), t)  # noqa: E731
    return type(result)(map(restored, result)) if isinstance(result, (list, tuple)) else restored(result)


def layouts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments in short: layout strings for DTensors, values for the rest."""

    def show(a: Any) -> str:
        if is_dtensor(a):
            return str(a._spec)
        if isinstance(a, torch.Tensor):
            kind = "" if a.layout is torch.strided else str(a.layout).removeprefix("torch.") + " "
            return f"plain {kind}{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
        if isinstance(a, (list, tuple)):
            return "[" + ", ".join(show(x) for x in a) + "]"
        return repr(a)

    return ", ".join([show(a) for a in args] + [f"{k}={show(v)}" for k, v in kwargs.items()])


def make_call(func: Op, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[TensorMeta | None]) -> Call:
    """The call with specs in the tensors' places and defaults filled in."""
    spec = lambda a: a._spec if is_dtensor(a) else a  # noqa: E731
    sa, sk = map_args(spec, args, kwargs)
    arguments: dict[str, Any] = {}
    for i, a in enumerate(func._schema.arguments):
        arguments[a.name] = sa[i] if i < len(sa) else sk.get(a.name, a.default_value)
    inputs, names = flat_inputs(list(arguments.items()))
    return Call(func, arguments, inputs, names, tuple(outs))


_call = threading.local()
_device_hint = torch._meta_registrations.device_hint


def _device_of_call(tensor: Any) -> str:
    """Torch's shape functions take a bare meta tensor for one of CUDA, whose results lie otherwise in memory."""
    return str(getattr(_call, "device", None) or _device_hint(tensor))


torch._meta_registrations.device_hint = _device_of_call


def output_metas(
    func: Op, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, tuple[TensorMeta | None, ...]] | None:
    """Structure ("one", "tuple", "list", "none") and global metadata of the outputs; None if not known before running.

    The op runs on meta tensors of the global shapes, so its own shape errors reach the user as they are.
    """

    known = known_metas(op_name(func), args, kwargs)
    if known is not None:
        return known

    def meta(a: Any) -> Any:
        if is_dtensor(a):
            s = a._spec
            return torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta")
        return None if isinstance(a, torch.Generator) else a

    margs, mkwargs = map_args(meta, args, kwargs)
    params = func._schema.arguments
    if any(a.name == "device" for a in params):
        at = next((i for i, a in enumerate(params) if a.name == "device" and not a.kwarg_only), len(margs))
        if at < len(margs):
            margs = (*margs[:at], torch.device("meta"), *margs[at + 1 :])
        else:
            mkwargs["device"] = torch.device("meta")
        mkwargs.pop("pin_memory", None)
    devices = [a._local_tensor.device.type for a in flat(args, kwargs) if is_dtensor(a)]
    _call.device = devices[0] if devices and devices[0] != "meta" else None
    try:
        got = func(*margs, **mkwargs)
    except (NotImplementedError, ZeroDivisionError):  # the latter where torch's own shape functions average nothing
        return None
    except RuntimeError as e:
        unknown = type(e).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException")
        # What the op allows and torch's shape function does not: a power of bools in place, an extreme of empty rows.
        strict = "dtype torch.bool, but this can't be cast" in str(e) or "does not have an identity" in str(e)
        if unknown or strict or any(text in str(e) for text in ("meta tensor", "INTERNAL ASSERT", "no fake impl")):
            return None
        raise
    finally:
        _call.device = None
    return _structure(got)


def metas_by_running(
    func: Op, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, tuple[TensorMeta | None, ...]] | None:
    """As `output_metas`, for an op of torch without a meta kernel: it runs once, on ones (integers: on zeros).

    The tensors have the global shapes and lie where the DTensors do, so all ranks find the same. None where it fails.
    """
    if depends_on_data(func):
        return None

    def made(a: Any) -> Any:
        if not is_dtensor(a):
            return a
        s, value = a._spec, int(a._spec.dtype.is_floating_point or a._spec.dtype.is_complex)
        room = 1 + sum((n - 1) * k for n, k in zip(s.shape, s.stride, strict=True)) if s.numel else 0
        memory = torch.full((room,), value, dtype=s.dtype, device=a._local_tensor.device)
        return memory.as_strided(tuple(s.shape), s.stride)

    device = next(a._local_tensor.device for a in flat(args, kwargs) if is_dtensor(a))
    draws = torch.Tag.nondeterministic_seeded in func.tags
    with _disable_current_modes(), torch.random.fork_rng([] if device.type == "cpu" else [device], enabled=draws):
        try:
            new_args, new_kwargs = map_args(made, args, kwargs)
            got = func(*new_args, **new_kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            log.debug("%s: it was run for the shapes of its results, and failed: %s", op_name(func), error)
            return None
    return _structure(got)


def _structure(got: Any) -> tuple[str, tuple[TensorMeta | None, ...]] | None:
    if got is None:
        return "none", ()
    if isinstance(got, torch.Tensor):
        return ("one", (_meta_of(got),)) if got.layout is torch.strided else None
    if isinstance(got, (list, tuple)) and all(t is None or isinstance(t, (torch.Tensor, int)) for t in got):
        if not got:
            return "none", ()
        metas = tuple(_meta_of(t) if isinstance(t, torch.Tensor) else None for t in got)
        return "list" if isinstance(got, list) else "tuple", metas
    return None


def _meta_of(t: torch.Tensor) -> TensorMeta:
    return TensorMeta(t.shape, tuple(t.stride()), t.dtype)


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
