"""Which dim of which parameter goes with a module's output features, and which with its input features.

    Linear              weight [out, in]           features last
    Embedding           weight [rows, out]         features last; the "input features" are the rows
    Conv1d/2d/3d        weight [out, in/g, ...]    features are the channels, before the spatial dims
    ConvTranspose       weight [in, out/g, ...]
    weight_dims=(o, i)  any other module that multiplies by a `weight` with its output features on dim o

With g groups, whole groups go together: the first dim of a convolution's weight is both kinds of channels then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

__all__ = ["Kind", "kind_of"]


@dataclass(frozen=True, slots=True)
class Kind:
    """`column`, `row`: the dim of each parameter that is sharded; those not named are replicated.

    Attributes:
        dim: where the features are in input and output, counted from the end.
        inputs: how many input features there are; None for a lookup, whose input has none.
        groups: groups of features that do not mix.
    """

    column: Mapping[str, int]
    row: Mapping[str, int]
    dim: int
    inputs: int | None
    groups: int = 1


def kind_of(module: nn.Module, weight_dims: tuple[int, int] | None = None) -> Kind | None:
    """The kind of `module`; None where it is none that is known. `weight_dims`: (output, input) dim of its weight."""
    if weight_dims is not None:
        out, into = weight_dims
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2 or sorted((out % 2, into % 2)) != [0, 1]:
            return None
        return Kind({"weight": out % 2, "bias": 0}, {"weight": into % 2}, -1, weight.shape[into])
    if isinstance(module, nn.Linear):
        return Kind({"weight": 0, "bias": 0}, {"weight": 1}, -1, module.in_features)
    if isinstance(module, nn.Embedding):
        return Kind({"weight": 1}, {"weight": 0}, -1, None)
    if isinstance(module, _ConvNd):
        transposed, groups = isinstance(module, _ConvTransposeNd), module.groups
        out = 1 if transposed and groups == 1 else 0
        dim = -1 - len(module.kernel_size)
        return Kind({"weight": out, "bias": 0}, {"weight": 0 if transposed else 1}, dim, module.in_channels, groups)
    return None
