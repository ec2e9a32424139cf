"""What stands in the place of NCCL's grouped launches in tests without a GPU.

`Group` takes down what it is asked between start and end and only then carries it out; `NothingRead` fails where
something is read before; `as_on_gpus` has CPU tensors taken for those of a device with streams.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor import DTensor, Placement, Replicate
from dtensor.comm import pending as comm_sent
from dtensor.comm.c10d import C10dCommunicator
from dtensor.comm.wire import eager
from dtensor.dispatch import lists as dispatch_lists
from dtensor.dispatch import miss as dispatch_miss
from dtensor.redistribute.executor import coalescing as together
from dtensor.spec import Spec

R = Replicate()


class Ended:
    """The work of a launch."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def wait(self) -> None:
        self.log.append("wait")


class Group:
    """A process group that launches what it is asked between start and end at the end; `log` says in which order."""

    def __init__(self, group: Any, log: list[Any], fails: str = "") -> None:
        self.group, self.log, self.fails = group, log, fails
        self.open: list[tuple[Callable[..., Any], tuple[Any, ...], list[Any]]] | None = None
        self.unread: set[int] = set()

    def _start_coalescing(self, device: torch.device) -> None:
        assert self.open is None
        self.open = []
        self.log.append("start")

    def _end_coalescing(self, device: torch.device) -> Any:
        assert self.open is not None
        calls, self.open = self.open, None
        self.log.append("end")
        if self.fails == "end":
            raise RuntimeError("NCCL error: a peer is gone")
        for call, args, alive in calls:
            assert all(ref() is not None for ref in alive), "memory was given back before the launch"
            if call.__name__ == "alltoall_base" and not args[1].numel() and dist.get_backend(self.group) == "fake":
                continue  # it fills what arrives with what leaves, so of that there must be something
            work = call(*args)
            if work is not None:
                work.wait()
        self.unread.clear()
        return Ended(self.log)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.group, name)
        if name not in ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base"):
            return found

        def call(*args: Any) -> Any:
            self.log.append((name, args[-1].asyncOp))
            if self.open is None:
                return found(*args)
            if self.fails == name:
                raise RuntimeError("NCCL error: invalid usage")
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            own = {id(t): t.detach() for t in tensors}  # so that not this keeps the caller's alive
            again = tuple([own.get(id(t), t) for t in a] if isinstance(a, list) else own.get(id(a), a) for a in args)
            self.unread |= {t.untyped_storage()._cdata for t in tensors[:1]}
            self.open.append((found, again, [weakref.ref(t) for t in tensors]))
            return Ended(self.log)

        call.__name__ = name
        return call


class NothingRead(TorchDispatchMode):
    """Fails where an op takes what a launch has yet to fill."""

    def __init__(self, groups: list[Group]) -> None:
        super().__init__()
        self.groups = groups

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func._schema.name.startswith("c10d") and "empty" not in func._schema.name:
            flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
            for t in flat:
                if isinstance(t, torch.Tensor) and type(t) is not DTensor:
                    for g in self.groups:
                        if g.open is not None:
                            assert t.untyped_storage()._cdata not in g.unread, f"{func} reads what has not arrived"
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """CPU tensors are taken for those of a device with streams, every group for one that launches together."""
    before = comm_sent.in_queue, C10dCommunicator.has_launches, together.may_meet
    comm_sent.in_queue = eager
    C10dCommunicator.has_launches = lambda self, device: True
    meets = lambda specs: len(specs) > 1  # noqa: E731
    together.may_meet = dispatch_lists.may_meet = dispatch_miss.may_meet = meets
    try:
        yield
    finally:
        comm_sent.in_queue, C10dCommunicator.has_launches = before[:2]
        together.may_meet = dispatch_lists.may_meet = dispatch_miss.may_meet = before[2]


def recorded(mesh: Any, fails: str = "") -> tuple[list[Any], list[Group]]:
    """The log of the groups of the mesh's axes, and the groups, which stand in front of the real ones from now on."""
    log: list[Any] = []
    groups = []
    for axis in range(mesh.ndim):
        comm = mesh.comm(axis)
        comm.group = Group(comm.group, log, fails)
        groups.append(comm.group)
    return log, groups


def move(mesh: Any, src: Placement, dst: Placement, shape: tuple[int, ...] = (8, 8)) -> tuple[torch.Tensor, Spec, Spec]:
    """A move along the mesh's first axis."""
    rest = (R,) * (mesh.ndim - 1)
    stride = tuple(torch.empty(shape, device="meta").stride())
    spec = Spec.make(mesh, (src, *rest), shape, stride, torch.float32)
    return torch.randn(spec.local_shape), spec, spec.with_placements((dst, *rest))
