"""Many ranks in one process.

    def program(n):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return mesh.comm("tp").all_reduce(torch.full((n,), float(mesh.get_rank())))

    results = dtensor.simulate(4)(program, 3)      # a list, one result a rank

`simulate(n)` runs an unmodified SPMD function on `n` ranks that take turns (see `dtensor.simulation.rank_threads`):
meshes made inside, collectives, backward and the function's own calls to `torch.distributed` work, every rank has its
own random number streams, and a program whose ranks disagree ends with an error instead of a hang. A default process
group exists inside; `init_process_group` is neither needed nor allowed.

`fake_world(n)` is for planning: one rank of `n`, any number, that never waits for the others; results have the right
shapes and no values, and the traffic is counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import ParamSpec, Protocol, TypeVar, cast

import torch
from torch._C._distributed_c10d import HashStore

from dtensor.comm.fake import FakeWorld, Traffic
from dtensor.comm.world import ended, entered
from dtensor.errors import expect, short
from dtensor.simulation.c10d import installed, join_torch, leave_torch
from dtensor.simulation.communicator import SimulatedWorld
from dtensor.simulation.rank_threads import CollectiveMismatch, RankThreads

__all__ = ["CollectiveMismatch", "FakeWorld", "RankError", "Traffic", "fake_world", "simulate"]

P = ParamSpec("P")
T = TypeVar("T")
MAX_RANKS = 256


class Ranks(Protocol):
    """What `simulate(n)` gives: calls a function on every rank and gives the list of their results."""

    def __call__(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...


class Simulate(Protocol):
    """What `dtensor.simulate` is: the function, with `fake_world` as an attribute, since it has this
    module's name.
    """

    def __call__(self, world_size: int) -> Ranks: ...

    def fake_world(self, world_size: int, rank: int = 0) -> AbstractContextManager[FakeWorld]:
        """See `fake_world`."""
        ...


class RankError(Exception):
    """An exception on a simulated rank. `rank` is the rank, `__cause__` the exception.

    What is raised is also an instance of the original exception's class, where that class allows it.
    """

    rank: int = -1
    text: str = ""

    def __str__(self) -> str:
        return self.text


def _error_class(original: type[BaseException]) -> type[RankError]:
    """The class of a RankError that is also an `original`; RankError where there can be none."""
    if issubclass(original, RankError):
        return original
    try:
        return type(f"Rank{original.__name__}", (RankError, original), {"__str__": RankError.__str__})
    except TypeError:
        return RankError


def _named(error: BaseException, rank: int) -> BaseException:
    """`error` as an exception that names the rank; exits and interrupts as they are."""
    if not isinstance(error, Exception):
        return error
    named: RankError
    try:
        cls = _error_class(type(error))
        named = cls.__new__(cls, *error.args)
        named.args = error.args
        named.__dict__.update(error.__dict__)
    except Exception:
        named = RankError(*error.args)
    named.rank = rank
    named.text = f"rank {rank}: {type(error).__name__}: {error}"
    named.__cause__ = error
    return named


def _keep_device_guard() -> None:
    """Have torch 2.11 make what stands for CUDA's device guard on this thread, if it ever will.

    Builds for CUDA do so without a GPU, when a fake tensor is made first, and 2.11 keeps the address of an object that
    ends with its thread.
    """
    if torch.__version__ < "2.12" and torch.backends.cuda.is_built() and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[FakeWorld]:
    """Be `rank` of a world of `world_size` ranks that does not exist, inside the `with`.

    Gives the world, whose `traffic` lists the collectives issued. Raises ValueError for a rank outside it.
    """
    world = FakeWorld(world_size, rank)
    try:
        with entered(world):
            yield world
    finally:
        ended()


def _with_fake_world(function: Callable[[int], Ranks]) -> Simulate:
    function.fake_world = fake_world  # type: ignore[attr-defined]
    return cast(Simulate, function)


@_with_fake_world
def simulate(world_size: int) -> Ranks:
    """A runner of SPMD functions: `simulate(4)(fn, *args, **kwargs)` is the list of every rank's result.

    All ranks get the same arguments (the same objects). The first exception on a rank ends all others and is
    raised as a `RankError` of the same type that names the rank; ranks that issue different collectives
    raise `CollectiveMismatch`, on every rank and here. Gather inside the function what is wanted whole: afterwards the
    ranks are gone, and a collective on a result is a RuntimeError. Raises TypeError or ValueError for a bad
    `world_size`.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        raise TypeError(f"simulate(world_size) takes an int, got {short(world_size)}\n  fix: simulate(4)(program)")
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"simulate(world_size) takes 1 to {MAX_RANKS} ranks, got {world_size}\n"
            "  fix: simulate(4)(program)"
        )

    def run(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        expect("simulate(n)(fn, *args)", "fn", fn, Callable, "the function that ranks call", "simulate(4)(program)")
        _keep_device_guard()
        threads = RankThreads(world_size)
        store = HashStore()

        def body(rank: int) -> T:
            world = SimulatedWorld(threads, rank)
            with entered(world):
                join_torch(world, store)
                try:
                    return fn(*args, **kwargs)
                finally:
                    leave_torch(world)

        with installed():
            results: list[T] = threads.run(body)
        error, failed = threads.error, threads.failed
        threads.end()
        ended()
        if error is not None:
            raise error if failed is None else _named(error, failed)
        return results

    return run


class _Callable(ModuleType):
    def __call__(self, world_size: int) -> Ranks:
        return simulate(world_size)


sys.modules[__name__].__class__ = _Callable
