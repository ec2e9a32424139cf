"""Rules against numbers: what `python -m dtensor.propagation_rules check` is made of; a fixed sample of the sweep."""

from __future__ import annotations

import builtins
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dtensor
from dtensor import Partial, Replicate, Shard, init_device_mesh
from dtensor.dispatch import late
from dtensor.errors import LayoutError
from dtensor.propagation_rules.__main__ import UnknownOp, main, overloads
from dtensor.propagation_rules.pointwise import pointwise
from dtensor.propagation_rules.proof import samples
from dtensor.propagation_rules.proof.keys import stale_plans, variants
from dtensor.propagation_rules.proof.missing import merged, missing_rows
from dtensor.propagation_rules.proof.parts import assemble, coords_of, part_of
from dtensor.propagation_rules.proof.reasons import reason_of
from dtensor.propagation_rules.proof.recorded import RecordedCall, Recorder
from dtensor.propagation_rules.proof.sweep import OpReport, Settings, check_overload, sweep, written_summary
from dtensor.propagation_rules.proof.truth import check_call
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, override, pattern
from dtensor.rules.rule import Kernel, Linear, Rule
from dtensor.spec import Spec

aten = torch.ops.aten
DOCS = Path(__file__).resolve().parents[2] / "docs"


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MM = RecordedCall(aten.mm.default, (rand(5, 4), rand(4, 3)), {})
RELU = RecordedCall(aten.relu.default, (rand(5, 6),), {})
ADD = RecordedCall(aten.add.Tensor, (rand(5, 6), rand(6)), {})
SOFTMAX = RecordedCall(aten._softmax.default, (rand(5, 7), 1, False), {})
TOPK = RecordedCall(aten.topk.default, (rand(5, 7), 2), {})
ADD_ = RecordedCall(aten.add_.Tensor, (rand(5, 6), rand(6)), {})


# ------------------------------------------------------------ parts
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 3)])
def test_parts_put_together_are_the_whole(mesh_shape: tuple[int, ...]) -> None:
    full = rand(5, 7)
    with dtensor.simulate.fake_world(6 if len(mesh_shape) == 2 else 3):
        mesh = init_device_mesh("cpu", mesh_shape)
    one = [Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max"), Partial("min")]
    for first in one:
        for second in one if len(mesh_shape) == 2 else one[:1]:
            placements = (first, second)[: len(mesh_shape)]
            spec = Spec.make(mesh, placements, full.shape, full.stride(), full.dtype)
            kinds = {p.reduce_op.replace("avg", "sum") for p in placements if isinstance(p, Partial)}
            if len(kinds) > 1:
                continue
            parts = [part_of(full, spec, 1, c) for c in coords_of(mesh_shape)]
            whole = assemble(spec, parts)
            assert isinstance(whole, torch.Tensor) and torch.allclose(whole, full), placements


def test_assemble_sees_replicas_that_disagree_and_wrong_shapes() -> None:
    with dtensor.simulate.fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
    spec = Spec.make(mesh, (Replicate(),), (3,), (1,), torch.float64)
    assert "disagree" in str(assemble(spec, [torch.zeros(3).double(), torch.ones(3).double()]))
    assert "shape" in str(assemble(spec, [torch.zeros(3).double(), torch.ones(2).double()]))
    assert "dtype" in str(assemble(spec, [torch.zeros(3), torch.zeros(3)]))


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_pending_parts_lie_on_both_sides_of_zero_and_one_position_holds_a_nan(op: str) -> None:
    full = rand(40).index_fill(0, torch.tensor([7]), float("nan"))
    with dtensor.simulate.fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
    spec = Spec.make(mesh, (Partial(op),), full.shape, full.stride(), full.dtype)
    parts = [part_of(full, spec, coord=(r,)) for r in (0, 1)]
    for part in parts:
        part = part[~part.isnan()]
        assert (part > 0).any() and (part < 0).any()
    assert not torch.equal(*parts)
    if op != "sum":
        assert sum(int(part.isnan().sum()) for part in parts) == 1


# ------------------------------------------------------------ calls
def test_recorded_calls_include_the_backward() -> None:
    x, w = rand(3, 4).requires_grad_(), rand(5, 4).requires_grad_()
    with Recorder("linear") as seen:
        torch.nn.functional.linear(x, w).softmax(-1).sum().backward()
    names = [c.name for c in seen.calls]
    assert {"aten.mm.default", "aten._softmax.default", "aten._softmax_backward_data.default"} <= set(names)
    assert all(c.origin == "linear" and not any(t.requires_grad for t in c.tensors) for c in seen.calls)


def test_select_keeps_unlike_calls_with_long_dims_first() -> None:
    small, large = (RecordedCall(aten.relu.default, (rand(*s),), {}) for s in ((1, 1), (5, 4)))
    one_dim = RecordedCall(aten.relu.default, (rand(5),), {})
    assert samples.select([small, large, one_dim, large.clone()], 2)["aten.relu.default"] == [large, one_dim]


def test_calls_from_shapes() -> None:
    call = samples.call_from_shapes(aten.index_select.default, ["5x4", "i64<5:3"], {"dim": "0"})
    assert str(call) == "aten.index_select.default(float64[5, 4], 0, int64[3])" and int(call.tensors[1].max()) < 5
    lists = samples.call_from_shapes(aten.cat.default, ["2x3", "4x3"], {})
    assert len(lists.tensors) == 2
    for shapes, given, message in (
        (["5x4"], {}, "needs a value"), (["5x4", "i64:3", "2"], {"dim": "0"}, "are left"), (["5by4"], {}, "no shape"),
        (["5x4", "i64:3"], {"dim": "0", "k": "1"}, "are left"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            samples.call_from_shapes(aten.index_select.default, shapes, given)


# ------------------------------------------------------------ wrong
def _avg(call: Call) -> Rule:
    return pattern("m k, k n -> m n", reduce="avg")(call)


def _ranks_part(call: Call) -> Rule:
    """Its local part meets others on one rank only."""

    def local(ins, outs):
        def run(ctx):
            if ctx.in_specs[0].mesh.coord == (0,):
                ctx.in_specs[0].mesh.comm(0).all_reduce(ctx.inputs[0], "sum")
            return ctx.inputs[0].relu()

        return run

    return replace(pointwise()(call), local=local)


BROKEN: list[tuple[str, RecordedCall, Callable[[Call], Rule]]] = [
    ("aten.mm", MM, _avg),
    ("aten.mm", MM, pattern("m k, k n -> m n", linear="0+1")),
    ("aten.mm", MM, pattern("m k, [k] n -> n m")),
    ("aten.relu", RELU, pointwise("0")),
    ("aten.relu", RELU, pointwise("neg:0")),
    ("aten.relu", RELU, _ranks_part),
    ("aten.add", ADD, pointwise("0|1")),
    ("aten.add", ADD_, pointwise("0|1")),
    ("aten._softmax", SOFTMAX, pointwise()),
    ("aten.sgn", RecordedCall(aten.sgn.default, (rand(5, 6),), {}), pointwise("max:0")),
]


@pytest.mark.parametrize(("name", "call", "build"), BROKEN, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(BROKEN)])
def test_a_wrong_rule_is_caught(name: str, call: RecordedCall, build: Callable[[Call], Rule]) -> None:
    with override(name, build):
        report = check_overload(call.name, [call], Settings(missing=False))
    assert report.wrong, "a wrong rule passes"
    assert name in written_summary([report])


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (RecordedCall(aten.cumsum.default, (rand(8, 8), 0), {}), r"value .* at \[4, 0\], not .*; 32 of 64 differ"),
        (RecordedCall(aten.tril.default, (rand(8, 8), 2), {}), r"value 0.0 at \[4, 3\], not .*; 1\d of 64 differ"),
        (RecordedCall(aten.cumsum.default, (rand(3, 16), 1), {}), r"value .* at \[0, 8\], not .*; 24 of 48 differ"),
    ],
    ids=["rows", "a triangle", "columns"],
)  # fmt: skip
def test_a_wrong_value_is_shown_where_it_is(call: RecordedCall, where: str) -> None:
    name = call.op._schema.name.replace("::", ".")
    with override(name, pattern("... -> ...")):
        wrong = check_call(call, (2,)).wrong
    assert any(re.search(where + r", the largest difference is [\d.]+, at \[\d, \d+\]$", w) for w in wrong), wrong


@pytest.mark.parametrize("error", [IndexError, LayoutError])
def test_the_exception_of_the_rank_that_raised_is_shown(error: type[Exception]) -> None:
    """Not that of the ranks that waited for it in a collective."""

    def fails(ctx: KernelContext) -> torch.Tensor:
        if ctx.in_specs[0].mesh.get_rank() == 1:
            raise error("row 7 of an empty part")
        return ctx.all_reduce(ctx.inputs[0] @ ctx.inputs[1], "sum")

    def build(call: Call) -> Rule:
        rule = pattern("[m] k, k n -> [m] n")(call)
        return replace(rule, kernels=(Kernel("k", frozenset({0}), ("shard",), fails),))

    with override("aten.mm", build):
        wrong = check_call(RecordedCall(aten.mm.default, (rand(4, 6), rand(6, 8)), {}), (3,)).wrong
    assert wrong and all("by k 0: rank 1 raises " in w and f"{error.__name__}: row 7" in w for w in wrong), wrong


@pytest.mark.parametrize("call", [MM, RELU, ADD, ADD_, SOFTMAX, TOPK], ids=lambda c: c.name)
def test_right_rules_pass(call: RecordedCall) -> None:
    report = check_overload(call.name, [call], Settings(missing=False, keys=True))
    assert not report.wrong and report.right > 10


def test_what_is_no_matter_of_rules_is_skipped() -> None:
    for call, why in (
        (RecordedCall(aten.bernoulli.default, (rand(4).abs(),), {}), "random"),
        (RecordedCall(aten.mm.out, (rand(2, 2), rand(2, 2)), {"out": rand(2, 2)}), "out="),
        (RecordedCall(aten.empty_like.default, (rand(4),), {}), "uninitialised"),
        (RecordedCall(aten.mm.default, (rand(2, 2), rand(3, 2)), {}), "raises"),
    ):
        assert why in check_call(call, (2,)).skipped


# ------------------------------------------------------------ missing
def test_rows_that_a_rule_lacks_are_found() -> None:
    with override("aten.mm", pattern("m k, k n -> m n")):
        assert sorted(merged(missing_rows(MM))) == ["P(sum|avg), R -> P(sum|avg)", "R, P(sum|avg) -> P(sum|avg)"]
    with override("aten.mm", pattern("m [k], [k] n -> m n", linear="0|1")):
        assert "S(1), S(0) -> P(sum)" in merged(missing_rows(MM))
    assert not missing_rows(MM)


def test_rows_that_hold_by_accident_are_not_reported() -> None:
    zero = RecordedCall(aten.mul.Tensor, (rand(5, 6), torch.zeros(6, dtype=torch.float64)), {})
    never = RecordedCall(aten.eq.Tensor, (rand(5, 6), rand(5, 6, seed=1)), {})
    positive = RecordedCall(aten.mul.Scalar, (rand(5, 6), 3.5), {})  # the number is no part of the plan
    one = RecordedCall(aten._softmax.default, (rand(5, 1), 1, False), {})
    for call in (zero, never, positive, one):
        assert not merged(missing_rows(call)), call


def test_a_linear_group_that_leaves_outputs_alone_is_no_missing_row() -> None:
    def build(call: Call) -> Rule:
        rule = pointwise()(call)
        return replace(rule, linear=(Linear(frozenset({0}), (("max", "max"), ("min", "min"))),))

    with override("aten.relu", build):
        assert not missing_rows(RELU)


# ------------------------------------------------------------ keys
def test_variants_differ_in_one_argument() -> None:
    texts = [str(c) for c in variants(TOPK)]
    assert texts[0] == str(TOPK) and len(texts) == len(set(texts)) > 4
    assert any("topk.default(float64[5, 7], 3" in t for t in texts)


def test_a_stale_plan_is_caught() -> None:
    from dtensor.rules.registry import find

    topk = find("aten.topk.default")
    assert topk is not None
    with override("aten.topk", topk.build, values="k largest"):
        assert stale_plans(TOPK)
    assert not stale_plans(TOPK)


# ------------------------------------------------------------ many ops
def test_a_process_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dtensor.propagation_rules.proof import sweep as module

    def stages(name: str, calls, settings):
        if name == "dies":
            os._exit(3)
        if name == "raises":
            raise ZeroDivisionError("here")
        yield OpReport(name, 1, 1)
        if name == "late":
            os._exit(4)
        if name == "never":
            time.sleep(60)

    monkeypatch.setattr(module, "_stages", stages)
    names = ["dies", "late", "never", "raises", "works"]
    reports = sweep(dict.fromkeys(names, [MM]), Settings(seconds=2), jobs=2)
    assert [r.name for r in reports] == names
    dies, late, never, raises, works = reports
    assert "exit status 3" in dies.wrong[0] and "ZeroDivisionError" in raises.wrong[0]
    assert not (late.wrong or never.wrong or works.wrong)
    assert "exit status 4" in str(late.skipped) and "no answer" in str(never.skipped) and not works.skipped
    assert "dies: 1 wrong" in capsys.readouterr().err


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    given = ["--shapes", "5x4", "i64<5:3", "--arg", "dim=0"]
    assert main(["check", "index_select", *given, "--json", str(found), "--mesh", "2"]) == 0
    assert "1 of 1 overloads checked" in capsys.readouterr().out
    assert json.loads(found.read_text())["name"] == "aten.index_select.default"
    with override("aten.mm", _avg):
        assert main(["check", "aten.mm", "--shapes", "5x4", "4x3", "--wrong-only"]) == 1
    assert "WRONG    aten.mm.default" in capsys.readouterr().out
    assert main(["show", "mm", "--shapes", "5x4", "4x3"]) == 0
    out = capsys.readouterr().out
    assert "a b, b c -> a c        a=5 b=4 c=3" in out and "factor b                 S(1), S(0) -> P" in out
    assert main(["show", "softmax", "--shapes", "5x4", "--arg", "dim=1", "half_to_float=False"]) == 0
    assert "softmax b" in capsys.readouterr().out
    assert main(["show", "softmxa"]) == 2
    assert "near: softmax" in capsys.readouterr().err
    assert main(["show", "mm", "--shapes", "5x4", "3x3"]) == 2
    assert "fit no overload" in capsys.readouterr().err


def test_names_of_ops() -> None:
    assert [str(o) for o in overloads("aten.mm.default")] == ["aten.mm.default"]
    assert str(overloads("softmax")[0]) == "aten._softmax.default"
    with pytest.raises(UnknownOp, match="near"):
        overloads("aten.mm.defalt")


def test_without_the_database_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("torch.testing._internal.common_methods"):
            raise ModuleNotFoundError("No module named 'expecttest'")
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert main(["check", "mm"]) == 2
    assert "expecttest" in capsys.readouterr().err


# ------------------------------------------------------------ a fixed sample of the sweep
SAMPLE = (
    "addmm amax argmax cat clamp cumsum expand gather index_select linalg.vector_norm masked_fill mean "
    "nn.functional.conv1d nn.functional.embedding nn.functional.layer_norm scatter_add softmax sort topk where"
).split()


@pytest.fixture(scope="module")
def sample() -> dict[str, list[RecordedCall]]:
    known = samples.database()
    names = [n for n in known if n in SAMPLE]
    assert len(names) >= len(SAMPLE) - 2
    calls = [c for n in names for c in samples.calls_of(n, known[n], most=3)]
    return samples.select(calls, 1)


def listed() -> dict[str, dict[str, list[str]]]:
    """What `docs/missing.md` lists: title of the reason -> overload -> rows."""
    found: dict[str, dict[str, list[str]]] = {}
    for section in (DOCS / "missing.md").read_text().split("\n## ")[1:]:
        rows = re.findall(r"^- `([^`]+)`: (.*)$", section, re.MULTILINE)
        found[section.partition("\n")[0]] = {name: re.findall(r"`([^`]+)` \(", text) for name, text in rows}
    return found


def test_a_fixed_sample_of_the_sweep(sample: dict[str, list[RecordedCall]]) -> None:
    """No strategy is wrong, and every row that is missing is in `docs/missing.md` with a reason."""
    known = {(name, row) for section in listed().values() for name, rows in section.items() for row in rows}
    unknown, right = [], 0
    for name, calls in sample.items():
        report = check_overload(name, calls, Settings(((2, 3),), limit=8))
        assert not report.wrong, report.wrong[:4]
        right += report.right
        unknown += [f"{name}: {row}" for row in report.missing if (name, row) not in known]
    assert right > 500
    assert not unknown, f"close these rows, or give a reason in proof/reasons.py and run `make sweep`: {unknown}"


def test_the_document_of_missing_rows_gives_the_reasons_there_are() -> None:
    for title, rules in listed().items():
        for name, rows in rules.items():
            for row in rows:
                reason = reason_of(name, row)
                assert reason is not None and reason.title == title, (
                    f"{name}: {row} is under {title!r}: run `make sweep`"
                )


def test_static_arguments_of_the_sample_are_in_the_keys(sample: dict[str, list[RecordedCall]]) -> None:
    faults = [fault for calls in sample.values() for fault in stale_plans(calls[0], 8)]
    assert not faults


VALUES: list[tuple[str, Callable[[torch.Tensor, float], object]]] = [
    ("add", lambda x, v: x + v),
    ("add alpha", lambda x, v: torch.add(x, x, alpha=v)),
    ("mul", lambda x, v: x * v),
    ("rsub", lambda x, v: v - x),
    ("pow", lambda x, v: x**v),
    ("clamp", lambda x, v: x.clamp(-v, v)),
    ("clamp_min", lambda x, v: x.clamp(min=v)),
    ("lerp", lambda x, v: torch.lerp(x, x, v)),
    ("masked_fill", lambda x, v: x.masked_fill(x > v, v)),
    ("comparison", lambda x, v: x < v),
    ("leaky_relu", lambda x, v: torch.nn.functional.leaky_relu(x, v)),
    ("addcmul", lambda x, v: torch.addcmul(x, x, x, value=v)),
    ("addcdiv_", lambda x, v: x.addcdiv_(x, x, value=v)),
    ("foreach", lambda x, v: torch._foreach_add([x, x], v)),
    ("foreach alpha", lambda x, v: torch._foreach_add([x, x], [x, x], alpha=v)),
    ("foreach scalars", lambda x, v: torch._foreach_mul([x, x], [v, 2 * v])),
    ("foreach lerp", lambda x, v: torch._foreach_lerp([x], [x], v)),
]


@pytest.mark.parametrize(("name", "fn"), VALUES, ids=[n for n, _ in VALUES])
def test_values_that_change_no_layout_cause_no_miss(
    name: str, fn: Callable[[torch.Tensor, float], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    misses: list[str] = []
    miss = late.miss
    monkeypatch.setattr(late, "miss", lambda info, *rest: misses.append(info.name) or miss(info, *rest))

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = dtensor.distribute_tensor(rand(6, 4), mesh, [Shard(0)])
        with torch.no_grad():
            fn(x, 0.5)
            before = len(misses)
            assert before
            for v in (0.25, 0.125, 1.5):
                fn(x, v)
            assert len(misses) == before, misses[before:]

    dtensor.simulate(2)(program)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad], ids=lambda m: m.__name__)
@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_a_changing_learning_rate_causes_no_miss(make, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    misses: list[str] = []
    miss = late.miss
    monkeypatch.setattr(late, "miss", lambda info, *rest: misses.append(info.name) or miss(info, *rest))

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        p = torch.nn.Parameter(dtensor.distribute_tensor(rand(6, 4).float(), mesh, [Shard(0)]))
        p.grad = dtensor.distribute_tensor(rand(6, 4, seed=1).float(), mesh, [Shard(0)])
        optimizer = make([p], lr=0.1, **{way: True})
        optimizer.step()
        optimizer.step()
        before = len(misses)
        for lr in (0.05, 0.025, 0.0125):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        assert len(misses) == before, misses[before:]

    dtensor.simulate(2)(program)
