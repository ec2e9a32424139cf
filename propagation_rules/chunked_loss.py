"""torch's cross entropy of a linear layer in chunks: on DTensors, the linear layer and the loss.

The chunked op saves memory by writing into buffers that it makes itself, plain ones, in its backward too. Shards
save that memory already, and the two ops that it stands for have rules. The exchange is made above autograd, by a
kernel of the dispatch key that only tensors of Python classes have, so the gradient is that of the two ops; plain
tensors never come here.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
import torch.nn.functional as F

from dtensor.tensor import DTensor

__all__: list[str] = []

NAME = "_linear_cross_entropy_batch_chunked_no_reduction"


def _unchunked(
    keys: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None,
    class_weight: torch.Tensor | None, ignore_index: int, *rest: Any, **more: Any,
) -> torch.Tensor:  # fmt: skip
    if not isinstance(x, DTensor):
        op = getattr(torch.ops.torch_nn, NAME).default
        rest_keys = keys.remove(torch._C.DispatchKey.PythonTLSSnapshot)
        return op.redispatch(rest_keys, x, weight, target, bias, class_weight, ignore_index, *rest, **more)
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits, target, class_weight, ignore_index=ignore_index, reduction="none")


with contextlib.suppress(ImportError):  # older torch
    importlib.import_module("torch.nn.modules.linear_cross_entropy")
    _library = torch.library.Library("torch_nn", "IMPL")
    _library.impl(NAME, _unchunked, "PythonTLSSnapshot", with_keyset=True)
