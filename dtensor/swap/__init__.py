"""Put this engine under a program that was written for torch's DTensor.

    import dtensor.swap                        first of all, before the program imports anything distributed
    dtensor.swap.install()

    python -m dtensor.swap script.py args      the same, for a script as it is
    torchrun --nproc-per-node 4 -m dtensor.swap script.py args

From then on `torch.distributed.tensor` and everything under it, `torch.distributed.device_mesh` and
`torch.distributed._tensor` give this engine, and so do torch's own modules that work with DTensors (`fully_shard`, the
distributed checkpoint, the state-dict functions, gradient clipping), loaded already or later.

How: facades stand for the modules in `sys.modules`, and globals of torch's loaded modules that hold one of the names
are replaced. Torch's own engine stays underneath. Torch's C++ looks its `DTensor` up by name at the first op of any
tensor subclass, and keeps what it finds; so that is made to happen before the names change. Modules that are not
loaded by then are swapped when the program loads them (`dtensor.swap.later`).
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch

from dtensor.spec import Spec
from dtensor.swap import files, rebind
from dtensor.swap.facade import Facade, Mapping, SwapError, load_names
from dtensor.swap.later import Finder, Patches
from dtensor.swap.names import CORE, MODULES, PATCHES, ROOTS, is_under

__all__ = ["Status", "SwapError", "install", "installed", "status", "swapped", "uninstall"]

_mapping = Mapping()
_changes: list[rebind.Change] = []
_patches = Patches()
_named: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Status:
    """What is swapped: printed, a list.

    Attributes:
        installed: whether `install` is in force.
        swapped: names of torch that give this engine.
        refused: names that say, when called, that they have no counterpart.
        torchs: names in swapped modules that are still torch's own; its functions refuse our tensors.
    """

    installed: bool
    swapped: tuple[str, ...]
    refused: tuple[str, ...]
    torchs: tuple[str, ...]

    def __str__(self) -> str:
        head = "swapped in" if self.installed else "not installed; it would be so"
        parts = (("this engine's", self.swapped), ("refused", self.refused), ("torch's own", self.torchs))
        return "\n".join([f"dtensor.swap: {head}", *(f"{what}:\n  " + "\n  ".join(names) for what, names in parts)])


def installed() -> bool:
    """Whether `install` is in force."""
    return _mapping.on


def install() -> None:
    """Swap the engine in; nothing when it is in already.

    Raises SwapError, before anything is changed, when a module of the program holds one of torch's names already: it
    would go on with torch's engine and mix the two.
    """
    if _mapping.on:
        return
    _load()
    early = rebind.bound_early(_mapping.forth())
    if early:
        named = ", ".join(early[:8]) + (", ..." if len(early) > 8 else "")
        raise SwapError(
            f"imported too early, and torch's already: {named}. Call dtensor.swap.install() before the program imports "
            "anything distributed, or run it with python -m dtensor.swap"
        )
    _changes.extend(rebind.rebind(_mapping.forth()))
    _put_facades()
    for name in _DATACLASS:
        setattr(Spec, name, getattr(_Fields, name))
    _mapping.on = True
    sys.meta_path.insert(0, _finder)
    for name in PATCHES:
        if name in sys.modules:
            _patches.apply(name, sys.modules[name])
    files.forget()


def uninstall() -> None:
    """Undo `install`: torch's names give torch's engine again. Tensors made meanwhile stay what they are.

    A module of the program that was imported meanwhile keeps the names that it imported.
    """
    if not _mapping.on:
        return
    sys.meta_path.remove(_finder)
    _patches.undo()
    files.forget()
    _mapping.on = False
    for name, module in _loaded():
        if isinstance(module, Facade):
            sys.modules[name] = module._real
    rebind.restore(_changes)
    _changes.clear()
    rebind.rebind(_mapping.back())
    for name in _DATACLASS:
        delattr(Spec, name)


@contextmanager
def swapped() -> Iterator[None]:
    """`with dtensor.swap.swapped():` installs for the block, and leaves as it was what was installed before it."""
    before = _mapping.on
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def status() -> Status:
    """What is swapped, or would be, and what of torch's engine stays torch's. Loads all of it."""
    for name in MODULES:
        importlib.import_module(name)
    _load()
    ours: list[str] = []
    refused: list[str] = []
    torchs: list[str] = []
    for real, _ in _mapping.modules.values():
        for name, value in vars(real).items():
            stands = None if isinstance(value, ModuleType) else _mapping.of(value)
            if stands is not None:
                refuses = isinstance(stands, type) and stands.__module__ == "dtensor.swap.facade"
                (refused if refuses else ours).append(f"{real.__name__}.{name}")
            elif isinstance(value, type | FunctionType) and value.__module__ == real.__name__:
                torchs.append(f"{real.__name__}.{name}")
    return Status(_mapping.on, tuple(sorted(ours)), tuple(sorted(refused)), tuple(sorted(torchs)))


def _load() -> None:
    """Torch's package, C++'s hold on it, and for what is loaded the tables and the facades. Changes no name."""
    if _mapping.on:
        return
    for name in CORE:
        importlib.import_module(name)
    if not _mapping.modules:
        _let_torch_find_its_own()
    for name, module in _loaded():
        _stand_for(name, module)


def _loaded() -> list[tuple[str, ModuleType]]:
    """What is loaded of the modules to swap, under all its names: some have an old one as well."""
    return [(name, module) for name, module in list(sys.modules.items()) if is_under(name, ROOTS)]


def _put_facades() -> None:
    """In the place of each module that has one, under all its names."""
    for name, module in _loaded():
        if id(module) in _mapping.modules:
            sys.modules[name] = _mapping.modules[id(module)][1]


def _stand_for(name: str, module: ModuleType) -> None:
    """A facade for one module, and its names."""
    if id(module) not in _mapping.modules:
        _mapping.modules[id(module)] = (module, Facade(module, _mapping))
    if name not in _named:
        load_names(_mapping, name, module)
    _named.add(name)


def _when_loaded(name: str, module: ModuleType) -> None:
    """A module has just run: what `install` does, for that one. Torch's engine holds its own modules, not facades."""
    if not _mapping.on:
        return
    _patches.apply(name, module)
    if not is_under(name, ROOTS):
        return
    for key, value in list(vars(module).items()):
        if isinstance(value, Facade):
            setattr(module, key, value._real)
    parent, _, child = name.rpartition(".")
    above = sys.modules.get(parent)
    if isinstance(above, Facade):
        setattr(above._real, child, module)
    _stand_for(name, module)
    _put_facades()


_finder = Finder(lambda name: name in PATCHES or is_under(name, ROOTS), _when_loaded)


class _Probe(torch.Tensor):
    """A tensor subclass, for one op."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return torch.zeros(())


def _let_torch_find_its_own() -> None:
    """One op of a tensor subclass: C++ looks up `torch.distributed.tensor.DTensor` and keeps it."""
    probe: Any = torch.Tensor._make_wrapper_subclass(_Probe, ())
    torch.neg(probe)


_DATACLASS = ("__dataclass_fields__", "__dataclass_params__", "__match_args__")
"""What makes a class a dataclass, for who asks: a part of it alone would be believed."""


@dataclasses.dataclass(repr=False, eq=False)
class _Fields:
    """What `dataclasses.replace(spec, tensor_meta=...)` passes on: the arguments of torch's `DTensorSpec`."""

    mesh: object
    placements: object
    tensor_meta: object
