"""`zeros, ones, empty, full, rand, randn`: DTensors made in place, each rank its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number

import torch

from dtensor.dispatch import random as rng
from dtensor.errors import expect, explain_error, short
from dtensor.mesh.device_mesh import DeviceMesh, as_mesh
from dtensor.placement import Partial, Placement, Replicate
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.spec import Spec, contiguous_stride, normalize_placements
from dtensor.tensor import DTensor
from dtensor.tensor_methods.compiled import refuse_export

__all__ = ["empty", "full", "ones", "rand", "randn", "zeros"]

Size = Sequence[int] | torch.Size


def _size(call: str, size: Sequence[int | Size]) -> torch.Size:
    one = size[0] if len(size) == 1 else None
    given = size if one is None or isinstance(one, int) else one
    try:
        made = torch.Size(given)  # type: ignore[arg-type]
    except TypeError:
        made = None
    if made is None or isinstance(one, bool) or any(n < 0 or n >= 2**63 for n in made):
        fix = f"{call}{'((4, 3), value' if call == 'full' else '(4, 3'}, device_mesh=mesh, placements=[Shard(0)])"
        error = TypeError if made is None or isinstance(one, bool) else ValueError
        got = f"size={short(one if len(size) == 1 else size)}"
        raise error(explain_error(call, got, "a size is made of ints from 0 to 2**63 - 1", fix))
    return made


def _make(
    call: str,
    size: torch.Size,
    fill: Callable[[Size, torch.dtype | None, str], torch.Tensor],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    random: bool = False,
) -> DTensor:
    """Check, make this rank's part, wrap. A Partial layout gets parts that reduce to the value."""
    refuse_export(call)
    if dtype is not None:
        expect(call, "dtype", dtype, torch.dtype, "a dtype", f"{call}(..., dtype=torch.bfloat16)")
    mesh = as_mesh(device_mesh)
    if layout is not torch.strided:
        raise ValueError(f"{call}: layout={layout} is not supported; DTensors are strided")
    placed = normalize_placements(placements, mesh, len(size), call)
    whole = tuple(Replicate() if isinstance(p, Partial) else p for p in placed)
    dt = dtype if dtype is not None else torch.get_default_dtype() if call != "full" else None
    probe = fill((0,), dt, "meta").dtype
    spec = Spec.make(mesh, whole, size, contiguous_stride(size), probe)
    if random and mesh.coord is not None:
        device = torch.empty((), device=mesh.device_type).device
        local = rng.draw_part(lambda shape: fill(shape, dt, mesh.device_type), spec, None, device)
        local = local if local.shape == spec.shape else local.clone()  # a part is a view of the whole draw
    else:
        local = fill(spec.local_shape, dt, mesh.device_type)
    target = spec.with_placements(placed)
    return DTensor(redistribute_local(local, spec, target), target, requires_grad=requires_grad)


def zeros(
    *size: int | Size, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided,
    requires_grad: bool = False, device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:  # fmt: skip
    """A DTensor of `size` filled with zeros; `placements` default to replicated."""
    fill = lambda s, d, dev: torch.zeros(s, dtype=d, device=dev)  # noqa: E731
    return _make("zeros", _size("zeros", size), fill, dtype, layout, requires_grad, device_mesh, placements)


def ones(
    *size: int | Size, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided,
    requires_grad: bool = False, device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:  # fmt: skip
    """A DTensor of `size` filled with ones, also under a Partial layout."""
    fill = lambda s, d, dev: torch.ones(s, dtype=d, device=dev)  # noqa: E731
    return _make("ones", _size("ones", size), fill, dtype, layout, requires_grad, device_mesh, placements)


def empty(
    *size: int | Size, dtype: torch.dtype | None = None, layout: torch.layout = torch.strided,
    requires_grad: bool = False, device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:  # fmt: skip
    """A DTensor of `size`, uninitialised."""
    fill = lambda s, d, dev: torch.empty(s, dtype=d, device=dev)  # noqa: E731
    return _make("empty", _size("empty", size), fill, dtype, layout, requires_grad, device_mesh, placements)


def full(
    size: Size, fill_value: bool | int | float | complex, *, dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided, requires_grad: bool = False, device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:  # fmt: skip
    """A DTensor of `size` filled with `fill_value`; the dtype follows the value as in `torch.full`."""
    number = (Number, torch.SymInt, torch.SymFloat)
    expect("full", "fill_value", fill_value, number, "a number", "full((4, 3), 1.0, device_mesh=mesh)")
    fill = lambda s, d, dev: torch.full(s, fill_value, dtype=d, device=dev)  # noqa: E731
    return _make("full", _size("full", (size,)), fill, dtype, layout, requires_grad, device_mesh, placements)


def rand(
    *size: int | Size, requires_grad: bool = False, dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided, device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:  # fmt: skip
    """Uniform numbers of [0, 1): replicas agree, shards differ."""
    fill = lambda s, d, dev: torch.rand(s, dtype=d, device=dev)  # noqa: E731
    return _make("rand", _size("rand", size), fill, dtype, layout, requires_grad, device_mesh, placements, True)


def randn(
    *size: int | Size, requires_grad: bool = False, dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided, device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:  # fmt: skip
    """Standard normal numbers: replicas agree, shards differ."""
    fill = lambda s, d, dev: torch.randn(s, dtype=d, device=dev)  # noqa: E731
    return _make("randn", _size("randn", size), fill, dtype, layout, requires_grad, device_mesh, placements, True)
