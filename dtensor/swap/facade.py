"""The modules that stand in for torch's while the engine is swapped in.

A facade answers a name in this order: ours where there is one, the facade of a submodule, otherwise torch's own. A
function of torch's own is handed out inside a guard, which refuses a tensor, mesh, spec or placement of ours, or a
module that holds such tensors: torch's engine would take them for something else.

Who asks matters. Torch's engine itself, and the parts of torch's compiler that know its class by its layout in memory,
go on seeing torch's names, so that torch's engine stays as it is; see `names.HOLDERS_OF_TORCHS_OWN`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Placement
from dtensor.spec import Spec
from dtensor.swap.later import at
from dtensor.swap.names import ENGINE, HOLDERS_OF_TORCHS_OWN, OURS, PASSED_OVER, REFUSED, is_under
from dtensor.tensor import DTensor

__all__ = ["Facade", "Mapping", "SwapError", "load_names"]

_OURS_TYPES = (DTensor, DeviceMesh, Placement, Spec)


class SwapError(RuntimeError):
    """The swap cannot be done, or a name of torch's engine has no counterpart here."""


class Mapping:
    """What stands for what: objects of torch by identity, modules by their facade."""

    def __init__(self) -> None:
        self.on = False
        self.ours: dict[int, tuple[object, object]] = {}
        self.modules: dict[int, tuple[ModuleType, Facade]] = {}
        self.guards: dict[int, tuple[object, object]] = {}

    def of(self, value: object) -> object | None:
        """Ours for an object of torch, None where there is none."""
        found = self.ours.get(id(value)) or self.modules.get(id(value))
        return found[1] if found is not None and found[0] is value else None

    def forth(self) -> dict[int, tuple[object, object]]:
        """All of it, by identity: torch's and ours."""
        return {**self.ours, **self.modules}

    def back(self) -> dict[int, tuple[object, object]]:
        """The other way round: torch's for ours."""
        pairs = [*self.ours.values(), *self.modules.values()]
        return {id(new): (new, old) for old, new in pairs}

    def guarded(self, value: object, where: str) -> object:
        """`value`, inside a guard when it is a function of torch's engine."""
        if not isinstance(value, FunctionType) or not value.__module__.startswith("torch.distributed"):
            return value
        if id(value) not in self.guards:
            self.guards[id(value)] = (value, _guard(value, where))
        return self.guards[id(value)][1]


class Facade(ModuleType):
    """Stands in `sys.modules` for the module `_real`."""

    def __init__(self, real: ModuleType, mapping: Mapping) -> None:
        super().__init__(real.__name__, real.__doc__)
        for name in ("__file__", "__path__", "__package__", "__spec__", "__loader__", "__all__"):
            if hasattr(real, name):
                setattr(self, name, getattr(real, name))
        self._real, self._mapping = real, mapping

    def __getattr__(self, name: str) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__") or ""
        return self._answer(name, asks)

    def _answer(self, name: str, asks: str) -> Any:
        value = getattr(self._real, name)
        if not self._mapping.on or is_under(asks, HOLDERS_OF_TORCHS_OWN) or is_under(asks, ENGINE):
            return value
        ours = self._mapping.of(value)
        return self._mapping.guarded(value, f"{self.__name__}.{name}") if ours is None else ours

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._real)})

    def __repr__(self) -> str:
        return f"<module {self.__name__!r}, swapped by dtensor.swap>"


def load_names(mapping: Mapping, name: str, module: ModuleType) -> None:
    """Fill in what the tables have for one module of torch, the real one."""
    found: list[tuple[object, object]] = [
        (getattr(module, key), at(place)) for key, place in OURS.get(name, {}).items()
    ]
    for table, stand_in in ((REFUSED, _refusal), (PASSED_OVER, _passed_over)):
        for key, hint in table.get(name, {}).items():
            if hasattr(module, key):
                found.append((getattr(module, key), stand_in(f"{name}.{key}", hint)))
    mapping.ours.update((id(real), (real, ours)) for real, ours in found)


def _refusal(name: str, hint: str) -> type:
    """A class that can be imported, inherited from and asked for with isinstance, and not be called."""

    def refuse(cls: type, *args: object, **kwargs: object) -> object:
        raise SwapError(f"{name} has no counterpart in this engine: {hint}")

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__module__": __name__, "__doc__": hint})


def _passed_over(name: str, hint: str) -> Callable[..., Any]:
    """A function that makes a decorator which leaves what it decorates as it is, with a warning."""

    def register(op: object, *args: object, **kwargs: object) -> Callable[[Any], Any]:
        warnings.warn(f"{name} of {op} tells torch's engine alone where it may be sharded: {hint}", stacklevel=2)
        return lambda rule: rule

    return register


def _guard(function: Callable[..., object], name: str) -> Callable[..., object]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> object:
        for leaf in pytree.tree_leaves((args, kwargs)):
            for value in _held(leaf):
                if isinstance(value, _OURS_TYPES):
                    raise SwapError(
                        f"{name} is torch's own and was given a {type(value).__name__} of this engine; it has no "
                        "counterpart here (dtensor.swap.status() lists what has)"
                    )
        return function(*args, **kwargs)

    return guarded


def _held(leaf: object) -> Iterator[object]:
    yield leaf
    if isinstance(leaf, torch.nn.Module):
        yield from leaf.parameters()
        yield from leaf.buffers()
