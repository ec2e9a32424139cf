"""A call of an op as rules see it: its schema, its arguments with specs in the tensors' places, its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.spec import Spec, TensorMeta

__all__ = ["Call", "flat_inputs", "is_inplace", "op_name", "tensor_names"]


@dataclass(slots=True)
class Call:
    """One call of an op, tensors given as specs.

    Attributes:
        op: the overload called.
        arguments: every argument by name, defaults filled in; tensors as `Spec`, lists of them as tuples.
        inputs: the tensor arguments, flattened in schema order, absent ones left out.
        names: for each input the argument it is, `tensors` lists as `tensors.0`, `tensors.1`, ...
        outputs: global metadata of the tensor outputs, flattened; None for an output that is None.
    """

    op: torch._ops.OpOverload
    arguments: Mapping[str, Any]
    inputs: tuple[Spec, ...]
    names: tuple[str, ...]
    outputs: tuple[TensorMeta | None, ...]

    def __getitem__(self, name: str) -> Any:
        """Value of argument `name`."""
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Value of argument `name`, or `default` when the op has none of that name."""
        return self.arguments.get(name, default)

    def index(self, name: str) -> int | None:
        """Position of argument `name` among the inputs; None when it is absent or no tensor."""
        return self.names.index(name) if name in self.names else None

    def dim(self, name: str = "dim", of: int = 0) -> int:
        """Argument `name` as a non-negative dim of input `of`."""
        d, n = int(self.arguments[name]), self.inputs[of].ndim
        return d % n if n else 0

    def dims(self, name: str = "dim", of: int = 0) -> tuple[int, ...]:
        """Argument `name` (an int, a list, or None or [] for all) as sorted non-negative dims of input `of`."""
        given, n = self.arguments.get(name), self.inputs[of].ndim
        if given is None or (not isinstance(given, int) and len(given) == 0):
            return tuple(range(n))
        many = (given,) if isinstance(given, int) else given
        return tuple(sorted({int(d) % n if n else 0 for d in many})) if n else ()


def op_name(op: torch._ops.OpOverload) -> str:
    """`aten.add.Tensor` for `torch.ops.aten.add.Tensor`."""
    return f"{op.namespace}.{op._schema.name.rpartition('::')[2]}.{op._overloadname}"


def is_inplace(op: torch._ops.OpOverload) -> bool:
    """True for `relu_`, which writes its first argument, named after `relu`, which does not; False for `__iand__`."""
    first = op._schema.arguments[0].alias_info if op._schema.arguments else None
    name = op._schema.name
    return first is not None and first.is_write and name.endswith("_") and not name.endswith("__")


def tensor_names(op: torch._ops.OpOverload) -> list[str]:
    """Names of the arguments of an op that may be tensors, in schema order."""
    return [a.name for a in op._schema.arguments if "Tensor" in str(a.type) and not a.is_out]


def flat_inputs(arguments: Sequence[tuple[str, object]]) -> tuple[tuple[Spec, ...], tuple[str, ...]]:
    """Tensor inputs and their names, in order, from named arguments with specs in the tensors' places."""
    inputs: list[Spec] = []
    names: list[str] = []
    for name, value in arguments:
        if isinstance(value, Spec):
            inputs.append(value)
            names.append(name)
        elif isinstance(value, (list, tuple)):
            for j, item in enumerate(value):
                if isinstance(item, Spec):
                    inputs.append(item)
                    names.append(f"{name}.{j}")
    return tuple(inputs), tuple(names)
