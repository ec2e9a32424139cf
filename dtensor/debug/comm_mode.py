"""CommDebugMode: the collectives that run inside a `with`, by kind, by module, forward and backward apart.

    mode = CommDebugMode()
    with mode:
        net(x).sum().backward()
    mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
    print(mode.generate_comm_debug_tracing_table(noise_level=1))

It counts what this thread issues, whatever issues it: DTensors, functional collectives, torch.distributed. A
rank of a simulated world is a thread, so there too a mode sees one rank.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor.comm.observers import observers
from dtensor.debug import report
from dtensor.debug.collectives import Collective, CommCounts, classify
from dtensor.debug.module_tree import OUTSIDE, ModuleTree
from dtensor.debug.report import Event
from dtensor.placement import Placement
from dtensor.tensor import DTensor

__all__ = ["CommDebugMode", "Event"]


class CommDebugMode(TorchDispatchMode):
    """Count and trace collectives inside a `with`. Entering it again starts from zero."""

    def __init__(self) -> None:
        super().__init__()
        self._reset()

    def _reset(self) -> None:
        self.events: list[Event] = []
        self._operators: Counter[Any] = Counter()
        self._parameters: dict[str, WeakValueDictionary[str, nn.Parameter]] = {}
        self._sharding: dict[str, tuple[Placement, ...]] = {}
        self.tree = ModuleTree(self._on_module)

    def __enter__(self) -> CommDebugMode:
        self._reset()
        super().__enter__()
        self.tree.start()
        observers.append(self._on_collective)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        observers.remove(self._on_collective)
        self.tree.stop()
        super().__exit__(kind, error, trace)

    # ------------------------------------------------------------ what happens inside
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            layouts = tuple(str(a._spec) for a in _flat(args) if isinstance(a, DTensor))
            self._note(_short(func), None, layouts)
            return NotImplemented  # the engine runs it; what it does to local tensors comes back here
        out = func(*args, **kwargs)
        collective = classify(func, args, kwargs, out)
        if collective is not None:
            self._operators[func._overloadpacket] += 1
        self._note(_short(func), collective, ())
        return out

    def _on_collective(self, kind: str, ranks: tuple[int, ...], received: int, itemsize: int) -> None:
        """A collective of a simulated or fake world."""
        self._note(kind, Collective(kind, len(ranks), received, itemsize), ())

    def _note(self, name: str, collective: Collective | None, layouts: tuple[str, ...]) -> None:
        module, backward = self.tree.current()
        self.events.append(Event(name, module, backward, collective, layouts))

    def _on_module(self, name: str, module: nn.Module) -> None:
        own = dict(module.named_parameters(recurse=False))
        if own:
            self._parameters[name] = WeakValueDictionary(own)  # looking on keeps nothing alive
        for n, p in own.items():
            if isinstance(p, DTensor):
                self._sharding[f"{name}.{n}"] = p.placements

    # ------------------------------------------------------------ answers
    def get_comm_counts(self) -> dict[Any, int]:
        """How often each collective ran, by `torch.ops.c10d_functional.*` packet; absent ones are 0."""
        return CommCounts(Counter(e.collective.kind for e in self.events if e.collective), dict(self._operators))

    def get_total_counts(self) -> int:
        """How many collectives ran."""
        return sum(e.collective is not None for e in self.events)

    @property
    def comm_counts(self) -> dict[Any, int]:
        """`get_comm_counts()`, by the name that torch's mode has it under too."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """Module path -> "forward" and "backward" -> counts, those of the modules below included; "Global" is all."""
        kinds: dict[str, dict[str, Counter[str]]] = {}
        for e in self.events:
            if e.collective is None:
                continue
            for path in [OUTSIDE, *(_prefixes(e.module) if e.module != OUTSIDE else ())]:
                of = kinds.setdefault(path, {"forward": Counter(), "backward": Counter()})
                of["backward" if e.backward else "forward"][e.collective.kind] += 1
        kinds.setdefault(OUTSIDE, {"forward": Counter(), "backward": Counter()})
        return {
            path: {way: CommCounts(counted, {}) for way, counted in ways.items()} for path, ways in kinds.items()
        }

    def get_comm_bytes(self) -> dict[str, int]:
        """Bytes this rank received from others, by kind (all_reduce, all_gather, ...).

        An all-reduce of n bytes over k ranks counts as 2 n (k-1)/k, what a ring moves.
        """
        out: Counter[str] = Counter()
        for e in self.events:
            if e.collective is not None:
                out[e.collective.kind] += e.collective.nbytes
        return dict(out)

    def get_parameter_info(self) -> dict[str, dict[str, nn.Parameter]]:
        """Module path -> its own parameters by name, for every module with parameters that ran."""
        return {path: dict(own) for path, own in self._parameters.items()}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """Parameter path -> placements, for every DTensor parameter of a module that ran."""
        return self._sharding

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A text: per module, its parameters' layouts and what ran in forward and in backward.

        noise_level: 0 collectives only; 1 also operations on DTensors; 2 also operations on local tensors that
        compute something; 3 everything. Raises ValueError for another level.
        """
        return report.table(self.tree, self.events, self.get_parameter_info(), noise_level)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Append the tracing table to a file."""
        with open(file_name, "a", encoding="utf-8") as f:
            f.write(self.generate_comm_debug_tracing_table(noise_level) + "\n")

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the tracing table's content as JSON: a list of modules, nested as they ran."""
        with open(file_name, "w", encoding="utf-8") as f:
            f.write(report.as_json(self.tree, self.events, self.get_parameter_info(), noise_level))


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _short(func: Any) -> str:
    """`aten.mm.default`."""
    return str(func) if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", str(func))


def _flat(x: object) -> list[object]:
    if isinstance(x, (list, tuple)):
        return [z for y in x for z in _flat(y)]
    return [x]
