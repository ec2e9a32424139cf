"""local_map: run a function of plain tensors on the local parts of DTensors.

    rows = local_map(my_kernel, out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]), device_mesh=mesh)
    y = rows(x, w)         # my_kernel sees this rank's piece of x, and the whole w

Gradients. What the function does is known only locally. On a mesh axis where some output is not replicated
the ranks compute different things, so the gradient of a replicated input is a pending sum over the axis, and
a replicated output's gradient is split evenly; where all outputs are replicated the ranks compute the same,
and so do their gradients. `in_grad_placements` overrides this.

Uneven shards. Where an input's shards are uneven, the outputs' global shape cannot be told from a local
one; the ranks then exchange their local shapes (one small gather), and shapes that are no `torch.chunk`
parts raise on all ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from dtensor.errors import expect
from dtensor.mesh.device_mesh import DeviceMesh, as_mesh
from dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from dtensor.spec import Spec, contiguous_stride, is_even, normalize_placements
from dtensor.tensor import DTensor

__all__ = ["local_map"]

Layout = Sequence[Placement] | None
Function = Callable[..., Any]


def local_map(
    func: Function | None = None,
    out_placements: Any = None,
    in_placements: Any = None,
    in_grad_placements: Any = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Function:
    """`func` as a function of DTensors; also a decorator, when called without `func`.

    Args:
        out_placements: the layout of the output (a list), or a tuple with one for each output; None for an output
            that is no tensor.
        in_placements: a tuple with a layout for each positional input (flattened), None for one that is no DTensor.
            Without it every DTensor is taken in the layout it has.
        in_grad_placements: layouts of the inputs' gradients, likewise; see the module's text for the default.
        device_mesh: mesh of the outputs; by default that of the first DTensor.
        redistribute_inputs: bring inputs into `in_placements` instead of refusing other layouts.

    Keyword inputs are passed on, DTensors among them as their local parts. Called without any DTensor the function
    is called as it is. Raises ValueError when layouts do not fit the inputs or outputs.
    """
    if func is None:
        return functools.partial(
            local_map, out_placements=out_placements, in_placements=in_placements,
            in_grad_placements=in_grad_placements, device_mesh=device_mesh, redistribute_inputs=redistribute_inputs,
        )  # fmt: skip

    fix = "local_map(f, out_placements=[Shard(0)], in_placements=([Shard(0)], None))"
    expect("local_map", "func", func, Callable, "a function", fix)
    for name, given in (
        ("out_placements", out_placements), ("in_placements", in_placements),
        ("in_grad_placements", in_grad_placements),
    ):  # fmt: skip
        if not _is_layout(given):
            what = "a layout (a list of placements), or a tuple with a layout or None for each value"
            expect("local_map", name, given, (tuple, list, type(None)), what, fix)
            for layout in given or ():
                if layout is not None and not _is_layout(layout):
                    expect("local_map", f"an entry of {name}", layout, type(None), "a list of placements, or None", fix)
    device_mesh = None if device_mesh is None else as_mesh(device_mesh)

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, tree = pytree.tree_flatten(args)
        named, named_tree = pytree.tree_flatten(kwargs)
        dts = [x for x in (*flat, *named) if isinstance(x, DTensor)]
        if not dts:
            return func(*args, **kwargs)
        mesh = dts[0].device_mesh if device_mesh is None else as_mesh(device_mesh)
        flat = _laid_out(flat, in_placements, redistribute_inputs)
        mixed = _mixed_axes(out_placements, mesh)
        grads = _per_value("in_grad_placements", in_grad_placements, len(flat))
        uneven = any(isinstance(x, DTensor) and not is_even(x._spec) for x in (*flat, *named))
        flat = [_local(x, g, mesh, mixed) for x, g in zip(flat, grads, strict=True)]
        named = [_local(x, None, mesh, mixed) for x in named]
        out = func(*pytree.tree_unflatten(flat, tree), **pytree.tree_unflatten(named, named_tree))
        return _wrapped(out, out_placements, mesh, mixed, uneven)

    return mapped


# ------------------------------------------------------------ inputs
def _per_value(name: str, given: Any, count: int) -> list[Layout]:
    """One layout for each flattened input; all None when nothing is given."""
    if given is None:
        return [None] * count
    layouts = [given] if _is_layout(given) else list(given)
    if len(layouts) != count:
        raise ValueError(
            f"local_map: {name} has {len(layouts)} layouts for {count} inputs\n"
            "  rule: one layout for each positional input, None for one that is no DTensor"
        )
    return layouts


def _is_layout(x: object) -> bool:
    """A list of placements, as opposed to a tuple of layouts."""
    return isinstance(x, (list, tuple)) and len(x) > 0 and all(isinstance(p, Placement) for p in x)


def _laid_out(flat: list[Any], in_placements: Any, redistribute: bool) -> list[Any]:
    if in_placements is None:
        return flat
    out = []
    for i, (x, want) in enumerate(zip(flat, _per_value("in_placements", in_placements, len(flat)), strict=True)):
        if not isinstance(x, torch.Tensor):
            if want is not None:
                raise ValueError(f"local_map: in_placements[{i}] is {want!r}, but input {i} is no tensor: give None")
        elif isinstance(x, DTensor):
            if want is None:
                raise ValueError(
                    f"local_map: in_placements[{i}] is None, but input {i} is a DTensor laid out as "
                    f"{list(x.placements)}; give its layout"
                )
            placed = normalize_placements(want, x.device_mesh, x.ndim, "local_map(in_placements=)")
            if placed != x.placements:
                if not redistribute:
                    raise ValueError(
                        f"local_map: input {i} is laid out as {list(x.placements)}, in_placements asks for "
                        f"{list(placed)}\n"
                        "  fix: redistribute_inputs=True, or x.redistribute(placements=...) before the call"
                    )
                x = x.redistribute(placements=placed)
        out.append(x)
    return out


def _mixed_axes(out_placements: Any, mesh: DeviceMesh) -> list[bool]:
    """Per mesh axis, whether some output is not replicated on it."""
    layouts = [out_placements] if _is_layout(out_placements) else list(out_placements or ())
    given = [tuple(layout) for layout in layouts if layout is not None]
    return [any(a < len(g) and not isinstance(g[a], Replicate) for g in given) for a in range(mesh.ndim)]


def _local(x: Any, grads: Layout, mesh: DeviceMesh, mixed: list[bool]) -> Any:
    if not isinstance(x, DTensor):
        return x
    if grads is None and x.device_mesh == mesh:
        grads = [
            Partial() if m and isinstance(p, Replicate) else Replicate() if isinstance(p, Partial) else p
            for p, m in zip(x.placements, mixed, strict=True)
        ]
    local = x.to_local(grad_placements=grads)
    wait = getattr(local, "wait", None) if type(local).__name__ == "AsyncCollectiveTensor" else None
    return local if wait is None else wait()


# ------------------------------------------------------------ outputs
def _wrapped(out: Any, out_placements: Any, mesh: DeviceMesh, mixed: list[bool], uneven: bool) -> Any:
    flat, tree = pytree.tree_flatten(out)
    if out_placements is None:
        layouts: list[Layout] = [None] * len(flat)
    else:
        layouts = [out_placements] if _is_layout(out_placements) else list(out_placements)
    if not _is_layout(out_placements) and len(layouts) == 1 and layouts[0] is None:
        layouts = [None] * len(flat)  # one output that is no tensor, of any structure
    if len(layouts) != len(flat):
        raise ValueError(
            f"local_map: out_placements has {len(layouts)} layouts, the function returned {len(flat)} outputs\n"
            "  rule: one layout for each output, None for one that is no tensor"
        )
    placed: list[tuple[Placement, ...] | None] = []
    for i, (x, layout) in enumerate(zip(flat, layouts, strict=True)):
        if isinstance(x, DTensor):
            raise ValueError(f"local_map: output {i} is a DTensor; the function must return plain tensors")
        if (layout is None) == isinstance(x, torch.Tensor):
            kind = "a tensor: give its layout" if layout is None else f"{type(x).__name__}: give None"
            raise ValueError(f"local_map: out_placements[{i}] is {layout!r}, but output {i} is {kind}")
        placed.append(
            None if layout is None else normalize_placements(layout, mesh, x.ndim, "local_map(out_placements=)")
        )
    tensors = [(x, p) for x, p in zip(flat, placed, strict=True) if p is not None]
    shapes = iter(_global_shapes(tensors, mesh) if uneven else [None] * len(tensors))
    made = [x if p is None else _as_dtensor(x, p, mesh, mixed, next(shapes)) for x, p in zip(flat, placed, strict=True)]
    return pytree.tree_unflatten(made, tree)


def _as_dtensor(
    x: torch.Tensor, placed: tuple[Placement, ...], mesh: DeviceMesh, mixed: list[bool], shape: torch.Size | None
) -> DTensor:
    grads = [
        Partial() if m and isinstance(p, Replicate) else Replicate() if isinstance(p, Partial) else p
        for p, m in zip(placed, mixed, strict=True)
    ]
    stride = None if shape is None else contiguous_stride(shape)
    return DTensor.from_local(
        x, mesh, placed, run_check=False, shape=shape, stride=stride, grad_placements=grads
    )


def _global_shapes(tensors: list[tuple[torch.Tensor, tuple[Placement, ...]]], mesh: DeviceMesh) -> list[torch.Size]:
    """The outputs' global shapes from all ranks' local ones: one gather. ValueError where they are no chunks."""
    own = [n for x, _ in tensors for n in x.shape]
    if not own:
        return [torch.Size() for _ in tensors]
    sizes = torch.tensor([own], dtype=torch.int64, device=mesh.device_type)
    gathered = DTensor.from_local(sizes, mesh, [Shard(0)] * mesh.ndim, run_check=False).full_tensor()
    table = gathered.view(*mesh.shape, len(own))
    out, at = [], 0
    for i, (x, placed) in enumerate(tensors):
        shapes = table[..., at : at + x.ndim]
        at += x.ndim
        out.append(_explained(i, x, placed, mesh, shapes))
    return out


def _explained(
    i: int, x: torch.Tensor, placed: tuple[Placement, ...], mesh: DeviceMesh, shapes: torch.Tensor
) -> torch.Size:
    """The global shape of which `shapes[coord]` are the parts in layout `placed`."""
    shape = []
    for d in range(x.ndim):
        sharded = [isinstance(p, (Shard, StridedShard)) and p.dim == d for p in placed]
        along = shapes[..., d][tuple(slice(None) if c else 0 for c in sharded)]
        shape.append(int(along.sum()))
    spec = Spec.make(mesh, placed, shape, contiguous_stride(shape), x.dtype)
    for flat in range(math.prod(mesh.shape)):
        coord = tuple(int(c) for c in torch.unravel_index(torch.tensor(flat), mesh.shape))
        got, want = tuple(shapes[coord].tolist()), tuple(spec.local_shape_of(coord))
        if got != want:
            raise ValueError(
                f"local_map: output {i} is declared {list(placed)}, but the ranks' parts are no shards like that\n"
                f"  got: {got} at position {coord}, where a tensor of shape {tuple(shape)} has {want}\n"
                "  rule: shards are torch.chunk's parts, of size ceil(n / k), the last ones smaller\n"
                "  fix: redistribute the input to even shards or Replicate() first"
            )
    return spec.shape
