"""SequenceParallel: norms and dropout that work on a sequence sharded over the axis, with replicated parameters."""

from __future__ import annotations

import torch
from torch import nn

from dtensor.distribute import distribute_module
from dtensor.mesh import DeviceMesh
from dtensor.placement import Placement, Replicate, Shard
from dtensor.tensor import DTensor

from .steps import SequenceSteps, replaced
from .style import ParallelStyle, arranged, check_fresh, on_input, on_output

__all__ = ["SequenceParallel"]


class SequenceParallel(SequenceSteps, ParallelStyle):
    """Run a module (LayerNorm, RMSNorm, Dropout, ...) on activations that are sharded along the sequence.

    Args:
        sequence_dim: the dim that is sharded; 1 for [batch, sequence, ...].
        use_local_output: give back this rank's plain tensor instead of a DTensor.

    A plain input is taken as this rank's piece already; a DTensor is brought to Shard(sequence_dim). The
    parameters are replicated as they are, without a broadcast: initialise them alike on all ranks. Their
    gradients stay pending sums, Partial("sum").
    """

    lays_out_parameters = True

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        check_fresh(self, module, device_mesh)

    def _layouts(self, module: nn.Module) -> dict[str, Placement]:
        return {name: Replicate() for name, _ in module.named_parameters(recurse=False)}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check(module, device_mesh)
        if replaced(self, SequenceSteps):
            return self._apply_steps(module, device_mesh)
        over, layout, local = self.over(device_mesh), self.sequence_sharding[0], self.use_local_output
        call = self.of(module)

        def prepare(x: object) -> object:
            if not isinstance(x, torch.Tensor):
                raise ValueError(f"{call}: expected a tensor or a DTensor as input, got {type(x).__name__}")
            return arranged(x, over, layout, layout, call)

        def finish(y: object) -> object:
            return y.to_local() if local and isinstance(y, DTensor) else y

        distribute_module(module, over.mesh, self._replicate_module_fn)
        on_input(module, prepare)
        on_output(module, finish)
        return module

    def __repr__(self) -> str:
        dim = self.sequence_sharding[0].dim
        return f"SequenceParallel(sequence_dim={dim}, use_local_output={self.use_local_output})"
