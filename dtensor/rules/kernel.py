"""What a kernel sees: this rank's inputs, where they lie in the global tensors, and its mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dtensor.comm.communicator import traced
from dtensor.intervals import Interval
from dtensor.rules.call import Call
from dtensor.spec import Spec

__all__ = ["KernelContext", "looks_at_values", "traced"]


def looks_at_values(x: torch.Tensor) -> bool:
    """True where a check may read `x` at once: on CPU, outside of a trace.

    On accelerators that would wait for the device, and the tensors of a trace (a compiler's, `dtensor.lower`'s) have no
    values: there a check is an assertion on the device, or in the graph.
    """
    return x.device.type == "cpu" and not traced(x)


@dataclass(slots=True)
class KernelContext:
    """One run of a kernel on one rank.

    Attributes:
        call: the global call (op, specs of the inputs, static arguments by name).
        axes: the mesh axes this kernel was chosen on; `factors[i]` is what axis `axes[i]` splits.
        inputs: this rank's local tensors, in the order of the rule's inputs.
        in_specs, out_specs: layouts the inputs arrive in and the outputs must leave in.
        arguments: argument name -> value of this very call (tensors as local tensors).
    """

    call: Call
    axes: tuple[int, ...]
    factors: tuple[int, ...]
    inputs: Sequence[torch.Tensor]
    in_specs: Sequence[Spec]
    out_specs: Sequence[Spec | None]
    arguments: Mapping[str, object]

    def tensor(self, name: str) -> torch.Tensor:
        """The local tensor of argument `name`; TypeError when it is not given."""
        t = self.arguments[name]
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"argument {name} of {self.call.op} is {t!r}, not a tensor")
        return t

    def optional(self, name: str) -> torch.Tensor | None:
        """The local tensor of argument `name`, or None."""
        t = self.arguments.get(name)
        return t if isinstance(t, torch.Tensor) else None

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce `x` over the kernel's axes; same shape on all their ranks."""
        if not self.axes:
            return x
        return self.in_specs[0].mesh.comm(self.axes).all_reduce(x, op)

    def intervals(self, i: int, dim: int) -> tuple[Interval, ...]:
        """Intervals (start, length) of dim `dim` of input `i` that this rank holds."""
        spec = self.in_specs[i]
        coord = spec.mesh.coord
        return spec.intervals_of(coord)[dim] if coord is not None else ()

    def indices(self, i: int, dim: int, device: torch.device | None = None) -> torch.Tensor:
        """Global indices along dim `dim` of input `i` that this rank holds: int64, ascending."""
        runs = self.intervals(i, dim)
        parts = [torch.arange(s, s + n, device=device) for s, n in runs]
        if not parts:
            return torch.empty(0, dtype=torch.int64, device=device)
        return torch.cat(parts) if len(parts) != 1 else parts[0]
