"""Cutting a full tensor into the local parts of a layout, putting parts together again, and comparing.

This is the specification of layouts that rules are held to, written without the engine's redistribution: what a
shard is follows from `Spec.intervals_of`, what a pending reduction is from `dtensor.comm.reduce_ops`. Parts are made so
that a wrong claim about them shows:

    P(sum), P(avg)    uneven summands of mixed signs, every position another
    P(max), P(min)    for every element another position holds it, the others lie far off, often on the other side of 0
    P(product)        factors of both signs; P(norm<p>) shares of the p-th power, of the sign of the whole
    P(band), P(bor), P(bxor)    other bits on every position

Summands are binary fractions (times a power of two that suits the tensor), so that sums are exact, and no whole
numbers, which functions such as `floor` would pass.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from dtensor.comm.reduce_ops import reduce_tensors
from dtensor.experimental.verify import difference
from dtensor.placement import Partial, Replicate
from dtensor.spec import Spec

__all__ = ["assemble", "coords_of", "differs", "kinds_of", "part_of", "pending_ops"]


def coords_of(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """The coords of a mesh of `shape`, in the order of the ranks."""
    return list(itertools.product(*(range(k) for k in shape)))


def pending_ops(dtype: torch.dtype) -> tuple[str, ...]:
    """The reductions that missing rows are looked for in: those that ops leave pending most."""
    if dtype.is_complex:
        return ("sum", "avg")
    if dtype.is_floating_point:
        return ("sum", "avg", "max", "min")
    return ("sum", "max", "min") if dtype in (torch.int64, torch.int32, torch.int16) else ()


def kinds_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Every kind of reduction that a tensor of `dtype` may be pending in, of norms one even and one odd order.

    Averages of integers are left out: on several axes they are rounded axis by axis.
    """
    if dtype.is_complex:
        return ("sum", "avg", "product")
    if dtype.is_floating_point:
        return ("sum", "avg", "max", "min", "product", "norm2", "norm3")
    if dtype == torch.bool:
        return ("sum", "product", "max", "min", "band", "bor", "bxor")
    return ("sum", "max", "min", "product", "band", "bor", "bxor")


# ------------------------------------------------------------ axes_of
def part_of(full: torch.Tensor, spec: Spec, seed: int = 0, coord: Sequence[int] | None = None) -> torch.Tensor:
    """The local tensor of `full` in layout `spec` on the rank at `coord` (default: this rank).

    It is on the device of `full`, and the same on all devices: parts of a pending tensor are made up on the CPU.
    """
    if full.device.type not in ("cpu", "meta"):
        return part_of(full.cpu(), spec, seed, coord).to(full.device)
    coord = spec.mesh.coord if coord is None else coord
    if coord is None:
        return full.new_empty(spec.local_shape)
    part = full
    for axis, (p, k, r) in enumerate(zip(spec.placements, spec.mesh.shape, coord, strict=True)):
        if isinstance(p, Partial):
            apart = sum(c for c, q in zip(coord[:axis], spec.placements, strict=False) if not isinstance(q, Replicate))
            part = _pending_part(part, p.reduce_op, k, r, seed * 31 + axis * 7 + apart)
    for d, runs in enumerate(spec.intervals_of(coord)):
        if runs != ((0, full.shape[d]),):
            index = torch.tensor([i for s, n in runs for i in range(s, s + n)], dtype=torch.int64)
            part = part.index_select(d, index)
    return part.clone(memory_format=torch.contiguous_format)


def _pending_part(t: torch.Tensor, op: str, k: int, r: int, seed: int) -> torch.Tensor:
    """What position `r` of `k` holds of `t`, pending in `op`. Raises ValueError where there is no way to split."""
    g = torch.Generator().manual_seed(seed)
    exact = not (t.is_floating_point() or t.is_complex())
    if op in ("band", "bor", "bxor") or t.dtype == torch.bool:
        return _pending_bits(t, {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op), k, r, g)
    if op.startswith("norm"):
        p = Partial(op).norm or 1.0
        shares = torch.rand((k, *t.shape), generator=g, dtype=torch.float64).add_(0.1)
        return (t * (shares[r] / shares.sum(0)) ** (1 / p)).to(t.dtype)
    noise = [_noise(t, g) for _ in range(k)]
    if op in ("sum", "avg"):
        if op == "avg" and exact:
            return t + noise[r] if r else t - sum(noise[1:], torch.zeros_like(t))
        whole = t * k if op == "avg" else t
        return noise[r] if r else whole - sum(noise[1:], torch.zeros_like(t))
    if op in ("max", "min"):
        winner = torch.randperm(t.numel(), generator=g).reshape(t.shape) % k
        off = noise[r].abs() + 1
        if t.is_floating_point():  # NaN, and the infinity that wins, lie on one position only;
            away, low = 2 * off if op == "max" else -2 * off, -math.inf if op == "max" else 0.0
            mine = t
            t = torch.where(t.isnan(), away, t.nan_to_num(0.0, math.inf if op == "min" else 0.0, low))
        else:  # nothing lies further off than the smallest and the largest number
            mine, ends = t, torch.iinfo(t.dtype)
            off = torch.minimum(off, (t.clamp(max=-8) - ends.min if op == "max" else ends.max - t.clamp(min=8)))
        return torch.where(winner == r, mine, t - off if op == "max" else t + off)
    if op == "product":
        last = -1.0 if exact and t.dtype.is_signed else 1.0 if exact else -0.5
        factors = [torch.where(n.real > 0, 1.0 if exact else 2.0, last).to(t.dtype) for n in noise]
        others = math.prod(factors[1:], start=torch.ones_like(t))
        return factors[r] if r else t * others if exact else t / others
    raise ValueError(f"no way to split for a pending {op}")


def _pending_bits(t: torch.Tensor, op: str, k: int, r: int, g: torch.Generator) -> torch.Tensor:
    """As `_pending_part`, for the operations on bits."""
    one = t.dtype == torch.bool
    draw = lambda: torch.randint(0, 2 if one else 128, t.shape, generator=g).to(t.dtype)  # noqa: E731
    owner, noise = draw(), [draw() for _ in range(k)]
    if op == "bxor":
        return noise[r] if r else functools.reduce(torch.bitwise_xor, noise[1:], t)
    mine = owner if r == 0 else ~owner  # which bits the first position has as they are, and which the others
    return t & mine if op == "bor" else t | (~mine & noise[r])


def _noise(t: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Small exact numbers of mixed signs, as large as the elements of `t`, of its dtype."""
    if not (t.is_floating_point() or t.is_complex()):
        return torch.randint(-3, 4, t.shape, generator=g).to(t.dtype)
    size = t.abs().double().nan_to_num(0.0, 0.0, 0.0).mean().item() if t.numel() else 1.0
    unit = 2.0 ** max(math.ceil(math.log2(size)), 0) / 64 if 0 < size < 1e30 else 1 / 64
    draw = lambda: torch.randint(-192, 193, t.shape, generator=g).double() * unit  # noqa: E731
    return torch.complex(draw(), draw()).to(t.dtype) if t.is_complex() else draw().to(t.dtype)


# ------------------------------------------------------------ putting together
def assemble(spec: Spec, parts: Sequence[torch.Tensor]) -> torch.Tensor | str:
    """The global tensor that `parts`, one a rank of the mesh in order, make in layout `spec`; or what is wrong.

    Shapes, dtypes and the agreement of replicas are checked.
    """
    shape = spec.mesh.shape
    held = dict(zip(coords_of(shape), parts, strict=True))
    for coord, part in held.items():
        want = spec.local_shape_of(coord)
        if part.shape != want:
            return f"local shape {list(part.shape)} at {coord}, not {list(want)}, for {spec}"
        if part.dtype != spec.dtype:
            return f"local dtype {part.dtype} at {coord}, not {spec.dtype}"
    for axis, p in enumerate(spec.placements):
        if isinstance(p, (Replicate, Partial)):
            for coord in [c for c in held if c[axis] == 0]:
                line = [held.pop((*coord[:axis], r, *coord[axis + 1 :])) for r in range(shape[axis])]
                if isinstance(p, Partial):
                    held[coord] = reduce_tensors(line, p.reduce_op)
                else:
                    for r, other in enumerate(line[1:], 1):
                        bad = differs(other, line[0], 1e-6, 1e-6)
                        if bad:
                            return f"replicas disagree, position {r} of axis {axis} has {bad}"
                    held[coord] = line[0]
    full = parts[0].new_empty(spec.shape)
    for coord, part in held.items():
        place = [
            torch.tensor([i for s, n in runs for i in range(s, s + n)], dtype=torch.int64)
            for runs in spec.intervals_of(coord)
        ]
        if part.numel():
            full[torch.meshgrid(*place, indexing="ij") if place else ()] = part
    return full


# ------------------------------------------------------------ comparing
def differs(got: torch.Tensor, want: torch.Tensor, rtol: float, atol: float) -> str:
    """What differs, and where first, or ''. Shape and dtype count; NaN equals NaN."""
    if got.shape == want.shape and got.dtype != want.dtype:
        return f"dtype {got.dtype}, not {want.dtype}"
    return difference(got, want, rtol, atol)
