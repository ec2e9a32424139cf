"""Results that are still on their way: tensors that finish a collective, and what follows it, when first used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["unwaited"]


def unwaited(finish: Callable[[], torch.Tensor], like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor of `shape`, and of the dtype and device of `like`, that calls `finish` when first used.

    It is an `AsyncCollectiveTensor`, so code that looks for one and calls `wait()` works.
    """
    made: torch.Tensor = _unwaited_class()(finish, like, shape)
    return made


@functools.cache
def _unwaited_class() -> Any:
    """The class; made when first needed, because its base loads much of `torch.distributed`."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.utils._pytree import tree_map_only

    class Unwaited(AsyncCollectiveTensor):
        """An `AsyncCollectiveTensor` whose value is computed, not only waited for."""

        finish: Any

        @staticmethod
        def __new__(cls: Any, finish: Callable[[], torch.Tensor], like: torch.Tensor, shape: Sequence[int]) -> Any:
            made = torch.Tensor._make_wrapper_subclass(
                cls, tuple(shape), dtype=like.dtype, layout=like.layout, device=like.device
            )
            made.finish, made.completed = finish, False
            return made

        def trigger_wait(self) -> torch.Tensor:
            if not self.completed:
                self.elem = self.finish()
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
