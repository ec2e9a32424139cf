"""FSDP2 as people use it, on torch's names alone; each case is held to one process here, and to torch's engine by
`tests/swap/test_subsystems.py`.

A case takes the number of processes and gives its numbers.
"""

import torch
import torch.nn as nn
from common import batches, close, full, made, numbers, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 2


def grid(dp, tp=1):
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def sharded(mesh, model=None, tp=None, prepare=None, **options):
    """The model, or `made()`, under tensor parallelism where `tp` is a mesh, and fully sharded."""
    model = made() if model is None else model
    if tp is not None:
        parallelize_module(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, **options)
    if prepare is not None:
        prepare(model)
    return model


def compared(mesh, model, plain, dp, rows=4, width=10, tolerance=1e-9, clip=0.5, **options):
    """Both are trained, the sharded one on its part of each batch, and agree."""
    data = batches(STEPS, rows * dp, width)
    optimizer, its = (torch.optim.AdamW(m.parameters(), lr=0.01, **options) for m in (model, plain))
    part = data.chunk(dp, 1)[mesh.get_local_rank(0) if mesh.ndim == 1 else mesh.get_rank() % dp]
    seen, expected = train(model, part, optimizer, clip), train(plain, data, its, clip)
    if clip is not None:
        close(seen[::2], expected[::2], tolerance)
    close(numbers(model), numbers(plain), tolerance)
    return numbers(model, *seen)


def case_alone_uneven(world):
    mesh = init_device_mesh("cpu", (world,))
    model = sharded(mesh, made(9, 3))
    assert isinstance(model, FSDPModule) and isinstance(model[0].weight, DTensor)
    assert model[0].weight.placements == (Shard(0),) and model[0].weight.shape == (3, 9)
    return compared(mesh, model, made(9, 3), world, width=9, foreach=True)


def case_over_tp(world):
    mesh = grid(world // 2, 2)
    return compared(mesh["dp"], sharded(mesh["dp"], tp=mesh["tp"]), made(), world // 2, clip=None, fused=True)


def case_over_tp_uneven_and_clipped(world):
    """Clipping meets parameters of two meshes."""
    mesh = grid(world // 2, 2)
    model = sharded(mesh["dp"], made(9, 13), tp=mesh["tp"])
    return compared(mesh["dp"], model, made(9, 13), world // 2, width=9, foreach=False)


def mixed(world, policy, **options):
    mesh = init_device_mesh("cpu", (world,))
    model = sharded(mesh, made(dtype=torch.float32), mp_policy=policy, **options)
    data = batches(STEPS, 4 * world, dtype=torch.float32).chunk(world, 1)[mesh.get_local_rank()]
    seen = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x in data:
        y = model(x)
        seen.append(torch.tensor(float(y.dtype is torch.bfloat16)))
        y.float().pow(2).mean().backward()
        seen += [full(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    plain = made(dtype=torch.float32)
    train(plain, batches(STEPS, 4 * world, dtype=torch.float32), torch.optim.AdamW(plain.parameters(), lr=0.01))
    close(numbers(model), numbers(plain), 5e-2)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    return numbers(model, *seen)


def case_mixed_precision(world):
    return mixed(world, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def case_mixed_precision_all_low(world):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    return mixed(world, policy, reshard_after_forward=False)


def case_mixed_precision_over_tp(world):
    mesh = grid(world // 2, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mesh["dp"], made(dtype=torch.float32), tp=mesh["tp"], mp_policy=policy)
    data = batches(STEPS, 2 * world, dtype=torch.float32).chunk(world // 2, 1)[mesh.get_local_rank("dp")]
    seen = train(model, data, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = made(dtype=torch.float32)
    train(plain, batches(STEPS, 2 * world, dtype=torch.float32), torch.optim.SGD(plain.parameters(), lr=0.1))
    close(numbers(model), numbers(plain), 5e-3)
    return numbers(model, *seen)


def case_prefetch(world):
    def prepare(model):
        model.set_modules_to_forward_prefetch([model[0], model[2]])
        model[0].set_modules_to_forward_prefetch([model[2]])
        model[2].set_modules_to_backward_prefetch([model[0]])
        model.unshard(async_op=True).wait()
        model.reshard()

    mesh = init_device_mesh("cpu", (world,))
    return compared(mesh, sharded(mesh, prepare=prepare), made(), world)


def case_reshard_after_forward(world):
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for after in (False, True, *([2] if world == 4 else [])):
        model = sharded(mesh, reshard_after_forward=after)
        found += compared(mesh, model, made(), world)
    model = sharded(mesh, prepare=lambda m: m.set_reshard_after_forward(False))
    model[0].set_reshard_after_backward(False)
    model(batches(1, 4)[0]).sum().backward()
    whole = model[0].weight
    assert not isinstance(whole, DTensor)
    close([whole.detach()], [made()[0].weight.detach()])
    model[0].reshard()
    assert isinstance(model[0].weight, DTensor)
    return found


def case_replicate_and_shard(world):
    """HSDP: gradients are scattered along one axis and summed along the other."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    found = compared(mesh, model, made(), world)
    model = sharded(mesh)
    data = batches(1, 8 * world)[0].chunk(2 * world)
    for i in range(2):
        model.set_requires_all_reduce(i == 1)
        model(data[2 * torch.distributed.get_rank() + i]).pow(2).mean().backward()
    plain = made()
    (plain(batches(1, 8 * world)[0]).pow(2).mean() * 2).backward()
    close([full(p.grad) for p in model.parameters()], [p.grad for p in plain.parameters()])
    return found + [full(p.grad) for p in model.parameters()]


def case_replicate_shard_and_tp(world):
    mesh = init_device_mesh("cpu", (world // 2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = sharded(mesh["replicate", "shard"], tp=mesh["tp"])
    data = batches(STEPS, 2 * world).chunk(world // 2, 1)[mesh.get_local_rank("replicate")]
    plain = made()
    seen = train(model, data, torch.optim.SGD(model.parameters(), lr=0.1))
    train(plain, batches(STEPS, 2 * world), torch.optim.SGD(plain.parameters(), lr=0.1))
    close(numbers(model), numbers(plain))
    return numbers(model, *seen)


def case_no_sync(world):
    """Gradients of two micro-batches are reduced once."""
    mesh = init_device_mesh("cpu", (world,))
    model, plain = sharded(mesh), made()
    data = batches(1, 8 * world)[0].chunk(2 * world)
    mine = data[2 * mesh.get_local_rank() :][:2]
    for i, x in enumerate(mine):
        model.set_requires_gradient_sync(i == 1)
        model.set_is_last_backward(i == 1)
        model(x).pow(2).mean().backward()
    (plain(batches(1, 8 * world)[0]).pow(2).mean() * 2).backward()
    close([full(p.grad) for p in model.parameters()], [p.grad for p in plain.parameters()])
    return [full(p.grad) for p in model.parameters()]


def case_offload(world):
    mesh = init_device_mesh("cpu", (world,))
    model = sharded(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return compared(mesh, model, made(), world)


def case_shard_along_another_dim(world):
    mesh = init_device_mesh("cpu", (world,))
    where = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % world == 0 else None  # noqa: E731
    model = sharded(mesh, shard_placement_fn=where)
    if world == 2:
        assert model[0].weight.placements == (Shard(1),)
    return compared(mesh, model, made(), world)


def case_tied_ignored_and_frozen(world):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.embed, self.inner = nn.Embedding(10, 6), nn.Linear(6, 6)
            self.head, self.scale = nn.Linear(6, 10, bias=False), nn.Parameter(torch.ones(6))
            self.head.weight = self.embed.weight
            self.inner.bias.requires_grad_(False)

        def forward(self, tokens):
            return self.head(self.inner(self.embed(tokens)) * self.scale)

    mesh = init_device_mesh("cpu", (world,))
    model, plain = Model().double(), Model().double()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
    assert not isinstance(model.scale, DTensor) and isinstance(model.embed.weight, DTensor)
    tokens = torch.arange(4 * world) % 10
    for _ in range(STEPS):
        for m, t in ((model, tokens.chunk(world)[mesh.get_local_rank()]), (plain, tokens)):
            m.zero_grad()
            nn.functional.cross_entropy(m(t), t).backward()
            if m is model:
                torch.distributed.all_reduce(m.scale.grad)
                m.scale.grad /= world
            nn.utils.clip_grad_norm_([p for p in m.parameters() if p is not m.scale], 0.1)
            with torch.no_grad():
                for p in m.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.5)
    close(numbers(model), numbers(plain))
    return numbers(model)


def case_from_meta(world):
    """Made without memory, sharded, then given memory and values."""
    mesh = init_device_mesh("cpu", (world,))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 12), nn.GELU(), nn.Linear(12, 10), nn.LayerNorm(10)).double()
    model = sharded(mesh, model)
    model.to_empty(device="cpu")
    whole = made().state_dict()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(whole[name], p.device_mesh, p.placements))
    return compared(mesh, model, made(), world)


def case_gradient_division(world):
    mesh = init_device_mesh("cpu", (world,))

    def prepare(model):
        for part in (model[0], model[2], model):
            part.set_gradient_divide_factor(1.0)

    model, plain = sharded(mesh, prepare=prepare), made()
    data = batches(1, 4 * world)[0]
    model(data.chunk(world)[mesh.get_local_rank()]).pow(2).sum().backward()
    plain(data).pow(2).sum().backward()
    close([full(p.grad) for p in model.parameters()], [p.grad for p in plain.parameters()])
    return [full(p.grad) for p in model.parameters()]


def case_parameters_on_the_whole_mesh(world):
    """Parameters that are DTensors on both axes before `fully_shard`, which is told which axis is its own."""
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = grid(world // 2, 2)
    model = made()
    for i, placed in ((0, (Replicate(), Shard(0))), (2, (Replicate(), Shard(1))), (3, (Replicate(), Replicate()))):
        for name, p in list(model[i].named_parameters()):
            where = placed if p.ndim == 2 or i == 0 else (Replicate(), Replicate())
            model[i].register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, where)))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    plain = made()
    data = batches(STEPS, 2 * world)
    part = data.chunk(world // 2, 1)[mesh.get_local_rank("dp")]
    optimizer, its = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    for x, y in zip(part, data):
        out = model(distribute_tensor(x, mesh, (Replicate(), Replicate()), src_data_rank=None))
        loss = out.pow(2).mean()
        (loss.to_local() if isinstance(loss, DTensor) else loss).backward()
        plain(y).pow(2).mean().backward()
        for o in (optimizer, its):
            o.step()
            o.zero_grad()
    close(numbers(model), numbers(plain))
    return numbers(model)


def case_experts(world):
    """Experts on one axis, sharded along another dim over the other axis."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            g = torch.Generator().manual_seed(2)
            self.up = nn.Parameter(torch.randn(4, 6, 5, generator=g, dtype=torch.float64))

        def forward(self, x):
            up = self.up.to_local() if isinstance(self.up, DTensor) else self.up
            return torch.einsum("ebi,eio->ebo", x, up)

    model, plain = Experts(), Experts()
    model.up = nn.Parameter(distribute_tensor(model.up.detach(), mesh["ep"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1))
    assert model.up.placements == (Shard(1), Shard(0))
    x = batches(1, 4 * world, 6)[0].reshape(4, -1, 6)
    mine = x.chunk(world // 2, 1)[mesh.get_local_rank("dp")].chunk(2)[mesh.get_local_rank("ep")]
    optimizer, its = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for _ in range(STEPS):
        (model(mine).pow(2).sum() / mine[0].numel()).backward()
        (plain(x).pow(2).sum() / x[0].numel()).backward()
        for o in (optimizer, its):
            o.step()
            o.zero_grad()
    close(numbers(model), numbers(plain))
    return numbers(model)


def case_replicate(world):
    """`replicate` of the FSDP2 family: gradients are averaged, parameters stay whole."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = made()
    for part in (model[0], model[2], model):
        replicate(part, mesh=mesh)
    return compared(mesh, model, made(), world)


def case_the_older_fsdp(world):
    """Its sharded state dicts are DTensors; `HYBRID_SHARD` on two axes."""
    found, plain, data = [], made(), batches(STEPS, 4 * world)
    its = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, data, its)
    for shape, strategy in (((world,), ShardingStrategy.FULL_SHARD), ((world // 2, 2), ShardingStrategy.HYBRID_SHARD)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        options = {"device_mesh": mesh, "use_orig_params": True, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(made(), sharding_strategy=strategy, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, data.chunk(world, 1)[torch.distributed.get_rank()], optimizer)
        state = get_model_state_dict(model)
        assert all(isinstance(t, DTensor) for t in state.values())
        other = FullyShardedDataParallel(made(seed=4), sharding_strategy=strategy, **options)
        set_model_state_dict(other, state)
        whole = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
        close([whole[name] for name, _ in plain.named_parameters()], [p.detach() for p in plain.parameters()])
        found += whole.values()
    return found


def case_the_older_fsdp_over_tp(world):
    """As in the examples that came before `fully_shard`; what is saved sharded is loaded into another model."""
    dp = world // 2
    mesh = grid(dp, 2)
    plain, data = made(), batches(STEPS, 4 * world)
    its = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, data, its)

    def wrapped(seed):
        model = made(seed=seed)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        return FullyShardedDataParallel(model, device_mesh=mesh["dp"], **options)

    model = wrapped(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    train(model, data.chunk(dp, 1)[mesh.get_local_rank("dp")], optimizer)
    state = get_model_state_dict(model)
    assert all(isinstance(t, DTensor) for t in state.values())
    assert state["0.weight"].placements == (Shard(0), Shard(0)) and state["0.weight"].shape == (12, 10)
    other = wrapped(4)
    set_model_state_dict(other, state)
    found = [t.full_tensor() for t in get_model_state_dict(other).values()]
    close(found, [p.detach() for p in plain.parameters()])
    return found


def case_the_older_fsdp_over_tp_goes_on(world):
    """With uneven parts, and a frozen parameter where FSDP takes one; its state goes through state dicts."""
    return [x for each in (True, False) for x in gone_on(world, use_orig_params=each, frozen=each)]


def gone_on(world, use_orig_params, frozen):
    """A step, then model and optimizer from sharded state, from state on the CPU, from the optimizer's full state."""
    dp = world // 2
    mesh = grid(dp, 2)
    ways = [StateDictOptions(), StateDictOptions(cpu_offload=True), StateDictOptions(full_state_dict=True)]
    data = batches(len(ways) + 1, 4 * world, 9)
    mine = data.chunk(dp, 1)[mesh.get_local_rank("dp")]

    def optimized(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def wrapped(seed):
        model = made(9, 13, seed=seed)
        model[0].bias.requires_grad_(not frozen)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], **options)
        return model, optimized(model)

    plain = made(9, 13)
    plain[0].bias.requires_grad_(not frozen)
    its = optimized(plain)
    model, optimizer = wrapped(0)
    for i, options in enumerate(ways):
        train(plain, data[i : i + 1], its)
        train(model, mine[i : i + 1], optimizer)
        weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options)
        for name, p in plain.named_parameters():
            if p.requires_grad:
                close([full(moments["state"][name]["exp_avg"])], [its.state[p]["exp_avg"]])
        moment = moments["state"]["2.weight"]["exp_avg"]
        assert options.full_state_dict or moment.placements == (Shard(0), Shard(1))
        model, optimizer = wrapped(4 + i)
        set_model_state_dict(model, weights)
        set_optimizer_state_dict(model, optimizer, moments, options=options)
    train(plain, data[len(ways) :], its)
    train(model, mine[len(ways) :], optimizer)
    found = [t.full_tensor() for t in get_model_state_dict(model).values()]
    close(found, [p.detach() for p in plain.parameters()])
    assert not frozen or torch.equal(found[1], made(9, 13)[0].bias)
    return found


def case_empty_parts(world):
    """A layer with fewer rows than processes, clipped."""
    mesh = init_device_mesh("cpu", (world,))
    model, plain = sharded(mesh, made(3, world - 1)), made(3, world - 1)
    return compared(mesh, model, plain, world, width=3)


def case_from_meta_over_tp(world):
    """Made without memory, sharded along both axes, given memory and values, then those of a full state dict."""
    mesh = grid(world // 2, 2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 12), nn.GELU(), nn.Linear(12, 10), nn.LayerNorm(10)).double()
    model = sharded(mesh["dp"], model, tp=mesh["tp"])
    model.to_empty(device="cpu")
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    drawn = full(model[0].weight).abs()
    assert drawn.max() <= 10**-0.5 and drawn.std() > 0.05 and full(model[3].weight).eq(1).all()
    set_model_state_dict(model, made().state_dict(), options=StateDictOptions(full_state_dict=True))
    return compared(mesh["dp"], model, made(), world // 2, clip=None)


def case_tied_over_tp(world):
    """A weight that the embedding and the head share, sharded along both axes; gradients of two batches summed."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.mlp, self.head = nn.Embedding(12, 10), made(), nn.Linear(10, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.mlp(self.embed(tokens)))

    mesh = grid(world // 2, 2)
    model, plain = Tied().double(), Tied().double()
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], {**plan, "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    model.head.weight = model.embed.weight
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    tokens = torch.arange(2 * world) % 12
    mine = tokens.chunk(world // 2)[mesh.get_local_rank("dp")]
    for i in range(2):
        model.set_requires_gradient_sync(i == 1)
        for m, t in ((model, mine), (plain, tokens)):
            nn.functional.cross_entropy(m(t), t).backward()
    assert model.head.weight is model.embed.weight
    close([full(p.grad) for p in model.parameters()], [p.grad for p in plain.parameters()])
    return [full(p.grad) for p in model.parameters()]
