"""Rows of a user's sharding rule, tried on numbers: a row that gives other values than the op is refused.

Each row is tried on one axis of 2 and one of 3 positions with random inputs of the call's own shapes: inputs are
sharded, or split into pending parts of unequal values, as the row says, the op runs on every position's part, and what
the outputs' placements make of the results is compared with the op on the full inputs. Nothing is sent; every rank
draws the same inputs, so all of them reach the same verdict.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.rules.registry import Call
from dtensor.spec import Spec

__all__ = ["LIMIT", "difference", "wrong_row"]

LIMIT = 1 << 20
"""Calls with more input elements than this are not tried."""

log = logging.getLogger("dtensor")
Row = tuple[tuple[Placement, ...], tuple[Placement, ...]]


def wrong_row(call: Call, rows: Sequence[Row]) -> tuple[int, str] | None:
    """The first row that is wrong for this call, and how; None when none is, or when it cannot be told.

    It cannot be told for ops that write, give views, draw random numbers or raise on random inputs, or on large ones.
    """
    writes_or_views = any(a.alias_info is not None for a in call.op._schema.arguments)
    if writes_or_views or torch.Tag.nondeterministic_seeded in call.op.tags:
        return None
    if sum(s.numel for s in call.inputs) > LIMIT:
        log.debug("%s: too large to try its sharding rule on numbers", call.op)
        return None
    generator = torch.Generator().manual_seed(20)
    full = [_random(s, generator) for s in call.inputs]
    want = _run(call, full)
    again = _run(call, full)
    if want is None or again is None or not all(map(_close, want, again)):
        return None
    for i, (outs, ins) in enumerate(rows):
        for k in (2, 3):
            parts = [_parts(x, p, k, generator) for x, p in zip(full, ins, strict=True)]
            if any(p is None for p in parts):
                continue
            results = [_run(call, [p[r] for p in parts if p is not None]) for r in range(k)]
            if any(r is None for r in results):
                continue
            for j, (p, whole) in enumerate(zip(outs, want, strict=True)):
                said = _join([r[j] for r in results if r is not None], p, whole)
                if said:
                    return i, f"output {j} on an axis of {k} {said}"
    return None


def _random(spec: Spec, generator: torch.Generator) -> torch.Tensor:
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        kind = torch.complex64 if spec.dtype.is_complex else torch.float32
        x = torch.randn(spec.shape, generator=generator, dtype=kind)
    else:
        x = torch.randint(0, 2 if spec.dtype == torch.bool else 4, tuple(spec.shape), generator=generator)
    return x.to(device=spec.mesh.device_type, dtype=spec.dtype)


def _run(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
    """The op on these tensors, results flattened; None when it raises."""
    given = iter(tensors)
    put = lambda v: next(given) if isinstance(v, Spec) else v  # noqa: E731
    values: Mapping[str, object] = {
        n: [put(x) for x in v] if isinstance(v, (list, tuple)) else put(v) for n, v in call.arguments.items()
    }
    schema = call.op._schema.arguments
    try:
        got = call.op(
            *(values[a.name] for a in schema if not a.kwarg_only),
            **{a.name: values[a.name] for a in schema if a.kwarg_only},
        )
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return None
    many = got if isinstance(got, (list, tuple)) else [got]
    return [x for y in many for x in (y if isinstance(y, (list, tuple)) else [y])]


def _parts(x: torch.Tensor, p: Placement, k: int, generator: torch.Generator) -> list[torch.Tensor] | None:
    """What each of `k` positions holds of `x`; None where that cannot be made here."""
    if isinstance(p, Replicate):
        return [x] * k
    if isinstance(p, Shard):
        sharded = list(x.chunk(k, p.dim))
        return sharded if len(sharded) == k and x.shape[p.dim] >= k else None
    if not isinstance(p, Partial) or x.dtype == torch.bool:
        return None
    noise = [_like(x, generator) for _ in range(k - 1)]
    if p.reduce_op in ("sum", "avg"):
        scale = k if p.reduce_op == "avg" else 1
        return [*noise, x * scale - sum(noise)]
    if p.reduce_op in ("max", "min"):
        sign = -1 if p.reduce_op == "max" else 1
        return [*(x + sign * n.abs() for n in noise), x]
    return None


def _like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(x.shape, generator=generator).mul(3).to(device=x.device, dtype=x.dtype)


def _join(parts: Sequence[torch.Tensor | None], p: Placement, whole: torch.Tensor | None) -> str:
    """What is wrong when positions holding `parts` are read as `p`; "" when it gives `whole`."""
    if whole is None or any(x is None for x in parts):
        return ""
    local = [x for x in parts if x is not None]
    if isinstance(p, Replicate):
        found = [(r, how) for r, x in enumerate(local) if (how := _differs(x, whole))]
        return f"differs on position {found[0][0]} from the op's value: {found[0][1]}" if found else ""
    if isinstance(p, Shard):
        sizes = [tuple(c.shape) for c in whole.chunk(len(local), p.dim)]
        if sizes != [tuple(x.shape) for x in local]:
            return f"has shards of shapes {[list(x.shape) for x in local]}, not {[list(s) for s in sizes]}"
        said = _differs(torch.cat(local, p.dim), whole)
        return f"has shards with other values than the op's: {said}" if said else ""
    if not isinstance(p, Partial) or p.reduce_op not in ("sum", "avg", "max", "min", "product"):
        return ""
    if any(x.shape != whole.shape for x in local):
        return f"has pending parts of shapes {[list(x.shape) for x in local]}, not {list(whole.shape)}"
    stacked = torch.stack(local)
    made = {
        "sum": lambda: stacked.sum(0, dtype=whole.dtype), "avg": lambda: stacked.sum(0) / len(local),
        "max": lambda: stacked.amax(0), "min": lambda: stacked.amin(0), "product": lambda: stacked.prod(0),
    }[p.reduce_op]()  # fmt: skip
    said = _differs(made, whole)
    return f"does not reduce ({p.reduce_op}) to the op's value: {said}" if said else ""


def _close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else not _differs(a, b)


def _differs(a: torch.Tensor, b: torch.Tensor) -> str:
    """Where `a` is not `b`, within rounding; "" where it is."""
    if not (b.dtype.is_floating_point or b.dtype.is_complex):
        return difference(a.to(b.dtype), b, 0.0, 0.0)
    finite = b.abs()[b.isfinite()]
    scale = float(finite.max()) if finite.numel() else 1.0
    tolerance = 1e-3 if b.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128) else 5e-2
    return difference(a.to(b.dtype), b, tolerance, tolerance * max(scale, 1e-6))


def difference(got: torch.Tensor, want: torch.Tensor, rtol: float, atol: float) -> str:
    """Where two tensors of one dtype differ first, how many elements do and by how much at most; "" where none does.

    NaN equals NaN.

        value -0.884 at [4, 0], not -3.194; 32 of 64 differ, the largest difference is 5.01, at [7, 3]
    """
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, not {list(want.shape)}"
    exact = not (want.dtype.is_floating_point or want.dtype.is_complex)
    wrong = got != want if exact else ~torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    if not bool(wrong.any()):
        return ""
    at = wrong.nonzero()
    wide = torch.complex128 if want.dtype.is_complex else torch.float64
    apart = (got.to(wide) - want.to(wide)).abs().nan_to_num(math.inf, math.inf)[wrong]
    far = int(apart.argmax())
    place = lambda i: at[i].tolist()  # noqa: E731
    value = lambda t: t[tuple(place(0))].item()  # noqa: E731
    return (
        f"value {value(got)} at {place(0)}, not {value(want)}; {len(at)} of {want.numel()} differ, "
        f"the largest difference is {apart[far].item():.4g}, at {place(far)}"
    )
