"""The memory that a redistribution holds at one time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor.redistribute.executor.run import redistribute_local
from dtensor.spec import Spec


class Peak(TorchDispatchMode):
    """The most bytes that storages made inside hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def _gone(self, n: int) -> None:
        self.now -= n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage not in self.known and not any(t.is_set_to(a) for a in tree_leaves(args) if a is t):
                    self.known.add(storage)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage.nbytes())
        return out


def allocated(x: torch.Tensor, a: Spec, b: Spec, calls: int) -> int:
    """Bytes that a redistribution holds at one time, the least of some calls: gloo's thread may let go of one late."""
    redistribute_local(x, a, b)
    peaks = []
    for _ in range(calls):
        peak = Peak()
        peak.known.add(x.untyped_storage())
        with peak:
            redistribute_local(x, a, b)
        peaks.append(peak.most)
    return min(peaks)
