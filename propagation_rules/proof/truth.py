"""Law of truth: every strategy that a rule derives gives the plain op's value.

For one recorded call and one mesh, on simulated ranks: the rule is asked for its strategies (those of several axes
are compositions), the full inputs are sharded into the layout that a strategy asks for, every rank runs its local part
or kernel, and the parts are put together and compared with the plain op on the full tensors.

    right       value, shape, dtype and the agreement of replicas hold
    wrong       anything else: another value, a local op that raises, ranks that disagree

Besides all strategies, the one that the engine takes for pending inputs is run as it is taken, moves included, since
a rule may read the layouts. List ops (`_foreach_add`), which have no strategies of their own, are run by the engine
on lists in every layout instead.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import dtensor
from dtensor import DeviceMesh, DTensor, init_device_mesh
from dtensor.comm.observers import observers
from dtensor.dispatch import hit as hot
from dtensor.dispatch import late
from dtensor.dispatch.call import make_call
from dtensor.dispatch.in_place import kept
from dtensor.dispatch.metadata import output_metas
from dtensor.dispatch.miss import actual_outputs
from dtensor.dispatch.plan import Plan
from dtensor.errors import LayoutError, NoRuleError
from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.rules.choice import all_decisions, decide
from dtensor.rules.decision import Decision
from dtensor.rules.deferred import finish
from dtensor.rules.registry import rule_of
from dtensor.spec import Spec

from .parts import assemble, differs, kinds_of, part_of
from .recorded import RecordedCall, map_tensors, plain_result, tensors_of

__all__ = ["MESHES", "Outcome", "check_call", "skip_reason", "wrapped"]

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2), (2, 3))
MOST_LISTED = 250
"""Strategies of one call that are listed before some of them are chosen."""


@dataclass
class Outcome:
    """What one call on one mesh showed: strategies that were right, those that were wrong, why it was skipped.

    `unpriced`: kernels that communicate although their rule says that they do not, so that they seem free.
    """

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""
    unpriced: set[str] = field(default_factory=set)


@dataclass
class _Run:
    """One strategy on one rank: its text, the layouts of the results, the local results or an error."""

    text: str
    specs: tuple[Spec | None, ...] = ()
    written: tuple[Spec, ...] = ()
    parts: tuple[torch.Tensor, ...] = ()
    left: tuple[torch.Tensor, ...] = ()
    error: str = ""
    refused: bool = False
    unpriced: str = ""
    sums: bool = False


def check_call(call: RecordedCall, mesh_shape: Sequence[int], limit: int = 48, extremes_only: bool = False) -> Outcome:
    """Up to `limit` strategies of one call on one mesh; `extremes_only`: those with a pending maximum or minimum."""
    shape = tuple(mesh_shape)
    why = skip_reason(call)
    if why:
        return Outcome(skipped=why)
    call = _untied(call)
    plain, after = plain_result(call)
    want = list(tensors_of(plain))
    ranks = dtensor.simulate(math.prod(shape))
    try:
        per_rank = ranks(_on_rank, call, shape, limit, None, [])
    except Exception:  # ranks that do not meet: find the strategy
        per_rank = _one_by_one(ranks, call, shape, limit)
    if isinstance(per_rank[0], str):
        return Outcome(skipped=per_rank[0])
    outcome = Outcome()
    for runs in zip(*per_rank, strict=True):
        if extremes_only and "P(m" not in runs[0].text:
            continue
        outcome.unpriced |= {r.unpriced for r in runs if r.unpriced}
        bad = _judge(runs, want, after.tensors, _tolerance([*want, *call.tensors]))
        if bad is None:
            continue
        if bad:
            outcome.wrong.append(f"{runs[0].text}: {bad}")
        else:
            outcome.right += 1
    return outcome


def _untied(call: RecordedCall) -> RecordedCall:
    """The call with distinct integers where it orders them: which of two equal ones comes first is not settled."""
    if call.op._schema.name not in ("aten::topk", "aten::sort", "aten::kthvalue", "aten::median", "aten::nanmedian"):
        return call
    g = torch.Generator().manual_seed(0)
    distinct = lambda t: torch.randperm(t.numel(), generator=g).reshape(t.shape).to(t.dtype)  # noqa: E731
    return call.with_tensors([t if t.is_floating_point() else distinct(t) for t in call.tensors])


def skip_reason(call: RecordedCall) -> str:
    """Why a call is not checked; '' when it is."""
    info = hot.OpInfo(call.op)
    if info.special is not None:
        return "handled as a whole, not by a rule"
    if info.kind == "ordinary" and info.entry is None:
        return "no rule"
    if info.kind == "out":
        return "out= runs the functional form"
    if info.entry is not None and info.entry.random:
        return "random"
    if torch.Tag.inplace_view in call.op.tags:
        return "a view in place runs the view"
    if "empty" in info.name:
        return "uninitialised"
    try:
        first, a = plain_result(call)
        second, b = plain_result(call)
    except Exception as e:
        return f"the plain op raises {type(e).__name__}"
    for x, y in zip(tensors_of((first, a.tensors)), tensors_of((second, b.tensors)), strict=True):
        if x.layout != torch.strided:
            return "not a strided result"
        if x.is_conj() or x.is_neg():
            return "a lazy result"
        if differs(x, y, 0, 0):
            return "another result each time"
    return ""


def _tolerance(tensors: Sequence[torch.Tensor]) -> float:
    """By the coarsest dtype: pending parts of bfloat16 are rounded before anything is done with them."""
    dtypes = {t.dtype for t in tensors}
    if dtypes & {torch.bfloat16, torch.float16}:
        return 2e-2
    return 1e-3 if dtypes & {torch.float32, torch.complex64} else 1e-6


def _judge(
    runs: Sequence[_Run], want: Sequence[torch.Tensor], after: Sequence[torch.Tensor], tolerance: float
) -> str | None:
    """What is wrong with one strategy, '' when nothing is, None when every rank refused it clearly."""
    if any(r.text != runs[0].text for r in runs):
        return f"ranks decide differently: {runs[0].text} and {next(r.text for r in runs if r.text != runs[0].text)}"
    if all(r.refused for r in runs):
        return None
    for at, r in enumerate(runs):
        if r.error:
            return f"rank {at} {r.error}"
    specs = [s for s in runs[0].specs if s is not None]
    for i, (spec, ref) in enumerate(zip(specs, want, strict=False)):
        bad = _part_differs(spec, [r.parts[i] for r in runs], ref, tolerance, runs[0].sums)
        if bad:
            return f"result {i} as {spec}: {bad}"
    if len(specs) != len(want):
        return f"{len(specs)} results, not {len(want)}"
    for i, spec in enumerate(runs[0].written):
        at = int(runs[0].left[2 * i])
        bad = _part_differs(spec, [r.left[2 * i + 1] for r in runs], after[at], tolerance, runs[0].sums)
        if bad:
            return f"what is written as {spec}: {bad}"
    return ""


def _part_differs(spec: Spec, parts: Sequence[torch.Tensor], ref: torch.Tensor, tolerance: float, sums: bool) -> str:
    """What differs. A sum of parts that all became infinite is NaN: with pending `sums` that counts as infinite."""
    whole = assemble(spec, parts)
    if isinstance(whole, str):
        return whole
    if sums and whole.shape == ref.shape and ref.is_floating_point():
        whole = torch.where(whole.isnan() & ref.isinf(), ref.to(whole.dtype), whole)
    # Rounding goes by the size of the summands, which in low precision may well exceed the sum.
    size = sum(p.abs().max().item() for p in parts if p.numel()) if tolerance > 1e-2 and sums else 0.0
    return differs(whole, ref, tolerance, tolerance * max(1.0, size))


# ------------------------------------------------------------ on every rank
def _on_rank(
    call: RecordedCall, shape: tuple[int, ...], limit: int, only: int | None, raised: list[tuple[int, _Run]]
) -> list[_Run] | str:  # fmt: skip
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyzw"[: len(shape)]))
    with torch.no_grad():
        if hot.OpInfo(call.op).kind == "lists":
            return _run_lists(call, mesh)
        given = _Given.of(call, mesh)
        if isinstance(given, str):
            return given
        decisions = given.decisions(limit)
        return [given.run(d, raised) for i, d in enumerate(decisions) if only is None or i == only]


def _one_by_one(ranks: Any, call: RecordedCall, shape: tuple[int, ...], limit: int) -> list[Any]:
    """Every strategy in a simulation of its own, so that one whose ranks do not meet is told from the others."""
    n = math.prod(shape)
    found: list[list[_Run]] = [[] for _ in range(n)]
    for i in range(limit * 2):
        raised: list[tuple[int, _Run]] = []  # in order: first what a rank raised, then those that waited for it
        try:
            got = ranks(_on_rank, call, shape, limit, i, raised)
        except Exception as e:
            unknown = _Run(f"strategy {i}", error=f"raises {type(e).__name__}: {_first(e)}")
            at, first = raised[0] if raised else (0, unknown)
            got = [[first if r == at else _Run(first.text)] for r in range(n)]
            if "list" in hot.OpInfo(call.op).kind or i > 2 * limit - 2:
                return got
        if isinstance(got[0], str) or not got[0]:
            return found if found[0] else got
        for mine, new in zip(found, got, strict=True):
            mine += new
    return found


@dataclass
class _Given:
    """A call on one rank: the op, its replicated arguments, the metadata of its results."""

    call: RecordedCall
    info: hot.OpInfo
    mesh: DeviceMesh
    structure: str
    outs: tuple[Any, ...]

    @staticmethod
    def of(call: RecordedCall, mesh: DeviceMesh) -> _Given | str:
        """The call; or why it cannot be checked."""
        info = hot.OpInfo(call.op)
        args, kwargs = wrapped(call, mesh, [(Replicate(),) * mesh.ndim] * len(call.tensors), cut=False)
        metas = output_metas(call.op, args, kwargs)
        if metas is None:
            return "the shape of the result depends on the data"
        given = _Given(call, info, mesh, metas[0], metas[1])
        if rule_of(info.entry, make_call(call.op, args, kwargs, metas[1])) is None:
            return "the rule has nothing to say about this call"
        return given

    def _rule(self, layouts: Sequence[Sequence[Placement]]) -> tuple[Any, Any]:
        args, kwargs = wrapped(self.call, self.mesh, layouts, cut=False)
        given = make_call(self.call.op, args, kwargs, self.outs)
        return given, rule_of(self.info.entry, given)

    def decisions(self, limit: int) -> list[Decision]:
        """Some of all strategies, and those taken for pending inputs."""
        whole = (Replicate(),) * self.mesh.ndim
        count = len(self.call.tensors)
        given, rule = self._rule([whole] * count)
        keep = kept(self.info, given)
        ops = sorted({op for s in given.inputs for op in kinds_of(s.dtype)})
        listed = [
            d
            for d in itertools.islice(
                all_decisions(self.info.name, rule, given.inputs, self.outs, self.mesh, pending=ops), MOST_LISTED
            )
            if _splits(d.inputs)
        ]
        if keep:  # a written tensor keeps its layout
            listed = [
                d for d in listed
                if all(o < 0 or _same(d.outputs[o], d.inputs[i]) for i, o in keep.items())
            ]  # fmt: skip
        if len(listed) > limit:
            first = limit // 3
            listed = listed[:first] + random.Random(0).sample(listed[first:], limit - first)
        seen = {str(d) for d in listed}
        for layouts in self._pending_layouts(given.inputs, limit // 2):
            try:
                actual, rule = self._rule(layouts)
            except LayoutError:  # refused clearly
                continue
            if rule is None:
                continue
            d = decide(self.info.name, rule, actual.inputs, self.outs, self.mesh, keep)
            if d is not None and str(d) not in seen and _splits(d.inputs):
                seen.add(str(d))
                listed.append(d)
        return listed

    def _pending_layouts(self, inputs: Sequence[Spec], most: int) -> Iterator[list[tuple[Placement, ...]]]:
        whole: tuple[Placement, ...] = (Replicate(),) * self.mesh.ndim
        cut = lambda s: (Shard(0),) if s.ndim and self.mesh.ndim > 1 else (Replicate(),)  # noqa: E731
        rest = self.mesh.ndim - 1
        cases: list[list[tuple[Placement, ...]]] = []
        for op in dict.fromkeys(op for s in inputs for op in kinds_of(s.dtype)):
            can = [op in kinds_of(s.dtype) for s in inputs]
            p = [(Partial(op), *(cut(s) * rest)) if c else whole for s, c in zip(inputs, can, strict=True)]
            cases += [[p[i] if i == j else whole for j in range(len(p))] for i, c in enumerate(can) if c]
            if sum(can) > 1:
                cases.append(p)
        yield from cases[:most]

    def run(self, decision: Decision, raised: list[tuple[int, _Run]]) -> _Run:
        """One strategy: the local results of this rank. What it raises is noted in `raised` as well."""
        text = str(decision).partition("   by ")[0] + " by " + " / ".join(decision.choices)
        try:
            return self._run(decision, text)
        except Exception as e:
            clear = isinstance(e, (LayoutError, NoRuleError, NotImplementedError)) and "fault of the rule" not in str(e)
            failed = _Run(text, error=f"raises {type(e).__name__}: {_first(e)}", refused=clear)
            raised.append((self.mesh.get_rank(), failed))
            return failed

    def _run(self, decision: Decision, text: str) -> _Run:
        call = self.call
        args, kwargs = wrapped(call, self.mesh, [s.placements for s in decision.inputs])
        given = make_call(call.op, args, kwargs, self.outs)
        tensors = list(_dtensors((args, kwargs)))
        names = [a.name for a in call.op._schema.arguments][: len(args)]
        plan = Plan(self.info, given, decision, self.structure, names)
        local, named = map_tensors(_local, (list(args), dict(kwargs)))
        sent: list[str] = []
        unpriced = ""
        watch = lambda kind, ranks, received, itemsize: sent.extend([kind] if received else [])  # noqa: E731
        observers.append(watch)
        try:
            got = plan.execute(local, named, args)
        finally:
            observers.remove(watch)
        finish(_dtensors(got))
        if sent and not plan.moves and not (decision.kernel is not None and decision.kernel.collectives):
            unpriced = decision.kernel.name if decision.kernel is not None else "local"
        own = plan.kernel is None and plan.run is self.info.run
        actual = actual_outputs(decision, got) if own and not self.info.written else decision
        specs = tuple(None if s is None else Spec.make(self.mesh, s.placements, *s.tensor_meta) for s in actual.outputs)
        parts = tuple(t._local_tensor.detach() for t in _dtensors(got))
        written: list[Spec] = []
        left: list[torch.Tensor] = []
        for i in kept(self.info, given):
            written.append(decision.inputs[i])
            left += [torch.tensor(i), tensors[i]._local_tensor.detach()]
        return _Run(text, specs, tuple(written), parts, tuple(left), unpriced=unpriced, sums=_sums(decision.inputs))


def _first(e: BaseException) -> str:
    return str(e).splitlines()[0] if str(e) else ""


def _same(out: Spec | None, given: Spec) -> bool:
    return out is not None and out.placements == given.placements


def _splits(inputs: Sequence[Spec]) -> bool:
    """True when there is a way to split tensors of these dtypes as their layouts say."""
    return all(p.reduce_op in kinds_of(s.dtype) for s in inputs for p in s.placements if isinstance(p, Partial))


def _sums(inputs: Sequence[Spec]) -> bool:
    return any(p in (Partial("sum"), Partial("avg")) for s in inputs for p in s.placements)


def _local(t: Any) -> torch.Tensor:
    local: torch.Tensor = t._local_tensor
    return local


def _dtensors(x: Any) -> Iterator[DTensor]:
    return (t for t in tensors_of(x) if isinstance(t, DTensor))


def wrapped(
    call: RecordedCall, mesh: DeviceMesh, layouts: Sequence[Sequence[Placement]], cut: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with DTensors in these layouts; with `split` they hold this rank's parts, else the whole."""
    at = itertools.count()

    def wrap(t: torch.Tensor) -> DTensor:
        i = next(at)
        spec = Spec.make(mesh, tuple(layouts[i]), t.shape, t.stride(), t.dtype)
        return late.new(DTensor, part_of(t, spec, seed=i) if cut else t, spec, requires_grad=False)

    args, kwargs = map_tensors(wrap, (call.args, dict(call.kwargs)))
    return args, kwargs


# ------------------------------------------------------------ list ops
def _run_lists(call: RecordedCall, mesh: DeviceMesh) -> list[_Run]:
    """The engine on lists whose tensors all lie alike, per layout."""
    every = dict.fromkeys(op for t in call.tensors for op in kinds_of(t.dtype))
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1), *map(Partial, every)]
    runs: list[_Run] = []
    for kind in kinds:
        fits = [
            (kind,) + (Replicate(),) * (mesh.ndim - 1)
            if (isinstance(kind, Shard) and kind.dim < t.ndim)
            or (isinstance(kind, Partial) and kind.reduce_op in kinds_of(t.dtype))
            else (Replicate(),) * mesh.ndim
            for t in call.tensors
        ]
        args, kwargs = wrapped(call, mesh, fits)
        text = f"{call.name} on lists in {kind}"
        try:
            got = hot.dispatch(call.op, args, kwargs)
        except (LayoutError, NoRuleError, NotImplementedError) as e:
            runs.append(_Run(text, error=_first(e), refused=True))
            continue
        except Exception as e:
            runs.append(_Run(text, error=f"raises {type(e).__name__}: {_first(e)}"))
            continue
        outs = list(_dtensors(got)) if call.op._schema.returns else []
        finish(outs)
        tensors = list(_dtensors((args, kwargs)))
        left = [x for i, t in enumerate(tensors) for x in (torch.tensor(i), t._local_tensor)]
        runs.append(
            _Run(
                text, tuple(t._spec for t in outs), tuple(t._spec for t in tensors),
                tuple(t._local_tensor for t in outs), tuple(left), sums=kind in (Partial("sum"), Partial("avg")),
            )
        )  # fmt: skip
    return runs
