"""The laws that every rule is held to, as functions over one table of samples.

`check_layouts(sample, mesh_shape)`     runs `sample.fn` on DTensors in every (sampled) layout of its inputs, on
                                        simulated ranks, forward and backward, and compares with the plain function
                                        on the full tensors.
`check_strategies(sample, mesh_shape)`  runs `sample.fn` once, and for every op it reaches, backward included, every
                                        strategy that the op's rule derives for the mesh: local inputs are sharded from
                                        the full ones, the local part runs, the outputs are put together and compared
                                        with the plain op.

`check_kinds(calls, mesh_shape)`        runs recorded calls of ops by the engine with every tensor in turn pending in
                                        every kind of reduction, beside replicated ones, and with all of them pending;
                                        and the forms of these ops that write (in place, `out=`, on lists) with what
                                        is written pending in every kind.

All return a `Report`; `report.must_hold()` raises when something was wrong or a rank disagreed. The oracle is the
plain op on the full tensor. Pending inputs are split unevenly with mixed signs; pending maxima have their winner
on another rank for every element.

    SAMPLES = [Sample("mm", torch.mm, (rand(5, 6), rand(6, 3)))]
    check_layouts(SAMPLES[0], (2, 2)).must_hold()
"""

from __future__ import annotations

import importlib
import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dtensor
from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from dtensor import tensor as tensor_module
from dtensor.dispatch import hit as hot
from dtensor.dispatch import late, products
from dtensor.dispatch.call import flat as arguments_of
from dtensor.dispatch.call import make_call, map_args
from dtensor.dispatch.in_place import functional_form
from dtensor.dispatch.metadata import output_metas
from dtensor.dispatch.plan import Plan
from dtensor.propagation_rules.proof.parts import differs, kinds_of, part_of
from dtensor.propagation_rules.proof.recorded import RecordedCall, Recorder, plain_result, tensors_of
from dtensor.propagation_rules.proof.truth import skip_reason, wrapped
from dtensor.redistribute.executor.run import redistribute_local
from dtensor.rules.choice import all_decisions
from dtensor.rules.deferred import finish
from dtensor.rules.registry import rule_of
from dtensor.spec import Spec

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2))
REFUSALS = (NotImplementedError, RuntimeError, ValueError)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same wherever it is called; integers of -4..4 for integer dtypes."""
    g = torch.Generator().manual_seed(1000 + seed + 7 * sum(shape))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=g, dtype=torch.float32).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    return torch.randint(-4, 5, shape, generator=g).to(dtype)


def ints(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Indices in [0, high)."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(2000 + seed))


@dataclass
class Sample:
    """One call to check.

    Attributes:
        name: for messages.
        fn: the function; takes the tensors, returns a tensor or a tuple or list of tensors.
        tensors: full inputs. Integer and bool inputs get no gradient.
        grads: check gradients of the floating inputs too.
        pending: reductions to try on floating inputs, besides R and S(d).
        may_refuse: a clear refusal is fine.
        rtol, atol: tolerance.
        fixed: inputs that stay replicated.
        inplace: fn writes into its first input (a clone is passed); the input's value is compared as well.
    """

    name: str
    fn: Callable[..., Any]
    tensors: Sequence[torch.Tensor]
    grads: bool = True
    pending: tuple[str, ...] = ("sum", "avg", "max", "min")
    may_refuse: bool = False
    rtol: float = 1e-3
    atol: float = 1e-4
    fixed: frozenset[int] = frozenset()
    inplace: bool = False


def all_samples() -> list[Sample]:
    """The samples of all tables, each once."""
    found: dict[int, Sample] = {}
    for name in sorted(p.stem for p in (Path(__file__).parent / "samples").glob("[a-z]*.py")):
        for value in vars(importlib.import_module(f"helpers.samples.{name}")).values():
            if isinstance(value, list):
                found |= {id(s): s for s in value if isinstance(s, Sample)}
    return list(found.values())


@dataclass
class Report:
    """What a check found: `right` cases, `refused` and `wrong` ones with a line each."""

    name: str
    right: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    may_refuse: bool = False

    def must_hold(self) -> None:
        """Raise AssertionError unless everything was right (or refused where that is allowed)."""
        bad = self.wrong + ([] if self.may_refuse else [f"refused: {r}" for r in self.refused])
        if bad:
            raise AssertionError(
                f"{self.name}: {len(bad)} of {self.right + len(bad)} cases:\n  " + "\n  ".join(bad[:12])
            )
        if self.right == 0:
            raise AssertionError(f"{self.name}: no case ran")


# ------------------------------------------------------------ tables
def in_turn(
    samples: Sequence[Sample], meshes: Sequence[tuple[int, ...]] = ((4,), (2, 2))
) -> list[tuple[Sample, tuple[int, ...]]]:
    """Each sample on one of the meshes: for families whose samples are many and much alike."""
    return [(sample, meshes[at % len(meshes)]) for at, sample in enumerate(samples)]


def named(value: object) -> str:
    """How a test calls a sample or a mesh."""
    return value.name if isinstance(value, Sample) else str(value)


# ------------------------------------------------------------ comparison
def flat(x: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for y in x for t in flat(y)] if isinstance(x, (list, tuple)) else []


# ------------------------------------------------------------ making local parts
def make(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], requires_grad: bool = False) -> DTensor:
    """A DTensor whose value is `full`, in this layout (Partial included)."""
    spec = Spec.make(mesh, tuple(placements), full.shape, full.stride(), full.dtype)
    return DTensor(part_of(full, spec), spec, requires_grad=requires_grad)


def layouts_of(t: torch.Tensor, axes: int, pending: Sequence[str]) -> list[tuple[Placement, ...]]:
    """Every layout of a tensor over {R, S(d), P(op)}, one kind of pending reduction at a time."""
    kinds = pending if t.is_floating_point() else ()
    one: list[Placement] = [Replicate(), *(Shard(d) for d in range(t.ndim)), *(Partial(op) for op in kinds)]
    return [
        c for c in itertools.product(one, repeat=axes) if len({p.reduce_op for p in c if isinstance(p, Partial)}) <= 1
    ]


# ------------------------------------------------------------ the laws
def check_layouts(sample: Sample, mesh_shape: Sequence[int], limit: int = 40, seed: int = 0) -> Report:
    """Forward and gradients of `sample.fn` on (up to `limit`) layouts of its inputs, on simulated ranks."""
    shape = tuple(mesh_shape)
    options = [
        [(Replicate(),) * len(shape)] if i in sample.fixed else layouts_of(t, len(shape), sample.pending)
        for i, t in enumerate(sample.tensors)
    ]
    total = 1
    for o in options:
        total *= len(o)
    rng = random.Random(seed)
    if total <= limit:
        cases: list[tuple[tuple[Placement, ...], ...]] = list(itertools.product(*options))
    else:
        singles = [
            tuple(c if i == j else o[0] for j, o in enumerate(options)) for i, opts in enumerate(options) for c in opts
        ]
        rng.shuffle(singles)
        cases = singles[: limit // 2] + [tuple(rng.choice(o) for o in options) for _ in range(limit - limit // 2)]
    want = _reference(sample)
    n = 1
    for k in shape:
        n *= k
    outcomes = dtensor.simulate(n)(_run_layouts, sample, shape, cases, want)
    report = Report(f"{sample.name} on {shape}", may_refuse=sample.may_refuse)
    for case, per_rank in zip(cases, zip(*outcomes, strict=True), strict=True):
        text = " | ".join(",".join(map(str, c)) for c in case)
        kinds = {o[0] for o in per_rank}
        if kinds == {"right"}:
            report.right += 1
        elif kinds == {"refused"}:
            report.refused.append(f"{text}: {per_rank[0][1]}")
        else:
            first = next(o for o in per_rank if o[0] != "right")
            report.wrong.append(f"{text}: {first[1]}" + (" (ranks disagree)" if len(kinds) > 1 else ""))
    return report


def _cotangent(t: torch.Tensor, i: int) -> torch.Tensor:
    return torch.randint(-8, 9, t.shape, generator=torch.Generator().manual_seed(50 + i)).to(t.dtype) / 4


def _scalar(outs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    terms = [(o * _cotangent(o.detach(), i)).sum() for i, o in enumerate(outs) if o.requires_grad]
    return sum(terms[1:], terms[0]) if terms else None


def _differentiable(sample: Sample) -> list[bool]:
    return [sample.grads and t.is_floating_point() for t in sample.tensors]


def _reference(sample: Sample) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    ins = [t.clone().requires_grad_(g) for t, g in zip(sample.tensors, _differentiable(sample), strict=True)]
    used = [x * 1 if x.requires_grad else x.clone() for x in ins] if sample.inplace else ins
    outs = flat(sample.fn(*used)) + ([used[0]] if sample.inplace else [])
    loss = _scalar(outs)
    if loss is not None:
        loss.backward()
    return [o.detach() for o in outs], [x.grad for x in ins]


def _run_layouts(
    sample: Sample, shape: tuple[int, ...], cases: Sequence[Sequence[Sequence[Placement]]],
    want: tuple[list[torch.Tensor], list[torch.Tensor | None]],
) -> list[tuple[str, str]]:  # fmt: skip
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyzw"[: len(shape)]))
    return [_one_layout(sample, mesh, case, want) for case in cases]


def _one_layout(
    sample: Sample, mesh: DeviceMesh, case: Sequence[Sequence[Placement]],
    want: tuple[list[torch.Tensor], list[torch.Tensor | None]],
) -> tuple[str, str]:  # fmt: skip
    ins = [make(t, mesh, p, g) for t, p, g in zip(sample.tensors, case, _differentiable(sample), strict=True)]
    try:
        used = [x * 1 if x.requires_grad else x.clone() for x in ins] if sample.inplace else ins
        outs = flat(sample.fn(*used)) + ([used[0]] if sample.inplace else [])
        whole = [o.full_tensor() if isinstance(o, DTensor) else o for o in outs]
        loss = _scalar(whole)
        if loss is not None:
            loss.backward()
        grads = [x.grad for x in ins]
        full_grads = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    except REFUSALS as e:
        if "is a fault of the rule" in str(e):
            return "wrong", str(e).splitlines()[0]
        return "refused", f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    if len(whole) != len(want[0]):
        return "wrong", f"{len(whole)} results, not {len(want[0])}"
    for i, (got, ref) in enumerate(zip(whole, want[0], strict=True)):
        bad = differs(got.detach(), ref, sample.rtol, sample.atol)
        if not bad and isinstance(outs[i], DTensor) and outs[i].shape != ref.shape:
            bad = f"global shape {list(outs[i].shape)}"
        if bad:
            return "wrong", f"result {i}: {bad}; layout {getattr(outs[i], '_spec', '')}"
    for i, (got_grad, ref_grad) in enumerate(zip(full_grads, want[1], strict=True)):
        if (got_grad is None) != (ref_grad is None):
            return "wrong", f"gradient {i} is {'missing' if got_grad is None else 'not None'}"
        if got_grad is not None and ref_grad is not None:
            bad = differs(got_grad.detach(), ref_grad, sample.rtol, sample.atol)
            if bad:
                return "wrong", f"gradient {i}: {bad}; layout {getattr(grads[i], '_spec', '')}"
    return "right", ""


# ------------------------------------------------------------ every strategy
HELD: set[Any] = set()
"""The calls of ops that were held to all their strategies in this process: samples reach many of them again."""


def check_strategies(
    sample: Sample, mesh_shape: Sequence[int], limit: int = 48, held: set[Any] | None = None
) -> Report:
    """Derived strategies (all, or up to `limit` an op) of every op that `sample.fn` reaches, backward included.

    With `held`, calls in it are left out, and those that were right are added: see `_call_key`.
    """
    shape = tuple(mesh_shape)
    n = 1
    for k in shape:
        n *= k
    with _checking(limit, held) as found:
        dtensor.simulate(n)(_run_once, sample, shape)
    report = Report(f"strategies of {sample.name} on {shape}")
    report.right, report.wrong = found["right"], found["wrong"]
    if held is not None and not report.wrong:
        report.right += sum(key in held for key in found["keys"])
        held |= found["keys"]
    return report


def _call_key(info: hot.OpInfo, args: Any, kwargs: Any, shape: tuple[int, ...], limit: int) -> tuple[Any, ...]:
    """What two calls must share for one to stand for the other: op and rule, shapes, strides, dtypes, other values."""

    def key(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            values = () if a.is_floating_point() or a.is_complex() else tuple(flat_values(a))
            return tuple(a.shape), a.stride(), a.dtype, values
        return tuple(map(key, a)) if isinstance(a, (list, tuple)) else repr(a)

    def flat_values(a: torch.Tensor) -> list[Any]:
        local = a._local_tensor if isinstance(a, DTensor) else a
        return local.flatten().tolist()  # type: ignore[no-any-return]

    assert info.entry is not None
    return info.func, info.entry.build, key(args), key(sorted(kwargs.items())), shape, limit


def _run_once(sample: Sample, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyzw"[: len(shape)]))
    whole = (Replicate(),) * len(shape)
    ins = [make(t, mesh, whole, g) for t, g in zip(sample.tensors, _differentiable(sample), strict=True)]
    used = [x * 1 if x.requires_grad else x.clone() for x in ins] if sample.inplace else ins
    loss = _scalar([o.full_tensor() for o in flat(sample.fn(*used))])
    if loss is not None:
        loss.backward()


@contextmanager
def _checking(limit: int, held: set[Any] | None) -> Iterator[dict[str, Any]]:
    """Every op dispatched inside has its strategies checked first; linear layers and products come op by op."""
    found: dict[str, Any] = {"right": 0, "wrong": [], "keys": set(), "held": held}
    plain = tensor_module._run
    products.see_whole(False)

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        check_op(func, args, kwargs or {}, found, limit)
        return plain(func, args, kwargs)

    tensor_module._run = run
    try:
        yield found
    finally:
        tensor_module._run = plain
        products.see_whole(True)


def check_op(func: Any, args: Any, kwargs: Any, found: dict[str, Any], limit: int) -> None:
    """All strategies of one call whose DTensor arguments are replicated."""
    info = hot.OpInfo(func)
    if "empty" in info.name:  # uninitialised
        return
    if info.special or info.kind != "ordinary" or info.entry is None or info.entry.random:
        return
    tensors = [a for a in arguments_of(args, kwargs) if isinstance(a, DTensor)]
    others = [a for a in arguments_of(args, kwargs) if isinstance(a, torch.Tensor) and not isinstance(a, DTensor)]
    if others or not tensors or not all(t._spec.is_replicated() for t in tensors):
        return
    metas = output_metas(func, args, kwargs)
    if metas is None:
        return
    structure, outs = metas
    call = make_call(func, args, kwargs, outs)
    rule = rule_of(info.entry, call)
    if rule is None:
        return
    keep_ops = ("sum", "avg", "max", "min")
    pending = [op for op in keep_ops if all(s.dtype.is_floating_point for s in call.inputs)]
    names = [a.name for a in func._schema.arguments][: len(args)]
    fulls = [t._local_tensor for t in tensors]
    plain = flat(func(*_clones(args), **_clones_kw(kwargs)))
    if any(t.is_conj() or t.is_neg() for t in (*fulls, *plain)):  # lazy values: compared by `check_layouts`
        return
    mesh = call.inputs[0].mesh
    if found["held"] is not None:  # it changes between two samples, not between the ranks of one
        key = _call_key(info, args, kwargs, mesh.shape, limit)
        found["keys"].add(key)
        if key in found["held"]:
            return
    every = all_decisions(info.name, rule, call.inputs, outs, mesh, pending=pending)
    decisions = list(itertools.islice(every, 8 * limit))
    for decision in decisions[:: -(-len(decisions) // limit) or 1]:  # the cheap ones come first: some of all prices
        given = make_call(func, args, kwargs, outs)
        given.inputs = decision.inputs
        pieces = iter(
            late.new(DTensor, part_of(full, s, seed=i), s, requires_grad=False)
            for i, (full, s) in enumerate(zip(fulls, decision.inputs, strict=True))
        )
        wrapped, wrapped_kw = map_args(lambda a: next(pieces) if isinstance(a, DTensor) else a, args, kwargs)  # noqa: B023
        local, named = map_args(lambda a: a._local_tensor if isinstance(a, DTensor) else a, wrapped, wrapped_kw)
        if info.written and any(
            s is not None and s.placements != decision.inputs[0].placements for s in decision.outputs
        ):
            continue
        plan = Plan(info, given, decision, structure, names)
        got = flat(plan.execute(list(local), named, wrapped))
        finish(got)
        for g, ref, spec in zip(got, plain, [s for s in decision.outputs if s is not None], strict=True):
            settled = Spec.make(mesh, spec.placements, spec.shape, spec.stride, spec.dtype)
            if g._local_tensor.shape != settled.local_shape:
                found["wrong"].append(
                    f"{decision}: local shape {list(g._local_tensor.shape)}, not {list(settled.local_shape)}"
                )
                break
            whole = settled.with_placements((Replicate(),) * mesh.ndim)
            bad = differs(redistribute_local(g._local_tensor, settled, whole), ref, 1e-3, 1e-3)
            if bad:
                found["wrong"].append(f"{decision}: {bad}")
                break
        else:
            found["right"] += 1


def _clones(args: Any) -> Any:
    return map_args(lambda a: a._local_tensor.clone() if isinstance(a, DTensor) else a, args, {})[0]


def _clones_kw(kwargs: Any) -> Any:
    return map_args(lambda a: a._local_tensor.clone() if isinstance(a, DTensor) else a, (), kwargs)[1]


# ------------------------------------------------------------ every kind of pending reduction
def recorded(samples: Sequence[Sample], each: int = 1) -> list[RecordedCall]:
    """Calls of ops that the samples reach, backward included: up to `each` an overload, of numbers of usual size."""
    found: dict[Any, list[RecordedCall]] = {}
    for sample in samples:
        with Recorder(sample.name) as seen:
            _reference(sample)
        for call in seen.calls:
            same = found.setdefault(call.op, [])
            usual = lambda t: t.numel() > 0 and (t.dtype != torch.int64 or bool(t.abs().max() < 1 << 40))  # noqa: E731
            if len(same) < each and all(map(usual, call.tensors)):
                same.append(call)
    return [call for same in found.values() for call in same]


def forms(call: RecordedCall) -> list[RecordedCall]:
    """The call in place, with `out=`, and on lists of one tensor, in place and not, where the op has such forms."""
    packet = call.op._schema.name.rpartition("::")[2]
    values = {a.name: v for a, v in zip(call.op._schema.arguments, call.args)} | dict(call.kwargs)
    found = []
    for name in (packet, f"{packet}_", f"_foreach_{packet}", f"_foreach_{packet}_"):
        ops = getattr(torch.ops.aten, name, None)
        for op in () if ops is None else (getattr(ops, o) for o in ops.overloads()):
            out = any(a.is_out for a in op._schema.arguments)
            alike = op._overloadname in (call.op._overloadname, "List", "default")
            if functional_form(op) is call.op if out else alike:
                made = _in_form(call, op, values) if op is not call.op else None
                found += [] if made is None else [made]
    return found


def _in_form(call: RecordedCall, op: Any, values: dict[str, Any]) -> RecordedCall | None:
    """`op` on these values, tensors as lists of one where it takes lists; None where it does not fit."""
    try:
        results = tensors_of(plain_result(call)[0])
        given: dict[str, Any] = {}
        for a in op._schema.arguments:
            v = next(results).clone() if a.is_out else values.get(a.name, a.default_value)
            if a.is_out and v.numel() > 1:
                v = v.flatten().flip(0).reshape(v.shape)  # it holds something else
            given[a.name] = [v] if str(a.type) == "List[Tensor]" and isinstance(v, torch.Tensor) else v
        args = [given.pop(a.name) for a in op._schema.arguments if not a.kwarg_only]
        made = RecordedCall(op, tuple(args), given, "form")
        before = [t.shape for t in made.tensors]
        return made if [t.shape for t in plain_result(made)[1].tensors] == before else None
    except (RuntimeError, TypeError, ValueError, IndexError, StopIteration, NotImplementedError):
        return None


def check_kinds(calls: Sequence[RecordedCall], mesh_shape: Sequence[int]) -> Report:
    """Every call with its tensors pending in every kind, by the engine, on simulated ranks."""
    shape = tuple(mesh_shape)
    n = 1
    for k in shape:
        n *= k
    reasons = [skip_reason(c) for c in calls]
    usable = [(c, *plain_result(c)) for c, why in zip(calls, reasons) if why in ("", "out= runs the functional form")]
    per_rank = dtensor.simulate(n)(_run_kinds, usable, shape)
    report = Report(f"{len(usable)} calls with tensors pending in every kind, on {shape}", may_refuse=True)
    for outcome in zip(*per_rank, strict=True):
        texts = {text for text, _, _ in outcome}
        words = {word for _, word, _ in outcome}
        if len(texts) > 1 or len(words) > 1:
            report.wrong.append(f"ranks disagree: {sorted(texts)} {sorted(words)}")
        elif words == {"right"}:
            report.right += 1
        else:
            text, word, how = outcome[0]
            (report.refused if word == "refused" else report.wrong).append(f"{text}: {how}")
    return report


def _run_kinds(
    calls: Sequence[tuple[RecordedCall, Any, RecordedCall]], shape: tuple[int, ...]
) -> list[tuple[str, str, str]]:  # fmt: skip
    mesh = init_device_mesh("cpu", shape)
    found = []
    with torch.no_grad():
        for call, plain, after in calls:
            for layouts in _layouts_of_kinds(call, mesh):
                text = f"{call} in {' | '.join(','.join(map(str, p)) for p in layouts)}"
                found.append((text, *_one_kind(call, plain, after, mesh, layouts)))
    return found


def _layouts_of_kinds(call: RecordedCall, mesh: DeviceMesh) -> Iterator[list[tuple[Placement, ...]]]:
    """One tensor pending and the others replicated; all pending alike. Of calls that write, what is written only.

    Kinds that the rule does not pass are reduced first; where they are written to, one of them is tried. Of those
    that it passes some are, and all of a list op's.
    """
    whole: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    tensors = call.tensors
    info = hot.OpInfo(call.op)
    names = [a.name for a in call.op._schema.arguments]
    places = [n for n, v in [*zip(names, call.args), *call.kwargs.items()] for _ in tensors_of(v)]
    some: list[list[tuple[Placement, ...]]] = []
    for i, t in enumerate(tensors):
        if not info.written or places[i] in info.written:
            kinds = kinds_of(t.dtype)
            tried = [[(Partial(op), *whole[1:]) if i == j else whole for j in range(len(tensors))] for op in kinds]
            some += _worth_trying(call, mesh, tried, bool(info.written))
    for op in ("sum", "avg", "max", "min", "product", "norm2", "bor") if len(tensors) > 1 else ():
        if all(op in kinds_of(t.dtype) for t in tensors):
            some += _worth_trying(call, mesh, [[(Partial(op), *whole[1:])] * len(tensors)], False)
    return iter(some)


def _worth_trying(
    call: RecordedCall, mesh: DeviceMesh, layouts: Sequence[list[tuple[Placement, ...]]], more: bool
) -> list[list[tuple[Placement, ...]]]:
    """Up to three layouts in which the rule passes something, all of a list op's, and with `more` one of the others."""
    info = hot.OpInfo(call.op)
    passed: list[list[tuple[Placement, ...]]] = []
    rest: list[list[tuple[Placement, ...]]] = []
    metas = None
    for i, layout in enumerate(layouts if info.kind == "ordinary" and info.entry is not None else ()):
        args, kwargs = wrapped(call, mesh, layout, cut=False)
        metas = metas if i else output_metas(call.op, args, kwargs)
        try:
            rule = None if metas is None else rule_of(info.entry, make_call(call.op, args, kwargs, metas[1]))
        except REFUSALS:
            rule = None
        ops = {p.reduce_op for placements in layout for p in placements if isinstance(p, Partial)}
        passes = rule is not None and any(group.out_op(op) for group in rule.linear for op in ops)
        (passed if passes else rest).append(layout)
    if info.kind != "ordinary" or info.entry is None:
        passed, rest = (list(layouts), []) if info.kind == "lists" else ([], list(layouts))
    start = zlib.crc32(str(call).encode())
    some = [passed[(start + 3 * i) % len(passed)] for i in range(min(3, len(passed)))] if passed else []
    return (passed if info.kind == "lists" else some) + ([rest[start % len(rest)]] if rest and more else [])


def _one_kind(
    call: RecordedCall, plain: Any, after: RecordedCall, mesh: DeviceMesh, layouts: Sequence[Sequence[Placement]]
) -> tuple[str, str]:  # fmt: skip
    args, kwargs = wrapped(call, mesh, layouts)
    given = [t for t in tensors_of((args, kwargs)) if isinstance(t, DTensor)]
    try:
        got = hot.dispatch(call.op, args, kwargs)
    except REFUSALS as e:
        fault = "fault of the rule" in str(e)
        return "wrong" if fault else "refused", f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    except Exception as e:
        return "wrong", f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
    pairs = [(given, after.tensors, "what is written" if hot.OpInfo(call.op).written else "an input")]
    if call.op._schema.returns:
        pairs.append((list(tensors_of(got)), list(tensors_of(plain)), "result"))
    coarse = {torch.bfloat16, torch.float16}.intersection(t.dtype for t in [*call.tensors, *tensors_of(plain)])
    tolerance = 2e-2 if coarse else 1e-3
    found = [
        (f"{what} {i}, laid out as {getattr(g, '_spec', '')}", g.full_tensor() if isinstance(g, DTensor) else g, want)
        for gots, wants, what in pairs
        for i, (g, want) in enumerate(zip(gots, wants, strict=True))
    ]
    for what, full, want in found:  # after all have been made whole, which every rank must do
        bad = differs(full, want, tolerance, tolerance)
        if bad:
            return "wrong", f"{what}: {bad}"
    return "right", ""
