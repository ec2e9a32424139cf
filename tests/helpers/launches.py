"""A world of GPUs without one: what its ranks issue, recorded; what stands in the place of NCCL's grouped launches.

`Recorder` writes down collectives, `played` runs a function as every rank of a world that carries nothing.
`Group` takes down what it is asked between start and end and only then carries it out; `NothingRead` fails where
something is read before; `as_on_gpus` has CPU tensors taken for those of a device with streams.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor import DTensor, Placement, Replicate, init_device_mesh
from dtensor.comm import issue as comm_sent
from dtensor.comm.c10d import C10dCommunicator
from dtensor.comm.wire import eager
from dtensor.dispatch import lists as dispatch_lists
from dtensor.dispatch import plan as dispatch_plan
from dtensor.redistribute.executor import coalescing as together
from dtensor.spec import Spec

R = Replicate()


class Call(NamedTuple):
    """One collective as a rank issued it. `now`: queued on the current stream (asyncOp off)."""

    kind: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    sent: tuple[int, ...]
    splits: tuple[tuple[int, ...], tuple[int, ...]]
    now: bool


class Recorder(TorchDispatchMode):
    """Writes down the collectives that are issued inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func._schema.name.split("::")
        if space in ("c10d", "_c10d_functional") and name != "wait_tensor":
            given = dict(zip([a.name for a in func._schema.arguments], args)) | (kwargs or {})
            defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
            self.calls.append(self._call(space, name, defaults | given))
            args = self._fed(name, list(args))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _fed(name: str, args: list[Any]) -> list[Any]:
        """torch's fake groups fill what arrives with what leaves, so of that there must be something."""
        at = {"alltoall_base_": (1, 4), "all_to_all_single": (0, 2)}.get(name)
        if at is not None and not args[at[0]].numel():
            args[at[0]], args[at[1]] = args[at[0]].new_ones(1), [1] + [0] * (len(args[at[1]]) - 1)
        return args

    def _call(self, space: str, name: str, given: dict[str, Any]) -> Call:
        group = given.get("group_name") or given.get("process_group")
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        else:
            group = dist.ProcessGroup.unbox(group)
        tensors = next(
            v for k, v in given.items() if k in ("input", "input_tensor", "input_tensors", "tensors", "inputs")
        )
        while isinstance(tensors, (list, tuple)):
            tensors = tensors[0]
        splits = tuple(tuple(given.get(f"{side}_split_sizes") or ()) for side in ("output", "input"))
        kinds = {
            "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
            "alltoall_base_": "all_to_all", "all_gather_into_tensor": "all_gather", "broadcast_": "broadcast",
            "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all",
            "reduce_scatter_": "reduce_scatter",
        }  # fmt: skip
        now = space == "c10d" and given.get("async_op", given.get("asyncOp")) is False
        ranks = tuple(dist.get_process_group_ranks(group))
        return Call(kinds.get(name, name), ranks, tensors.dtype, tuple(tensors.shape), splits, now)


@contextmanager
def on_rank(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a world that carries nothing, whose tensors are on a device with streams."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    before = comm_sent.in_queue
    comm_sent.in_queue = eager
    try:
        yield
    finally:
        comm_sent.in_queue = before
        dist.destroy_process_group()


def played(shape: tuple[int, ...], body: Callable[[Any], Any]) -> list[Any]:
    """`body(mesh)` as every rank in turn."""
    world = torch.Size(shape).numel()
    out = []
    for rank in range(world):
        with on_rank(rank, world):
            out.append(body(init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyz"[: len(shape)]))))
    return out


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
    together.may_meet = dispatch_lists.may_meet = dispatch_plan.may_meet = meets
    try:
        yield
    finally:
        comm_sent.in_queue, C10dCommunicator.has_launches = before[:2]
        together.may_meet = dispatch_lists.may_meet = dispatch_plan.may_meet = before[2]


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
