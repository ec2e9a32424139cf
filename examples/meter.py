"""What one training step moves and holds: collectives by kind with their bytes, and the bytes of live tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# How many of its n positions' parts a rank receives, as a share of the full tensor (ring algorithms).
KINDS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "scatter": lambda n: 1.0,
}


class Meter(TorchDispatchMode):
    """Watches every op on plain tensors of this process while it is entered.

    `traffic[kind]` is (calls, bytes this rank receives); `peak` the most bytes held by tensors at one
    time, `holdings` (what lived before) included. Scratch memory inside an op is not seen.
    """

    def __init__(self, holdings: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.traffic: dict[str, tuple[int, int]] = {}
        self.live = self.peak = 0
        self._known: set[int] = set()
        for tensor in holdings:
            self._hold(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # the engine runs the op; what it does with plain tensors comes here
        out = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace in NAMESPACES:
            self._collective(name.replace("_", ""), args, kwargs or {}, out)
        for tensor in tensors_in(out):
            self._hold(tensor)
        return out

    def _hold(self, tensor: Tensor) -> None:
        """Count the storage of `tensor`, once, until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def received(self, kind: str, ranks: tuple[int, ...], elements: int, itemsize: int) -> None:
        """What simulated ranks report, whose collectives are no ops."""
        self._note(kind, elements * itemsize)

    def _collective(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        kind = next((k for k in KINDS if k.replace("_", "") in name), None)
        if kind is not None:
            whole = max(sum(t.nbytes for t in tensors_in(group)) for group in (*args, out))
            self._note(kind, round(whole * KINDS[kind](group_size(args, kwargs))))

    def _note(self, kind: str, received: int) -> None:
        calls, total = self.traffic.get(kind, (0, 0))
        self.traffic[kind] = (calls + 1, total + received)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def group_size(args: Any, kwargs: Any) -> int:
    """Ranks of the process group among a collective's arguments, which is an object or a name."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value).size()
            except RuntimeError:
                continue
        if isinstance(value, str) and value not in ("sum", "avg", "min", "max", "product"):
            return dist.distributed_c10d._resolve_process_group(value).size()
    raise ValueError("a collective without a process group")
