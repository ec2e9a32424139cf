"""torch's cross entropy of a linear layer in chunks: on DTensors, the linear layer and the loss.

The chunked op saves memory by writing into buffers that it makes itself, plain ones, in its backward too. Shards
save that memory already, and the two ops that it stands for have rules. The exchange is made above autograd
(`dtensor.composites`), so the gradient is that of the two ops; plain tensors never come here.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
import torch.nn.functional as F

from dtensor.composites import instead_of

__all__: list[str] = []


def _unchunked(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None,
    class_weight: torch.Tensor | None, ignore_index: int, *_: Any, **__: Any,
) -> torch.Tensor:  # fmt: skip
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits, target, class_weight, ignore_index=ignore_index, reduction="none")


with contextlib.suppress(ImportError):  # older torch
    importlib.import_module("torch.nn.modules.linear_cross_entropy")
    instead_of("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")(_unchunked)
