"""A program's rules: one that cannot be meant is refused, one that can is used, whatever was registered before."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.laws import make, rand

import dtensor
from dtensor import DTensor, Replicate, Shard, init_device_mesh
from dtensor.debug import CommDebugMode
from dtensor.dispatch import no_rule as rule_absent
from dtensor.errors import LayoutError, NoRuleError, RuleError
from dtensor.experimental import register_sharding
from dtensor.rules import registry
from dtensor.rules.faults import overloads, unknown_values
from dtensor.rules.kernel import KernelContext
from dtensor.rules.registry import Call, built_in, entries, lookup, override, pattern, register
from dtensor.rules.rule import Kernel, Rule, linear

R, S0, S1 = Replicate(), Shard(0), Shard(1)
aten = torch.ops.aten
MM = "m k, k n -> m n"


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    lib = torch.library.Library("faults", "FRAGMENT")  # noqa: TOR901 - taken back below
    for text, f in (
        ("f(Tensor x, Tensor w, float scale=1.0) -> Tensor", lambda x, w, scale=1.0: x @ w * scale),
        ("two(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x.sum(1))),
        ("counted(Tensor x) -> Tensor", lambda x: x[x > 0]),
        ("unshaped(Tensor x) -> Tensor", lambda x: x * 2),
    ):
        name = text.partition("(")[0]
        tags = (torch.Tag.dynamic_output_shape,) if name == "counted" else ()
        lib.define(text, tags=tags)
        lib.impl(name, f, "CPU" if name in ("counted", "unshaped") else "CompositeExplicitAutograd")
    yield
    lib._destroy()


def on(n: int, f: Callable[..., Any], *args: Any) -> list[Any]:
    return dtensor.simulate(n)(lambda: f(init_device_mesh("cpu", (n,)), *args))


def run_f(mesh: Any) -> Any:
    return torch.ops.faults.f(make(rand(4, 6), mesh, [S0]), make(rand(6, 8), mesh, [R]))._spec


# ------------------------------------------------------------ refused when registered
REFUSED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "no op like that": ("faults.g", pattern(MM), {}, "no operator 'faults.g'"),
    "no overload like that": ("faults.f.Tensor", pattern(MM), {}, "no overload 'Tensor'"),
    "no library like that": ("fault.f", pattern(MM), {}, "no operator 'fault.f' .is it faults.f"),
    "an op of torch, misspelt": ("aten.logsumexpp", pattern("a [b] -> a"), {}, "is it aten.logsumexp"),
    "no namespace": ("mm", pattern(MM), {}, "namespace"),
    "an out form": ("aten.mm.out", pattern(MM), {}, "form"),
    "shapes that depend on data": ("aten.nonzero", pattern("a -> [b] [c]"), {}, "depends on data"),
    "linear beyond the inputs": ("faults.f", pattern(MM, linear="0|2"), {}, "linear='0|2'"),
    "linear in letters": ("faults.f", pattern(MM, linear="x|w"), {}, "linear='x|w'"),
    "linear of an unknown kind": ("faults.f", pattern(MM, linear="up:0"), {}, "linear='up:0'"),
    "linear as a list": ("faults.f", pattern(MM, linear=[0]), {}, "linear="),  # type: ignore[arg-type]
    "addends beyond the inputs": ("faults.f", pattern(MM, addends=(3,)), {}, "addends"),
    "an unknown reduction": ("faults.f", pattern(MM, reduce="total"), {}, "total"),
    "values misspelt": ("faults.f", pattern(MM), {"values": "scael"}, "is it scale"),
    "values of another op": ("faults.f", pattern(MM), {"values": ("scale", "alpha")}, "alpha"),
    "a new factor": ("faults.f", pattern("m k, k n -> m z"), {}, "z"),
    "a new factor in a group": ("faults.f", pattern("m k, k n -> m (n z)"), {}, "z"),
    "a factor twice": ("faults.f", pattern("m m, m n -> m n"), {}, "m in two dims"),
    "too many inputs": ("faults.f", pattern("m k, k n, n -> m n"), {}, "3 inputs"),
    "too many outputs": ("faults.f", pattern("m k, k n -> m n, m"), {}, "2 outputs"),
    "too few outputs": ("faults.two", pattern("m k -> m k"), {}, "1 outputs"),
    "no arrow": ("faults.f", pattern("m k, k n"), {}, "not of the form"),
    "another sign": ("faults.f", pattern("m k; k n -> m n"), {}, "not of the form"),
    "an open bracket": ("faults.f", pattern("m [k, k n -> m n"), {}, "not of the form"),
    "no text": ("faults.f", pattern(None), {}, "not of the form"),  # type: ignore[arg-type]
    "text for a builder": ("faults.f", MM, {}, "must be a function"),
    "nothing for a builder": ("faults.f", None, {}, "must be a function"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused_when_registered(fault: str) -> None:
    name, build, options, words = REFUSED[fault]
    before = entries()
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        register(name, build, **options)
    text = str(caught.value)
    assert name in text and "fix: " in text and len(text) < 2000
    assert entries() == before


def test_names_are_strings() -> None:
    with pytest.raises(TypeError, match="a string"):
        register(aten.mm.default, pattern(MM))  # type: ignore[arg-type]


def test_nothing_is_registered_where_one_of_several_is_refused() -> None:
    before = entries()
    with pytest.raises(RuleError, match="faults.g"):
        register("faults.f faults.g", pattern(MM))
    assert entries() == before


def test_a_composite_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="takes this op apart"), override("aten.matmul", pattern(MM)):
        pass


def test_the_engines_own_rules_pass_the_checks() -> None:
    """Those for ops that this torch has; with the others, of an older or newer torch, nothing is done."""
    checked = 0
    for name, entry in entries().items():
        if entry.where or "<" in name or not hasattr(getattr(torch.ops, name.split(".")[0]), name.split(".")[1]):
            continue
        try:
            ops = overloads(name)
        except ValueError:
            continue
        unknown = unknown_values((v for v in entry.values if isinstance(entry.build, pattern)), ops)
        misfit = entry.build.misfit(ops) if isinstance(entry.build, pattern) else ""
        assert not unknown and not misfit, (name, unknown, misfit)
        checked += 1
    assert checked > 400
    with built_in():
        register("aten.of_another_torch", pattern(MM))
    registry._own.pop("aten.of_another_torch")


# ------------------------------------------------------------ refused when built or run
def rule_of_mm(**changes: Any) -> Callable[[Call], Rule]:
    def build(call: Call) -> Rule:
        given = {"inputs": (((0,), (1,)), ((1,), (2,))), "outputs": (((0,), (2,)),), "sizes": (4, 6, 8)}
        return Rule(**{**given, **changes})  # type: ignore[arg-type]

    return build


def kernel(run: Any, outputs: tuple[str, ...] = ("shard",), **more: Any) -> Callable[[Call], Rule]:
    return rule_of_mm(whole=frozenset({0, 1, 2}), kernels=(Kernel("k", frozenset({0}), outputs, run, **more),))


def fails(ctx: KernelContext) -> Any:
    return {}["here"]  # this line is shown


BUILT: dict[str, tuple[Any, str]] = {
    "a tuple": (lambda call: ((0,), (1,)), "gave"),
    "a pattern not called": (lambda call: pattern(MM), "gave"),
    "no argument like that": (lambda call: call["factor"], "KeyError"),
    "no attribute like that": (lambda call: call.nothing, "call.nothing"),
    "a division": (lambda call: 1 / 0, "1 / 0"),
    "words of its own": (lambda call: (_ for _ in ()).throw(RuntimeError("only for 2-D")), "only for 2-D"),
    "too many arguments": (lambda call, more: None, "TypeError"),
    "inputs missing": (rule_of_mm(inputs=(((0,), (1,)),)), "1 inputs, the call 2"),
    "outputs missing": (rule_of_mm(outputs=()), "0 outputs"),
    "dims missing": (rule_of_mm(outputs=(((0,),),)), "1 dims for a tensor of 2"),
    "a factor beyond": (rule_of_mm(outputs=(((0,), (7,)),)), "factors"),
    "wrong sizes": (rule_of_mm(sizes=(4, 6, 9)), "size 8"),
    "a new factor": (rule_of_mm(outputs=(((0,), (3,)),), sizes=(4, 6, 8, 8)), "in no input"),
    "linear beyond": (rule_of_mm(linear=(linear(2),)), "linear"),
    "addends beyond": (rule_of_mm(addends=frozenset({-1})), "addends"),
    "whole beyond": (rule_of_mm(whole=frozenset({9})), "whole"),
    "an unknown reduction": (rule_of_mm(reduce={1: "total"}), "total"),
    "nothing for inputs": (rule_of_mm(inputs=None), "wrong type"),
    "bind gives no function": (rule_of_mm(bind=lambda ins, outs: 3), "not a function or None"),
    "bind fails": (rule_of_mm(bind=lambda ins, outs: outs[5]), "IndexError"),
    "local gives no function": (rule_of_mm(local=lambda ins, outs: "x"), "not a function or None"),
    "localize gives no mapping": (rule_of_mm(localize=lambda ins, outs: [1]), "not values by argument name"),
    "localize misnames": (rule_of_mm(localize=lambda ins, outs: {"scael": 1}), "'scael'"),
    "a kernel that fails": (kernel(fails), "this line is shown"),
    "a kernel that gives nothing": (kernel(lambda ctx: None), "gave None"),
    "a kernel that gives several": (kernel(lambda ctx: (ctx.inputs[0], ctx.inputs[1])), "for a tensor"),
    "a kernel of another shape": (kernel(lambda ctx: ctx.inputs[0]), "promised"),
    "a kernel that is none": (kernel(3), "no function"),
    "a kernel of two outputs": (kernel(fails, ("shard", "shard")), "2 outputs"),
    "a kernel with an unknown output": (kernel(fails, ("shared",)), "shared"),
    "a kernel that moves otherwise": (kernel(fails, moves="all_scatter"), "all_scatter"),
    "a pattern that does not fit": (pattern("m k n, k n -> m n"), "more dims"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BUILT)
def test_refused_at_the_first_call(fault: str) -> None:
    """On all ranks, by an error that names the op, the rule, and its file and line, in place of Python's words."""
    build, words = BUILT[fault]

    def f(mesh: Any) -> str:
        with pytest.raises(Exception, match=".") as caught:
            run_f(mesh)
        assert isinstance(caught.value, (RuleError, LayoutError)), repr(caught.value)
        return str(caught.value)

    with override("faults.f", build):
        texts = on(2, f)
    for text in texts:
        assert "faults.f.default" in text and f"{__file__}:" in text and words in text and len(text) < 2000, text
        assert "object has no" not in text and "object is not" not in text


def test_rows_that_are_none_name_the_rule() -> None:
    op = torch.ops.faults.f.default
    for rows in (lambda x, w, scale: None, lambda x, w, scale: x.nothing, lambda x: []):
        register_sharding(op)(rows)  # type: ignore[arg-type]
        try:
            with pytest.raises(ValueError, match=f"faults.f.default, rule .*\n?.*{Path(__file__).name}:"):
                on(2, run_f)
        finally:
            registry.unregister("faults.f.default")


def test_right_rules_are_taken() -> None:
    kinds: list[Any] = [
        pattern(MM, linear="0|1"), pattern("m k, k n -> m [z]"), rule_of_mm(), lambda call: pattern(MM)(call),
        kernel(lambda ctx: ctx.inputs[0] @ ctx.inputs[1]),
        rule_of_mm(bind=lambda ins, outs: torch.ops.faults.f.default),
    ]  # fmt: skip
    for build in kinds:
        with override("faults.f", build, values="scale"):
            assert on(2, run_f)[0].shape == (4, 8)


# ------------------------------------------------------------ a rule that exists is used
NONE_CUT = "... -> ..."


@pytest.mark.parametrize(
    ("rule", "op"),
    [
        ("aten.sum", aten.sum.dim_IntList), ("aten.add", aten.add_.Tensor), ("aten.div", aten.div.Tensor_mode),
        ("aten.special_airy_ai", aten.special_airy_ai.default), ("aten._native_batch_norm_legit", aten.sum.default),
    ],
    ids=str,
)
def test_a_programs_rule_comes_before_the_engines_own(rule: str, op: Any) -> None:
    """Also where that is for one overload, for the in-place form, for all pointwise ops, or registered later."""
    build = pattern("[a] [b] -> [c]") if rule == "aten.sum" else lambda call: None
    own = lookup(op)
    with override(rule, build):
        found = lookup(op)
        assert found is not own or rule == "aten._native_batch_norm_legit"
        with built_in():  # as when the engine's own are loaded afterwards
            if own is not None and not own.name.startswith("aten.<"):
                register(own.name, own.build, values=own.values, random=own.random)
        assert lookup(op) is found or found is own
    assert lookup(op) is not None and lookup(op).where == ""  # type: ignore[union-attr]


def test_list_forms_follow_a_programs_rule() -> None:
    def f(mesh: Any) -> Any:
        return torch._foreach_add([make(rand(4, 2), mesh, [S0])], 1.0)[0].placements

    assert on(2, f)[0] == (S0,)
    with override("aten.add", pattern("[a] [b] -> [a] [b]")):
        assert on(2, f)[0] == (R,)


def test_strict_rules_refuse_list_ops_that_are_cached() -> None:
    def f(mesh: Any) -> None:
        x = make(rand(4, 2), mesh, [S0])
        torch._foreach_exp([x])
        with dtensor.strict_rules():
            for _ in range(2):
                with pytest.raises(NoRuleError, match="_foreach_exp"):
                    torch._foreach_exp([x])
            torch._foreach_exp([make(rand(4, 2), mesh, [R])])

    with override("aten._foreach_exp", lambda call: None):
        on(2, f)


def test_a_rule_comes_before_what_handles_an_op_as_a_whole() -> None:
    def f(mesh: Any) -> Any:
        table, i = make(rand(6, 4), mesh, [S1]), make(torch.tensor([0, 1, 2]), mesh, [R])
        return aten._embedding_bag(table, i, make(torch.tensor([0, 2]), mesh, [R]))[0].placements

    assert on(2, f)[0] == (S1,)
    with override("aten._embedding_bag", pattern("[r] [w], [i], [o] -> [o] [w], [a], [b], [c]")):
        assert on(2, f)[0] == (R,)


# ------------------------------------------------------------ ops without a meta kernel
def calls(mesh: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By op: the call on DTensors, and on plain tensors."""
    x, y = rand(8, 4), rand(4, 3, 3)
    d, e = make(x, mesh, [S0]), make(y, mesh, [S0])
    a, b = torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32)
    whole = lambda t: make(t, mesh, [R])  # noqa: E731
    tensor = aten.fake_quantize_per_tensor_affine_cachemask
    channel = aten.fake_quantize_per_channel_affine_cachemask
    learnt = aten._fake_quantize_learnable_per_tensor_affine
    s, z = torch.tensor([0.1]), torch.tensor([0.0])
    return {
        "fake_quantize_per_tensor_affine_cachemask": (
            lambda: tensor(d, 0.1, 0, -128, 127), lambda: tensor(x, 0.1, 0, -128, 127),
        ),
        "fake_quantize_per_channel_affine_cachemask": (
            lambda: channel(d, whole(a), whole(b), 1, -128, 127), lambda: channel(x, a, b, 1, -128, 127),
        ),
        "_fake_quantize_learnable_per_tensor_affine": (
            lambda: learnt(d, whole(s), whole(z), -128, 127), lambda: learnt(x, s, z, -128, 127),
        ),
        "geqrf": (lambda: aten.geqrf(e), lambda: aten.geqrf(y)),
    }  # fmt: skip


UNSHAPED: dict[str, tuple[Any, str]] = {
    "fake_quantize_per_tensor_affine_cachemask": (pattern("... -> ..., ..."), "scale zero_point quant_min quant_max"),
    "fake_quantize_per_channel_affine_cachemask": (pattern("a b, b, b -> a b, a b"), "quant_min quant_max"),
    "_fake_quantize_learnable_per_tensor_affine": (pattern("..., 1, 1 -> ..."), ""),
    "geqrf": (pattern("b [m] [n] -> b [m] [n], b [k]"), ""),
}


def outcome(mesh: Any, name: str) -> Any:
    ours, plain = calls(mesh)[name]
    state = torch.get_rng_state()
    with CommDebugMode() as counted:
        got = ours()
    assert torch.equal(state, torch.get_rng_state())
    many, want = (got, plain()) if isinstance(got, (tuple, list)) else ([got], [plain()])
    for g, w in zip(many, want, strict=True):
        assert isinstance(g, DTensor) and (g.shape, g.dtype) == (w.shape, w.dtype)
        torch.testing.assert_close(g.full_tensor(), w)
    return many[0].placements, counted.get_total_counts()


@pytest.mark.parametrize("name", UNSHAPED)
def test_an_op_without_a_meta_kernel(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its rule is used; without one it is refused under strict rules, and gathers with a notice."""
    rule, values = UNSHAPED[name]
    with override(f"aten.{name}", rule, values=values), dtensor.strict_rules(decompositions=True):
        assert on(4, outcome, name) == [((S0,), 0)] * 4

    def refused(mesh: Any) -> None:
        text = rf"aten.{name}(.|\n)*register_fake\('aten::{name}'"
        with dtensor.strict_rules(), pytest.raises(NoRuleError, match=text):
            calls(mesh)[name][0]()

    on(2, refused)
    rule_absent._noticed.discard(f"aten.{name}.default")
    with caplog.at_level(logging.WARNING, logger="dtensor"):
        assert {placed for placed, _ in on(2, outcome, name)} == {(R,)}
    said = [r.getMessage() for r in caplog.records if f"aten.{name}" in r.getMessage()]
    assert len(said) == 1 and "register_fake" in said[0] and "gather" in said[0], said


def test_rows_for_an_op_without_a_meta_kernel() -> None:
    register_sharding(aten.geqrf.default)(lambda a: [([S0, S0], [S0])])
    try:
        assert on(2, outcome, "geqrf") == [((S0,), 0)] * 2
    finally:
        registry.unregister("aten.geqrf.default")


@pytest.mark.parametrize("with_rule", [False, True])
def test_an_op_of_another_library_without_a_fake_kernel(with_rule: bool) -> None:
    """It is not run on made-up numbers, as nothing is known about what it does."""

    def f(mesh: Any) -> None:
        text = r"cannot be predicted(.|\n)*torch.library.register_fake\('faults::unshaped'"
        with pytest.raises(NoRuleError, match=text):
            torch.ops.faults.unshaped(make(rand(4, 2), mesh, [S0]))

    with override("faults.unshaped", pattern("... -> ...")) if with_rule else warnings.catch_warnings():
        on(2, f)


# ------------------------------------------------------------ the first use
FIRST = """
import threading, torch, torch.distributed as dist, dtensor
from dtensor import Shard, distribute_tensor, init_device_mesh, strict_rules
from dtensor.rules import registry
from dtensor.rules.registry import pattern
registry.register("aten.neg", pattern("[a] [b] -> [a] [b]"))  # before the engine's own are loaded
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
assert not registry._loaded
start, errors = threading.Barrier(3), []
def work(k, op):
    start.wait()
    threading.Event().wait(0.02 * k)  # the first one is loading the rules
    try:
        with strict_rules():
            op()
    except BaseException as e:
        errors.append(repr(e))
ops = [lambda: torch.mm(x, x), lambda: x.sum(1), lambda: torch._foreach_add([x, x], 1)]
threads = [threading.Thread(target=work, args=(k, op)) for k, op in enumerate(ops)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
assert registry.find("aten.neg").where and not registry.find("aten.mm").where
dist.destroy_process_group()
"""


def test_the_first_use_from_several_threads() -> None:
    """None finds rules missing while another loads them; what was registered before stays."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", FIRST], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_rules_that_failed_to_load_are_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def load(name: str) -> None:
        seen.append(name)
        if len(seen) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setattr(registry.importlib, "import_module", load)
    with pytest.raises(KeyboardInterrupt):
        registry.load()
    registry.load()
    assert len(seen) == 2
