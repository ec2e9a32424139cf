"""The DTensor class: local and global views of a tensor, gradients, values, protocols. Simulated ranks."""

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.nn as nn
from helpers.laws import make, rand

import dtensor
from dtensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard, distribute_tensor, init_device_mesh
from dtensor.errors import LayoutError, MixedTensorError

R, P = Replicate(), Partial()


def on(n, f, *shape):
    """Run f(mesh) on n simulated ranks."""

    def run():
        mesh = init_device_mesh("cpu", shape or (n,))
        return f(mesh)

    return dtensor.simulate(n)(run)


def test_from_local_and_back() -> None:
    def f(mesh):
        local = rand(2, 3, seed=mesh.get_rank())
        d = DTensor.from_local(local, mesh, [Shard(-2)])
        assert d.shape == (8, 3) and d.placements == (Shard(0),) and d.stride() == (3, 1)
        with torch.no_grad():
            d.to_local().mul_(2)
        assert d.to_local().data_ptr() == local.data_ptr()
        return d.full_tensor()

    whole = torch.cat([2 * rand(2, 3, seed=r) for r in range(4)])
    for got in on(4, f):
        torch.testing.assert_close(got, whole)


def test_gradients_of_from_local_and_to_local() -> None:
    def f(mesh):
        x = rand(2, 3, seed=mesh.get_rank()).requires_grad_()
        d = DTensor.from_local(x * 2, mesh, [Shard(0)])
        y = (d * 3).to_local() * 5
        y.sum().backward()
        assert torch.equal(x.grad, torch.full((2, 3), 30.0))
        p = torch.ones(4, requires_grad=True)
        DTensor.from_local(p, mesh, [P]).redistribute(placements=[R]).to_local().sum().backward()
        assert torch.equal(p.grad, torch.ones(4))
        w = distribute_tensor(torch.ones(3, requires_grad=True), mesh, [R])
        (w.to_local(grad_placements=[P]) * (mesh.get_rank() + 1)).sum().backward()
        assert torch.equal(w.grad.full_tensor(), torch.full((3,), 10.0))

    on(4, f)


NO_GRADIENT = {
    "a norm of order 0": lambda t: t.norm(p=0), "an unused result": lambda t: torch._foreach_norm([t, t.detach()])[1],
    "sgn": lambda t: t.sgn(), "no repetition": lambda t: t.repeat(0, 1), "times 0": lambda t: t * 0,
}  # fmt: skip
PASSED_ON = {
    "redistribute": lambda t: t.redistribute(placements=[Shard(1)]),
    "local": lambda t: DTensor.from_local(t.to_local() * 1, t.device_mesh, t.placements),
    "product": lambda t: torch.nn.functional.linear(t, t.detach()), "sum": lambda t: t.sum(0, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_gradients_that_autograd_leaves_out_or_gives_as_plain_zeros(name: str) -> None:
    """Nothing where plain torch has nothing, zeros where it has zeros, whatever they pass. Moves are cached: twice."""

    def f(mesh):
        for via, placement, _ in itertools.product(PASSED_ON, (R, Shard(0)), range(2)):
            got, want = distribute_tensor(rand(4, 4), mesh, [placement]).requires_grad_(), rand(4, 4).requires_grad_()
            NO_GRADIENT[name](PASSED_ON[via](got)).sum().backward()
            NO_GRADIENT[name](want if via in ("redistribute", "local") else PASSED_ON[via](want)).sum().backward()
            assert (got.grad is None) == (want.grad is None), via
            assert got.grad is None or torch.equal(got.grad.full_tensor(), want.grad)
        moved = distribute_tensor(rand(4, 4), mesh, [R]).requires_grad_().redistribute(placements=[Shard(0)])
        with pytest.raises(MixedTensorError, match="gradient of a DTensor is a DTensor"):
            moved.backward(torch.ones(4, 4))

    on(2, f)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), R, StridedShard(0, split_factor=2)], ids=str)
def test_a_leafs_gradient_has_its_layout(placement) -> None:
    def f(mesh):
        x = make(rand(6, 5), mesh, [placement], requires_grad=True)
        (x.redistribute(placements=[R]) * make(rand(6, 5, seed=1), mesh, [Shard(1)])).sum().backward()
        assert x.grad.placements == (placement,) or (placement is R and x.grad.placements[0].is_partial())
        torch.testing.assert_close(x.grad.full_tensor(), rand(6, 5, seed=1))
        p = torch.nn.Parameter(make(rand(6, 5), mesh, [placement]))
        assert isinstance(p, DTensor) and p.requires_grad
        (p * make(rand(6, 5, seed=1), mesh, [R])).sum().backward()
        assert p.grad.placements == (placement,)

    on(2, f)


def test_values_are_global() -> None:
    def f(mesh):
        x = make(torch.tensor([1.0, 2.0, 3.0]), mesh, [P])
        total = x.sum()
        assert total.item() == 6.0 and float(total) == 6.0 and bool(total > 5)
        assert make(torch.tensor(7), mesh, [P]).item() == 7 and int(make(torch.tensor(7), mesh, [R])) == 7
        a, b = make(rand(5, 3), mesh, [Shard(0)]), make(rand(5, 3), mesh, [Shard(1)])
        assert torch.equal(a, b)
        changed = rand(5, 3)
        changed[4, 2] += 1
        assert not torch.equal(a, make(changed, mesh, [Shard(0)]))
        assert a.tolist() == rand(5, 3).tolist() and len(a) == 5
        with pytest.raises(RuntimeError, match="cannot be converted to"):
            a.item()
        assert (a.numpy() == rand(5, 3).numpy()).all() and a.data_ptr() == a.to_local().data_ptr()

    on(4, f)


def test_factories_have_the_value_in_every_layout() -> None:
    def f(mesh):
        for placed in ([P, Shard(0)], [R, Partial("avg")], [Shard(1), Shard(1)], [Partial("product"), R]):
            assert torch.equal(dtensor.ones(5, 3, device_mesh=mesh, placements=placed).full_tensor(), torch.ones(5, 3))
            assert torch.equal(
                dtensor.full((5, 3), 7, device_mesh=mesh, placements=placed).full_tensor(), torch.full((5, 3), 7)
            )
            assert torch.equal(
                dtensor.zeros((5, 3), device_mesh=mesh, placements=placed).full_tensor(), torch.zeros(5, 3)
            )
        assert dtensor.empty(5, 3, dtype=torch.int32, device_mesh=mesh, placements=[Shard(0), R]).dtype == torch.int32
        a = dtensor.randn(4, 4, device_mesh=mesh, placements=[Shard(-1), R], requires_grad=True)
        assert a.is_leaf and a.requires_grad and a.placements == (Shard(1), R)

    on(4, f, 2, 2)


def test_data_takes_over_or_refuses() -> None:
    def f(mesh):
        x = make(rand(6, 2), mesh, [Shard(0)], requires_grad=True)
        x.data = make(rand(6, 2, seed=1), mesh, [Shard(1)])
        assert torch.equal(x.full_tensor(), rand(6, 2, seed=1)) and x.placements == (Shard(1),)
        (x * 2).sum().backward()
        assert x.grad.placements == (Shard(1),)
        with pytest.raises(TypeError, match="must be a DTensor"):
            x.data = rand(6, 2)

    on(2, f)


def test_copies_and_pickles() -> None:
    def f(mesh):
        x = make(rand(5, 3), mesh, [Shard(0)], requires_grad=True)
        c = copy.deepcopy(x)
        assert c.is_leaf and c.requires_grad and torch.equal(c.full_tensor(), rand(5, 3))
        assert c.to_local().data_ptr() != x.to_local().data_ptr()
        (c * 2).sum().backward()
        assert x.grad is None and c.grad.placements == (Shard(0),)
        p = pickle.loads(pickle.dumps(x))
        assert isinstance(p, DTensor) and p.requires_grad and torch.equal(p.full_tensor(), x.full_tensor())
        buffer = io.BytesIO()
        torch.save({"x": x}, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=False)["x"].full_tensor(), x.full_tensor())
        inner, context = x.__tensor_flatten__()
        again = DTensor.__tensor_unflatten__({n: getattr(x, n) for n in inner}, context, x.shape, x.stride())
        assert again._spec is x._spec and again._local_tensor is x._local_tensor

    on(2, f)


def test_a_view_that_moved_data_follows_its_base_and_is_written_through() -> None:
    def f(mesh):
        x, want = make(rand(6, 4), mesh, [Shard(0)]), rand(6, 4)
        row, plain = x[1], want[1]
        for t, r in ((x, row), (want, plain)):
            r.add_(1)
            r[:2].mul_(2)
            t.add_(1)
        for read in (
            lambda: (row + 0).full_tensor(), row.full_tensor, lambda: row.redistribute(placements=[R]).to_local(),
            lambda: torch.tensor(row.tolist()), lambda: pickle.loads(pickle.dumps(row)).full_tensor(),
            lambda: copy.deepcopy(row).full_tensor(), lambda: row.detach().full_tensor(),
        ):  # fmt: skip
            x.mul_(2)
            want.mul_(2)
            torch.testing.assert_close(read(), plain)
        torch.testing.assert_close(x.full_tensor(), want)
        inner, deep = x[1:3][1][:2], want[1:3][1][:2]
        x.mul_(2)
        want.mul_(2)
        torch.testing.assert_close((inner + 0).full_tensor(), deep)
        with torch.inference_mode():
            y, z = make(rand(6, 4), mesh, [Shard(0)]), rand(6, 4)
            part, piece = y[1:3], z[1:3]
            y.mul_(2)
            z.mul_(2)
            torch.testing.assert_close(part.full_tensor(), piece)
        column = x[:, 1]
        column.zero_()
        assert x.full_tensor()[:, 1].abs().sum() == 0

    on(3, f)


def test_ranks_outside_the_mesh_hold_nothing() -> None:
    def f():
        mesh = dtensor.DeviceMesh("cpu", [0, 2])
        d = dtensor.ones(5, 2, device_mesh=mesh, placements=[Shard(0)])
        e = (d * 2 + d).redistribute(placements=[R])
        return mesh.get_coordinate(), d.to_local().numel(), e.to_local().numel()

    assert dtensor.simulate(3)(f) == [((0,), 6, 10), (None, 0, 0), ((1,), 4, 10)]


def test_what_ranks_outside_the_mesh_hold_is_on_the_device_of_their_inputs() -> None:
    def f():
        mesh = dtensor.DeviceMesh("cpu", [0, 2])
        local = torch.empty(2 if mesh.get_coordinate() else 0, 3, device="meta")
        d = dtensor.DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1))
        made = [d * 2, d.sum(0), torch.zeros_like(d), *d.split(2), *torch._foreach_add([d, d], 1.0)]
        return {(t.device.type, t.to_local().device.type) for t in made}

    assert dtensor.simulate(3)(f) == [{("meta", "meta")}] * 3


def test_no_write_escapes_a_view_that_moved_data() -> None:
    """Whatever writes to the base's memory, the view shows it; what writes elsewhere does not count."""

    def f(mesh):
        def sgd(w, **kwargs):
            p = torch.nn.Parameter(w)
            p.grad = torch.ones_like(w)
            torch.optim.SGD([p], lr=1.0, **kwargs).step()

        writes = {
            "mul_": lambda w: w.mul_(2),
            "data": lambda w: w.data.mul_(2),
            "detach": lambda w: w.detach().mul_(2),
            "foreach": lambda w: torch._foreach_mul_([w], 2.0),
            "sgd": sgd,
            "sgd for": lambda w: sgd(w, foreach=False),
            "sgd fused": lambda w: sgd(w, fused=True),
            "slice": lambda w: w.view(8)[:].zero_(),
            "out": lambda w: torch.add(w, w, out=w),
            "copy_": lambda w: w.copy_(w * 2),
        }
        for name, write in writes.items():
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    if mode is torch.inference_mode and name.startswith("sgd"):
                        continue
                    w, other = make(torch.arange(8.0), mesh, [Shard(0)]), make(torch.arange(8.0), mesh, [Shard(0)])
                    view = w.detach()[5:7]
                    write(other)
                    assert view.full_tensor().tolist() == [5, 6], name
                    write(w)
                    assert (view + 0).full_tensor().tolist() == w.full_tensor()[5:7].tolist() != [5, 6], name
        w = make(torch.arange(8.0), mesh, [Shard(0)])
        view = w[5:7]
        w.to_local().zero_()  # past the engine: perhaps on this rank only
        with pytest.raises(LayoutError, match="view"):
            (view + 0).full_tensor()

    on(2, f)


def test_without_torchs_own_wrapper_constructor(monkeypatch) -> None:
    """Older versions of torch lack the C++ constructor; the one in Python does the same."""
    from dtensor import tensor
    from dtensor.dispatch import late
    from dtensor.rules.registry import clear_plans

    monkeypatch.setattr(tensor, "new", tensor._python_new)
    monkeypatch.setattr(late, "new", tensor._python_new)
    clear_plans()  # plans hold the constructor

    def f(mesh):
        x, w = make(rand(6, 4), mesh, [Shard(0)], requires_grad=True), make(rand(4, 5), mesh, [R], requires_grad=True)
        y = torch.softmax(x @ w, 1).t().reshape(30)
        y.square().sum().backward()
        a, b = rand(6, 4).requires_grad_(), rand(4, 5).requires_grad_()
        z = torch.softmax(a @ b, 1).t().reshape(30)
        z.square().sum().backward()
        for got, want in ((y, z), (x.grad, a.grad), (w.grad, b.grad)):
            torch.testing.assert_close(got.full_tensor(), want)
        assert y.shape == (30,) and x.grad.stride() == (4, 1) and x.dtype == torch.float32

    on(2, f)
    clear_plans()


@pytest.mark.parametrize("grad", [False, True])
def test_a_rank_outside_the_mesh_has_an_empty_part(grad: bool) -> None:
    @dtensor.simulate(4)
    def run() -> None:
        mesh = dtensor.DeviceMesh("cpu", [0, 2])
        x = dtensor.DTensor.from_local(torch.ones(3, 4, requires_grad=grad), mesh, [dtensor.Shard(0)])
        assert x.shape == (6, 4) and x.requires_grad == grad
        for y in (x, x + 2):
            assert y.to_local().shape == ((0,) if mesh.get_coordinate() is None else (3, 4))

    assert len(run) == 4


@pytest.mark.parametrize("layout", [Shard(0), Shard(-1), Replicate()], ids=str)
@pytest.mark.parametrize("way", ["set", "swapped", "swap_tensors", "partition_fn"])
def test_plain_parameters_become_dtensors_in_place(way: str, layout: Placement) -> None:
    """`_apply` and `swap_tensors` from plain to DTensor: the same objects, with their gradients; training goes on."""

    def run() -> None:
        mesh, x = init_device_mesh("cpu", (2,)), torch.arange(9.0).view(3, 3) / 4
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval()
        net[2].bias = net[2].bias.requires_grad_(False)
        ref = copy.deepcopy(net)
        opts = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m in (net, ref)]
        before = list(net.parameters())
        if way != "swap_tensors":
            for m in (net, ref):
                m(x).sum().backward()

        def put(t: torch.Tensor) -> torch.Tensor:
            placed = layout if t.ndim else Replicate()
            return t if isinstance(t, DTensor) else distribute_tensor(t.detach(), mesh, [placed])

        if way == "partition_fn":
            dtensor.distribute_module(net, mesh, lambda name, m, mesh: m._apply(put, recurse=False))
        elif way == "swap_tensors":
            for p in before:
                torch.utils.swap_tensors(p, nn.Parameter(put(p), requires_grad=p.requires_grad))
            dtensor.distribute_module(net, mesh)
        else:
            net._apply(put)
        assert [id(p) for p in net.parameters()] == [id(p) for p in before]
        assert all(type(p) is DTensor and isinstance(p, nn.Parameter) for p in net.parameters())
        for m, t in ((net, distribute_tensor(x, mesh, [Replicate()])), (ref, x)):
            m(t).square().sum().backward()
        for opt in opts:
            opt.step()
        for (name, p), q in zip(net.named_parameters(), ref.parameters(), strict=True):
            assert p.requires_grad == q.requires_grad
            assert p.grad is None or isinstance(p.placements[0], Replicate) or p.grad.placements == p.placements, name
            torch.testing.assert_close(p.full_tensor(), q, msg=name)

    torch.__future__.set_swap_module_params_on_conversion(way == "swapped")  # of the process: for all ranks at once
    try:
        dtensor.simulate(2)(run)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_part_is_known_where_there_is_no_group() -> None:
    """A DTensor sent to a process without a group, such as one that writes checkpoints, keeps its place."""

    def f(mesh):
        x = distribute_tensor(torch.arange(14.0).view(7, 2), mesh, [Shard(0), Shard(1)])
        return pickle.dumps(x), mesh.coord, [c.offsets for c in x.__create_chunk_list__()]

    for data, coord, offsets in on(4, f, 2, 2):
        with pytest.warns(UserWarning, match="has no groups"):
            x = pickle.loads(data)
        assert x.device_mesh.coord == coord and x._spec.local_shape == x.to_local().shape
        assert [c.offsets for c in x.__create_chunk_list__()] == offsets
        assert [i.index.offset for i in x.__create_write_items__("x", x)] == offsets


@pytest.mark.parametrize("name", ["_op_dispatcher", "_propagator", "_custom_dispatch_ops"])
def test_private_names_of_torchs_class_say_what_stands_for_them(name: str) -> None:
    with pytest.raises(AttributeError, match=f"DTensor.{name} is of torch's engine; here "):
        getattr(DTensor, name)
    assert not hasattr(DTensor, name)
