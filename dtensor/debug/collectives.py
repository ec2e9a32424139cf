"""What counts as a collective: its kind, the operator it is counted under, and the elements this rank receives.

Three sources, all counted under one key per kind, torch's legacy `torch.ops.c10d_functional.*` packets:

    _c10d_functional.*    functional collectives (what this engine issues on process groups)
    c10d.*_               torch.distributed's own in-place collectives
    observers             collectives of simulated and fake worlds, which no dispatcher sees
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d

from dtensor.comm.observers import MESSAGE, purpose
from dtensor.placement import REDUCE_OPS

__all__ = ["Collective", "CommCounts", "classify", "key_of_kind"]

_KIND = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce_coalesced": "all_reduce_coalesced",
    "_c10d_functional::all_reduce_coalesced_": "all_reduce_coalesced",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather_coalesced",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter_coalesced",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
    "_c10d_functional::broadcast_": "broadcast",
    "_c10d_functional_autograd::all_to_all_single": "all_to_all",
    "_c10d_functional_autograd::all_gather_into_tensor": "all_gather",
    "_c10d_functional_autograd::reduce_scatter_tensor": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce_coalesced",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_coalesced_": "all_gather_coalesced",
    "c10d::allgather_into_tensor_coalesced_": "all_gather_coalesced",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter_coalesced",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::scatter_": "scatter",
    "c10d::gather_": "gather",
    "c10d::reduce_": "reduce",
    "c10d::send": "send",
    "c10d::recv_": "recv",
    "c10d::recv_any_source_": "recv",
}

_KEY = {
    "all_reduce": ("c10d_functional", "all_reduce"),
    "all_reduce_coalesced": ("c10d_functional", "all_reduce_coalesced"),
    "all_gather": ("c10d_functional", "all_gather_into_tensor"),
    "all_gather_coalesced": ("c10d_functional", "all_gather_into_tensor_coalesced"),
    "reduce_scatter": ("c10d_functional", "reduce_scatter_tensor"),
    "reduce_scatter_coalesced": ("c10d_functional", "reduce_scatter_tensor_coalesced"),
    "all_to_all": ("c10d_functional", "all_to_all_single"),
    "broadcast": ("c10d_functional", "broadcast"),
    "scatter": ("c10d", "scatter_"),
    "gather": ("c10d", "gather_"),
    "reduce": ("c10d", "reduce_"),
    "send": ("c10d", "send"),
    "recv": ("c10d", "recv_"),
}


class Collective(NamedTuple):
    """One collective as this rank sees it. `received` counts elements that come from other ranks."""

    kind: str
    size: int
    received: float
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes received from other ranks; an all-reduce counts as reduce-scatter and all-gather."""
        return round(self.received * self.itemsize)


class CommCounts(dict[Any, int]):
    """Counts by operator packet; absent ones are 0.

    Keys are the `torch.ops.c10d_functional.*` packets. Looking up the packet that really ran, e.g.
    `torch.ops.c10d.allreduce_`, gives how often that one did.
    """

    def __init__(self, by_kind: dict[str, int], by_operator: dict[Any, int]) -> None:
        super().__init__({key_of_kind(kind): n for kind, n in by_kind.items()})
        self._by_operator = by_operator

    def __missing__(self, key: Any) -> int:
        return self._by_operator.get(key, 0)


def key_of_kind(kind: str) -> Any:
    """The operator packet that collectives of `kind` are counted under."""
    import torch.distributed._functional_collectives  # noqa: F401 - defines the c10d_functional operators

    namespace, name = _KEY.get(kind, ("c10d", kind))
    return getattr(getattr(torch.ops, namespace), name)


def classify(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> Collective | None:
    """The collective that an operator call is, or None."""
    name = func._schema.name
    kind = _KIND.get(name)
    if kind is None or purpose.kind == MESSAGE:
        return None
    values = [*args, *kwargs.values()]
    group = _group(values)
    k = 1 if group is None else group.size()
    given = list(_tensors(args[1] if name.startswith("c10d::") and _second_is_input(name) else args[0]))
    made = list(_tensors(args[0] if name.startswith("c10d::") else out))
    sent, got = sum(t.numel() for t in given), sum(t.numel() for t in made)
    rest = (k - 1) / max(k, 1)
    received = {
        "all_reduce": 2 * sent * rest,
        "all_gather": got - sent if got >= sent else got * rest,
        "reduce_scatter": sent * rest,
        "all_to_all": got - got * _own_share(values, k, 0 if group is None else group.rank()),
        "gather": got,
        "send": 0,
    }.get(kind.removesuffix("_coalesced"), got)
    if kind in ("broadcast", "scatter") and group is not None and _root(values) == group.rank():
        received = 0
    return Collective(purpose.kind or kind, k, received, next((t.element_size() for t in (*made, *given)), 0))


def _second_is_input(name: str) -> bool:
    """c10d operators that move data from one buffer to another take the output first."""
    return any(word in name for word in ("gather", "scatter", "alltoall"))


def _tensors(x: object) -> Iterable[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _tensors(y)


def _own_share(values: Iterable[object], k: int, rank: int) -> float:
    """Part of an all-to-all's output that comes from this rank itself: the first list are split sizes, or tensors."""
    for v in values:
        if isinstance(v, (list, tuple)) and len(v) == k and all(isinstance(t, torch.Tensor) for t in v):
            sizes = [t.numel() for t in v]
            return sizes[rank] / sum(sizes) if sum(sizes) else 0.0
        if isinstance(v, (list, tuple)) and len(v) == k and all(isinstance(n, int) for n in v) and sum(v):
            return float(v[rank] / sum(v))
    return 1 / k


def _root(values: Iterable[object]) -> int | None:
    """The group rank that a broadcast or scatter comes from: the first number among an operator's arguments."""
    return next((v for v in values if type(v) is int), None)


def _group(values: Iterable[object]) -> dist.ProcessGroup | None:
    """The group among an operator's arguments, which hold it as it is or by its name."""
    for v in values:
        if isinstance(v, dist.ProcessGroup):
            return v
        try:
            if isinstance(v, torch.ScriptObject):
                return dist.ProcessGroup.unbox(v)
            if isinstance(v, str) and v not in REDUCE_OPS:
                return _c10d._resolve_process_group(_c10d.GroupName(v))
        except (RuntimeError, ValueError, KeyError, TypeError):
            continue
    return None
