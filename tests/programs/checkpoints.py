"""State of models and optimizers in files and dicts, on torch's names alone. Cases as in `fsdp.py`; functions `write_*`
and `read_*` are two halves, each of which may run on either engine.
"""

import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from common import batches, close, full, made, numbers, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 2


def grid(dp, tp=1):
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def trained(world, dp=None, steps=STEPS, uneven=False):
    """A model that is sharded over `dp` processes and parallel over the others, and its optimizer."""
    dp = world // 2 if dp is None else dp
    mesh = grid(dp, world // dp)
    model = made(9, 13) if uneven else made()
    if world > dp:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = batches(STEPS, 4, 9 if uneven else 10)[:steps]
    train(model, data, optimizer)  # each process the same batch, so that the number of processes makes no difference
    return model, optimizer


def reference(steps=STEPS, uneven=False):
    plain = made(9, 13) if uneven else made()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, batches(STEPS, 4, 9 if uneven else 10)[:steps], optimizer)
    return plain, optimizer


def folder_for_all():
    """A folder that the first process makes."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return names[0]


class App(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def checked(model, optimizer, uneven=False):
    """The state is that of one process, and goes on like it."""
    plain, its = reference(uneven=uneven)
    close(numbers(model), numbers(plain))
    more = batches(1, 4, 9 if uneven else 10, seed=9)
    train(model, more, optimizer)
    train(plain, more, its)
    close(numbers(model), numbers(plain))
    return numbers(model)


def write_app(world, folder, uneven=False):
    """One mesh ..."""
    dcp.save({"app": App(*trained(world, uneven=uneven))}, checkpoint_id=folder)


def read_app(world, folder, uneven=False):
    """... and others: all processes share one axis, or the other."""
    found = []
    for dp in (1, world // 2, world):
        model, optimizer = trained(world, dp, steps=1, uneven=uneven)
        dcp.load({"app": App(model, optimizer)}, checkpoint_id=folder)
        found += checked(model, optimizer, uneven)
    return found


def write_uneven_app(world, folder):
    """Parts of different sizes along both axes."""
    write_app(world, folder, uneven=True)


def read_uneven_app(world, folder):
    return read_app(world, folder, uneven=True)


LAYOUTS = (
    ((Shard(0), Replicate()), (7, 3)),
    ((Shard(0), Shard(0)), (5, 3)),
    ((Shard(1), Shard(0)), (7, 5)),
    ((Replicate(), Shard(0)), (1,)),
)


def tensors(world):
    mesh = grid(world // 2, 2)
    numbers = [torch.arange(1.0, torch.Size(s).numel() + 1).reshape(s) for _, s in LAYOUTS]
    return mesh, numbers, [distribute_tensor(t, mesh, p) for t, (p, _) in zip(numbers, LAYOUTS)]


def write_tensors(world, folder):
    _, _, held = tensors(world)
    dcp.save({"held": held, "number": 3}, checkpoint_id=folder)


def read_tensors(world, folder):
    mesh, expected, _ = tensors(world)
    for placed in (0, 1, 2, 3):
        where = [LAYOUTS[placed][0] if t.ndim == 2 else LAYOUTS[3][0] for t in expected]
        state = {"held": [zeros(t.shape, device_mesh=mesh, placements=p) for t, p in zip(expected, where)], "number": 0}
        dcp.load(state, checkpoint_id=folder)
        close([full(t) for t in state["held"]], expected)
        assert state["number"] == 3
    return expected


def write_file(world, folder):
    _, _, held = tensors(world)
    held[0].requires_grad_()
    file = os.path.join(folder, f"{dist.get_rank()}.pt")
    torch.save({"held": held, "again": held[0], "parameter": nn.Parameter(held[2])}, file)


def read_file(world, folder):
    _, expected, held = tensors(world)
    for weights_only in (True, False):
        state = torch.load(os.path.join(folder, f"{dist.get_rank()}.pt"), weights_only=weights_only)
        assert state["again"] is state["held"][0] and state["again"].requires_grad
        assert isinstance(state["parameter"], nn.Parameter) and isinstance(state["parameter"], DTensor)
        close([full(t) for t in state["held"]], expected)
        for t, h in zip(state["held"], held):
            assert isinstance(t, DTensor) and t.placements == h.placements and t.device_mesh == h.device_mesh
            close([full(t + h)], [2 * full(h)])
        (state["again"].sum() * 2).backward()
        close([full(state["again"].grad)], [torch.full((7, 3), 2.0)])
    return expected


def full_state(world, uneven):
    """Gathered, on the first process or on all; given to all from the first."""
    model, optimizer = trained(world, uneven=uneven)
    plain, its = reference(uneven=uneven)
    whole = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=whole)
    moments = get_optimizer_state_dict(model, optimizer, options=whole)
    names = [name for name, _ in plain.named_parameters()]
    assert not any(isinstance(t, DTensor) for t in state.values())
    close([state[n] for n in names], [p.detach() for p in plain.parameters()])
    close([moments["state"][n]["exp_avg"] for n in names], [s["exp_avg"] for s in its.state_dict()["state"].values()])
    first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    kept = get_model_state_dict(model, options=first)
    kept_moments = get_optimizer_state_dict(model, optimizer, options=first)
    assert len(kept) == (len(names) if dist.get_rank() == 0 else 0)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    found = []
    for options, values, more in ((whole, state, moments), (spread, kept, kept_moments)):
        other, its_optimizer = trained(world, dp=world, steps=0, uneven=uneven)
        set_model_state_dict(other, values, options=options)
        more = copy.deepcopy(more)  # the optimizer keeps what it is given
        set_optimizer_state_dict(other, its_optimizer, more, options=options)
        found += checked(other, its_optimizer, uneven=uneven)
    return found


def case_full_state(world):
    return full_state(world, uneven=False)


def case_full_state_of_uneven_parts(world):
    return full_state(world, uneven=True)


def case_parts_of_the_state(world):
    """Sharded state, moved to the CPU; one submodule's; frozen parameters left out; optimizer state flat."""
    model, optimizer = trained(world)
    sharded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert all(isinstance(t, DTensor) and t.device.type == "cpu" for t in sharded.values())
    part = get_model_state_dict(model, submodules={model[2]})
    model[0].bias.requires_grad_(False)
    fewer = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    model[0].bias.requires_grad_(True)
    assert "0.bias" not in fewer and len(fewer) == len(sharded) - 1
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert isinstance(flat["state.0.weight.exp_avg"], DTensor)
    other, its = trained(world, steps=1)
    set_model_state_dict(other, sharded)
    set_optimizer_state_dict(other, its, flat, options=StateDictOptions(flatten_optimizer_state_dict=True))
    found = checked(other, its)
    strict = set_model_state_dict(other, part, options=StateDictOptions(strict=False))
    assert "0.weight" in strict.missing_keys
    return found + [full(t) for t in part.values()]


def case_plain_state_dicts(world):
    """`state_dict` and `load_state_dict` of modules and optimizers, without torch.distributed.checkpoint."""
    model, optimizer = trained(world)
    other, its = trained(world, steps=1)
    other.load_state_dict(model.state_dict())
    its.load_state_dict(optimizer.state_dict())
    assert isinstance(its.state_dict()["state"][0]["exp_avg"], DTensor)
    third, another = trained(world, steps=1)
    third.load_state_dict(model.state_dict(), assign=True)
    close(numbers(third), numbers(model))
    return checked(other, its)


def case_saving_in_the_background(world):
    folder = folder_for_all()
    model, optimizer = trained(world)
    dcp.async_save({"app": App(model, optimizer)}, checkpoint_id=folder).result()
    other, its = trained(world, steps=1)
    dcp.load({"app": App(other, its)}, checkpoint_id=folder)
    return checked(other, its)


def case_to_one_file_and_back(world):
    """A sharded checkpoint made into one file of `torch.save`, which one process reads, and the reverse."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    folder = folder_for_all()
    model, optimizer = trained(world)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    file, back = os.path.join(folder, "all.pt"), folder_for_all()
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, file)
        torch_save_to_dcp(file, back)
    dist.barrier()
    plain, _ = reference()
    whole = torch.load(file, weights_only=True)["model"]
    close(list(whole.values()), list(plain.state_dict().values()))
    other, its = trained(world, dp=world, steps=1)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=back)
    set_model_state_dict(other, state["model"])
    close(numbers(other), numbers(plain))
    return numbers(other)
