"""What the makers of meshes accept: ranks in any form, names, backends, and the device of the process."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dtensor.comm.world import World
from dtensor.errors import expect, explain_error, short
from dtensor.mesh.geometry import BackendConfig, Ranks

__all__ = [
    "as_names", "as_ranks", "as_shape", "backward_on_this_thread", "check_device_type", "choose_device",
    "normalise_override", "own_device", "start_world", "typed_names",
]  # fmt: skip


def as_ranks(mesh: object) -> Ranks:
    """Ranks as an int64 array. Raises TypeError for what is not made of integers, ValueError for a ragged list."""
    if isinstance(mesh, torch.Tensor):
        mesh = mesh.detach().cpu().tolist()
    try:
        array = np.asarray(mesh)
    except ValueError as error:
        raise ValueError(
            explain_error("DeviceMesh", f"mesh={short(mesh)}", "ranks make a full grid", "[[0, 1], [2, 3]]")
        ) from error
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(
            explain_error(
                "DeviceMesh", f"{array.dtype} in mesh={short(mesh)}", "the mesh takes integer ranks",
                'DeviceMesh("cpu", [[0, 1], [2, 3]])',
            )
        )  # fmt: skip
    return np.ascontiguousarray(array, dtype=np.int64).reshape(array.shape)


def as_shape(shape: object) -> tuple[int, ...]:
    """`mesh_shape` as a tuple. TypeError for what is not made of integers, ValueError for an axis without ranks."""
    given = (shape,) if isinstance(shape, int) and not isinstance(shape, bool) else shape
    fix = 'init_device_mesh("cpu", (2, 4))'
    expect("init_device_mesh", "mesh_shape", given, (Sequence, np.ndarray), "a tuple of ints, one for each axis", fix)
    for n in given:  # type: ignore[attr-defined]
        if not hasattr(n, "__index__") or isinstance(n, bool):
            expect("init_device_mesh", f"mesh_shape={short(shape)}: axis", n, int, "an int", fix)
        if n < 1 or n > 2**31:
            rule = "every axis needs at least one rank, and no more than a world can have"
            raise ValueError(explain_error("init_device_mesh", f"mesh_shape={short(shape)}", rule, fix))
    made = tuple(int(n) for n in given)  # type: ignore[attr-defined]
    if math.prod(made) > 2**31:
        raise RuntimeError(f"Mesh should not be bigger than default world size, but found {math.prod(made)} ranks!")
    return made


@functools.lru_cache(maxsize=256)
def _known_device(device_type: str) -> bool:
    try:
        return device_type.isalnum() and torch.device(device_type).index is None
    except RuntimeError:
        return False


def check_device_type(call: str, device_type: object) -> None:
    """TypeError for what is no string, ValueError for one that torch does not know, RuntimeError for "cuda:0"."""
    fix = f'{call}("cpu", ...) or {call}("cuda", ...)'
    expect(call, "device_type", device_type, str, "the name of a device type", fix)
    kind, colon, index = str(device_type).partition(":")
    if colon and _known_device(kind):
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. Pass the type alone, device.type\n"
            f"  fix: {call}({kind!r}, ...)"
        )
    if not _known_device(str(device_type)):
        got = f"device_type={short(device_type)}"
        raise ValueError(explain_error(call, got, "device_type must be one that torch knows", fix))


def typed_names(names: object, ndim: int) -> tuple[str, ...] | None:
    """Names as a tuple, None for none; a string is an only axis's name. TypeError for what is not made of strings."""
    if names is None:
        return None
    made = (names,) if isinstance(names, str) and ndim == 1 else names
    if not isinstance(made, Sequence) or not all(isinstance(n, str) for n in made):
        raise TypeError(
            explain_error(
                "DeviceMesh", f"mesh_dim_names={short(names)}", "it is a tuple of strings, one for each axis",
                'mesh_dim_names=("dp", "tp")',
            )
        )  # fmt: skip
    return tuple(made)


def as_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    """Names as a tuple, None for none. Raises ValueError for a wrong number, RuntimeError for a name given twice."""
    made = typed_names(names, ndim)
    if not made:
        return None
    if len(made) != ndim:
        raise ValueError(
            f"mesh_dim_names {made} names {len(made)} dimensions of a mesh that has {ndim}\n"
            "  fix: one each"
        )
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
            f"Found invalid keys in backend_override: got {short(list(given))}, expected integers in range [0, {ndim}) "
            f"or one of {names or ()}"
        )
    return tuple(out)
