"""What surrounds a model in training, on torch's names alone: clipping, optimizers, DDP, activation checkpointing,
compiling, pipelines, loss scaling. Each case is held to one process here, and to torch's engine by
`tests/swap/test_subsystems.py`.

A case takes the number of processes and gives its numbers.
"""

import copy
import functools
import tempfile

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from common import batches, close, full, made, numbers, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PLAN = {"0": ColwiseParallel, "2": RowwiseParallel}


def parallel(mesh, model=None):
    return parallelize_module(made() if model is None else model, mesh, {k: style() for k, style in PLAN.items()})


def grid(dp, tp=1):
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def values():
    g = torch.Generator().manual_seed(5)
    return [torch.randn(*s, generator=g, dtype=torch.float64) for s in ((7, 3), (6, 4), (5,), (1, 4))]


def placed(mesh, layouts, tensors, leaf=False):
    made = [distribute_tensor(t.clone(), mesh, p) for t, p in zip(tensors, layouts)]
    return [nn.Parameter(t) for t in made] if leaf else made


def case_clipping(world):
    mesh = grid(world // 2, 2)
    layouts = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate())]
    found = []
    for order, foreach in ((2.0, None), (2.0, False), (1.0, True), (float("inf"), False), (3.0, None)):
        plain, ours = [nn.Parameter(t) for t in values()], placed(mesh, layouts, values(), leaf=True)
        for p, q, g in zip(plain, ours, values()):
            p.grad, q.grad = g.clone(), distribute_tensor(g, q.device_mesh, q.placements)
        total = nn.utils.get_total_norm([q.grad for q in ours], order, foreach=foreach)
        norms = [full(nn.utils.clip_grad_norm_(m, 0.3, order, foreach=foreach)) for m in (ours, plain)]
        close([full(total), norms[0]], [norms[1], norms[1]])
        close([full(q.grad) for q in ours], [p.grad for p in plain])
        found += [norms[0], *(full(q.grad) for q in ours)]
    return found


def case_clipping_that_is_not_finite(world):
    mesh = init_device_mesh("cpu", (world,))
    p = nn.Parameter(distribute_tensor(torch.ones(2 * world), mesh, [Shard(0)]))
    g = torch.ones(2 * world)
    g[-1] = float("nan")
    p.grad = distribute_tensor(g, mesh, [Shard(0)])
    try:
        nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        assert "non-finite" in str(error)
    else:
        raise AssertionError("no error")
    return [full(p.grad).nan_to_num(7.0)]


def case_clipping_over_meshes(world):
    """Gradients on both axes, on either axis, and plain ones."""
    mesh = grid(world // 2, 2)
    found = []
    for order in (2.0, float("inf")):
        for foreach in (False, True):
            grads = values()
            ours = [
                distribute_tensor(grads[0], mesh, [Shard(0), Shard(1)]),
                distribute_tensor(grads[1], mesh["tp"], [Shard(0)]),
                distribute_tensor(grads[2], mesh["dp"], [Shard(0)]),
                grads[3].clone(),
            ]
            params = []
            for g in ours:
                params.append(torch.zeros_like(g).requires_grad_())
                params[-1].grad = g
            plain = [torch.zeros_like(g).requires_grad_() for g in grads]
            for p, g in zip(plain, grads):
                p.grad = g.clone()
            norms = [nn.utils.clip_grad_norm_(m, 0.3, order, foreach=foreach) for m in (params, plain)]
            close([full(norms[0])], [norms[1]])
            close([full(p.grad) for p in params], [p.grad for p in plain])
            found += [full(norms[0])]
    return found


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adadelta": {"lr": 0.1},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.01, "t0": 1},
    "Rprop": {"lr": 0.01},
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def optimized(world, pick, forms):
    """Three steps on sharded and replicated parameters, the state saved and loaded after the first."""
    mesh = grid(world // 2, 2)
    layouts = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Replicate())]
    found = []
    for name in pick:
        for form in forms:
            build = functools.partial(getattr(torch.optim, name), **OPTIMIZERS[name], **form)
            plain, ours = [nn.Parameter(t) for t in values()], placed(mesh, layouts, values(), leaf=True)
            its, mine = build(plain), build(ours)
            for step in range(3):
                for p, q, g in zip(plain, ours, values()):
                    p.grad = g * (step + 1) - 1
                    q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements)
                its.step()
                mine.step()
                if step == 0:
                    state, mine = mine.state_dict(), build(ours)
                    mine.load_state_dict(state)
            close([full(q) for q in ours], [p.detach() for p in plain])
            found += [full(q) for q in ours]
    return found


def case_optimizers_in_a_loop(world):
    return optimized(world, [n for n in OPTIMIZERS if n != "Rprop"], [{"foreach": False}])


def case_optimizers_foreach(world):
    return optimized(world, [n for n in OPTIMIZERS if n != "Rprop"], [{"foreach": True}])


def case_rprop(world):
    return optimized(world, ["Rprop"], [{"foreach": False}, {"foreach": True}])


def case_optimizers_fused(world):
    return optimized(world, [n for n in FUSED if n in ("Adam", "AdamW")], [{"fused": True}])


def case_optimizers_fused_more(world):
    """Whose fused form torch's engine has no rule for."""
    return optimized(world, [n for n in FUSED if n not in ("Adam", "AdamW")], [{"fused": True}])


def matrices(world, name, **options):
    mesh = grid(world // 2, 2)
    shapes, g = ((8, 6), (7, 5), (4, 9)), torch.Generator().manual_seed(7)
    start = [torch.randn(*s, generator=g) for s in shapes]
    layouts = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Shard(0))]
    plain, ours = [nn.Parameter(t.clone()) for t in start], placed(mesh, layouts, start, leaf=True)
    its, mine = (getattr(torch.optim, name)(m, lr=0.02, **options) for m in (plain, ours))
    for _ in range(2):
        for p, q in zip(plain, ours):
            p.grad = torch.randn(*p.shape, generator=g)
            q.grad = distribute_tensor(p.grad, mesh, q.placements)
        its.step()
        mine.step()
    close([full(q) for q in ours], [p.detach() for p in plain], 2e-3 if name == "Muon" else 1e-5)
    return [full(q) for q in ours]


def case_muon(world):
    return matrices(world, "Muon", weight_decay=0.1)


def case_adafactor(world):
    return matrices(world, "Adafactor", foreach=False) + matrices(world, "Adafactor", foreach=True)


def replicated(world, wrap):
    mesh = grid(world // 2, 2)
    plain, inner = made(), parallel(mesh["tp"])
    model = wrap(inner, mesh)
    data = batches(3, 2 * world)
    part = data.chunk(world // 2, 1)[mesh.get_local_rank("dp")]
    ours, its = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    for x, y in zip(part, data):
        for net, batch, optimizer in ((model, x, ours), (plain, y, its)):
            net(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    close([model(part[0]).detach()], [plain(part[0]).detach()])
    return [model(part[0]).detach()]


def case_ddp_over_tp_with_a_mesh(world):
    return replicated(world, lambda model, mesh: DistributedDataParallel(model, device_mesh=mesh["dp"]))


def case_ddp_over_tp_with_a_group(world):
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    def wrap(model, mesh):
        _pre_dp_module_transform(model)
        return DistributedDataParallel(model, process_group=mesh["dp"].get_group())

    return replicated(world, wrap)


def case_ddp_over_tp_with_a_group_alone(world):
    wrap = lambda model, mesh: DistributedDataParallel(model, process_group=mesh["dp"].get_group())  # noqa: E731
    return replicated(world, wrap)


def case_ddp_over_all_processes_is_refused(world):
    """They hold different parts of the model."""
    mesh = init_device_mesh("cpu", (world,))
    try:
        DistributedDataParallel(parallel(mesh))
    except ValueError as error:
        assert "ranks 0 and 1 hold different parts of" in str(error) and "mesh['dp']" in str(error), error
    else:
        raise AssertionError("no error")
    return []


class Shared(nn.Module):
    """A weight that two layers share, buffers of which one is sharded, a layer that is not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.also, self.down = nn.Linear(10, 12), nn.Linear(10, 12), nn.Linear(12, 10)
        self.also.weight, self.unused = self.up.weight, nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(12))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.down(torch.relu(self.up(x)) * self.scale + self.also(x))


def case_ddp_over_tp_with_buffers(world):
    """Two batches to a step, the first without a reduction; a call that fails leaves the model as it was."""
    mesh = grid(world // 2, 2)
    model, plain = Shared().double(), Shared().double()
    wide = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh["tp"], {"up": wide, "also": wide, "down": RowwiseParallel()})
    model.scale = distribute_tensor(model.scale, mesh["tp"], [Shard(0)])
    distribute_module(model.unused, mesh["tp"])
    model = DistributedDataParallel(model, device_mesh=mesh["dp"], find_unused_parameters=True)
    try:
        model(torch.ones(3, 7, dtype=torch.float64))
    except Exception:
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    else:
        raise AssertionError("no error")
    data = batches(4, 2 * world)
    part = data.chunk(world // 2, 1)[mesh.get_local_rank("dp")]
    ours, its = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for i in range(0, 4, 2):
        with model.no_sync():
            model(part[i]).pow(2).mean().backward()
        model(part[i + 1]).pow(2).mean().backward()
        for x in data[i : i + 2]:
            plain(x).pow(2).mean().backward()
        for o in (ours, its):
            o.step()
            o.zero_grad()
    close([model(part[0]).detach()], [plain(part[0]).detach()])
    assert model.module.calls.item() == 6 and model.module.also.weight is model.module.up.weight
    return [model(part[0]).detach()]


def case_ddp_over_tp_with_state_dicts(world):
    """Sharded, full, from the first process, through a checkpoint; the model's own, and each process's parts."""
    mesh = grid(world // 2, 2)

    def wrapped(seed):
        model = DistributedDataParallel(parallel(mesh["tp"], made(9, 13, seed=seed)), device_mesh=mesh["dp"])
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    plain, data = made(9, 13), batches(6, 2 * world, 9)
    its = torch.optim.AdamW(plain.parameters(), lr=0.01)
    part = data.chunk(world // 2, 1)[mesh.get_local_rank("dp")]
    names = dict(plain.named_parameters())
    model, optimizer = wrapped(0)
    whole = StateDictOptions(full_state_dict=True)
    first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for i, (options, back) in enumerate(((StateDictOptions(),) * 2, (whole, whole), (first, spread), (None, None))):
        train(model, part[i : i + 1], optimizer)
        train(plain, data[i : i + 1], its)
        state, moments = get_state_dict(model, optimizer, options=options)
        if dist.get_rank() == 0 or options is not first:
            for name, p in names.items():
                found = state[name], moments["state"][name]["exp_avg"]
                close([full(t) for t in found], [p.detach(), its.state[p]["exp_avg"]])
                assert isinstance(found[0], DTensor) != (options in (whole, first) or name.startswith("3"))
        other, its_optimizer = wrapped(i + 1)
        if options is None:
            folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(folder)
            dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder[0])
            state, moments = get_state_dict(other, its_optimizer)
            dcp.load({"model": state, "optimizer": moments}, checkpoint_id=folder[0])
        moments = copy.deepcopy(moments)
        set_model_state_dict(other, state, options=back)
        set_optimizer_state_dict(other, its_optimizer, moments, options=back)
        model, optimizer = other, its_optimizer
    train(model, part[4:5], optimizer)
    train(plain, data[4:5], its)
    third, fourth = wrapped(8)[0], wrapped(9)[0]
    third.load_state_dict(model.state_dict())
    fourth.load_state_dict({name: p.detach() for name, p in model.named_parameters()})
    for m in (model, third, fourth):
        close([full(t) for t in m.state_dict().values()], [p.detach() for p in names.values()])
    return [full(t) for t in model.state_dict().values()]


def case_optimizer_in_backward(world):
    """Each parameter is stepped as soon as its gradient is there."""
    model, plain = parallel(init_device_mesh("cpu", (world,))), made()
    for m in (model, plain):
        _apply_optimizer_in_backward(torch.optim.SGD, m.parameters(), {"lr": 0.1})
        for x in batches(2, 4):
            m(x).pow(2).mean().backward()
    close(numbers(model), numbers(plain))
    return numbers(model)


class Block(nn.Module):
    """A residual layer that is computed again in backward, in one of three ways."""

    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x):
        if self.how == "selective":
            policy = lambda ctx, op, *args, **kwargs: (  # noqa: E731
                CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
            )
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return x + checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
        return x + checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


def checkpointed(world, shard):
    found = []
    for how in ("reentrant", "not", "selective"):
        mesh = grid(world // 2, 2)
        inner = made()
        model, plain = nn.Sequential(Block(inner, how)), nn.Sequential(Block(made(), "not"))
        parallel(mesh["tp"], inner)
        if shard:
            fully_shard(model, mesh=mesh["dp"])
        data = batches(2, 2 * world)
        part = data.chunk(world // 2, 1)[mesh.get_local_rank("dp")] if shard else data
        for m, xs in ((model, part), (plain, data)):
            train(m, [x.requires_grad_() for x in xs.detach().unbind()], torch.optim.SGD(m.parameters(), lr=0.1))
        close(numbers(model), numbers(plain))
        found += numbers(model)
    return found


def case_activation_checkpointing(world):
    return checkpointed(world, shard=False)


def case_activation_checkpointing_and_fsdp(world):
    return checkpointed(world, shard=True)


def case_ddp_over_tp_with_checkpointing(world):
    mesh = grid(world // 2, 2)
    found = []
    for how in ("not", "selective", "reentrant"):
        inner = made()
        model, plain = Block(inner, how), Block(made(), "not")
        parallel(mesh["tp"], inner)
        model = DistributedDataParallel(model, device_mesh=mesh["dp"], static_graph=how == "reentrant")
        data = batches(2, 2 * world)
        part = data.chunk(world // 2, 1)[mesh.get_local_rank("dp")]
        for m, xs in ((model, part), (plain, data)):
            train(m, [x.requires_grad_() for x in xs.detach().unbind()], torch.optim.SGD(m.parameters(), lr=0.1))
        close([model(part[0]).detach()], [plain(part[0]).detach()])
        found += [model(part[0]).detach()]
    return found


def compiled(world, backend):
    """Parts are of one size whatever the number of processes, so that kernels are made once."""
    mesh = init_device_mesh("cpu", (world,))
    torch._dynamo.reset()
    inner = parallel(mesh, made(hidden=6 * world))
    model, plain = torch.compile(inner, backend=backend), made(hidden=6 * world)
    data = batches(2, 4)
    seen = train(model, data, torch.optim.AdamW(model.parameters(), lr=0.01))
    expected = train(plain, data, torch.optim.AdamW(plain.parameters(), lr=0.01))
    torch._dynamo.reset()
    close(numbers(inner, *seen), numbers(plain, *expected))
    return numbers(inner, *seen)


def case_compile_aot_eager(world):
    return compiled(world, "aot_eager")


def case_compile_inductor(world):
    return compiled(world, "inductor")


def case_compile_blocks_under_fsdp(world):
    mesh = init_device_mesh("cpu", (world,))
    torch._dynamo.reset()
    model, plain = made(), made()
    for i in (0, 2):
        model[i].compile(backend="aot_eager")
        fully_shard(model[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    data = batches(2, 4 * world)
    part = data.chunk(world, 1)[mesh.get_local_rank()]
    for m, xs in ((model, part), (plain, data)):
        train(m, xs, torch.optim.AdamW(m.parameters(), lr=0.01))
    torch._dynamo.reset()
    close(numbers(model), numbers(plain))
    return numbers(model)


def case_compile_ddp_over_tp(world):
    torch._dynamo.reset()
    compile = functools.partial(torch.compile, backend="aot_eager")
    found = replicated(world, lambda model, mesh: compile(DistributedDataParallel(model, device_mesh=mesh["dp"])))
    torch._dynamo.reset()
    return found


def piped(world, schedule, shard=False):
    """Two stages; within each, with 4 processes, tensor parallelism or sharded data parallelism."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "tp"))
    stage, inner = mesh.get_local_rank("pp"), mesh["tp"]
    whole = [made(seed=1), made(seed=2)]
    mine = made(seed=1 + stage)
    if shard:
        fully_shard(mine, mesh=inner)
    else:
        parallel(inner, mine)
    loss = lambda y, t: F.mse_loss(y, t)  # noqa: E731
    data, target = batches(2, 8)
    part = slice(None)
    if shard:
        rows = 8 // (world // 2)
        part = slice(rows * mesh.get_local_rank("tp"), rows * (mesh.get_local_rank("tp") + 1))
    run = schedule(PipelineStage(mine, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group()), 4, loss_fn=loss)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    plain = nn.Sequential(*whole)
    its = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        losses = []
        if stage == 0:
            run.step(data[part])
        else:
            run.step(target=target[part], losses=losses)
        F.mse_loss(plain(data), target).backward()
        close([full(p.grad) for p in mine.parameters()], [p.grad for p in whole[stage].parameters()])
        for o in (optimizer, its):
            o.step()
            o.zero_grad()
    close(numbers(mine), numbers(whole[stage]))
    return numbers(mine)


def case_pipeline_gpipe(world):
    return piped(world, ScheduleGPipe)


def case_pipeline_1f1b(world):
    return piped(world, Schedule1F1B)


def case_pipeline_of_sharded_stages(world):
    return piped(world, ScheduleGPipe, shard=True)


def case_pipeline_of_dtensors(world):
    """What goes from stage to stage is a DTensor on the other axis, sharded along its features."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "tp"))
    stage, inner = mesh.get_local_rank("pp"), mesh["tp"]
    layers, data = [made(seed=1)[0], made(seed=2)[2]], batches(1, 8)[0]
    mine = distribute_module(nn.Sequential(*[made(seed=1)[:1], made(seed=2)[2:3]][stage]), inner)
    mine[0].weight = nn.Parameter(mine[0].weight.redistribute(placements=[Shard(stage)]))
    run = ScheduleGPipe(
        PipelineStage(
            mine, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group(), get_mesh=lambda names, layout: inner
        ),
        4,
        loss_fn=lambda y, t: (y - t).pow(2).mean().full_tensor(),
    )  # fmt: skip
    if stage == 0:
        run.step(distribute_tensor(data, inner, [Replicate()]))
    else:
        run.step(target=distribute_tensor(data, inner, [Replicate()]))
    F.mse_loss(layers[1](layers[0](data)), data).backward()
    close([full(p.grad) for p in mine.parameters()], [p.grad for p in layers[stage].parameters()])
    return [full(p.grad) for p in mine.parameters()]


def case_pipeline_of_four_stages(world):
    """Two stages a process, in turn, and with the gradients of inputs and of weights apart."""
    found = []
    for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "tp"))
        place, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
        whole = [made(seed=i) for i in range(4)]
        mine = [parallel(mesh["tp"], made(seed=i)) for i in (place, place + 2)]
        stages = [PipelineStage(m, i, 4, torch.device("cpu"), group=group) for m, i in zip(mine, (place, place + 2))]
        run = schedule(stages, 4, loss_fn=F.mse_loss)
        data, target = batches(2, 8)
        run.step(*([data] if place == 0 else []), **({"target": target} if place == 1 else {}))
        F.mse_loss(nn.Sequential(*whole)(data), target).backward()
        for m, i in zip(mine, (place, place + 2)):
            close([full(p.grad) for p in m.parameters()], [p.grad for p in whole[i].parameters()])
            found += [full(p.grad) for p in m.parameters()]
    return found


def case_averaged_model(world):
    """A moving average of the parameters, in its foreach form and in a loop."""
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for options in ({"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"avg_fn": None}):
        models = [parallel(mesh), made()]
        averages = [AveragedModel(m, **options) for m in models]
        for m, average in zip(models, averages):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            for x in batches(2, 4):
                train(m, [x], optimizer)
                average.update_parameters(m)
        close(numbers(averages[0]), numbers(averages[1]))
        found += numbers(averages[0])
    return found


def case_loss_scaling(world):
    """A gradient that is infinite in one process's part only: no process takes the step, and all scale down."""
    found = []
    for form in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        mesh = init_device_mesh("cpu", (world,))
        w = torch.arange(1.0, 2 * world + 1)
        p, q = nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])), nn.Parameter(w.clone())
        runs = [(torch.optim.AdamW([x], lr=0.1, **form), torch.amp.GradScaler("cpu", init_scale=8.0)) for x in (p, q)]
        for step in range(3):
            for x, (optimizer, scaler) in zip((p, q), runs):
                x.grad = None
                scaler.scale((x * x).sum()).backward()
                if step == 1:
                    g = full(x.grad).clone()
                    g[-1] = float("inf")
                    x.grad = distribute_tensor(g, mesh, [Shard(0)]) if x is p else g
                if "fused" not in form:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_([x], 1e9)
                scaler.step(optimizer)
                scaler.update()
        scales = [scaler.get_scale() for _, scaler in runs]
        assert scales == [4.0, 4.0], scales
        close([full(p)], [q.detach()], 1e-5)
        found += [full(p), torch.tensor(scales)]
    return found


def case_autocast(world):
    mesh = init_device_mesh("cpu", (world,))
    model, plain = parallel(mesh, made(dtype=torch.float32)), made(dtype=torch.float32)
    seen = []
    for m in (model, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(batches(1, 4, dtype=torch.float32)[0])
            loss = (y.float() ** 2).mean()
        loss.backward()
        seen.append([full(y).float(), *(full(p.grad) for p in m.parameters())])
    close(seen[0], seen[1], 3e-2)
    return seen[0]


def case_autocast_and_loss_scaling(world):
    """Sharded parameters and plain ones in one optimizer, float16 inside."""
    mesh, seen = init_device_mesh("cpu", (world,)), []
    for m in (parallel(mesh, made(dtype=torch.float32)), made(dtype=torch.float32)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for x in batches(2, 4, dtype=torch.float32):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = m(x).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        seen.append(numbers(m))
    close(seen[0], seen[1], 5e-3)
    return seen[0]


def case_functional_collectives(world):
    """They take a mesh, or a mesh and one of its axes."""
    mesh = grid(world // 2, 2)
    found = [funcol.all_reduce(torch.ones(3), "sum", group) for group in (mesh["tp"], (mesh, 1))]
    close([full(t) for t in found], [torch.full((3,), 2.0)] * 2)
    return [full(t) for t in found]


def case_a_module_distributed_whole(world):
    mesh = init_device_mesh("cpu", (world,))
    model, plain = made(), made()
    distribute_module(model, mesh)
    x = batches(1, 4)[0]
    y = model(distribute_tensor(x, mesh, [Shard(0)]))
    y.sum().backward()
    plain(x).sum().backward()
    close([full(p.grad) for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert isinstance(y, DTensor) and not any(isinstance(p.grad.placements[0], Shard) for p in model.parameters())
    return [full(p.grad) for p in model.parameters()]
