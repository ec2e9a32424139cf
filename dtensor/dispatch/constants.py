"""Composites of torch that make plain tensors which meet their arguments: the one list, each with its reason.

What is on the list follows from shapes and numbers alone, so it is the same on all ranks and counts as replicated,
eagerly and in traces. An op is caught by its name, above autograd; a Python function of torch is replaced by one that
calls it and says so meanwhile. Where an argument, or a parameter of the layer that is called, is a plain tensor, which
is the user's, nothing is granted.

A composite that is not listed is refused where a plain tensor of its own meets a DTensor; inside
`dtensor.experimental.implicit_replication()` it runs.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from dtensor.dispatch.call import flat, is_dtensor
from dtensor.dispatch.composites import catch
from dtensor.dispatch.plain import COMPARED, CONSTANT, granted, only_numbers
from dtensor.torch_changes import replace

__all__ = ["FUNCTIONS", "OPS", "Listed", "install"]

_PLACES = "which places of the input each place of the output is made of, by their sizes and scales"
OPS: dict[str, str] = {
    "_upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec _upsample_lanczos2d_aa.vec": _PLACES,
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d": _PLACES,
    "_upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec": _PLACES,
    "upsample_bicubic2d upsample_bicubic2d.vec upsample_bilinear2d upsample_bilinear2d.vec": _PLACES,
    "upsample_linear1d upsample_linear1d.vec upsample_trilinear3d upsample_trilinear3d.vec": _PLACES,
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d": _PLACES,
    "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec": _PLACES,
    "quantile quantile.scalar nanquantile nanquantile.scalar": "the fraction, spread over the rows",
    "one_hot": "the numbers of the classes",
    "matrix_power linalg_matrix_power": "the identity, for the power 0",
    "istft": "a window of ones",
    "ctc_loss.IntList": "the lengths of the targets, which are numbers",
    "multi_margin_loss multilabel_margin_loss_forward": "the numbers of the classes",
    "scaled_dot_product_attention _scaled_dot_product_attention_math": "a causal mask, by the lengths",
}
"""Ops of torch, and what their plain tensors are. Some are taken apart in C++, some in Python under a compiler."""



class Listed(NamedTuple):
    """What the plain tensors of a Python function of torch are, and which of its arguments may be plain as well."""

    grant: int
    reason: str
    argument: str = ""


FUNCTIONS: dict[str, Listed] = {
    "torch.functional:_unravel_index": Listed(CONSTANT, "how many elements a step along each dim is"),
    "torch.masked._ops:mean": Listed(CONSTANT, "how many elements are reduced, where there is no mask"),
    "torch.masked._ops:_std_var": Listed(CONSTANT, "how many elements are reduced, where there is no mask"),
    "torch.nn.functional:multi_head_attention_forward": Listed(CONSTANT, "a key and a value of zeros"),
    "torch._lowrank:get_approximate_basis": Listed(COMPARED, "a random start, the same where ranks are seeded alike"),
    "torch.nn.utils.rnn:pack_padded_sequence": Listed(COMPARED, "the order of the sequences by length", "lengths"),
    "torch.nn.utils.rnn:pad_packed_sequence": Listed(COMPARED, "the order of the sequences"),
    "torch.nn.modules.rnn:_apply_permutation": Listed(COMPARED, "the order of the sequences", "permutation"),
    **{
        f"torch.nn.modules.rnn:{layer}.forward": Listed(CONSTANT, "a first state of zeros")
        for layer in ("GRU", "GRUCell", "LSTM", "LSTMCell", "RNN", "RNNCell")
    },
}
"""Python functions of torch. What is random or follows from a plain argument is compared over the ranks."""


def _catch_op(name: str) -> None:
    packet, _, overload = name.partition(".")
    if not hasattr(getattr(torch.ops.aten, packet, None), overload or "default"):
        return

    def call(op: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with granted.set_to(CONSTANT if only_numbers(args, kwargs) else granted.value):
            return op()

    catch(f"aten::{name}", call)


def _replace(name: str, listed: Listed) -> None:
    home, _, path = name.partition(":")
    *owner, function = path.split(".")
    place: Any = functools.reduce(getattr, owner, import_module(home))
    original = getattr(place, function)
    names, grant = list(inspect.signature(original).parameters), functools.partial(_grant, listed)

    def call(*args: Any, **kwargs: Any) -> Any:
        with grant({**dict(zip(names, args, strict=False)), **kwargs}):
            return original(*args, **kwargs)

    # TorchScript reads the source of what is wrapped, and resolves its names in the globals of what it is given.
    made: Any = FunctionType(call.__code__, original.__globals__, function, None, call.__closure__)
    functools.update_wrapper(made, original)
    for holder in (place, sys.modules[home.rpartition(".")[0]]):  # a package may hand on what its module has
        if getattr(holder, function, None) is original:
            replace(holder, function, made)


def _grant(listed: Listed, arguments: dict[str, Any]) -> AbstractContextManager[None]:
    """What holds while a listed function runs on these arguments."""
    given = [_tensors_of(a) for name, a in arguments.items() if name != listed.argument]
    ours = any(map(is_dtensor, flat((*given, arguments.get(listed.argument)), {})))
    return granted.set_to(listed.grant if ours and only_numbers(given, {}) else granted.value)


def _tensors_of(a: Any) -> Any:
    """An argument, where a layer stands for its parameters and buffers, and packed sequences for their data."""
    if isinstance(a, torch.nn.Module):
        return [*a._parameters.values(), *a._buffers.values()]
    return a.data if isinstance(a, PackedSequence) else a


for _name in " ".join(OPS).split():
    _catch_op(_name)


def install() -> None:
    """Replace the listed functions by those that say what they are while they run."""
    for name, listed in FUNCTIONS.items():
        _replace(name, listed)
