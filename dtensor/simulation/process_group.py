"""A process group of simulated ranks, in Python: its collectives are meetings of rank threads.

What `torch.distributed` asks of a group is spelled as c10d calls it, several names for one thing where c10d's C++ and
Python sides differ. Results are written into the caller's tensors, outside autograd; `async_op` changes nothing,
except for receives, which are done when they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]

from dtensor.comm.observers import observers, received
from dtensor.comm.reduce_ops import check_reduction, reduce_tensors
from dtensor.comm.world import check_own
from dtensor.simulation.communicator import SimulatedWorld, run_local
from dtensor.simulation.rank_threads import Signature

__all__ = ["SimulatedProcessGroup", "group_name_of"]

_Group: Any = dist.ProcessGroup  # its declared signatures are overloads that a Python group does not see
Combine = Callable[[list[Any]], Sequence[Any]]

_OPS = {
    "SUM": "sum", "AVG": "avg", "PRODUCT": "product", "MIN": "min", "MAX": "max",
    "BAND": "band", "BOR": "bor", "BXOR": "bxor",
}  # fmt: skip


def _reduction(options: Any) -> str:
    """Our name of the reduction in `options` (None: sum). Raises ValueError for one that is not among ours."""
    op = "SUM" if options is None else getattr(options, "reduceOp", options)
    name = str(getattr(op, "op", op)).rsplit(".", 1)[-1]
    if name not in _OPS:
        raise ValueError(f"simulated ranks do not reduce with {name}, only with {', '.join(_OPS)}")
    return _OPS[name]


def _completed(result: object = None) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _fill(out: torch.Tensor, value: torch.Tensor) -> None:
    """Write a result into a tensor of the caller's, of any shape with as many elements."""
    if out.numel() != value.numel():
        raise ValueError(f"a tensor of shape {tuple(out.shape)} cannot take {tuple(value.shape)}")
    with torch.no_grad():
        out.detach().copy_(value.view(out.shape))


class _Receive(Work):
    """A receive that is done when it is waited for; what was sent lies in the mail until then."""

    def __init__(self, receive: Callable[[], int]) -> None:
        super().__init__()
        self._receive: Callable[[], int] | None = receive
        self._source = -1

    def wait(self, timeout: object = None) -> bool:
        if self._receive is not None:
            receive, self._receive = self._receive, None
            self._source = receive()
        return True

    def is_completed(self) -> bool:
        return self._receive is None

    def _source_rank(self) -> int:
        return self._source


class SimulatedProcessGroup(_Group):
    """The process group of `ranks` (ascending) as the simulated rank of `world` sees it, which is one of them."""

    def __init__(self, world: SimulatedWorld, ranks: tuple[int, ...], name: str, desc: str = "undefined") -> None:
        super().__init__(ranks.index(world.rank), len(ranks))
        self._world = world
        self._ranks = ranks
        self._name = name
        self._desc = desc
        self._at = ranks.index(world.rank)

    # what c10d asks of a group

    def size(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return self._at

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getBackendName(self) -> str:
        return "simulated"

    def name(self) -> str:
        return "simulated"

    def _get_backend(self, device: object) -> SimulatedProcessGroup:
        """What works for a device; torch 2.14 asks it whether messages can be coalesced, which they cannot."""
        return self

    def __repr__(self) -> str:
        return f"SimulatedProcessGroup(ranks={self._ranks}, rank={self._at})"

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: object = None,
        pg_options: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        backend: object = None,
    ) -> SimulatedProcessGroup | None:
        """The hook by which `dist.new_group` makes groups: one of ours, None on ranks that are not in it."""
        if self._world.rank not in ranks:
            return None
        return SimulatedProcessGroup(
            self._world, tuple(ranks), group_name_of(self._world, str(group_name)), group_desc or "undefined"
        )

    # collectives

    def _meet(self, kind: str, signature: Signature, payload: Any, work: Combine, elements: int, itemsize: int) -> Any:
        if len(observers) and kind != "barrier":
            observers.report(kind, self._ranks, elements, itemsize)
        check_own(self._world, "this process group")
        threads = self._world.threads
        return threads.meet(
            self._world.rank, self._ranks, self._at, (f"dist.{kind}", *signature), payload, run_local(work)
        )

    def _reduce_list(self, kind: str, tensors: Sequence[torch.Tensor], op: str, root: int | None = None) -> list[Any]:
        for t in tensors:
            check_reduction(op, t.dtype)
        signature = ("shape", _shapes(tensors), "dtype", _dtypes(tensors), "op", op, "dst", root)
        elements = sum(received("all_reduce", self.size(), self._at, t.numel()) for t in tensors)

        def work(lists: list[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
            totals = [reduce_tensors(column, op) for column in zip(*lists)]
            return [totals for _ in lists]

        return cast(list[Any], self._meet(kind, signature, list(tensors), work, elements, tensors[0].itemsize))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        for t, total in zip(tensors, self._reduce_list("all_reduce", tensors, _reduction(opts))):
            _fill(t, total)
        return _completed(tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        tensors = _listed(tensors)
        for t, total in zip(tensors, self._reduce_list("reduce", tensors, _reduction(opts), opts.rootRank)):
            if self._at == opts.rootRank:
                _fill(t, total)
        return _completed(tensors)

    def barrier(self, opts: Any = None) -> Any:
        self._meet("barrier", (), None, lambda payloads: payloads, 0, 0)
        return _completed()

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        elements = x.numel() * (self.size() - 1)

        def work(xs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
            copies = [x.contiguous().clone() for x in xs]
            return [copies for _ in xs]

        return cast(list[torch.Tensor], self._meet("all_gather", ("dtype", x.dtype), x, work, elements, x.itemsize))

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        inputs = _listed(input_tensors)
        outputs = [output_tensors] if isinstance(output_tensors[0], torch.Tensor) else output_tensors
        for outs, x in zip(outputs, inputs):
            for out, value in zip(outs, self._gathered(x)):
                _fill(out, value)
        return _completed(output_tensors)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        _fill(output, torch.cat([x.reshape(-1) for x in self._gathered(input)]))
        return _completed(output)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for out, x in zip(outputs, inputs):
            self.all_gather_single(out, x, opts)
        return _completed(outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        columns = [self._gathered(x) for x in inputs]
        for i, outs in enumerate(output_lists):
            for out, column in zip(outs, columns):
                _fill(out, column[i])
        return _completed(output_lists)

    def _scattered(self, parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
        own = parts[self._at]
        check_reduction(op, own.dtype)
        signature = ("shapes", _shapes(parts), "dtype", own.dtype, "op", op)
        elements = received("reduce_scatter", self.size(), self._at, own.numel())

        def work(lists: list[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
            return [reduce_tensors([parts[j] for parts in lists], op) for j in range(len(lists))]

        return cast(torch.Tensor, self._meet("reduce_scatter", signature, list(parts), work, elements, own.itemsize))

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        outputs = _listed(output_tensors)
        lists = [input_tensors] if isinstance(input_tensors[0], torch.Tensor) else input_tensors
        for out, parts in zip(outputs, lists):
            _fill(out, self._scattered(parts, _reduction(opts)))
        return _completed(output_tensors)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        parts = input.reshape(self.size(), -1).unbind(0)
        _fill(output, self._scattered(parts, _reduction(opts)))
        return _completed(output)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        for out, x in zip(outputs, inputs):
            self.reduce_scatter_single(out, x, opts)
        return _completed(outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _exchanged(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        elements = sum(p.numel() for i, p in enumerate(parts) if i != self._at)

        def work(lists: list[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
            return [[parts[j].clone() for parts in lists] for j in range(len(lists))]

        signature = ("dtype", parts[0].dtype)
        return cast(
            list[torch.Tensor],
            self._meet("all_to_all", signature, list(parts), work, elements, parts[0].itemsize),
        )

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        for out, value in zip(output_tensors, self._exchanged(input_tensors)):
            _fill(out, value)
        return _completed(output_tensors)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        parts = torch.split(input, _splits(input, input_splits, self.size()))
        outs = torch.split(output, _splits(output, output_splits, self.size()))
        for out, value in zip(outs, self._exchanged(parts)):
            _fill(out, value)
        return _completed(output)

    alltoall_base = all_to_all_single

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        tensors = _listed(tensors)
        root = opts.rootRank
        signature = ("shape", _shapes(tensors), "dtype", _dtypes(tensors), "src", root)
        elements = 0 if self._at == root else sum(t.numel() for t in tensors)

        def work(lists: list[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
            sent = [t.contiguous().clone() for t in lists[root]]
            return [sent for _ in lists]

        got = self._meet("broadcast", signature, tensors, work, elements, tensors[0].itemsize)
        if self._at != root:
            for t, value in zip(tensors, got):
                _fill(t, value)
        return _completed(tensors)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        out = _listed(output_tensors)[0]
        root = opts.rootRank
        elements = 0 if self._at == root else out.numel()

        def work(lists: list[Any]) -> list[torch.Tensor]:
            return [t.contiguous().clone() for t in lists[root][0]]

        signature = ("dtype", out.dtype, "src", root)
        _fill(out, self._meet("scatter", signature, input_tensors, work, elements, out.itemsize))
        return _completed(output_tensors)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        x = _listed(input_tensors)[0]
        root = opts.rootRank
        elements = x.numel() * (self.size() - 1) if self._at == root else 0

        def work(xs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
            copies = [x.contiguous().clone() for x in xs]
            return [copies for _ in xs]

        got = self._meet("gather", ("dtype", x.dtype, "dst", root), x, work, elements, x.itemsize)
        if self._at == root:
            for out, value in zip(output_tensors[0], got):
                _fill(out, value)
        return _completed(output_tensors)

    # messages; the mail of a group is keyed by its ranks

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        self._world.threads.post(
            (self._ranks, self._at, dst, tag), _listed(tensors)[0].detach().clone(), self._ranks[dst]
        )
        return _completed()

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self._receive(_listed(tensors)[0], [src], tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._receive(_listed(tensors)[0], range(self.size()), tag)

    def _receive(self, out: torch.Tensor, sources: Sequence[int], tag: int) -> _Receive:
        keys = [(self._ranks, src, self._at, tag) for src in sources]
        shown = self._ranks[sources[0]] if len(sources) == 1 else "any"
        signature = ("recv", "src", shown, "shape", tuple(out.shape), "dtype", out.dtype, "tag", tag)

        def receive() -> int:
            which, message = self._world.threads.collect(self._world.rank, keys, signature, self._ranks)
            if len(observers):
                observers.report("recv", self._ranks, out.numel(), out.itemsize)
            _fill(out, message)
            return int(sources[which])

        return _Receive(receive)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in tensors)


def _dtypes(tensors: Sequence[torch.Tensor]) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in tensors)


def _splits(x: torch.Tensor, splits: Any, size: int) -> list[int]:
    return list(splits) if splits is not None and len(splits) else [x.shape[0] // size] * size


def group_name_of(world: SimulatedWorld, name: str) -> str:
    """`name` made unique in the process: torch's C++ registry of groups knows no ranks."""
    return f"simulated{cast(tuple[str, int], world.identity)[1]}.{world.rank}.{name}"
