"""Rows that a rule does not offer although they need no communication.

A *row* is a layout of every input and of every output on one mesh axis: `S(0), R -> S(0)`. For one recorded call all
rows of inputs in R, S(d) and P(sum|avg|max|min) are gone through. The engine is asked what it would do; where it
would communicate (or gather), the plain op is run on the parts, and if its results are parts of the right results in
some layout, the row is missing.

That a row was right once proves little, so it must hold for

    axes of 2 and of 3 positions            sizes that do not divide; dims shorter than the axis are not sharded
    the sample and others made from it      negated, shuffled, scaled, moved values, one NaN, where the op takes them

    other numbers                           where the rule says that a number is no part of the plan (`values`)

and the results must say something: a result that is one and the same number in all trials does not. Rows from which
another one follows by slicing a replicated input, which costs nothing, are left out: what is reported are the
largest rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor import DTensor, init_device_mesh
from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch.call import make_call
from dtensor.dispatch.metadata import output_metas
from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.rules.choice import decide
from dtensor.rules.registry import rule_of
from dtensor.simulation.simulate import fake_world
from dtensor.spec import Spec

from .parts import assemble, differs, part_of, pending_ops
from .recorded import RecordedCall, map_tensors, plain_result, tensors_of
from .truth import skip_reason

__all__ = ["Row", "merged", "missing_rows", "other_numbers"]

MOST_ROWS = 512
R = Replicate()


@dataclass(frozen=True)
class Row:
    """Layouts of inputs and outputs on one axis."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    def __str__(self) -> str:
        one = lambda p: "P" if p == Partial("sum") else str(p)  # noqa: E731
        return f"{', '.join(map(one, self.inputs))} -> {', '.join(map(one, self.outputs))}"


def missing_rows(call: RecordedCall) -> list[Row]:
    """The rows that are right for this call and that its rule does not offer; none where a rule is not asked."""
    info = hot.OpInfo(call.op)
    sizes = [t.numel() for t in call.tensors]
    if skip_reason(call) or info.kind != "ordinary" or info.written or not sizes or min(sizes) == 0 or max(sizes) < 3:
        return []
    trials = _trials(call, info)
    if not trials:
        return []
    found: list[Row] = []
    offers = _Offers(call, info)
    if not offers.ruled:
        return []
    for ins in _rows(call):
        if any(_follows(ins, row.inputs) for row in found) or offers.free(ins):
            continue
        outs = _outputs(trials, ins)
        if outs is not None:
            found.append(Row(ins, outs))
    return found


def merged(rows: Sequence[Row]) -> list[str]:
    """The rows as text, those that differ only in the reduction as one: `P(sum|avg) -> P(sum|avg)`."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        kinds = {p.reduce_op for p in (*row.inputs, *row.outputs) if isinstance(p, Partial)}
        if len(kinds) == 1:
            kind = kinds.pop()
            one = lambda p: "P(*)" if isinstance(p, Partial) else str(p)  # noqa: E731
            text = f"{', '.join(map(one, row.inputs))} -> {', '.join(map(one, row.outputs))}"
            groups.setdefault(text, []).append(kind)
        else:
            groups.setdefault(str(row), [])
    return [t.replace("P(*)", f"P({'|'.join(dict.fromkeys(kinds))})") if kinds else t for t, kinds in groups.items()]


def _follows(ins: Sequence[Placement], larger: Sequence[Placement]) -> bool:
    """True when inputs in `ins` come to `larger` by slicing, or zero-filling, replicated ones."""
    return all(a == b or a == R for a, b in zip(ins, larger, strict=True))


# ------------------------------------------------------------ the rows
def _rows(call: RecordedCall) -> Iterator[tuple[Placement, ...]]:
    """Layouts of the inputs, those with fewer replicated inputs first; all of them, or the likely ones."""
    tensors = call.tensors
    numeric = all(not t.is_floating_point() and not t.is_complex() for t in tensors)
    options: list[list[Placement]] = []
    for t in tensors:
        can = t.is_floating_point() or t.is_complex() or numeric  # pending indices mean nothing
        pending = pending_ops(t.dtype) if can and t.numel() >= 4 else ()  # with fewer elements chance has a say
        options.append([R, *(Shard(d) for d, n in enumerate(t.shape) if n >= 3), *(Partial(op) for op in pending)])
    unread = _unread(call)
    total = 1
    for o in options:
        total *= len(o)
    if total <= MOST_ROWS:
        rows = list(itertools.product(*options))
    else:
        rows = _likely(tensors, options)
    rows = [row for row in dict.fromkeys(rows) if any(p != R for p in row) and _one_kind(row)]
    # What is not read may be pending in anything: that is said once, by itself.
    alone = lambda row: sum(p != R for p in row) == 1  # noqa: E731
    rows = [row for row in rows if alone(row) or not any(isinstance(row[i], Partial) for i in unread)]
    yield from sorted(rows, key=lambda row: sum(p == R for p in row))


def _one_kind(row: Sequence[Placement]) -> bool:
    return len({p.reduce_op for p in row if isinstance(p, Partial)}) <= 1


def _unread(call: RecordedCall) -> list[int]:
    """Inputs whose values the results do not depend on."""
    want = list(tensors_of(plain_result(call)[0]))
    found = []
    for i, t in enumerate(call.tensors):
        other = call.with_tensors([_moved(_shuffled(t)) if i == j else x for j, x in enumerate(call.tensors)])
        try:
            got = list(tensors_of(plain_result(other)[0]))
        except Exception:
            continue
        if t.is_floating_point() and all(not differs(a, b, 0, 0) for a, b in zip(got, want, strict=True)):
            found.append(i)
    return found


def _likely(tensors: Sequence[torch.Tensor], options: Sequence[Sequence[Placement]]) -> list[tuple[Placement, ...]]:
    """One or two inputs that are not replicated; all that can in one reduction, or sharded on one dim."""
    rows: list[tuple[Placement, ...]] = []
    n = len(options)
    if n > 8:
        singles: list[tuple[int, ...]] = [(0,), (1,), (n - 1,)]
    else:
        singles = [*((i,) for i in range(n)), *itertools.combinations(range(n), 2)]
    for at in singles:
        rows += [
            tuple(pick[at.index(i)] if i in at else R for i in range(n))
            for pick in itertools.product(*(options[i][1:] for i in at))
        ][:MOST_ROWS]
    for op in ("sum", "avg", "max", "min"):
        p = Partial(op)
        rows.append(tuple(p if p in o else R for o in options))
    for d in range(max((t.ndim for t in tensors), default=0)):
        rows.append(tuple(Shard(d) if Shard(d) in o else R for o in options))
        from_end = [Shard(t.ndim - 1 - d) if d < t.ndim else R for t in tensors]
        rows.append(tuple(s if s in o else R for s, o in zip(from_end, options, strict=True)))
    return rows[: 4 * MOST_ROWS]


# ------------------------------------------------------------ what the rule offers
class _Offers:
    """What the engine does with this call's inputs in some layout, on an axis of two."""

    def __init__(self, call: RecordedCall, info: hot.OpInfo) -> None:
        self.call, self.info = call, info
        with fake_world(2):
            self.mesh = init_device_mesh("cpu", (2,))
            metas = output_metas(call.op, *self._wrapped([R] * len(call.tensors)))
            self.outs = None if metas is None else metas[1]
            self.ruled = self.outs is not None and self._rule([R] * len(call.tensors))[1] is not None

    def _wrapped(self, row: Sequence[Placement]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        at = iter(row)

        def wrap(t: torch.Tensor) -> DTensor:
            spec = Spec.make(self.mesh, (next(at),), t.shape, t.stride(), t.dtype)
            return late.new(DTensor, t, spec, requires_grad=False)

        args, kwargs = map_tensors(wrap, (self.call.args, dict(self.call.kwargs)))
        return args, kwargs

    def _rule(self, row: Sequence[Placement]) -> tuple[Any, Any]:
        args, kwargs = self._wrapped(row)
        given = make_call(self.call.op, args, kwargs, self.outs or ())
        return given, rule_of(self.info.entry, given)

    def free(self, row: Sequence[Placement]) -> bool:
        """True when the engine needs no communication for inputs in `row`."""
        with fake_world(2):
            given, rule = self._rule(row)
            if rule is None or self.outs is None:
                return False
            decision = decide(self.info.name, rule, given.inputs, self.outs, self.mesh)
        return decision is not None and decision.cost == 0


# ------------------------------------------------------------ whether a row is right
@dataclass
class _Trial:
    """A call with values, its plain results, on an axis of `k`; `spec` makes layouts of that axis."""

    call: RecordedCall
    want: list[torch.Tensor]
    k: int
    mesh: Any
    cut: dict[tuple[int, Placement, int], torch.Tensor]

    def parts(self, i: int, p: Placement) -> list[torch.Tensor]:
        """The local parts of input `i`, one a position."""
        t = self.call.tensors[i]
        spec = Spec.make(self.mesh, (p,), t.shape, t.stride(), t.dtype)
        for r in range(self.k):
            if (i, p, r) not in self.cut:
                self.cut[i, p, r] = part_of(t, spec, seed=i, coord=(r,))
        return [self.cut[i, p, r] for r in range(self.k)]


def _negated(t: torch.Tensor) -> torch.Tensor:
    return -t if t.is_floating_point() or t.is_complex() else t


def _scaled(t: torch.Tensor) -> torch.Tensor:
    return t * 1.75 if t.is_floating_point() or t.is_complex() else t


def _moved(t: torch.Tensor) -> torch.Tensor:
    return t + 0.375 if t.is_floating_point() or t.is_complex() else t


def _sunk(t: torch.Tensor) -> torch.Tensor:
    return t - 0.625 if t.is_floating_point() or t.is_complex() else t


def _shuffled(t: torch.Tensor) -> torch.Tensor:
    if t.dtype == torch.int32:  # pivots, which LAPACK takes as they are
        return t
    g = torch.Generator().manual_seed(t.numel())
    return t.flatten()[torch.randperm(t.numel(), generator=g)].reshape(t.shape)


VARIANTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    _shuffled, _negated, _scaled, _moved, _sunk,
)  # fmt: skip


def other_numbers(
    call: RecordedCall, info: hot.OpInfo, other: Callable[[Any], Any] = lambda x: -x - type(x)(1)
) -> RecordedCall:
    """The call with other values of the numbers that are no part of a plan's key."""

    def change(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(change, x))
        return other(x) if isinstance(x, (int, float, complex)) and not isinstance(x, bool) else x

    args = tuple(change(a) if i in info.value_args else a for i, a in enumerate(call.args))
    kwargs = {n: change(a) if n in info.value_names else a for n, a in call.kwargs.items()}
    return RecordedCall(call.op, args, kwargs, call.origin)


def _trials(call: RecordedCall, info: hot.OpInfo) -> list[_Trial]:
    """The call and what can be made of it, on axes of 2 and 3. Empty where the plain results say nothing."""
    first = list(tensors_of(plain_result(call)[0]))
    if not first or any(t.numel() == 0 for t in first):
        return []
    told = [bool(t.isfinite().all()) for t in first]
    calls, plain = [(call, first)], [first]
    others = [(call.with_tensors([change(t) for t in call.tensors]), False) for change in VARIANTS]
    others += [(other_numbers(call, info), False), (other_numbers(call, info, lambda x: x + type(x)(3)), False)]
    others += [(call.with_nan_in(i), True) for i, t in enumerate(call.tensors[:4]) if t.is_floating_point()]
    for other, spoilt in others:
        try:
            got = list(tensors_of(plain_result(other)[0]))
        except Exception:
            continue  # not a call that the op takes
        if all(a.shape == b.shape for a, b in zip(got, first, strict=True)) and all(
            bool(t.isfinite().all()) or not was or spoilt for t, was in zip(got, told, strict=True)
        ):
            calls.append((other, got))
            plain += [] if spoilt else [got]
    if len(calls) < 2 or not all(map(_says_something, zip(*plain, strict=True))):
        return []
    trials = []
    for k in (2, 3):
        with fake_world(k):
            mesh = init_device_mesh("cpu", (k,))
            trials += [_Trial(c.clone(), want, k, mesh, {}) for c, want in calls]
    return trials


def _says_something(results: Sequence[torch.Tensor]) -> bool:
    """True when one output, over the trials, is not one and the same number throughout."""
    first = results[0].flatten()[0]
    return any(not torch.equal(t, first.expand(t.shape)) for t in results)


def _outputs(trials: Sequence[_Trial], ins: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """Layouts in which the results of the op on the parts are right in every trial; None when there are none."""
    left: list[list[Placement]] | None = None
    for trial in trials:
        results = _local_results(trial, ins)
        if results is None or any(len(r) != len(trial.want) for r in results):
            return None
        if left is None:
            left = [_candidates(ref, ins) for ref in trial.want]
        for j, ref in enumerate(trial.want):
            left[j] = [p for p in left[j] if _is_right(trial, p, [r[j] for r in results], ref)]
            if not left[j]:
                return None
    return None if left is None else tuple(found[0] for found in left)


def _local_results(trial: _Trial, ins: Sequence[Placement]) -> list[list[torch.Tensor]] | None:
    parts = [trial.parts(i, p) for i, p in enumerate(ins)]
    results = []
    for r in range(trial.k):
        local = trial.call.with_tensors([p[r] for p in parts])
        try:
            got = local.op(*local.args, **local.kwargs)
        except Exception:
            return None
        results.append([t.detach() for t in tensors_of(got)])
    return results


def _candidates(ref: torch.Tensor, ins: Sequence[Placement]) -> list[Placement]:
    given = [p for p in ins if isinstance(p, Partial) and p.reduce_op in pending_ops(ref.dtype)]
    pending = [Partial(op) for op in pending_ops(ref.dtype)]
    return [R, *(Shard(d) for d in range(ref.ndim)), *dict.fromkeys([*given, *pending])]


def _is_right(trial: _Trial, p: Placement, parts: Sequence[torch.Tensor], ref: torch.Tensor) -> bool:
    spec = Spec.make(trial.mesh, (p,), ref.shape, ref.stride(), ref.dtype)
    if any(t.shape != spec.local_shape_of((r,)) or t.dtype != ref.dtype for r, t in enumerate(parts)):
        return False
    whole = assemble(spec, parts)
    tolerance = 1e-3 if ref.dtype in (torch.float32, torch.complex64) else 1e-7
    return not isinstance(whole, str) and not differs(whole, ref, tolerance, tolerance)
