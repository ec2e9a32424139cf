"""What the makers of meshes accept: ranks in any form, names, backends, and the device of the process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dtensor.mesh_geometry import BackendConfig, Ranks
from dtensor.world import World

__all__ = [
    "as_names", "as_ranks", "backward_on_this_thread", "choose_device", "normalise_override", "own_device",
    "start_world",
]  # fmt: skip


def as_ranks(mesh: object) -> Ranks:
    """Ranks as an int64 array. Raises TypeError for what is not made of integers, ValueError for a ragged list."""
    if isinstance(mesh, torch.Tensor):
        mesh = mesh.detach().cpu().tolist()
    array = np.asarray(mesh)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"DeviceMesh takes integer ranks, got {array.dtype} in {mesh!r}")
    return np.ascontiguousarray(array, dtype=np.int64).reshape(array.shape)


def as_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    """Names as a tuple, None for none. Raises ValueError for a wrong number, RuntimeError for a name given twice."""
    if not names:
        return None
    made = tuple(names)
    if len(made) != ndim:
        raise ValueError(f"mesh_dim_names {made} names {len(made)} dimensions of a mesh that has {ndim}")
    if len(set(made)) != len(made):
        raise RuntimeError(f"Each mesh_dim_name must be unique. Found repeated mesh_dim_name in {made}")
    return made


def start_world(device_type: str) -> None:
    """`init_process_group()` from the environment, bound to this process's accelerator, which is chosen first.

    A group that is bound connects at once, and the groups of a mesh can be split off it. ValueError where the
    environment says nothing of a world.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            "a mesh needs a world, and this process is no rank of one: there is no process group, and the environment "
            f"has no {', '.join(missing)}\n"
            "  rule: every rank is a process of its own, which a launcher starts, or is simulated\n"
            "  fix: torchrun --nproc-per-node 4 program.py; or all ranks in one process: dtensor.simulate(4)(f); "
            "or one rank without the others, for counting: with dtensor.simulate.fake_world(512): ..."
        )
    handle = getattr(torch, device_type, None)
    if device_type == "cpu" or handle is None or not handle.is_available() or "LOCAL_RANK" not in os.environ:
        dist.init_process_group()
        return
    if not handle.is_initialized():
        handle.set_device(own_device(device_type))
    dist.init_process_group(device_id=torch.device(device_type, handle.current_device()))


def own_device(device_type: str) -> int:
    """The index of the accelerator that is this process's own, one process a device, by LOCAL_RANK.

    Where a launcher shows each process one device only (CUDA_VISIBLE_DEVICES differs between them), that is number 0.
    Raises RuntimeError where the machine shows fewer devices than processes were started on it.
    """
    count, local = getattr(torch, device_type).device_count(), int(os.environ["LOCAL_RANK"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if max(here, local + 1) <= count:
        return local
    if count == 1 and shown:
        return 0
    seen = "is not set" if shown is None else f"is {shown!r}"
    raise RuntimeError(
        f"{here} processes were started on this machine (LOCAL_RANK here is {local}), and torch sees {count} "
        f"{device_type} device{'s' * (count != 1)} (CUDA_VISIBLE_DEVICES {seen}): "
        f"each process needs one of its own. Start at most {count}: torchrun --nproc-per-node {max(count, 1)} ..."
    )


def choose_device(device_type: str, world: World) -> None:
    """Set the process's accelerator, unless one was set before.

    It is the one that the default group is bound to, else that of `own_device`, else rank modulo devices.
    """
    handle = getattr(torch, device_type, None)
    if device_type == "cpu" or handle is None or dist.get_backend() == "fake":
        return
    bound = dist.distributed_c10d._get_default_group().bound_device_id if dist.is_initialized() else None
    if bound is not None and bound.type == device_type and handle.is_available():
        if handle.current_device() != bound.index:
            handle.set_device(bound.index)
        return
    if handle.is_initialized():
        return
    count = handle.device_count()
    if count == 0:
        return
    if "LOCAL_RANK" in os.environ:
        handle.set_device(own_device(device_type))
        return
    warnings.warn(
        f"No device was chosen and LOCAL_RANK is not set: rank {world.rank} takes {device_type}:{world.rank % count}. "
        f"Call torch.{device_type}.set_device() before making the mesh, or start with torchrun.",
        stacklevel=4,
    )
    if world.size > count and world.size % count:
        raise RuntimeError(
            f"DeviceMesh only support homogeneous hardware, but found {world.size} ranks "
            f"and {count} {device_type} devices!"
        )
    handle.set_device(world.rank % count)


def backward_on_this_thread(device_type: str) -> None:
    """Let backwards that this thread starts run on it, also those of an accelerator.

    torch runs the latter on a thread of its own for each device. What the program has set for its thread
    (`implicit_replication`, `use_cost_model`, `strict_rules`, `equal_seeds`) would not hold there, and errors would
    not know the program's line. With one device a process that thread gains nothing: who calls backward waits for it.
    (The threads of simulated ranks do without it in any case.)
    """
    handle = getattr(torch, device_type, None)
    if device_type not in ("cpu", "meta") and handle is not None and handle.is_available():
        torch.autograd.set_multithreading_enabled(False)


def normalise_override(given: dict[Any, Any], ndim: int, names: tuple[str, ...] | None) -> tuple[BackendConfig, ...]:
    """(backend, options) for each axis from a dict by index or name. Raises RuntimeError for keys that name none."""
    out: list[BackendConfig] = []
    for i in range(ndim):
        name = names[i] if names else None
        if name is not None and name in given:
            if i in given:
                raise RuntimeError(f"Found redundant dim index {i} and name {name} in backend_override")
            value = given.pop(name)
        elif i in given:
            value = given.pop(i)
        else:
            out.append((None, None))
            continue
        if isinstance(value, str):
            out.append((value, None))
        elif isinstance(value, tuple):
            out.append((value[0], value[1]))
        else:
            out.append((None, value))
    if given:
        raise RuntimeError(
            f"Found invalid keys in backend_override: got {list(given)}, expected integers in range [0, {ndim}) "
            f"or one of {names or ()}"
        )
    return tuple(out)
