"""Calls of a `DTensor` inside `torch.compile`: `from_local`, `to_local`, `redistribute`, `full_tensor`.

Dynamo follows Python code and writes down what happens to tensors. It can hold constants and tensors as the arguments
of what it writes down; placements and meshes are made constants here. So while dynamo follows a
function, these four calls go through functions that it writes down as one call each (`allow_in_graph`). When the
graph is made they run as ever, on tensors without values: the collectives in it are functional ones, by the name of
their group.

    x.redistribute(mesh, [Shard(0), Replicate()])   in a graph:   _redistribute(x, mesh, (Shard(0), Replicate()), ...)

How a DTensor itself goes through a compiler is in `DTensor.__tensor_flatten__`: the local tensor is what the graph
holds, the spec (mesh, placements, global shape, stride and dtype; interned) is what its guards compare, so another
layout, another shape or another mesh means another graph.

Torch's cache on disk of graphs as they were traced (AOTAutograd's) is passed by (`refuse_caching`): what a trace of
DTensors gives depends on the rank's coord, the names of its groups, the cost model and the rules, and makes groups that
a graph taken from a file would lack. What comes of it, local ops and collectives with the group's name, with numbers
for shapes and offsets, has all that in its text, by which inductor's own caches know it: compiled code is found again.

`torch.export` is another matter: it writes down what is done to the tensors that it was given, before autograd, and
tracks tensors of Python classes only where an op made them. A DTensor that is made while it looks on, by one of these
calls or a factory, is none that it knows: `refuse_export` says so, where torch would end in C++ with a failed cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._ops import _get_dispatch_mode_pre_dispatch as _mode_above_autograd

from dtensor.dispatch import late
from dtensor.errors import explain_error
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard

__all__ = [
    "compiling", "full_tensor", "from_local", "redistribute", "refuse_caching", "refuse_export", "to_local",
]  # fmt: skip

compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""True in code that dynamo follows; False whenever code really runs."""

_proxies = torch._C._TorchDispatchModeKey.PROXY


def refuse_export(call: str) -> None:
    """RuntimeError while `torch.export` looks on, as `call` is about to make a DTensor that it cannot track."""
    if _mode_above_autograd(_proxies) is not None:
        raise RuntimeError(
            explain_error(
                f"torch.export of a program that calls {call}", "a DTensor made inside of the exported program",
                "an exported program can hold DTensors that are its inputs, parameters or results of ops on those, but "
                "none that it makes or moves itself, as parallel styles do",
                "torch.compile(module), which holds these calls, or dtensor.lower(step, args); export the module "
                "before it is parallelized",
            )
        )  # fmt: skip


def refuse_caching() -> NoReturn:
    """What torch takes as: this graph is not in the cache of traced graphs, and shall not be."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    raise BypassAOTAutogradCache("the graph of an operation on DTensors belongs to one rank: it is traced, not loaded")


def leave_alone(handler: Callable[..., Any]) -> None:
    """Keep dynamo, which compiles what runs where a graph breaks, from `handler` and all that it calls."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(handler.__code__, eval_frame._FrameExecStrategy(skip, skip))


# ------------------------------------------------------------ placements and meshes as constants
_PLACEMENT = ("is_shard", "is_replicate", "is_partial", "__eq__", "__ne__", "__hash__", "__repr__", "__str__")
_MESH = (
    "shape", "ndim", "coord", "device_type", "mesh_dim_names", "size", "get_coordinate", "get_local_rank", "get_rank",
    "axis_of", "axis_name", "get_group", "get_all_groups", "__getitem__", "__eq__", "__ne__", "__hash__", "__repr__",
)  # fmt: skip
_KINDS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Shard, (*_PLACEMENT, "dim")),
    (StridedShard, (*_PLACEMENT, "dim", "split_factor")),
    (Replicate, _PLACEMENT),
    (Partial, (*_PLACEMENT, "reduce_op")),
    (DeviceMesh, _MESH),
)
"""Classes whose objects are constants of a graph, and what of them is asked of the real object when it is made."""


def _placement_code(self: Placement) -> tuple[str, dict[str, type]]:
    """How a graph's code writes a placement."""
    return repr(self), {type(self).__name__: type(self)}


def _mesh_code(self: DeviceMesh) -> tuple[str, dict[str, type]]:
    """How a graph's code writes a mesh."""
    return f"DeviceMesh.by_number({self.graph_number})", {"DeviceMesh": DeviceMesh}


def _register_constants() -> None:
    """Make placements and meshes values that dynamo can hold and ask. Without torch's registry they are not."""
    Placement.__fx_repr__ = _placement_code  # type: ignore[attr-defined]
    DeviceMesh.__fx_repr__ = _mesh_code  # type: ignore[attr-defined]
    try:
        from torch._library import opaque_object as registry
    except ImportError:
        return
    register: Any = getattr(registry, "register_custom_class", None)  # torch 2.14 and newer
    register, kind = (register, "constant") if register else (registry.register_opaque_type, "value")
    for cls, asked in _KINDS:
        register(cls, typ=kind, members=dict.fromkeys(asked, registry.MemberType.USE_REAL))


_register_constants()


def _placed(placements: Sequence[Placement] | None) -> tuple[Placement, ...] | None:
    return None if placements is None else tuple(placements)


# ------------------------------------------------------------ what dynamo follows
def from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None, shape: Sequence[int] | None,
    stride: Sequence[int] | None, grads: Sequence[Placement] | None,
) -> Any:  # fmt: skip
    """`DTensor.from_local` as one call of the graph."""
    _allow()
    size = None if shape is None else tuple(shape)
    steps = None if stride is None else tuple(stride)
    return _from_local(local, mesh, _placed(placements), size, steps, _placed(grads))


def to_local(x: object, grads: Sequence[Placement] | None) -> Any:
    """`DTensor.to_local` as one call of the graph."""
    _allow()
    return _to_local(x, _placed(grads))


def full_tensor(x: object, grads: Sequence[Placement] | None) -> Any:
    """`DTensor.full_tensor` as one call of the graph."""
    _allow()
    return _full_tensor(x, _placed(grads))


def redistribute(
    x: object, mesh: DeviceMesh | None, placements: Sequence[Placement] | None,
    forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    """`DTensor.redistribute` as one call of the graph; in a graph every result is waited for."""
    _allow()
    return _redistribute(x, mesh, _placed(placements), forward_dtype, backward_dtype)


# ------------------------------------------------------------ what the graph calls
def _from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...] | None, shape: tuple[int, ...] | None,
    stride: tuple[int, ...] | None, grads: tuple[Placement, ...] | None,
) -> Any:  # fmt: skip
    return late.DTensor.from_local(local, mesh, placements, shape=shape, stride=stride, grad_placements=grads)


def _to_local(x: Any, grads: tuple[Placement, ...] | None) -> Any:
    return x.to_local(grad_placements=grads)


def _full_tensor(x: Any, grads: tuple[Placement, ...] | None) -> Any:
    return x.full_tensor(grad_placements=grads)


def _redistribute(
    x: Any, mesh: DeviceMesh | None, placements: tuple[Placement, ...] | None, forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    return x.redistribute(mesh, placements, forward_dtype=forward_dtype, backward_dtype=backward_dtype)


def _allow() -> None:
    """Tell dynamo to write these calls down as they are. Dynamo runs this function itself, when it meets it first."""
    for f in (_from_local, _to_local, _full_tensor, _redistribute):
        torch._dynamo.allow_in_graph(f)


_allow._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `torch._dynamo.assume_constant_result` does
