"""A rehearsal: run a plan on a copy of a model without values, as one rank of a world that is not there.

The copy holds fake tensors: shapes, no memory. Nothing of the real model is changed, and no real rank is waited for.
Decisions depend on layouts and shapes only, so what one rank does here is what every rank will do. A model whose
forward reads values (a router that picks experts) is copied with them and run on CPU; collectives then give zeros for
what other ranks would send.

Collectives are told apart by the module call they happen in, and by where in it:

    input    the style's hooks before forward
    inside   forward itself
    output   the style's hooks after forward
    backward of any of these: autograd numbers its nodes as they are made, so a node tells the call that made it
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from dtensor.comm.observers import observers
from dtensor.mesh import DeviceMesh, init_device_mesh
from dtensor.simulation.simulate import fake_world
from dtensor.tensor import DTensor

__all__ = [
    "Call", "Example", "Rehearsal", "Sent", "Stage", "leaves", "map_tensors", "needs_values", "rehearse",
    "split_example",
]  # fmt: skip

_log = logging.getLogger("torch._subclasses.fake_tensor")
"""Where torch writes what fails on fake tensors; here failures are answers."""

Example = torch.Tensor | tuple[object, ...] | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective: its kind and the bytes that this rank receives."""

    kind: str
    nbytes: int


@dataclass(slots=True)
class Call:
    """One call of a module. `seen`: tensors' layouts as they came, as forward saw them, as it gave them, handed on."""

    path: str
    first: int
    last: int
    depth: int
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sent: dict[str, list[Sent]] = field(default_factory=dict)


@dataclass(slots=True)
class Rehearsal:
    """What happened. `error`: (path of the module that raised, exception), None where all went well.

    `other`: what was sent in backward outside of all calls. `pending`: parameters whose gradients stay pending sums.
    """

    calls: list[Call]
    output: object = None
    error: tuple[str, Exception] | None = None
    other: list[Sent] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)


def split_example(example: Example) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional and keyword inputs: of a tensor, a tuple or a mapping."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


class Stage:
    """Where copies of one model live: among fake tensors, or (`values`) on CPU."""

    def __init__(self, values: bool) -> None:
        self.values = values
        self.mode = None if values else FakeTensorMode()

    def copy(self, model: nn.Module) -> nn.Module:
        """A copy of `model`. ValueError where it is parallelized already."""
        if any(isinstance(t, DTensor) for t in (*model.parameters(), *model.buffers())):
            raise ValueError(
                "the model has been parallelized already\n  rule: a plan is rehearsed on the plain model\n"
                "  fix: unparallelize_module(model) first"
            )
        if self.mode is None:
            return copy.deepcopy(model).cpu()
        memo: dict[int, object] = {}
        for module in model.modules():
            for t in (*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()):
                if isinstance(t, torch.Tensor):
                    memo[id(t)] = self.tensor(t)
        return copy.deepcopy(model, memo)

    def tensor(self, t: torch.Tensor) -> torch.Tensor:
        """A stand-in for `t`."""
        if self.mode is None:
            return t.detach().to("cpu", copy=True).requires_grad_(t.requires_grad)
        with self.mode:
            empty = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
        if isinstance(t, nn.Parameter):
            return nn.Parameter(empty, requires_grad=t.requires_grad)
        return empty.requires_grad_(t.requires_grad)

    @contextmanager
    def entered(self, mesh: DeviceMesh) -> Iterator[DeviceMesh]:
        """A mesh of the shape and names of `mesh` in a world that is not there, unseen by those who count for real."""
        watching, logged = list(observers), _log.disabled
        for observer in watching:
            observers.remove(observer)
        _log.disabled = True
        try:
            with fake_world(mesh.size()), self.mode or nullcontext():
                yield init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)
        finally:
            _log.disabled = logged
            for observer in watching:
                observers.append(observer)


def map_tensors(x: object, f: Callable[[torch.Tensor], object]) -> object:
    """`x` with every tensor in its lists, tuples and mappings replaced."""
    if isinstance(x, torch.Tensor):
        return f(x)
    if isinstance(x, Mapping):
        return {k: map_tensors(v, f) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        done = [map_tensors(v, f) for v in x]
        return type(x)(*done) if hasattr(x, "_fields") else type(x)(done)  # type: ignore[arg-type]
    return x


def leaves(x: object) -> Iterator[torch.Tensor]:
    """The tensors in `x`: its lists, tuples and mappings, in order."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, Mapping):
        for v in x.values():
            yield from leaves(v)
    elif isinstance(x, (list, tuple)):
        for v in x:
            yield from leaves(v)


def needs_values(model: nn.Module, error: BaseException) -> bool:
    """True where `error` says that a fake tensor has no value, and the model has values."""
    unreal = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
    return unreal and not any(p.is_meta for p in model.parameters())


def rehearse(
    model: nn.Module, example: Example, stage: Stage, backward: bool = True, copied: bool = False
) -> Rehearsal:
    """Run `model`, a copy, forward and backward (of the sum of its floating outputs), and note what happens.

    `copied`: the example's tensors are of the stage already.
    """
    notes = _Notes(model)
    args, kwargs = (x if copied else map_tensors(x, stage.tensor) for x in split_example(example))
    with notes.installed():
        try:
            with torch.enable_grad():
                notes.result.output = model(*args, **kwargs)  # type: ignore[arg-type,misc]
        except Exception as error:
            notes.result.error = (notes.stack[-1].path if notes.stack else "", error)
            return notes.result
        finally:
            notes.stack.clear()
        if backward:
            _backward(notes.result)
    for name, p in model.named_parameters():
        if isinstance(p.grad, DTensor) and any(q.is_partial() for q in p.grad.placements):
            notes.result.pending.append(name)
    return notes.result


def _backward(result: Rehearsal) -> None:
    plain = [y.to_local() if isinstance(y, DTensor) else y for y in leaves(result.output)]
    sums = [y.sum() for y in plain if y.requires_grad and y.is_floating_point()]
    if not sums:
        return
    try:
        torch.autograd.backward(sums, [torch.ones_like(s) for s in sums])
    except Exception as error:
        result.error = ("backward", error)


class _Notes:
    """Hooks on every module and an observer of collectives."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.stack, self.phase = model, list[Call](), dict[int, str]()
        self.result = Rehearsal([])

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Follow the model inside the `with`."""
        handles = []
        for path, module in self.model.named_modules():
            handles += [
                module.register_forward_pre_hook(self._came(path), prepend=True, with_kwargs=True),
                module.register_forward_pre_hook(self._prepared, with_kwargs=True),
                module.register_forward_hook(self._gave, prepend=True),
                module.register_forward_hook(self._handed, always_call=True),
            ]
        observers.append(self._sent)
        try:
            yield
        finally:
            observers.remove(self._sent)
            for handle in handles:
                handle.remove()

    def _came(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, kwargs: object) -> None:
            call = Call(path, _number(), 1 << 62, len(self.stack))
            self.stack.append(call)
            self.result.calls.append(call)
            self._see("came", (args, kwargs), "input")

        return hook

    def _prepared(self, module: nn.Module, args: object, kwargs: object) -> None:
        self._see("prepared", (args, kwargs), "inside")

    def _gave(self, module: nn.Module, args: object, output: object) -> None:
        self._see("gave", output, "output")

    def _handed(self, module: nn.Module, args: object, output: object) -> None:
        if output is not None and self.stack:
            self._see("handed", output, "")
            self.stack.pop().last = _number()

    def _see(self, moment: str, x: object, phase: str) -> None:
        call = self.stack[-1]
        call.seen[moment] = tuple(map(described, leaves(x)))
        self.phase[id(call)] = phase

    def _sent(self, kind: str, ranks: tuple[int, ...], received: int, itemsize: int) -> None:
        sent = Sent(kind, received * itemsize)
        if self.stack:
            call = self.stack[-1]
            call.sent.setdefault(self.phase[id(call)], []).append(sent)
            return
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        inside = [c for c in self.result.calls if c.first <= number < c.last]
        if inside:
            max(inside, key=lambda c: (c.depth, c.first)).sent.setdefault("backward", []).append(sent)
        else:
            self.result.other.append(sent)


def _number() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def described(x: torch.Tensor) -> str:
    """The layout of a DTensor, or the dtype and shape of a plain tensor."""
    if isinstance(x, DTensor):
        return str(x._spec)
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
