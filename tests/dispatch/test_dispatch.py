"""Dispatch: what the cache key holds, list and out forms, ops without a rule, the registry's API."""


import pytest
import torch
from helpers.laws import make, rand

import dtensor
from dtensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dtensor.dispatch import hit as hot
from dtensor.errors import LayoutError, MixedTensorError, NoRuleError
from dtensor.rules.registry import entries, find, lookup, override, pattern, printed
from dtensor.simulate import fake_world

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
aten = torch.ops.aten


def on(n, f, *shape):
    return dtensor.simulate(n)(lambda: f(init_device_mesh("cpu", shape or (n,))))


def plans(op) -> int:
    info = hot.ops.get(id(op))
    return len(info.plans) if info is not None else 0


def test_values_are_not_in_the_key_and_everything_else_is() -> None:
    def f(mesh):
        x = make(rand(6, 4), mesh, [S0])
        full = rand(6, 4)
        for v in (2.0, 3.0, -1.5, 1e9):
            torch.testing.assert_close((x * v).full_tensor(), full * v)
            torch.testing.assert_close(torch.add(x, x, alpha=v).full_tensor(), torch.add(full, full, alpha=v))
            torch.testing.assert_close(x.clamp(min=-abs(v)).full_tensor(), full.clamp(min=-abs(v)))
            torch.testing.assert_close((x**2.0).full_tensor(), full**2.0)
        i = make(torch.arange(24).reshape(6, 4), mesh, [S0])
        for v in (2, 2.0, True):  # equal as keys of a dict, different in dtype
            assert (i * v).dtype == (torch.arange(3) * v).dtype
        for dim in (0, 1, -1, 0):
            for keep in (False, True):
                got = x.sum(dim, keepdim=keep)
                torch.testing.assert_close(got.full_tensor(), full.sum(dim, keepdim=keep))
        for k in (2, 3, 1):
            torch.testing.assert_close(x.topk(k, 1)[0].full_tensor(), full.topk(k, 1)[0])
        for layout in (torch.contiguous_format, torch.preserve_format):
            assert x.t().clone(memory_format=layout).stride() == full.t().clone(memory_format=layout).stride()
        for dtype in (torch.float64, torch.int32, torch.bfloat16):
            assert x.to(dtype).dtype == dtype and x.to(dtype).to_local().dtype == dtype

    on(2, f)


def test_a_changing_number_is_no_miss() -> None:
    with fake_world(2):
        x = DTensor.from_local(rand(3, 4), init_device_mesh("cpu", (2,)), [S0])
        counts = []
        for v in (2.0, 7.0, 8.0, 0.1):
            x * v, x**v, x.clamp(-v, v), torch.add(x, x, alpha=v), x.clone().mul_(v), torch._foreach_mul([x], v)
            ops = (aten.mul.Tensor, aten.pow.Tensor_Scalar, aten.clamp.default, aten.add.Tensor, aten.mul_.Tensor)
            counts.append([plans(op) for op in (*ops, aten._foreach_mul.Scalar)])
        assert all(c == counts[0] and min(c) >= 1 for c in counts), counts


def test_out_forms_write_into_the_given_layout() -> None:
    def f(mesh):
        a, b = make(rand(6, 4), mesh, [S0]), make(rand(6, 4, seed=1), mesh, [S1])
        for placed in (S0, S1, R):
            out = dtensor.zeros(6, 4, device_mesh=mesh, placements=[placed])
            assert torch.add(a, b, out=out) is out and out.placements == (placed,)
            torch.testing.assert_close(out.full_tensor(), rand(6, 4) + rand(6, 4, seed=1))
        with pytest.raises(LayoutError, match="is not resized"):
            torch.add(a, b, out=dtensor.zeros(3, 4, device_mesh=mesh, placements=[S0]))
        with pytest.raises(MixedTensorError):
            torch.add(a, b, out=torch.zeros(6, 4))

    on(2, f)


def test_list_ops_decide_each_element() -> None:
    def f(mesh):
        layouts = [S0, S1, R, P]
        xs = [make(rand(5, 3, seed=i), mesh, [p]) for i, p in enumerate(layouts)]
        ys = [make(rand(5, 3, seed=i + 9), mesh, [p]) for i, p in enumerate(reversed(layouts))]
        for got, i in zip(torch._foreach_mul(xs, ys), range(4), strict=True):
            torch.testing.assert_close(got.full_tensor(), rand(5, 3, seed=i) * rand(5, 3, seed=i + 9))
        before = [x.placements for x in xs]
        torch._foreach_add_(xs, ys, alpha=0.5)
        assert [x.placements for x in xs] == before
        for x, i in zip(xs, range(4), strict=True):
            torch.testing.assert_close(x.full_tensor(), rand(5, 3, seed=i) + 0.5 * rand(5, 3, seed=i + 9))
        cut, pending = make(rand(3), mesh, [S0]), make(rand(3), mesh, [P])
        torch._foreach_exp_([cut, pending])  # a pending target stays pending
        assert cut.placements == (S0,) and pending.placements == (P,)
        for t in (cut, pending):
            torch.testing.assert_close(t.full_tensor(), rand(3).exp())

    on(2, f)


def test_a_foreign_op_without_a_rule_is_refused() -> None:
    torch.library.define("shardwright_test::nothing", "(Tensor a) -> Tensor")
    torch.library.impl("shardwright_test::nothing", "CPU", lambda a: a + 1)
    torch.library.register_fake("shardwright_test::nothing", lambda a: a + 1)

    def f(mesh):
        with pytest.raises(NoRuleError, match="shardwright_test.nothing"):
            torch.ops.shardwright_test.nothing(make(rand(4), mesh, [S0]))

    on(2, f)


def test_data_dependent_shapes_are_the_same_on_every_rank() -> None:
    def f(mesh):
        x = make(rand(5, 3), mesh, [S0])
        got = torch.nonzero(x > 0)
        assert isinstance(got, DTensor) and torch.equal(got.full_tensor(), torch.nonzero(rand(5, 3) > 0))
        assert torch.equal(x[x > 0].full_tensor(), rand(5, 3)[rand(5, 3) > 0])
        assert torch.allclose(x, make(rand(5, 3), mesh, [S1]))

    on(2, f)


def test_override_list_and_print() -> None:
    def f(mesh):
        a, b = make(rand(4, 6), mesh, [S1]), make(rand(6, 4), mesh, [S0])
        torch.testing.assert_close((a @ b).full_tensor(), rand(4, 6) @ rand(6, 4), rtol=1e-4, atol=1e-4)
        return (a @ b).placements

    assert on(2, f)[0] == (P,)
    with override("aten.mm", pattern("m [k], [k] n -> m n")):
        assert on(2, f)[0] != (P,)
    assert on(2, f)[0] == (P,)
    before = dict(entries())
    with pytest.raises(KeyError, match="inside"), override("aten.mm", pattern("m k, k n -> m n")):
        raise KeyError("inside")
    assert dict(entries()) == before
    assert list(entries()) == sorted(entries())
    text = printed()
    assert "m k, k n -> m n   linear 0|1" in text and len(text.splitlines()) == len(entries())
    assert find("aten.mm.default") is find("aten.mm") is lookup(aten.mm.default)
    assert lookup(aten.add_.Tensor) is find("aten.add.Tensor")
    with pytest.raises(ValueError, match="namespace"):
        override("mm", pattern("m k, k n -> m n")).__enter__()


def test_every_thread_shares_the_plans() -> None:
    import threading

    def f(mesh):
        x = make(rand(6, 4), mesh, [S0])
        x + x
        count = plans(aten.add.Tensor)
        worker = threading.Thread(target=lambda: x + x)
        worker.start()
        worker.join()
        assert plans(aten.add.Tensor) == count

    with fake_world(2):
        f(init_device_mesh("cpu", (2,)))


def test_the_cache_is_bounded(monkeypatch) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        monkeypatch.setattr(hot, "MAX_PLANS", 50)
        for n in range(1, 120):
            x = DTensor.from_local(torch.ones(n), mesh, [S0])
            x + x
            assert sum(len(i.plans) for i in hot.ops.values()) <= 60


def test_inference_mode_decomposes_composites() -> None:
    def f(mesh):
        x, w = make(rand(2, 6, 4), mesh, [S0]), make(rand(3, 4), mesh, [R])
        with torch.inference_mode():
            got = torch.nn.functional.linear(x, w)
        torch.testing.assert_close(got.full_tensor(), torch.nn.functional.linear(rand(2, 6, 4), rand(3, 4)))

    on(2, f)


def test_metadata_changing_inplace_views() -> None:
    def f(mesh):
        x = make(rand(6, 1, 4), mesh, [Shard(2)])
        assert x.squeeze_(1) is x and x.shape == (6, 4) and x.placements == (S1,) and x.stride() == (4, 1)
        x.t_()
        assert x.shape == (4, 6) and x.placements == (S0,) and x.stride() == (1, 4)
        torch.testing.assert_close((x + 1).full_tensor(), rand(6, 1, 4).squeeze(1).t() + 1)

    on(2, f)


def test_lazy_conjugates_and_negations_move_as_values() -> None:
    def f(mesh):
        x = torch.complex(rand(4, 6), rand(4, 6, seed=1))
        for placed in (S0, S1, R, P):
            t = make(x, mesh, [placed])
            for call in (
                lambda t: t @ t.mH,
                lambda t: torch.nn.functional.linear(t, t.conj()),
                torch.cov,
                lambda t: torch.cat([t.conj(), t]),
                lambda t: t.conj().imag * 1,
                lambda t: torch.bmm(t[None], t.mH[None]),
            ):
                torch.testing.assert_close(call(t).full_tensor().resolve_conj(), call(x), rtol=1e-4, atol=1e-4)

    on(2, f)


def test_metadata_follows_the_local_op_where_torchs_shape_function_differs() -> None:
    def f(mesh):
        x = rand(4, 6).bfloat16()
        for placed in (S0, R):
            for _ in range(2):  # the first call and a cached one
                got = torch.native_layer_norm(make(x, mesh, [placed]), [6], None, None, 1e-5)
                want = torch.native_layer_norm(x, [6], None, None, 1e-5)
                for g, w in zip(got, want, strict=True):
                    assert g.dtype == w.dtype == g.to_local().dtype
                    torch.testing.assert_close(g.full_tensor(), w, rtol=2e-2, atol=2e-2)

    on(2, f)


def test_what_torchs_own_composites_and_formulas_need() -> None:
    """Plain zeros in backward, lists as indices, lazy conjugation inside ops, clipping of pending gradients."""

    def f(mesh):
        x, c = rand(4, 6), torch.complex(rand(4, 6), rand(4, 6, seed=1))
        pinv = torch.linalg.pinv(make(c, mesh, [S0])).full_tensor()
        torch.testing.assert_close(pinv, torch.linalg.pinv(c), rtol=1e-3, atol=1e-3)
        d = make(x, mesh, [S0])
        assert torch.equal(d[[0, 2]].full_tensor(), x[[0, 2]])
        assert torch.equal(d[[True, False, True, False]].full_tensor(), x[[True, False, True, False]])
        d[[0, 3]] = 7.0
        assert torch.equal(d.full_tensor(), x.index_fill(0, torch.tensor([0, 3]), 7.0))
        leaf, plain = make(x, mesh, [S0], requires_grad=True), x.clone().requires_grad_()
        for t in (leaf, plain):
            (torch.cummax(t, 0)[0].sum() + torch.copysign(t, t * 2).square().sum()).backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)
        p = torch.nn.Parameter(make(torch.ones(6), mesh, [R]))
        (make(x, mesh, [S0]) * p).sum().backward()
        assert p.grad.placements == (P,)
        torch.nn.utils.clip_grad_value_([p], 0.1)
        torch.testing.assert_close(p.grad.full_tensor(), x.sum(0).clamp(-0.1, 0.1))
        w, b = (make(rand(6, seed=s), mesh, [R], requires_grad=True) for s in (1, 2))
        torch.nn.functional.batch_norm(make(x, mesh, [S0]), None, None, w, b, True).sum().backward()
        torch.testing.assert_close(b.grad.full_tensor(), torch.full((6,), 4.0))
        empty = make(torch.zeros(0, 4), mesh, [S0], requires_grad=True)
        torch.nn.functional.mse_loss(empty, empty * 2).backward()
        assert empty.grad.shape == (0, 4)
        assert make(rand(1, 1, 4), mesh, [R]).squeeze(()).shape == (1, 1, 4)

    on(2, f)


def test_distributing_a_transposed_tensor_keeps_views_true() -> None:
    def f(mesh):
        d = dtensor.distribute_tensor(rand(4, 6).t(), mesh, [S0])
        assert d.stride() == (1, 6) and d.to_local().stride()[0] == 1
        d.t()[:].mul_(2)
        torch.testing.assert_close(d.full_tensor(), 2 * rand(4, 6).t())

    on(2, f)


def test_gradient_placements_of_another_shape_are_refused() -> None:
    def f(mesh):
        local = rand(3 if mesh.get_rank() == 0 else 2, 7).requires_grad_()
        with pytest.raises(ValueError, match="shard the same dims"):
            DTensor.from_local(local, mesh, [S0], shape=(5, 7), stride=(7, 1), grad_placements=[S1])

    on(2, f)


def test_results_lie_in_memory_as_their_strides_say() -> None:
    """A view of a result shares memory with it, also where the result was moved or made by a kernel."""

    def f(mesh):
        calls = {
            "relu": torch.relu, "softmax": lambda t: t.softmax(0), "softmax 1": lambda t: t.softmax(1),
            "sort": lambda t: t.sort(0)[0], "centred": lambda t: t - t.mean(), "cumsum": lambda t: t.cumsum(0),
            "filled": lambda t: t.masked_fill(t > 0, 1.0), "times": lambda t: t * 2.0,
        }  # fmt: skip
        for placed in (P, S0, S1, R, Partial("max")):
            for name, call in calls.items():
                got, want = call(make(rand(4, 6), mesh, [placed]).t()), call(rand(4, 6).t())
                assert got.stride() == want.stride(), name
                try:
                    got.t().reshape(-1).mul_(2)
                except LayoutError:  # it had to move, and says so
                    continue
                want.t().reshape(-1).mul_(2)
                torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-4)

    on(2, f)


def test_small_pending_elements_of_a_list_are_reduced_together() -> None:
    from dtensor.debug import CommDebugMode

    def f(mesh):
        xs = [make(rand(5, 3, seed=i), mesh, [P]) for i in range(6)]
        ys = [make(rand(5, 3, seed=i + 9), mesh, [P]) for i in range(6)]
        for _ in range(2):
            with CommDebugMode() as sent:
                got = torch._foreach_mul(xs, ys)
            assert sent.get_total_counts() == 1
            for i, t in enumerate(got):
                torch.testing.assert_close(
                    t.full_tensor(), rand(5, 3, seed=i) * rand(5, 3, seed=i + 9), rtol=1e-4, atol=1e-4
                )
        mixed = torch._foreach_exp([make(rand(4).t(), mesh, [p]) for p in (P, S0, P, R)])
        for t in mixed:
            torch.testing.assert_close(t.full_tensor(), rand(4).exp(), rtol=1e-4, atol=1e-4)

    on(2, f)
