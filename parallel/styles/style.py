"""ParallelStyle: how one module is laid out over one mesh axis, and the small steps all styles share.

A style does two things to a module: it replaces parameters by DTensors, and it puts hooks around forward
that bring the input into the layout the parameters need and the output into the layout the caller wants.

    plain piece --from_local(input layout)--> DTensor --redistribute--> forward --redistribute--> to_local
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from dtensor.distribute import distribute_module, distribute_tensor
from dtensor.errors import SEE_INPUTS, short
from dtensor.mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.spec import stride_like
from dtensor.tensor import DTensor

from .axis import Others, StyleAxis, style_axis
from .compare import Checks, checking, compare_inputs
from .shared_input import shared

__all__ = [
    "ParallelStyle", "arranged", "check_fresh", "check_placement", "full", "lay_out", "on_input", "on_output",
    "relayout", "wrap",
]  # fmt: skip

APPLIED = "_distribute_module_applied"
"""Attribute that marks a module whose parameters were laid out; `distribute_module` sets it."""


class ParallelStyle(ABC):
    """How to lay out one module. Subclass it and write `_apply` to make a style of your own.

    Attributes, set by `parallelize_module`:
        src_data_rank: rank (position on the mesh) whose parameter values count; None: each rank shards its own,
            without communication.
        axis, others: which axis of a mesh of several the style works on, and how plain tensors lie over the
            other ones; `over(mesh)` puts them together.
        check_inputs: the ranks compare their plain inputs in every call, or ("first") in the first of each shape.
        path: of the module that the style is applied to, in the module that the plan is for.
    """

    src_data_rank: int | None = 0
    axis: str | int | None = None
    others: Others = None
    check_inputs: Checks = False
    path: str = ""
    lays_out_parameters: ClassVar[bool] = False
    keeps_ties: bool = True

    @property
    def gives_pieces(self) -> bool:
        """Whether the module's plain output is this rank's piece of what it gives in one process."""
        return False

    def of(self, module: nn.Module) -> str:
        """What an error says of `module` under this style: `ColwiseParallel of 'layers.0.up' (Linear)`."""
        kind = type(module).__name__
        return f"{type(self).__name__} of " + (f"{self.path!r} ({kind})" if self.path else kind)

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Lay `module` out in place over `device_mesh` and return it, or the module to put in its place."""

    def _undo(self, module: nn.Module) -> None:  # noqa: B027 - most styles change nothing else
        """Take back what `_apply` did to `module` other than hooks, parameters and buffers, which are undone anyway."""

    def over(self, device_mesh: DeviceMesh) -> StyleAxis:
        """The mesh axis to work on. ValueError where the mesh has several and none was named."""
        return style_axis(self, device_mesh, self.axis, self.others, self.check_inputs)

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:  # noqa: B027 - a style may have no checks
        """Raise when this style cannot be applied to `module`; must change nothing."""

    def _layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Placement that each own parameter of `module` will get, by name; {} when not known."""
        return {}


# ------------------------------------------------------------ checks
def check_placement(call: str, name: str, value: object) -> Placement:
    """`value` when it is one placement; TypeError otherwise."""
    if isinstance(value, Placement):
        return value
    raise TypeError(f"{call}: {name} must be one placement, got {short(value)}\n  fix: {name}=Shard(0)")


def check_fresh(style: ParallelStyle, module: nn.Module, device_mesh: DeviceMesh) -> None:
    """RuntimeError when `module` was laid out before, ValueError when a parameter is a DTensor of another mesh."""
    mesh = style.over(device_mesh).mesh
    if getattr(module, APPLIED, False):
        raise RuntimeError(
            f"{style.of(module)}: the module already has a parallel style "
            "(or went through distribute_module)\n  rule: a module is laid out once\n"
            "  fix: name it once in the plan; a module that is used in two places is parallelized in one of them; "
            "unparallelize_module(module) takes a plan off again"
        )
    for name, param in module.named_parameters():
        if isinstance(param, DTensor) and param.device_mesh != mesh:
            raise ValueError(
                f"{style.of(module)}: its {name} is a DTensor of another mesh already\n"
                f"  got: {param.device_mesh!r}, asked for {mesh!r}\n"
                "  fix: parallelize before anything else distributes the module, or unparallelize_module(module) first"
            )


# ------------------------------------------------------------ parameters
def lay_out(
    module: nn.Module, over: StyleAxis, layouts: dict[str, Placement], src_data_rank: int | None
) -> nn.Module:
    """Replace the parameters of `module`: those in `layouts` get that placement, all others are replicated.

    A parameter that is a DTensor of the mesh already is brought to its layout; one that has it is left.
    """

    def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for name, param in list(part.named_parameters(recurse=False)):
            placed = over.parameter(layouts.get(name, Replicate()) if part is module else Replicate())
            if isinstance(param, DTensor):
                if param.placements == tuple(placed):
                    continue  # it may be shared, and stays so
                value = param.detach().redistribute(placements=placed)
            else:
                value = distribute_tensor(param, mesh, placed, src_data_rank=src_data_rank)
            part.register_parameter(name, nn.Parameter(value, requires_grad=param.requires_grad))

    return distribute_module(module, over.mesh, partition)


# ------------------------------------------------------------ tensors
def wrap(
    x: object, over: StyleAxis, layout: Placement, call: str, known: tuple[int, int] | None = None
) -> DTensor:
    """`x` as a DTensor: a DTensor is returned as it is, a plain tensor is taken as this rank's piece of `layout`.

    known: (a dim counted from the end, its global size). A piece that is sharded there then needs not be even.
    Raises TypeError for something else, ValueError when the tensor does not fit `known`.
    """
    if isinstance(x, DTensor):
        if known is not None and x.ndim + known[0] >= 0 and x.shape[known[0]] != known[1]:
            raise ValueError(_other_features(str(x._spec), x.shape[known[0]], over, known, call))
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{call}: expected a tensor to lay out as {layout}, got {type(x).__name__}")
    placed = over.piece(layout, call)
    dim = x.ndim if known is None else x.ndim + known[0]
    sharded = known is not None and isinstance(layout, Shard) and 0 <= dim < x.ndim and layout.dim % x.ndim == dim
    mode = over.check or checking()
    told = (call, tuple(placed), x.shape, x.dtype)
    if mode is True or mode and told not in over.compared:
        compare_inputs(x, over.mesh, placed, call, dim if sharded else None)
        over.compared.add(told)
    if known is not None and not sharded and 0 <= dim and x.shape[dim] != known[1]:
        raise ValueError(_other_features(f"{x.dtype} {list(x.shape)}", x.shape[dim], over, known, call))
    if known is None or not sharded:
        return DTensor.from_local(x, over.mesh, placed, run_check=False)
    _check_piece(x.shape[dim], over, known, call)
    shape = [known[1] if d == dim else over.extent(n, d, x.ndim) for d, n in enumerate(x.shape)]
    stride = stride_like(x, tuple(shape))
    return DTensor.from_local(x, over.mesh, placed, run_check=False, shape=torch.Size(shape), stride=stride)


def _other_features(got: str, size: int, over: StyleAxis, known: tuple[int, int], call: str) -> str:
    dim, features = known
    piece = size in {-(-features // over.size), features // over.size}
    told = f", which is the size of one rank's piece of {features}" if piece else ""
    fix = (
        "  fix: RowwiseParallel() for this module, which takes pieces; or ColwiseParallel(output_layouts=Replicate()) "
        f"for the one before; or input_layouts=Shard({dim}) here, which gathers them"
        if piece
        else "  fix: pass what the module takes in one process, or name in the plan which of its layers are sharded"
    )
    return (
        f"{call}: the input has {size} features on dim {dim}, where the module takes {features} (in_features)\n"
        f"  got: {got}{told}\n"
        f"  rule: a column-wise layer takes a whole input, and gives each rank a piece of its output\n{fix}"
    )


def _check_piece(size: int, over: StyleAxis, known: tuple[int, int], call: str) -> None:
    k, r, (dim, features) = over.size, over.position, known
    if r is None:
        return
    chunk = -(-features // k)
    want = max(min(chunk, features - r * chunk), 0)
    if size == want:
        return
    whole = " (the whole dim: pass input_layouts=Replicate())" if size == features else ""
    raise ValueError(
        f"{call}: a plain input is taken as this rank's piece of dim {dim}, which is sharded\n"
        f"  got: a size of {size} there{whole}\n"
        f"  rule: rank {r} of {k} holds {want} of the module's {features} input features\n"
        f"  fix: pass the piece, a DTensor, or the input_layouts that the tensor really has; {SEE_INPUTS}"
    )


def relayout(x: DTensor, over: StyleAxis, layout: Placement, call: str) -> DTensor:
    """`x` in `layout` over the style's axis; `x` itself when it has that layout (negative dims count from the end)."""
    if isinstance(layout, (Shard, StridedShard)) and layout.dim < 0:
        d = layout.dim + x.ndim
        layout = Shard(d) if isinstance(layout, Shard) else StridedShard(d, split_factor=layout.split_factor)
    if x.device_mesh is over.mesh and x.placements[over.index] is layout and not isinstance(layout, Partial):
        return x
    placed = over.moved(x, layout, call)
    if tuple(x.placements) == tuple(placed) and not isinstance(layout, Partial):
        return x
    return x.redistribute(placements=placed)


def arranged(
    x: object, over: StyleAxis, given: Placement, desired: Placement, call: str, known: tuple[int, int] | None = None
) -> DTensor:
    """An input, `wrap`ped as `given` and brought to `desired`: once for all modules of a scope that take it so."""
    make = lambda: relayout(wrap(x, over, given, call, known), over, desired, call)  # noqa: E731
    if given is desired and isinstance(desired, Shard) and not isinstance(x, DTensor):
        return make()  # nothing is sent for it, forward or backward
    return shared(x, (over, given, desired, known), make)


# ------------------------------------------------------------ hooks
def on_input(module: nn.Module, prepare: Callable[[object], object]) -> None:
    """Before forward, pass the first input through `prepare`, whether it came by position or by keyword.

    All other inputs are handed on as they are.
    """
    try:
        first = next(iter(inspect.signature(module.forward).parameters), None)
    except (TypeError, ValueError):
        first = None

    def hook(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if args:
            return (prepare(args[0]), *args[1:]), kwargs
        if first is not None and first in kwargs:
            return args, {**kwargs, first: prepare(kwargs[first])}
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def on_output(module: nn.Module, finish: Callable[[object], object]) -> None:
    """After forward, replace the output by `finish(output)`."""

    def hook(_: nn.Module, args: tuple[object, ...], output: object) -> object:
        return finish(output)

    module.register_forward_hook(hook)


def full(x: DTensor) -> torch.Tensor:
    """All elements of `x`, in memory of their own; on the meta device only the shape."""
    with torch.no_grad():
        x = x.detach()
        local = x.to_local()
        if local.is_meta:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        whole = x.full_tensor()
        return whole.clone() if whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() else whole
