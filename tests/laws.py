"""The laws that every rule is held to, as functions over one table of samples.

`check_layouts(sample, mesh_shape)`     runs `sample.fn` on DTensors in every (sampled) layout of its inputs, on
                                        simulated ranks, forward and backward, and compares with the plain function
                                        on the full tensors.
`check_strategies(sample, mesh_shape)`  runs `sample.fn` once, and for every op it reaches, backward included, every
                                        strategy that the op's rule derives for the mesh: local inputs are cut from
                                        the full ones, the local part runs, the outputs are put together and compared
                                        with the plain op.

Both return a `Report`; `report.must_hold()` raises when something was wrong or a rank disagreed. The oracle is the
plain op on the full tensor. Pending inputs are split unevenly with mixed signs; pending maxima have their winner
on another rank for every element.

    SAMPLES = [Sample("mm", torch.mm, (rand(5, 6), rand(6, 3)))]
    check_layouts(SAMPLES[0], (2, 2)).must_hold()
"""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dtensor
from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, init_device_mesh, products
from dtensor import dispatch as hot
from dtensor import dispatch_miss as slow
from dtensor import tensor as tensor_module
from dtensor.deferred import finish
from dtensor.dispatch_call import flat as arguments_of
from dtensor.dispatch_call import make_call, map_args, output_metas
from dtensor.propagate import all_decisions
from dtensor.propagation_rules.proof.parts import differs, part_of
from dtensor.reshard_run import redistribute_local
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
    for name in sorted(p.stem for p in Path(__file__).parent.glob("samples_*.py")):
        for value in vars(importlib.import_module(name)).values():
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
def check_strategies(sample: Sample, mesh_shape: Sequence[int], limit: int = 48) -> Report:
    """Every derived strategy (up to `limit` an op) of every op that `sample.fn` reaches, backward included."""
    shape = tuple(mesh_shape)
    n = 1
    for k in shape:
        n *= k
    with _checking(limit) as found:
        dtensor.simulate(n)(_run_once, sample, shape)
    report = Report(f"strategies of {sample.name} on {shape}")
    report.right, report.wrong = found["right"], found["wrong"]
    return report


def _run_once(sample: Sample, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyzw"[: len(shape)]))
    whole = (Replicate(),) * len(shape)
    ins = [make(t, mesh, whole, g) for t, g in zip(sample.tensors, _differentiable(sample), strict=True)]
    used = [x * 1 if x.requires_grad else x.clone() for x in ins] if sample.inplace else ins
    loss = _scalar([o.full_tensor() for o in flat(sample.fn(*used))])
    if loss is not None:
        loss.backward()


@contextmanager
def _checking(limit: int) -> Iterator[dict[str, Any]]:
    """Every op dispatched inside has its strategies checked first; linear layers and products come op by op."""
    found: dict[str, Any] = {"right": 0, "wrong": []}
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
    if info.special or info.kind != "plain" or info.entry is None or info.entry.random:
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
    rule = slow.rule_of(info.entry, call)
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
    for at, decision in enumerate(all_decisions(info.name, rule, call.inputs, outs, mesh, pending=pending)):
        if at >= limit:
            break
        given = make_call(func, args, kwargs, outs)
        given.inputs = decision.inputs
        pieces = iter(
            hot._new(DTensor, part_of(full, s, seed=i), s, requires_grad=False)
            for i, (full, s) in enumerate(zip(fulls, decision.inputs, strict=True))
        )
        wrapped, wrapped_kw = map_args(lambda a: next(pieces) if isinstance(a, DTensor) else a, args, kwargs)  # noqa: B023
        local, named = map_args(lambda a: a._local_tensor if isinstance(a, DTensor) else a, wrapped, wrapped_kw)
        if info.written and any(
            s is not None and s.placements != decision.inputs[0].placements for s in decision.outputs
        ):
            continue
        plan = hot.Plan(info, given, decision, structure, names)
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
