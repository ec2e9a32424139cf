"""Ops without a rule, plain tensors among DTensors, results whose shape depends on data, strict mode."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.laws import Sample, check_layouts, check_strategies, ints, make, rand
from helpers.samples import strided as samples_strided

import dtensor
from dtensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dtensor.comm.observers import observers
from dtensor.dispatch import no_rule as rule_absent
from dtensor.dispatch.decompositions import decomposition_of
from dtensor.errors import LayoutError, MixedTensorError, NoRuleError
from dtensor.rules import registry
from dtensor.rules.registry import override

R, S0, P = Replicate(), Shard(0), Partial()
NONE = lambda call: None  # noqa: E731 - a builder: this call has no rule


def on(n: int, f: Callable[..., object], shape: tuple[int, ...] | None = None) -> list[object]:
    return dtensor.simulate(n)(lambda: f(init_device_mesh("cpu", shape or (n,))))


def sampled(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(x, grid, align_corners=False)


def attended(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], attn_mask=mask)


# ------------------------------------------------------------ decompositions
TAKEN_APART = [
    ("aten.huber_loss", lambda a, b: F.huber_loss(a, b, reduction="none"), (rand(5, 4), rand(5, 4, seed=1))),
    ("aten.logit_backward", lambda x: torch.logit(x.sigmoid(), 1e-3), (rand(5, 4),)),
    ("aten.glu_backward", lambda x: F.glu(x, 1), (rand(5, 4),)),
    ("aten.trace", torch.trace, (rand(5, 4),)),
    ("aten.renorm", lambda x: torch.renorm(x, 2, 0, 1.0), (rand(5, 4),)),
    ("aten.dist", torch.dist, (rand(4, 3), rand(4, 3, seed=2))),
    ("aten.grid_sampler_2d", sampled, (rand(2, 3, 3, 3), rand(2, 2, 1, 2))),
    ("aten.upsample_bilinear2d", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (rand(4, 3, 4, 4),)),
    ("aten.native_layer_norm_backward", lambda x: F.layer_norm(x, (3,)), (rand(4, 3),)),
    ("aten.native_group_norm", lambda x: F.group_norm(x, 2), (rand(4, 4, 3),)),
    ("aten.im2col", lambda x: F.unfold(x, (2, 2)), (rand(2, 3, 4, 4),)),
    ("aten.unfold_backward", lambda x: x.unfold(0, 2, 1), (rand(4, 3),)),
    ("aten.index_add", lambda x, y, i: x.index_add(0, i, y), (rand(4, 3), rand(2, 3), torch.tensor([1, 2]))),
    ("aten.isin", torch.isin, (ints(4, 4, 3), ints(4, 3, seed=1))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn", "tensors"), TAKEN_APART, ids=[t[0] for t in TAKEN_APART])
def test_an_op_without_a_rule_is_taken_apart(name: str, fn: Callable[..., torch.Tensor], tensors, monkeypatch) -> None:
    """Values and gradients in many layouts; some of them are computed without gathering."""
    from dtensor.dispatch import miss

    tried: list[bool] = []

    def noted(info, call, args, kwargs):
        found = original(info, call, args, kwargs)
        tried.append(found is not None)
        return found

    original = miss.decomposed
    monkeypatch.setattr(miss, "decomposed", noted)
    with override([name], NONE):
        check_layouts(Sample(name, fn, tensors), (3,), limit=8).must_hold()
        check_layouts(Sample(name, fn, tensors), (2, 2), limit=6).must_hold()
    assert any(tried)


def test_a_decomposition_is_looked_for_once_a_key(monkeypatch) -> None:
    from dtensor.dispatch import decompositions

    found: list[str] = []
    monkeypatch.setattr(decompositions, "decomposition_of", lambda op: found.append(str(op)) or decomposition_of(op))

    def f(mesh):
        a, b = make(rand(6, 4), mesh, [S0]), make(rand(6, 4, seed=1), mesh, [S0])
        sent: list[str] = []
        observers.append(lambda kind, *_: sent.append(kind))
        for delta in (1.0, 1.0, 2.0):
            got = F.huber_loss(a, b, reduction="none", delta=delta)
            assert got.placements == (S0,)
            want = F.huber_loss(rand(6, 4), rand(6, 4, seed=1), reduction="none", delta=delta)
            torch.testing.assert_close(got.to_local(), want.chunk(2)[mesh.get_local_rank()])
        assert not sent

    with override(["aten.huber_loss"], NONE):
        on(2, f)
    assert found.count("aten.huber_loss.default") == 2 * 2  # two keys on each of two ranks


def test_a_decomposition_that_gathers_more_is_not_taken(caplog) -> None:
    """A cumulative sum along the sharded dim: torch's decomposition is no cheaper than gathering once."""

    def f(mesh):
        x = make(rand(6, 4), mesh, [S0])
        torch.testing.assert_close(torch.cummax(x, 0)[0].full_tensor(), torch.cummax(rand(6, 4), 0)[0])

    rule_absent._noticed.clear()
    with override(["aten.cummax"], NONE), caplog.at_level(logging.WARNING, logger="dtensor"):
        on(2, f)
    assert [r for r in caplog.records if "aten.cummax" in r.getMessage()]


# ------------------------------------------------------------ the notice and the strict mode
def test_the_notice_says_what_it_cost_once(caplog) -> None:
    def f(mesh):
        x = make(rand(4, 4), mesh, [S0])
        for _ in range(2):
            torch.testing.assert_close(torch.cummax(x, 1)[0].full_tensor(), torch.cummax(rand(4, 4), 1)[0])
        torch.cummax(make(rand(4, 4), mesh, [R]), 1)

    rule_absent._noticed.clear()
    with override(["aten.cummax"], NONE), caplog.at_level(logging.WARNING, logger="dtensor"):
        on(2, f)
    texts = [r.getMessage() for r in caplog.records if "no sharding rule" in r.getMessage()]
    assert len(texts) == 1
    for part in ("aten.cummax", "all_gather", "32 bytes", "f32[4@0,4]", "test_fallback.py:", "rules.register("):
        assert part in texts[0], texts[0]


def test_the_rule_in_the_notice_can_be_pasted(caplog) -> None:
    def f(mesh):
        torch.cummax(make(rand(4, 3), mesh, [S0]), 1)

    rule_absent._noticed.clear()
    with override(["aten.cummax"], NONE), caplog.at_level(logging.WARNING, logger="dtensor"):
        on(2, f)
    text = next(r.getMessage() for r in caplog.records if "aten.cummax" in r.getMessage())
    call = text.partition("rule: ")[2].partition(", without")[0]
    assert call == "dtensor.rules.register('aten.cummax', dtensor.rules.pattern('[a] [b] -> [a] [b], [a] [b]'))"
    name, _, pattern = call.removeprefix("dtensor.rules.register(").removesuffix(")").partition(", ")
    builder = eval(pattern.replace("[a]", "a"), {"dtensor": dtensor})  # rows can be computed by themselves

    def g(mesh):
        got = torch.cummax(make(rand(4, 3), mesh, [S0]), 1)[0]
        assert got.placements == (S0,)
        torch.testing.assert_close(got.full_tensor(), torch.cummax(rand(4, 3), 1)[0])

    with override([eval(name)], builder):
        on(2, g)


@pytest.mark.parametrize("by", ["context", "environment"])
def test_strict_rules_refuse_what_would_gather(by: str, monkeypatch) -> None:
    def f(mesh):
        x, y = make(rand(4, 4), mesh, [S0]), make(rand(4, 4, seed=1), mesh, [S0])
        torch.cummax(x, 1)  # cached before the mode is on
        F.huber_loss(x, y, reduction="none")

        def strict(decompositions: bool = False):
            if by == "context":
                return dtensor.strict_rules(decompositions=decompositions)
            monkeypatch.setenv("DTENSOR_STRICT_RULES", "all" if decompositions else "1")
            return warnings.catch_warnings()  # any `with`

        with strict():
            for _ in range(2):
                with pytest.raises(NoRuleError, match=r"aten.cummax.*\n.*f32\[4@0,4\](.|\n)*rules.register\("):
                    torch.cummax(x, 1)
                F.huber_loss(x, y, reduction="none")
            torch.cummax(make(rand(4, 4), mesh, [R]), 1)
            torch.linalg.multi_dot([x, y, x])  # a composite
            with strict(decompositions=True), pytest.raises(NoRuleError, match="aten.huber_loss"):
                F.huber_loss(x, y, reduction="none")
        monkeypatch.delenv("DTENSOR_STRICT_RULES", raising=False)
        torch.cummax(x, 1)

    with override(["aten.cummax", "aten.huber_loss"], NONE):
        on(1 if by == "environment" else 2, f, (1,) if by == "environment" else None) if by == "context" else on(2, f)


def test_strict_rules_reach_simulated_ranks() -> None:
    def f(mesh):
        with pytest.raises(NoRuleError, match="cummax"):
            torch.cummax(make(rand(4, 4), mesh, [S0]), 1)

    with override(["aten.cummax"], NONE), dtensor.strict_rules():
        on(2, f)


# ------------------------------------------------------------ shapes that depend on data
X, I = rand(5, 4), ints(3, 7)
COUNTED = [
    ("nonzero", lambda x: torch.nonzero(x.relu()), (X,)),
    ("nonzero as tuple", lambda x: torch.nonzero(x.relu(), as_tuple=True), (X,)),
    ("argwhere", lambda x: torch.argwhere(x > 0), (X,)),
    ("where of a condition", lambda x: torch.where(x > 0), (X,)),
    ("masked_select", lambda x: torch.masked_select(x, x > 0), (X,)),
    ("boolean index", lambda x: x[x > 0], (X,)),
    ("boolean rows", lambda x: x[x.sum(1) > 0], (X,)),
    ("boolean write", lambda x: x.masked_fill(x > 0, 0.0), (X,)),
    ("unique", lambda i: torch.unique(i, return_inverse=True, return_counts=True), (I,)),
    ("unique of rows", lambda i: torch.unique(i.view(7, 1), dim=0), (I,)),
    ("unique_consecutive", lambda i: torch.unique_consecutive(i, return_counts=True), (I,)),
    ("bincount", torch.bincount, (I,)),
    ("bincount with weights", torch.bincount, (I, rand(7))),
    ("repeat_interleave", lambda x, n: torch.repeat_interleave(x, n, 0), (X, ints(3, 5))),
    ("repeat_interleave of counts", torch.repeat_interleave, (ints(3, 5),)),
    ("histogram", lambda x: tuple(torch.histogram(x, 4)), (X,)),
    ("histc", lambda x: torch.histc(x, 4), (X,)),
    ("isclose", torch.isclose, (X, X + 1e-9)),
    ("one_hot", F.one_hot, (I,)),
    ("combinations", torch.combinations, (rand(4),)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn", "tensors"), COUNTED, ids=[t[0] for t in COUNTED])
def test_a_shape_that_depends_on_data_is_the_same_everywhere(name: str, fn, tensors) -> None:
    grads = name in ("masked_select", "boolean index", "boolean rows", "repeat_interleave", "boolean write")
    sample = Sample(name, fn, tensors, grads=grads, pending=("sum", "max"))
    check_layouts(sample, (3,), limit=8).must_hold()
    check_layouts(sample, (2, 2), limit=6).must_hold()


def test_values_that_python_reads_are_global() -> None:
    def f(mesh):
        for placed in ([S0], [P], [R]):
            x = make(rand(4, 3), mesh, placed)
            assert torch.equal(x, x + 0) and not torch.equal(x, x + 1)
            assert torch.allclose(x, x + 1e-9) and not torch.allclose(x, x + 1)
            assert x.sum().item() == pytest.approx(rand(4, 3).sum().item(), rel=1e-5)
            assert bool(x.abs().sum() > 0) and torch.is_nonzero(x.abs().sum())

    on(3, f)


# ------------------------------------------------------------ plain tensors that torch makes
def rnn(kind: type[torch.nn.Module], **options: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """An RNN without a first state, its parameters laid out like the input's mesh wants them: replicated."""

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        module = kind(3, 5, **options)
        if isinstance(x, DTensor):
            dtensor.distribute_module(module, x.device_mesh)
        got = module(x)
        return got[0] if isinstance(got, tuple) else got

    return run


def seeded(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(*tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return f(*tensors)

    return run


MADE_BY_TORCH = [
    ("quantile", lambda x: torch.quantile(x, 0.3, dim=0), (X,)),
    ("quantile midpoint", lambda x: torch.quantile(x, 0.3, dim=1, interpolation="midpoint"), (X,)),
    ("nanquantile", lambda x: torch.nanquantile(x, 0.3), (X,)),
    ("combinations", lambda x: torch.combinations(x, 3, True), (rand(4),)),
    ("unravel_index", lambda i: torch.unravel_index(i, (2, 2)), (torch.arange(4),)),
    ("lists among indices", lambda x, i: x[[0, 1, 2], i], (X, ints(4, 3))),
    ("svd_lowrank", seeded(lambda x: torch.svd_lowrank(x, q=2)[1]), (X,)),
    ("pca_lowrank", seeded(lambda x: torch.pca_lowrank(x, q=2)[1]), (X,)),
    ("causal attention", lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (rand(2, 2, 4, 8),)),
    ("istft", lambda x: torch.istft(torch.view_as_complex(x), n_fft=10), (rand(6, 4, 2),)),
    ("matrix_power 0", lambda x: torch.matrix_power(x, 0) + x, (rand(3, 3),)),
    ("gradient", lambda x: torch.gradient(x, spacing=2.0, edge_order=2, dim=0)[0], (X,)),
    ("block_diag", torch.block_diag, (rand(2, 3), rand(3, 2))),
    ("cdist", torch.cdist, (X, rand(3, 4))),
    ("masked mean", lambda x: torch.masked.mean(x, dim=0, keepdim=True), (X,)),
    ("masked var", lambda x: torch.masked.var(x, dim=1), (X,)),
    ("GRU", rnn(torch.nn.GRU, num_layers=2), (rand(4, 2, 3),)),
    ("LSTM", rnn(torch.nn.LSTM, bidirectional=True), (rand(4, 2, 3),)),
    ("RNN", rnn(torch.nn.RNN, batch_first=True), (rand(2, 4, 3),)),
    ("GRUCell", rnn(torch.nn.GRUCell), (rand(4, 3),)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn", "tensors"), MADE_BY_TORCH, ids=[t[0] for t in MADE_BY_TORCH])
def test_plain_tensors_of_torchs_own_code_count_as_replicated(name: str, fn, tensors) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fixed = frozenset({1}) if name == "lists among indices" else frozenset()
        check_layouts(Sample(name, fn, tensors, pending=("sum",), fixed=fixed), (3,), limit=6).must_hold()


@pytest.mark.parametrize("name", ("svd_lowrank", "pca_lowrank", "quantile", "GRU"))
def test_and_while_something_watches_the_interpreters_frames(name: str) -> None:
    """As `torch.compile` does, and goes on to where compiling has failed: a call then keeps what it passes."""
    from torch._C._dynamo import eval_frame

    fn, tensors = next((fn, tensors) for other, fn, tensors in MADE_BY_TORCH if other == name)

    def refused(mesh) -> None:
        x = make(X, mesh, [S0])
        with pytest.raises(MixedTensorError):
            torch.add(x, torch.ones(3))
        with pytest.raises(MixedTensorError):
            F.linear(x, rand(2, 3))

    before = eval_frame.set_eval_frame(False)  # run what is compiled already, compile nothing
    try:
        check_layouts(Sample(name, fn, tensors, pending=("sum",)), (3,), limit=6).must_hold()
        dtensor.simulate(2)(lambda: refused(init_device_mesh("cpu", (2,))))
    finally:
        eval_frame.set_eval_frame(before)


def test_and_in_inference_mode_and_under_torchs_modes() -> None:
    def f(mesh):
        from torch.utils.flop_counter import FlopCounterMode

        from dtensor.debug import CommDebugMode

        x = make(X, mesh, [S0])
        want = torch.quantile(X, 0.3, dim=0)
        with torch.inference_mode():
            torch.testing.assert_close(torch.quantile(x, 0.3, dim=0).full_tensor(), want)
            rnn(torch.nn.GRU)(make(rand(4, 2, 3), mesh, [S0]))
        for mode in (CommDebugMode(), FlopCounterMode(display=False)):
            with mode:
                torch.testing.assert_close(torch.quantile(x, 0.3, dim=0).full_tensor(), want)
                with pytest.raises(MixedTensorError):
                    x + torch.ones(5, 4)

    on(2, f)


W, B = torch.ones(4, 4), torch.ones(5, 4)
OF_THE_USER: dict[str, tuple[Callable[[DTensor], object], str]] = {
    "a temporary": (lambda x: x + torch.ones(5, 4), "argument 'other'"),
    "a variable": (lambda x: x + B, "argument 'other'"),
    "a view": (lambda x: x + B[:1], "argument 'other'"),
    "a function's argument": (lambda x: torch.add(x, torch.ones(5, 4)), "argument 'other'"),
    "a matrix": (lambda x: torch.matmul(x, torch.ones(4, 3)), "argument 'mat2'"),
    "a batch of matrices": (lambda x: torch.matmul(x, torch.ones(2, 4, 3)), "plain"),
    "a weight": (lambda x: F.linear(x, W), "argument 'mat2'"),
    "a temporary weight": (lambda x: F.linear(x, torch.ones(3, 4)), "argument 'mat2'"),
    "a transposed weight": (lambda x: F.linear(x, torch.ones(4, 3).T), "argument 'mat2'"),
    "a module's parameter": (lambda x: torch.nn.Linear(4, 3)(x), "plain"),
    "a frozen parameter": (lambda x: torch.nn.Linear(4, 3).requires_grad_(False)(x), "plain"),
    "a module's buffer": (lambda x: torch.nn.BatchNorm1d(4, affine=False)(x), "plain"),
    "in a list": (lambda x: torch.cat([x, torch.ones(5, 4)]), "item 1 of argument 'tensors'"),
    "first in a list": (lambda x: torch.stack([B, x]), "item 0 of argument 'tensors'"),
    "in an einsum": (lambda x: torch.einsum("ab,cb->ac", x, torch.ones(2, 4)), "plain"),
    "an index": (lambda x: x[torch.tensor([0, 1])], "item 0 of argument 'indices'"),
    "a mask": (lambda x: x.masked_fill(torch.ones(5, 4) > 0, 0), "argument 'mask'"),
    "a condition": (lambda x: torch.where(B > 0, x, x), "argument 'condition'"),
    "a target": (lambda x: F.mse_loss(x, torch.ones(5, 4)), "argument 'target'"),
    "a keyword": (lambda x: F.layer_norm(x, (4,), weight=torch.ones(4)), "argument 'weight'"),
    "an attention mask": (lambda x: attended(x, torch.ones(5, 5)), "plain"),
    "in place": (lambda x: x.add_(torch.ones(5, 4)), "argument 'other'"),
    "written": (lambda x: torch.ones(5, 4).add_(x), "argument 'self', which is written"),
    "an item": (lambda x: x.__setitem__(0, torch.ones(4)), "plain"),
    "a part": (lambda x: x + x.to_local(), "argument 'other'"),
    "a first state": (lambda x: rnn_with_state(x, torch.zeros(1, 5, 3)), "plain"),
}  # fmt: skip


def rnn_with_state(x: DTensor, state: torch.Tensor) -> torch.Tensor:
    module = torch.nn.GRU(4, 3)
    dtensor.distribute_module(module, x.device_mesh)
    return module(x[None], state)[0]


@pytest.mark.parametrize("placed", [R, S0], ids=str)
@pytest.mark.parametrize("what", OF_THE_USER)
def test_a_users_plain_tensor_is_refused(what: str, placed: dtensor.Placement) -> None:
    call, text = OF_THE_USER[what]

    def f(mesh):
        x = make(X, mesh, [placed])
        before = x.to_local().clone()
        with pytest.raises(MixedTensorError, match="plain") as caught:
            call(x)
        assert text in str(caught.value), caught.value
        assert torch.equal(x.to_local(), before)

    on(2, f)


def test_ranks_that_made_different_tensors_refuse_together() -> None:
    def f(mesh):
        torch.manual_seed(mesh.get_rank())
        x = make(X, mesh, [R, R])
        with pytest.raises(MixedTensorError, match="do not hold the same values"):
            torch.svd_lowrank(x, q=2)
        assert make(torch.ones(3), mesh, [P, P]).full_tensor().sum() == 3  # still in step

    on(4, f, (2, 2))


class _Doubled(torch.autograd.Function):
    """A user's function whose backward does `how(grad, rank)`; two outputs, one of them unused."""

    how: Callable[..., torch.Tensor]

    @staticmethod
    def forward(ctx, x, how, rank):
        ctx.how, ctx.rank = how, rank
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, g, unused):
        return ctx.how(g, unused, ctx.rank), None, None


@pytest.mark.parametrize(
    ("how", "right"),
    [
        (lambda g, unused, r: 2 * g + 3 * unused, True),
        (lambda g, unused, r: g * torch.ones(5, 4), False),
        (lambda g, unused, r: g * torch.full((5, 4), float(r)), False),
        (lambda g, unused, r: torch.cat([g[:3], torch.full((2, 4), float(r))]), False),
    ],
    ids=["zeros of autograd", "a user's tensor", "zero on one rank only", "differs by rank"],
)
def test_plain_tensors_in_a_users_backward(how: Callable[..., torch.Tensor], right: bool) -> None:
    def f(mesh):
        x = make(X, mesh, [R]).requires_grad_()
        loss = _Doubled.apply(x, how, mesh.get_rank())[0].sum()
        if right:
            loss.backward()
            assert x.grad.full_tensor().eq(2).all()
        else:
            with pytest.raises(MixedTensorError):
                loss.backward()

    on(2, f)


def test_a_formula_of_autograd_may_read_what_the_forward_let_pass() -> None:
    """The factor is a user's, saved under `implicit_replication`; the backward runs outside, and compares."""

    def f(mesh):
        x = make(X, mesh, [S0]).requires_grad_()
        for factor in (B, torch.full((5, 4), float(mesh.get_rank()))):
            with dtensor.experimental.implicit_replication():
                loss = (x * factor).sum()
            if factor is B:
                loss.backward()
                assert torch.equal(x.grad.full_tensor(), B)
            else:
                with pytest.raises(MixedTensorError, match="do not hold the same values"):
                    loss.backward()

    on(2, f)


def test_numbers_and_parts_of_one_element() -> None:
    """A 0-d or one-element tensor is a number, unless it may be a rank's part: then the ranks decide together."""

    def f(mesh):
        x = make(torch.arange(3.0), mesh, [S0])
        assert (x + torch.tensor(0.5)).full_tensor().tolist() == [0.5, 1.5, 2.5]
        assert (x + torch.tensor([0.5])).full_tensor().tolist() == [0.5, 1.5, 2.5]
        with pytest.raises(MixedTensorError):
            x + x.to_local()

    on(2, f)
    on(3, f)


# ------------------------------------------------------------ as_strided and resize_
@pytest.mark.parametrize("sample", [*samples_strided.SAMPLES, *samples_strided.WRITES], ids=lambda s: s.name)
def test_as_strided(sample: Sample) -> None:
    for shape in ((3,), (2, 2)):
        check_layouts(sample, shape, limit=12).must_hold()
    if not sample.inplace:
        check_strategies(sample, (3,), limit=12).must_hold()


def test_tensor_split_at_places_in_a_tensor() -> None:
    """torch reads the places out of memory, which a DTensor has only in parts; other tensors are left to torch."""
    places = torch.tensor([1, 3])
    fn = lambda x, i: torch.tensor_split(x, i, 0)  # noqa: E731
    for at in (places, torch.tensor(2)):
        check_layouts(Sample("tensor_split", fn, (X, at), pending=("sum",)), (3,), limit=8).must_hold()
    assert [t.shape[0] for t in torch.tensor_split(X, places)] == [1, 2, 2]


def test_as_strided_beyond_the_tensor_is_refused() -> None:
    def f(mesh):
        x = make(rand(4, 5), mesh, [S0])
        with pytest.raises(LayoutError, match="not the tensor's own"):
            x[:2].as_strided((4, 4), (5, 1))

    on(2, f)


def test_resize_of_replicated_tensors() -> None:
    def f(mesh):
        x = make(torch.arange(12.0).view(4, 3), mesh, [R])
        assert x.resize_(6, 2) is x and x.shape == (6, 2) and x.stride() == (2, 1)
        assert (x + 1).full_tensor().tolist() == (torch.arange(12.0).view(6, 2) + 1).tolist()
        x.resize_as_(make(torch.zeros(2, 2), mesh, [R]))
        assert x.full_tensor().tolist() == [[0, 1], [2, 3]]
        with pytest.raises(LayoutError, match="resize_"):
            make(rand(4, 3), mesh, [S0]).resize_(5, 3)

    on(2, f)


def test_an_op_of_another_library_is_refused_with_a_rule_to_paste() -> None:
    torch.library.define("shardwright_fallback::twice", "(Tensor a) -> Tensor")
    torch.library.impl("shardwright_fallback::twice", "CPU", lambda a: a * 2)
    torch.library.register_fake("shardwright_fallback::twice", lambda a: torch.empty_like(a))

    def f(mesh):
        with pytest.raises(NoRuleError, match=r"rules.register\('shardwright_fallback.twice'"):
            torch.ops.shardwright_fallback.twice(make(rand(4), mesh, [S0]))
        assert torch.equal(torch.ops.shardwright_fallback.twice(torch.ones(2)), torch.full((2,), 2.0))

    on(2, f)
    assert "shardwright_fallback.twice" not in registry.entries()


def test_zeros_that_a_formula_of_autograd_gives_a_leaf() -> None:
    """The gradient of `sgn` is a plain tensor without memory: the leaf gets zeros in its own layout."""

    def f(mesh):
        for placed in (R, S0, P):
            x = make(X, mesh, [placed]).requires_grad_()
            (x.sgn() * 3).sum().backward()
            assert isinstance(x.grad, DTensor) and x.grad.placements == (R if placed is P else placed,)
            assert torch.equal(x.grad.full_tensor(), torch.zeros(5, 4))

    on(2, f)


def test_the_chunked_loss_of_a_linear_layer() -> None:
    """torch's op writes into plain buffers of its own in its backward; DTensors go by the two ops it stands for."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None or not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")

    def fn(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        chunked = options(batch_chunk_size=2)
        return F.linear_cross_entropy(x, w, target, reduction="none", options=chunked)

    sample = Sample("chunked", fn, (rand(5, 4), rand(3, 4), ints(3, 5)), pending=("sum",))
    check_layouts(sample, (3,), limit=8).must_hold()


# ------------------------------------------------------------ memory, and tensors that are not dense
def test_methods_that_go_to_memory() -> None:
    """torch's own versions would read the memory of the wrapper, which has none, and end the process."""

    def f(mesh):
        for placed in (R, S0):
            x = make(X, mesh, [placed])
            assert not x.is_shared() and x.share_memory_() is x and x.is_shared()
            assert torch.equal(x.clone().apply_(lambda a: a + 1).full_tensor(), X.clone().apply_(lambda a: a + 1))
            assert torch.equal(x.clone().map_(x, max).full_tensor(), X)
        pending = make(X, mesh, [P])
        for call in (lambda: pending.apply_(abs), lambda: pending.map_(pending, max), lambda: x.map_(pending, max)):
            with pytest.raises(LayoutError, match="single elements"):
                call()

    on(2, f)


def test_only_dense_tensors_are_distributed() -> None:
    def f(mesh):
        sparse, x = torch.eye(4).to_sparse(), make(torch.eye(4), mesh, [S0])
        for call in (
            lambda: dtensor.distribute_tensor(sparse, mesh, [R]),
            lambda: DTensor.from_local(sparse, mesh, [R]),
            lambda: DTensor.from_local(torch.eye(4).to_sparse_csr(), mesh, [R]),
            lambda: x.to_sparse_csr(),
            lambda: x.to_mkldnn(),
            lambda: torch.nested.nested_tensor([x, x]),
        ):
            with pytest.raises(RuntimeError, match="only dense tensors"):
                call()
        with pytest.raises(MixedTensorError, match="plain sparse_coo float32"):
            torch.sparse.mm(sparse, x)

        table, index = make(rand(4, 3), mesh, [S0]).requires_grad_(), make(ints(4, 3), mesh, [R])
        with pytest.raises(RuntimeError, match="sparse=False"):
            F.embedding(index, table, sparse=True).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on(2, f)


# ------------------------------------------------------------ composites that work on memory
def packed(x: torch.Tensor) -> torch.Tensor:
    """A GRU over packed sequences of unequal lengths, given in any order."""
    rows = torch.nn.utils.rnn.pack_padded_sequence(x, [2, 4, 3], batch_first=True, enforce_sorted=False)
    torch.manual_seed(0)
    module = torch.nn.GRU(3, 5)
    if isinstance(x, DTensor):
        dtensor.distribute_module(module, x.device_mesh)
    return torch.nn.utils.rnn.pad_packed_sequence(module(rows)[0], True, -1.0, 5)[0]


ON_MEMORY = [
    ("vander", torch.vander, (rand(4),)),
    ("vander increasing", lambda x: torch.vander(x, 3, True), (rand(4),)),
    ("vander of one column", lambda i: torch.vander(i, 1), (torch.arange(4),)),
    ("pad_sequence", lambda x, y: torch.nn.utils.rnn.pad_sequence([x, y], True, -1.0), (rand(4, 3), rand(2, 3))),
    ("pad_sequence left", lambda x, y: torch.nn.utils.rnn.pad_sequence([x, y], padding_side="left"), (X, X[:2])),
    ("packed sequences", packed, (rand(3, 4, 3),)),
    ("fill_diagonal_", lambda x: x.clone().fill_diagonal_(2.0, True), (rand(7, 3),)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn", "tensors"), ON_MEMORY, ids=[t[0] for t in ON_MEMORY])
def test_composites_that_work_on_memory(name: str, fn: Callable[..., torch.Tensor], tensors) -> None:
    grads = not name.startswith("vander")  # torch's own cannot be differentiated
    check_layouts(Sample(name, fn, tensors, grads=grads, pending=("sum",)), (3,), limit=6).must_hold()
    if tensors[0].is_floating_point():
        assert type(fn(*tensors)) is torch.Tensor  # torch's own, on plain tensors
