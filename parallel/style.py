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

from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from dtensor.device_mesh import as_mesh
from dtensor.placement import StridedShard
from dtensor.strides import stride_like

__all__ = ["ParallelStyle", "check_placement", "lay_out", "one_axis_mesh", "on_input", "on_output", "relayout", "wrap"]

APPLIED = "_distribute_module_applied"
"""Attribute that marks a module whose parameters were laid out; `distribute_module` sets it."""


class ParallelStyle(ABC):
    """How to lay out one module. Subclass it and write `_apply` to make a style of your own.

    Attributes:
        src_data_rank: rank (position on the mesh) whose parameter values count; None: each rank cuts its own,
            without communication. Set by `parallelize_module`.
    """

    src_data_rank: int | None = 0
    lays_out_parameters: ClassVar[bool] = False

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Lay `module` out in place over the 1-D `device_mesh` and return it."""

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:  # noqa: B027 - a style may have no checks
        """Raise when this style cannot be applied to `module`; must change nothing."""

    def _layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Placement that each own parameter of `module` will get, by name; {} when not known."""
        return {}


# ------------------------------------------------------------ checks
def one_axis_mesh(style: object, mesh: object) -> DeviceMesh:
    """`mesh` as our DeviceMesh. ValueError unless it has one axis."""
    ours = as_mesh(mesh)
    if ours.ndim != 1:
        names = ours.mesh_dim_names
        pick = f'mesh["{names[-1]}"]' if names else 'name the axes and pass one of them, e.g. mesh["tp"]'
        raise ValueError(
            f"{type(style).__name__}: a style works over one mesh axis\n  got: {ours!r} with {ours.ndim} axes\n"
            f"  fix: {pick}"
        )
    return ours


def check_placement(call: str, name: str, value: object) -> Placement:
    """`value` when it is one placement; TypeError otherwise."""
    if isinstance(value, Placement):
        return value
    raise TypeError(f"{call}: {name} must be one placement, got {value!r}; give e.g. Shard(0) or Replicate()")


def check_fresh(style: ParallelStyle, module: nn.Module) -> None:
    """RuntimeError when `module` was laid out before."""
    if getattr(module, APPLIED, False):
        raise RuntimeError(
            f"{type(style).__name__}: this {type(module).__name__} already has a parallel style "
            "(or went through distribute_module)\n  rule: a module is laid out once\n"
            "  fix: name it once in the plan; a module that is used in two places is parallelized in one of them"
        )


# ------------------------------------------------------------ parameters
def lay_out(
    module: nn.Module, mesh: DeviceMesh, layouts: dict[str, Placement], src_data_rank: int | None
) -> nn.Module:
    """Replace the parameters of `module`: those in `layouts` get that placement, all others are replicated."""

    def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for name, param in list(part.named_parameters(recurse=False)):
            placement = layouts.get(name, Replicate()) if part is module else Replicate()
            value = distribute_tensor(param, mesh, [placement], src_data_rank=src_data_rank)
            part.register_parameter(name, nn.Parameter(value, requires_grad=param.requires_grad))

    return distribute_module(module, mesh, partition)


# ------------------------------------------------------------ tensors
def wrap(
    x: object, mesh: DeviceMesh, layout: Placement, call: str, features: int | None = None
) -> DTensor:
    """`x` as a DTensor: a DTensor is returned as it is, a plain tensor is taken as this rank's piece of `layout`.

    features: global size of the last dim when it is known. A piece that is cut there then needs not be even.
    Raises TypeError for something else, ValueError when the piece does not fit `features`.
    """
    if isinstance(x, DTensor):
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{call}: expected a tensor to lay out as {layout}, got {type(x).__name__}")
    if features is None or not isinstance(layout, Shard) or x.ndim == 0 or layout.dim % x.ndim != x.ndim - 1:
        return DTensor.from_local(x, mesh, [layout], run_check=False)
    _check_piece(x, mesh, features, call)
    shape = (*x.shape[:-1], features)
    stride = stride_like(x, shape)
    return DTensor.from_local(x, mesh, [layout], run_check=False, shape=torch.Size(shape), stride=stride)


def _check_piece(x: torch.Tensor, mesh: DeviceMesh, features: int, call: str) -> None:
    if mesh.get_coordinate() is None:
        return
    k, r = mesh.size(), mesh.get_local_rank()
    chunk = -(-features // k)
    want = max(min(chunk, features - r * chunk), 0)
    if x.shape[-1] == want:
        return
    whole = " (the whole dim: pass input_layouts=Replicate())" if x.shape[-1] == features else ""
    raise ValueError(
        f"{call}: a plain input is taken as this rank's piece of the sharded last dim\n"
        f"  got: last dim of {x.shape[-1]}{whole}\n"
        f"  rule: rank {r} of {k} holds {want} of the module's {features} input features\n"
        "  fix: pass the piece, a DTensor, or the input_layouts that the tensor really has"
    )


def relayout(x: DTensor, layout: Placement) -> DTensor:
    """`x` in `layout`; `x` itself when it has that layout (negative dims count from the end)."""
    if isinstance(layout, (Shard, StridedShard)) and layout.dim < 0:
        d = layout.dim + x.ndim
        layout = Shard(d) if isinstance(layout, Shard) else StridedShard(d, split_factor=layout.split_factor)
    if tuple(x.placements) == (layout,) and not isinstance(layout, Partial):
        return x
    return x.redistribute(placements=[layout])


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
