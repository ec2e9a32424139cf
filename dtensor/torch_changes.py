"""All that this project changes of torch for the whole process: one list, each with its reason; `undo` undoes it.

`import dtensor` changes nothing that a program without DTensors can notice. What is listed for "mesh" is changed when
the first mesh is made, which every DTensor has; what is listed for "rules" when the first op looks for its rule, or
the rules are imported. Each change passes calls without a DTensor on as they are.

Not here, as it does not stay or is no change: `simulate` stands for c10d's world while it runs; `dtensor.lower` records
through torch's generators, and says that it compiles, while it traces; `dtensor.swap` is there to change torch, and has
its own list (`dtensor.swap.names`); ops of our own lie in namespaces of their own (`dtensor::`, `shardwright::`); torch
is told of our classes (safe globals, optimizers' lists of types, constants of dynamo), which adds to its tables; a
group of a mesh has an entry of ours in c10d's table of ranks, by which its end is noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

__all__ = ["CHANGES", "Change", "apply", "library", "replace", "undo", "undoing"]


class Change(NamedTuple):
    """One change: `what` of torch, `why`, `when` it is made, and `by` which function, "module:name"."""

    what: str
    why: str
    when: str
    by: str


CHANGES = (
    Change(
        "torch.to_dlpack, torch.utils.dlpack.to_dlpack, torch._C._to_dlpack, _to_dlpack_versioned",
        "they give out memory and ask no method of the tensor: a DTensor's is a part, or none",
        "mesh", "dtensor.tensor_methods.memory:refuse_dlpack",
    ),
    Change(
        "torch._meta_registrations.device_hint",
        "shape functions take a bare meta tensor for one of CUDA; a call on DTensors says its own device",
        "mesh", "dtensor.dispatch.metadata:say_devices",
    ),
    Change(
        "kernels of composite ops for tensor subclasses (aten::vander, dist, one_hot, ...)",
        "they would be taken apart by values of one rank, or make plain tensors of numbers alone",
        "mesh", "dtensor.dispatch.composites:install",
    ),
    Change(
        "Python functions of torch that make plain tensors (recurrent layers, packed sequences, ...)",
        "what they make is replicated by what they are; each has its reason in the list",
        "mesh", "dtensor.dispatch.constants:install",
    ),
    Change(
        "kernels of aten::linear and aten::matmul for tensor subclasses",
        "where nothing is sent they run as one node instead of a chain of ops",
        "mesh", "dtensor.dispatch.products:install",
    ),
    Change(
        "a hook before every optimizer's step",
        "gradients that are pending sums are reduced, many at a time, before they are used",
        "rules", "dtensor.propagation_rules.optimizers.fused:install",
    ),
    Change(
        "_multi_tensor_* of torch.optim's modules",
        "a step on tensors laid out alike runs on the local tensors",
        "rules", "dtensor.propagation_rules.optimizers.lists:install",
    ),
    Change(
        "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype",
        "what measures or clips gradients settles those that are pending",
        "rules", "dtensor.propagation_rules.optimizers.pending_gradients:install",
    ),
    Change(
        "get_total_norm, clip_grads_with_norm_ of torch.nn.utils",
        "gradients may lie on several meshes, or in part on none",
        "rules", "dtensor.propagation_rules.optimizers.norms_over_meshes:install",
    ),
)  # fmt: skip

_lock = threading.RLock()
_made: set[Change] = set()
_undo: list[Callable[[], None]] = []


def apply(when: str) -> None:
    """Make the changes listed for `when` that have not been made."""
    with _lock:
        for change in CHANGES:
            if change.when == when and change not in _made:
                _made.add(change)
                module, _, name = change.by.partition(":")
                getattr(import_module(module), name)()


def undo() -> None:
    """Undo all changes, the last one first. DTensors made before and after lack what the changes do for them."""
    with _lock:
        while _undo:
            _undo.pop()()
        _made.clear()


def undoing(f: Callable[[], None]) -> None:
    """Have `f` called by `undo`."""
    _undo.append(f)


def replace(holder: Any, name: str, new: object) -> None:
    """`holder.name = new`, until `undo`."""
    old = getattr(holder, name)
    setattr(holder, name, new)
    undoing(lambda: setattr(holder, name, old))


def library(space: str) -> torch.library.Library:
    """A library that takes the place of kernels in the namespace `space`, until `undo`."""
    made = torch.library.Library(space, "IMPL")
    undoing(made._destroy)
    return made
