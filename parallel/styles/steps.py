"""The steps of the styles that lay out parameters, under the names that a subclass may replace.

A style of one's own is often one of these with another step: what is done to the parameters, the input or the output.
Where a subclass replaces none, the styles go their own way, which knows uneven pieces, several mesh axes and inputs
that modules share. Where it replaces one, all steps run as they are written here: over one axis, plain pieces even.

    class Gathered(SequenceParallel):
        @staticmethod
        def _prepare_output_fn(use_local_output, mod, outputs, device_mesh):
            return outputs.redistribute(placements=[Replicate()]).to_local()
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from dtensor.distribute import distribute_module, distribute_tensor
from dtensor.mesh import DeviceMesh
from dtensor.placement import Placement, Replicate, Shard
from dtensor.tensor import DTensor

__all__ = ["SequenceSteps", "WeightSteps", "replaced"]

STEPS = (
    "_partition_linear_fn", "_partition_embedding_fn", "_replicate_module_fn", "_prepare_input_fn",
    "_prepare_output_fn",
)  # fmt: skip


def replaced(style: object, steps: type) -> bool:
    """Whether the class of `style` has another step than `steps`, one of the classes here."""
    return any(getattr(type(style), name) is not getattr(steps, name) for name in STEPS if hasattr(steps, name))


def _placed(x: object, mesh: DeviceMesh, given: Placement, desired: Placement, what: str) -> DTensor:
    """`x` as a DTensor in the layout `desired`; a plain tensor is a piece of the layout `given`."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{what}: expected a tensor or a DTensor, got {type(x).__name__}")
    placed = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [given], run_check=False)
    return placed.redistribute(placements=[desired])


class WeightSteps:
    """Of styles that shard a weight."""

    src_data_rank: int | None
    input_layouts: tuple[Placement, ...]
    output_layouts: tuple[Placement, ...]
    desired_input_layouts: tuple[Placement, ...]
    use_local_output: bool

    def _layouts(self, module: nn.Module) -> dict[str, Placement]:
        raise NotImplementedError

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Shard the parameters of a Linear."""
        for key, layout in self._layouts(module).items():
            param = getattr(module, key)
            value = distribute_tensor(param, device_mesh, [layout], src_data_rank=self.src_data_rank)
            module.register_parameter(key, nn.Parameter(value, requires_grad=param.requires_grad))

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Shard the parameters of an Embedding."""
        WeightSteps._partition_linear_fn(self, name, module, device_mesh)

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> object:
        """The inputs, the first one in the layout that the parameters need."""
        first = _placed(inputs[0], device_mesh, input_layouts[0], desired_input_layouts[0], type(mod).__name__)
        return (first, *inputs[1:])

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> object:
        """The output in its layout."""
        outputs = outputs.redistribute(placements=list(output_layouts))
        return outputs.to_local() if use_local_output else outputs

    def _apply_steps(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        embedding = isinstance(module, nn.Embedding)
        return distribute_module(
            module,
            device_mesh,
            self._partition_embedding_fn if embedding else self._partition_linear_fn,
            partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )


class SequenceSteps:
    """Of `SequenceParallel`."""

    sequence_sharding: tuple[Shard, ...]
    use_local_output: bool

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Make the parameters replicated, as they are, without a broadcast."""
        for key, param in list(module.named_parameters(recurse=False)):
            if not isinstance(param, DTensor):
                value = DTensor.from_local(
                    param.detach(), device_mesh, [Replicate()] * device_mesh.ndim, run_check=False
                )
                module.register_parameter(key, nn.Parameter(value, requires_grad=param.requires_grad))

    @staticmethod
    def _prepare_input_fn(sequence_sharding: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> object:
        """The inputs, the first one sharded along the sequence."""
        sharded = sequence_sharding[0]
        return (_placed(inputs[0], device_mesh, sharded, sharded, type(mod).__name__), *inputs[1:])

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh) -> object:
        """The output, plain if that is wanted."""
        return outputs.to_local() if use_local_output else outputs

    def _apply_steps(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._replicate_module_fn,
            partial(self._prepare_input_fn, self.sequence_sharding),
            partial(self._prepare_output_fn, self.use_local_output),
        )
