"""One input of several modules is laid out once: one gather forward and one reduction backward for all of them.

Query, key and value projections are sharded by columns and read the same activation. Laid out by each of them anew,
it is gathered three times, and the three pending sums of its gradient are reduced one by one:

    x --from_local--> q        grad_q {P} --all-reduce--\\
    x --from_local--> k        grad_k {P} --all-reduce---+--> grad of x
    x --from_local--> v        grad_v {P} --all-reduce--/

Laid out once, autograd adds up the pending sums where the three uses meet, and one reduction is left:

    x --from_local--+--> q, k, v        grad_q + grad_k + grad_v {P} --all-reduce--> grad of x

What was made of an input is remembered while a common ancestor of the modules runs its forward: a *scope*, which
`parallelize_module` puts around every module with two or more styled ones below it. The end of the outermost scope
forgets everything, and no more than `LIMIT` inputs are remembered at a time, so nothing outlives the forward.
References are strong inside a scope on purpose. Were they weak, it would depend on the garbage collector of each
rank whether a gather is repeated, and ranks must issue the same collectives.

It is used again only where that cannot be told from making it anew: for the same tensor object, which nobody has
written to meanwhile (torch's version counters say so, and the engine's, which see writes through another DTensor of
the same memory), wanted in the same layout of the same mesh, in the same mode of autograd. Inside a checkpointed
region, or any other context with hooks for saved tensors or a dispatch mode, sharing needs a scope that began inside
too: a region that is computed again on its own must then do what it did before. Inference tensors have no version
counter and are never shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dtensor.dispatch.materialized import Watch, memory_version
from dtensor.tensor import DTensor

__all__ = ["LIMIT", "share_inputs", "shared"]

LIMIT = 2
"""Inputs remembered at a time, the last ones used. What follows a block's first input pushes it out soon, so that a
model's forward holds no more than this many beyond their time."""

Context = tuple[object, ...]


@dataclass(slots=True)
class _Made:
    """What was made of `x`, wanted as `key` says, and the versions that both had then."""

    x: torch.Tensor
    key: tuple[object, ...]
    context: Context
    result: DTensor
    versions: tuple[object, ...]
    watch: Watch

    def serves(self, x: torch.Tensor, key: tuple[object, ...], context: Context) -> bool:
        return (
            self.x is x
            and self.key == key
            and _same_context(self.context, context)
            and self.versions == _versions(self.x, self.result)
        )


class _Running(threading.local):
    """The scopes that are open in this thread, innermost last, and what they remember, last used first."""

    def __init__(self) -> None:
        self.scopes: list[tuple[nn.Module, Context]] = []
        self.made: list[_Made] = []


_running = _Running()


def shared(x: object, key: tuple[object, ...], make: Callable[[], DTensor]) -> DTensor:
    """`make()`, or what it gave for the same `x` and `key` earlier in the scope.

    `key` must hold all that `make` depends on besides `x` and torch's modes.
    """
    if torch.compiler.is_compiling() or not _running.scopes or not _can_be_shared(x):
        return make()
    assert isinstance(x, torch.Tensor)
    context, made = _context(), _running.made
    if not _same_context(_running.scopes[-1][1], context):
        return make()
    key = (*key, torch.is_grad_enabled(), x.requires_grad)
    for i, m in enumerate(made):
        if m.serves(x, key, context):
            made.insert(0, made.pop(i))
            return m.result
    watch = Watch()
    result = make()
    if result is not x:
        made.insert(0, _Made(x, key, context, result, _versions(x, result), watch))
        del made[LIMIT:]
    return result


def _can_be_shared(x: object) -> bool:
    if not isinstance(x, (DTensor, FakeTensor)) and type(x) not in (torch.Tensor, nn.Parameter):
        return False
    assert isinstance(x, torch.Tensor)
    if x.is_inference() or torch.is_inference_mode_enabled():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _versions(*tensors: torch.Tensor) -> tuple[object, ...]:
    """How often the tensors, and the memory they show on this rank, were written."""
    out: list[object] = []
    for t in tensors:
        out += [t._version, memory_version(t._local_tensor if isinstance(t, DTensor) else t)]
    return tuple(out)


def _context() -> Context:
    """What stands around a call and could tell it from the same call elsewhere."""
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


def _same_context(a: Context, b: Context) -> bool:
    return a[1:] == b[1:] and (a[0] is b[0] or a[0] == b[0])


# ------------------------------------------------------------ scopes
def share_inputs(root: nn.Module, styled: Iterable[nn.Module]) -> None:
    """Make a scope of every module of `root` that has at least two of the modules `styled` below it."""
    targets = {id(m) for m in styled}
    for module in root.modules():
        below = sum(id(m) in targets for m in module.modules() if m is not module)
        if below >= 2 and _enter not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_enter, prepend=True)
            module.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, args: tuple[object, ...]) -> None:
    if not torch.compiler.is_compiling():
        _running.scopes.append((module, _context()))


def _leave(module: nn.Module, args: tuple[object, ...], output: object) -> None:
    if torch.compiler.is_compiling():
        return
    scopes = _running.scopes
    at = next((i for i in reversed(range(len(scopes))) if scopes[i][0] is module), None)
    if at is not None:  # None: a hook before ours raised; those above it were left without notice
        del scopes[at:]
    if not scopes:
        _running.made.clear()
