"""Which module is running: forward by hooks, backward by the numbers that autograd gives its nodes.

Every autograd node carries a sequence number, counted up as nodes are made. A module's forward makes the
nodes of an interval of numbers, so when a node runs in backward its number tells the innermost module that
made it, without hooks on tensors:

    MLP          [10 ......................... 31]
      MLP.up         [10 .. 17]
      MLP.down                        [22 .. 30]        node 25 runs: MLP.down, backward
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["Forward", "ModuleTree"]

OUTSIDE = "Global"
"""What runs in no module."""


@dataclass(slots=True)
class Forward:
    """One forward of one module: nodes `first` to `last` (exclusive) were made in it."""

    name: str
    first: int
    last: int
    depth: int


@dataclass
class ModuleTree:
    """Follows the modules that run in this thread between `start` and `stop`.

    Attributes:
        names: every module that ran, in order of its first run, with its class name and depth.
        forwards: the finished and running forwards.
        on_enter: called with (name, module) when a module starts.
    """

    on_enter: Callable[[str, nn.Module], None]
    names: dict[str, tuple[str, int]] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)

    def start(self) -> None:
        """Begin to follow. Other threads' modules are not seen."""
        self._thread = threading.get_ident()
        self._stack: list[Forward] = []
        self._paths: dict[int, str] = {}
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    def current(self) -> tuple[str, bool]:
        """(module, is backward) for what runs now."""
        node = torch._C._current_autograd_node()
        if self._stack:
            return self._stack[-1].name, node is not None
        if node is None:
            return OUTSIDE, False
        number = node._sequence_nr()
        inside = [f for f in self.forwards if f.first <= number < f.last]
        return (max(inside, key=lambda f: (f.depth, f.first)).name if inside else OUTSIDE), True

    # ------------------------------------------------------------ hooks
    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        name = self._name(module)
        forward = Forward(name, _next_number(), 1 << 62, len(self._stack))
        self.names.setdefault(name, (type(module).__name__, len(self._stack)))
        self._stack.append(forward)
        self.forwards.append(forward)
        self.on_enter(name, module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._stack:
            self._stack.pop().last = _next_number()

    def _name(self, module: nn.Module) -> str:
        """`Class.path.to.module`, from the outermost module that runs."""
        if not self._stack:
            root = type(module).__name__
            self._paths = {id(m): f"{root}.{path}" if path else root for path, m in module.named_modules()}
        if id(module) not in self._paths:  # not registered below the outermost module
            for path, m in module.named_modules():
                here = f"{self._stack[-1].name}.{type(module).__name__}"
                self._paths.setdefault(id(m), f"{here}.{path}" if path else here)
        return self._paths[id(module)]


def _next_number() -> int:
    return int(torch._C._autograd._get_sequence_nr())
