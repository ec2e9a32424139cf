"""A step of a foreach optimizer on the local tensors, where all that it reads and writes is laid out alike.

torch's foreach optimizers work element by element: a parameter, its gradient and its state, tensor by tensor, in up to
a dozen list ops. Where these are laid out alike and nothing is pending, every one of those ops is the same op on the
local tensors, so the whole step is: torch's own function is called with lists of local tensors, and each tensor is
looked at once, not once an op.

    adamw    p, grad, exp_avg, exp_avg_sq: f32[8@dp,8] each       one look, 8 list ops on plain tensors

What was written is seen by the versions of the local tensors; autograd, and views that had to move data, learn of it as
from the ops. All else goes the ordinary way: another layout, pending gradients, states that are yet to be made, numbers
that are DTensors, and steps that a compiler, a tracer or a dispatch mode looks at.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import adadelta, adagrad, adam, adamax, nadam, radam, rmsprop, sgd

from dtensor.comm.world import kept
from dtensor.dispatch.materialized import note_written
from dtensor.spec import Spec
from dtensor.tensor import DTensor
from dtensor.torch_changes import replace

__all__ = ["on_local_tensors"]

_MOST = 1024
_ONLY = {DTensor}
_PLAIN = {torch.Tensor}
_spec_of, _local_of = operator.attrgetter("_spec"), operator.attrgetter("_local_tensor")
_version_of, _ndim_of = operator.attrgetter("_version"), operator.attrgetter("ndim")
_alike: dict[tuple[tuple[Spec, ...], ...], bool] = kept({})
"""By the specs of the lists: whether, element by element, they are laid out alike."""


def _known_alike(specs: tuple[tuple[Spec, ...], ...]) -> bool:
    found = _alike.get(specs)
    if found is None:
        found = all(map(_are_alike, *specs))
        if any(type(s) is not Spec for one in specs for s in one):
            return False  # views that had to move data
        if len(_alike) >= _MOST:
            _alike.clear()
        _alike[specs] = found
    return found


def _are_alike(first: Spec, *others: Spec) -> bool:
    """Whether tensors of these specs may be worked on part by part."""
    return (
        first.mesh.coord is not None
        and not first.has_partial()
        and all(
            s.mesh == first.mesh and s.placements == first.placements and s.shape == first.shape for s in others
        )
    )  # fmt: skip


def _lists_of(args: Sequence[Any], named: dict[str, Any]) -> list[list[DTensor]] | None:
    """The lists of DTensors among the arguments of a step; None where it is not one for local tensors."""
    found: list[list[DTensor]] = []
    for a in args:
        if type(a) is list and a:
            kinds = set(map(type, a))
            if kinds == _ONLY and len(a) == len(args[0]):
                found.append(a)
            elif not all(issubclass(k, torch.Tensor) and k is not DTensor for k in kinds):
                return None  # some have no state yet
            elif any(map(_ndim_of, a)):
                return None  # more than numbers of steps: whose values are they, beside DTensors?
        elif isinstance(a, DTensor):
            return None
    if any(isinstance(a, DTensor) for a in named.values()):
        return None
    return found if _known_alike(tuple(tuple(map(_spec_of, a)) for a in found)) else None


def on_local_tensors(step: Callable[..., None]) -> Callable[..., None]:
    """`step`, a function `(params, grads, *states, **numbers)` that works element by element, on local tensors."""

    @functools.wraps(step)
    def run(*args: Any, **named: Any) -> None:
        if torch.compiler.is_compiling() or not args or not args[0] or type(args[0][0]) is not DTensor:
            return step(*args, **named)
        if torch._C._len_torch_dispatch_stack() or torch.is_inference_mode_enabled():
            return step(*args, **named)
        lists = _lists_of(args, named)
        if lists is None:
            return step(*args, **named)
        local = [list(map(_local_of, a)) for a in lists]
        if any(set(map(type, a)) != _PLAIN for a in local) or any(t.is_inference() for a in local for t in a):
            return step(*args, **named)
        before = [list(map(_version_of, a)) for a in local]
        plain = {id(a): parts for a, parts in zip(lists, local, strict=True)}
        try:
            step(*(plain.get(id(a), a) for a in args), **named)
        finally:
            for a, parts, was in zip(lists, local, before, strict=True):
                if (now := list(map(_version_of, parts))) != was:
                    written = [t for t, v, w in zip(a, now, was, strict=True) if v != w]
                    increment_version(written)
                    note_written((written,), (0,))
        return None

    return run


def install() -> None:
    """Run foreach steps of torch's optimizers on local tensors where that is right."""
    for module in (adadelta, adagrad, adam, adamax, nadam, radam, rmsprop, sgd):
        name = f"_multi_tensor_{module.__name__.rpartition('.')[2]}"
        if (step := getattr(module, name, None)) is not None:
            replace(module, name, on_local_tensors(step))
