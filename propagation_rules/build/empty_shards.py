"""What a rank with an empty shard computes where the op itself would fail on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dtensor.spec import Spec

__all__ = ["is_empty_shard", "zeros_of"]


def is_empty_shard(spec: Spec) -> bool:
    """True where this rank's shard of a tensor that is not empty is."""
    return spec.local_numel == 0 and spec.numel > 0


def zeros_of(outs: Sequence[Spec | None]) -> Callable[..., object]:
    """A stand-in for an op: zeros in the local shapes of `outs`; a tuple of them where there are several."""

    def run(x: torch.Tensor, *_: object, **__: object) -> object:
        made = tuple(None if s is None else x.new_zeros(s.local_shape, dtype=s.dtype) for s in outs)
        return made[0] if len(made) == 1 else made

    return run
