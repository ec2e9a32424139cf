"""Styles of one's own that replace one step of a style here, as programs write them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.laws import rand
from helpers.modules import mlp
from helpers.parallel import grads_match, on_ranks, same
from torch import nn

from dtensor import DeviceMesh, DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

R = Replicate()


class Gathered(SequenceParallel):
    """Gives back the whole sequence."""

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh) -> object:
        return outputs.redistribute(placements=[R]).to_local()


class Whole(SequenceParallel):
    """Takes whole sequences and shards them; applies the steps itself."""

    @staticmethod
    def _prepare_input_fn(sequence_sharding: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> object:
        return distribute_tensor(inputs[0], device_mesh, sequence_sharding)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut = partial(self._prepare_input_fn, self.sequence_sharding)
        back = partial(self._prepare_output_fn, self.use_local_output)
        return distribute_module(module, device_mesh, self._replicate_module_fn, cut, back)


class Doubled(ColwiseParallel):
    """Twice the input, by another input step; its layouts are those that a Linear has."""

    @staticmethod
    def _prepare_input_fn(given: Any, desired: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> object:
        assert given == (R,) and desired == (R,)
        return ColwiseParallel._prepare_input_fn(given, desired, mod, (inputs[0] * 2,), device_mesh)


class Halved(RowwiseParallel):
    """Half the weight, by another step for parameters."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        with torch.no_grad():
            module.get_parameter("weight").mul_(0.5)
        super()._partition_linear_fn(name, module, device_mesh)


class Negated(PrepareModuleInput):
    def _prepare_input_arg(self, input: Any, mesh: DeviceMesh, given: Any, desired: Any) -> object:
        return super()._prepare_input_arg(-input, mesh, given, desired)


class Plus(PrepareModuleOutput):
    def _prepare_out_fn(self, outputs: Any, device_mesh: DeviceMesh) -> object:
        out: Any = super()._prepare_out_fn(outputs, device_mesh)
        return out + 1


@pytest.mark.parametrize("style", [Gathered, Whole])
def test_sequences(style: type[SequenceParallel]) -> None:
    def f(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        ref = nn.LayerNorm(6)
        net = parallelize_module(copy.deepcopy(ref), mesh, style())
        x = rand(2, 4, 6)
        piece = x if style is Whole else distribute_tensor(x, mesh, [Shard(1)])
        y = net(piece)
        assert isinstance(y, DTensor) == (style is Whole)
        same(y, ref(x))
        ref(x).square().sum().backward()
        (y.square().sum() if style is Whole else y.square().sum() / mesh.size()).backward()
        if style is Whole:
            grads_match(ref, net)

    on_ranks(f)


STYLES: dict[str, tuple[Callable[[], ParallelStyle], Callable[[], ParallelStyle], Callable[[nn.Module], None]]] = {
    "input": (Doubled, RowwiseParallel, lambda net: net[0].register_forward_pre_hook(lambda _, x: (x[0] * 2,))),  # type: ignore[index]
    "parameters": (ColwiseParallel, Halved, lambda net: net[2].weight.data.mul_(0.5)),  # type: ignore[index]
}


@pytest.mark.parametrize("name", STYLES)
def test_weights(name: str) -> None:
    up, down, change = STYLES[name]

    def f(mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        ref = mlp(6, 8, 5)
        net = parallelize_module(copy.deepcopy(ref), mesh, {"0": up(), "2": down()})
        change(ref)
        x = rand(4, 6)
        same(net(x), ref(x))
        for m in (ref, net):
            m(x).square().sum().backward()
        grads_match(ref, net)

    on_ranks(f)


def test_inputs_and_outputs() -> None:
    def f(mesh: DeviceMesh) -> None:
        x = rand(4, 8)
        net = nn.Sequential(nn.Identity())
        plan: dict[str, ParallelStyle] = {
            "": Negated(input_layouts=R, desired_input_layouts=Shard(0), use_local_output=True),
            "0": Plus(output_layouts=Shard(0), desired_output_layouts=R),
        }
        parallelize_module(net, mesh, plan)
        same(net(x), 1 - x)
        with pytest.raises(ValueError, match="2 positional inputs"):
            net(x, x)

    on_ranks(f)


def test_layouts_can_be_read() -> None:
    layouts: list[tuple[Placement, ...]] = [
        ColwiseParallel().input_layouts, ColwiseParallel().output_layouts, RowwiseParallel().input_layouts,
        RowwiseParallel().output_layouts, SequenceParallel(sequence_dim=2).sequence_sharding,
    ]  # fmt: skip
    assert layouts == [(R,), (Shard(-1),), (Shard(-1),), (R,), (Shard(2),)]
    assert repr(ColwiseParallel()) == "ColwiseParallel()"
    assert repr(ColwiseParallel(input_layouts=R)) == "ColwiseParallel(input_layouts=Replicate())"
