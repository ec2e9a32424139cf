"""The other forms of batch normalisation, told in terms of `native_batch_norm`.

They return the same three tensors, and some of them more: space that a backend reserves for its backward (here there
is none), and the new running statistics, where those that are given must not be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtensor.dispatch.hit import special
from dtensor.placement import Replicate
from dtensor.tensor import DTensor

aten = torch.ops.aten


def _named(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; running statistics are None where the op takes none."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | dict(kwargs)
    return {"running_mean": None, "running_var": None, "training": False, **given}


def _norm(named: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    made: tuple[Any, ...] = aten.native_batch_norm.default(*(named[n] for n in names))
    return made


def _copied(named: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """Put copies in the place of the running statistics, and return them."""
    named["running_mean"], named["running_var"] = named["running_mean"].clone(), named["running_var"].clone()
    return named["running_mean"], named["running_var"]


def _reserved(x: DTensor) -> DTensor:
    mesh = x.device_mesh
    return DTensor.from_local(
        torch.empty(0, dtype=torch.uint8, device=x.device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )


@special("aten._native_batch_norm_legit.default")
def _legit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return _norm(_named(aten._native_batch_norm_legit.default, args, kwargs))


@special("aten._native_batch_norm_legit.no_stats")
def _no_stats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return _norm(_named(aten._native_batch_norm_legit.no_stats, args, kwargs))


@special("aten._native_batch_norm_legit_no_training.default")
def _no_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return _norm(_named(aten._native_batch_norm_legit_no_training.default, args, kwargs))


@special("aten._native_batch_norm_legit_functional.default")
def _functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten._native_batch_norm_legit_functional.default, args, kwargs)
    new = _copied(named)
    return (*_norm(named), *new)


@special("aten._batch_norm_with_update.default")
def _with_update(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten._batch_norm_with_update.default, args, kwargs) | {"training": True}
    return (*_norm(named), _reserved(named["input"]))


@special("aten._batch_norm_with_update_functional.default")
def _with_update_functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten._batch_norm_with_update_functional.default, args, kwargs) | {"training": True}
    new = _copied(named)
    return (*_norm(named), _reserved(named["input"]), *new)


@special("aten._batch_norm_no_update.default")
def _no_update(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten._batch_norm_no_update.default, args, kwargs)
    return (*_norm(named), _reserved(named["input"]))


@special("aten.batch_norm_backward.default")
def _backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    named = _named(aten.batch_norm_backward.default, args, kwargs)
    names = (
        "grad_out input weight running_mean running_var save_mean save_var update eps output_mask"
    ).split()  # fmt: skip
    made: tuple[Any, ...] = aten.native_batch_norm_backward.default(*(named[n] for n in names))
    return made
