"""Results that are still on their way: tensors that finish a collective, and what follows it, when first used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtensor.comm.communicator import Pending, traced
from dtensor.comm.pending import gathering
from dtensor.errors import CollectiveError

__all__ = ["arriving", "belongs_to", "unwaited"]


def unwaited(finish: Callable[[], torch.Tensor], like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor of `shape`, and of the dtype and device of `like`, that calls `finish` when first used.

    It is an `AsyncCollectiveTensor`, so code that looks for one and calls `wait()` works. For who launches several
    collectives as one (`dtensor.redistribute.executor.coalescing`), and waits at once, the bare `Pending` will do.
    """
    if gathering.now is not None:
        return Pending(finish=finish)  # type: ignore[return-value]
    made: torch.Tensor = _unwaited_class()(finish, like, shape)
    return made


def arriving(pending: Pending[torch.Tensor]) -> torch.Tensor:
    """What a collective fills, as torch's own waiting tensor; an error of the group says what it was for."""
    if pending.raw is None or traced(pending.raw):
        return pending.tensor
    made: torch.Tensor = _arriving_class()(pending.raw, pending.wait)
    return made


def belongs_to(result: torch.Tensor, plan: object) -> torch.Tensor:
    """`result`, which may have to be waited for, of `plan`: errors that show then will say so."""
    if type(result).__name__ == "AsyncCollectiveTensor" and hasattr(result, "plan"):
        result.plan = plan
    return result


def _told(wait: Callable[[], torch.Tensor], plan: object) -> torch.Tensor:
    try:
        return wait()
    except CollectiveError as e:
        if plan is not None:
            e.during(f"redistribute {plan}")
        raise


@functools.cache
def _arriving_class() -> Any:
    """The class; made when first needed, because its base loads much of `torch.distributed`."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    class Arriving(AsyncCollectiveTensor):
        """An `AsyncCollectiveTensor` that waits by way of its collective, which knows what to say of an error."""

        finish: Any
        plan: Any

        @staticmethod
        def __new__(cls: Any, elem: torch.Tensor, finish: Callable[[], torch.Tensor]) -> Any:
            made = AsyncCollectiveTensor.__new__(cls, elem)
            made.finish, made.plan = finish, None
            return made

        def trigger_wait(self) -> torch.Tensor:
            if not self.completed:
                _told(self.finish, self.plan)
                self.finish, self.completed = None, True
            return self.elem

        wait = trigger_wait

    Arriving.__name__ = AsyncCollectiveTensor.__name__
    return Arriving


@functools.cache
def _unwaited_class() -> Any:
    """The class; made when first needed, because its base loads much of `torch.distributed`."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.utils._pytree import tree_map_only

    class Unwaited(AsyncCollectiveTensor):
        """An `AsyncCollectiveTensor` whose value is computed, not only waited for."""

        finish: Any
        plan: Any

        @staticmethod
        def __new__(cls: Any, finish: Callable[[], torch.Tensor], like: torch.Tensor, shape: Sequence[int]) -> Any:
            made = torch.Tensor._make_wrapper_subclass(
                cls, tuple(shape), dtype=like.dtype, layout=like.layout, device=like.device
            )
            made.finish, made.completed, made.plan = finish, False, None
            return made

        def trigger_wait(self) -> torch.Tensor:
            if not self.completed:
                self.elem = _told(self.finish, self.plan)
                self.finish, self.completed = None, True
            return self.elem

        wait = trigger_wait
        _get_acs_underlying_tensor = trigger_wait

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            self.trigger_wait()
            return ["elem"], None

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            args, kwargs = tree_map_only(cls, lambda t: t.trigger_wait(), (args, kwargs or {}))
            return func(*args, **kwargs)

    Unwaited.__name__ = AsyncCollectiveTensor.__name__  # by which others tell that there is something to wait for
    return Unwaited
