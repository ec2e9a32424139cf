"""The arguments of a call: what DTensors are in them, how to walk them, and the `Call` that rules see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dtensor.dispatch import late
from dtensor.errors import LayoutError, MeshError, explain_error
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Replicate
from dtensor.rules.call import Call, flat_inputs
from dtensor.spec import Spec, TensorMeta

__all__ = [
    "Op", "common_mesh", "flat", "is_dtensor", "layouts", "make_call", "map_args", "map_named", "plain_wrapper",
    "put_back", "replicated_on", "some_elements",
]  # fmt: skip

Op = torch._ops.OpOverload


def is_dtensor(x: object) -> bool:
    """True for a DTensor, subclasses included."""
    return isinstance(x, late.DTensor)


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
    return late.new(late.DTensor, local.detach() if local.requires_grad else local, spec, requires_grad=False)


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


def common_mesh(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceMesh:
    """The mesh of all DTensor arguments. MeshError when there are two."""
    mesh: DeviceMesh | None = None
    for a in flat(args, kwargs):
        if is_dtensor(a):
            if mesh is None:
                mesh = a._spec.mesh
            elif a._spec.mesh is not mesh and a._spec.mesh != mesh:
                raise MeshError(
                    explain_error(
                        op, layouts(args, kwargs) + f"; meshes {mesh} and {a._spec.mesh}",
                        "all DTensors of one operation must live on the same mesh",
                        "bring one over: distribute_tensor(x.full_tensor(), mesh, placements)",
                    )
                )  # fmt: skip
    if mesh is None:
        raise LayoutError(f"{op}: no DTensor among the arguments")
    return mesh
