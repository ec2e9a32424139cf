"""State dicts under DDP over tensor parallelism, of optimizers that wrap another and are no optimizers themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtensor
from dtensor import Shard, init_device_mesh
from dtensor.spec import Spec
from dtensor.swap import data_parallel_state


class Wrapper(torch.optim.Optimizer):
    """As programs make them: every attribute is the inner one's, `Optimizer.__init__` is never called."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str = "optimizer") -> None:
        self.__dict__[name] = optimizer
        self.__dict__["held"] = optimizer

    @property
    def param_groups(self) -> Any:
        return self.held.param_groups

    @property
    def state(self) -> Any:
        return self.held.state

    def state_dict(self) -> dict[str, Any]:
        return self.held.state_dict()


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    def original(model: torch.nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> dict[str, Any]:
        return optimizers[0].state_dict()

    found: dict[str, Any] = data_parallel_state.with_hooks(original, torch.nn.Module(), (optimizer,))["state"][0]
    return found


def stepped(parts: bool) -> torch.optim.Optimizer:
    p = torch.nn.Parameter(torch.ones(2, 3))
    if parts:
        mesh = init_device_mesh("cpu", (2,))
        p._st_info = Spec.make(mesh, (Shard(0),), (4, 3), (3, 1), p.dtype)
    made = torch.optim.Adam([p])
    p.grad = torch.ones(2, 3)
    made.step()
    return made


def test_an_optimizer_of_parts_that_is_wrapped_saves_dtensors() -> None:
    def program() -> tuple[Any, ...]:
        inner = stepped(parts=True)
        one, other = saved(inner), saved(Wrapper(inner))
        assert not inner._optimizer_state_dict_post_hooks and not inner._optimizer_load_state_dict_pre_hooks
        return tuple((type(s["exp_avg"]).__name__, tuple(s["exp_avg"].shape), s["step"].dim()) for s in (one, other))

    assert dtensor.simulate(2)(program) == [(("DTensor", (4, 3), 0),) * 2] * 2


def test_an_optimizer_without_parts_is_left_alone() -> None:
    assert type(saved(Wrapper(stepped(parts=False), "other"))["exp_avg"]) is torch.Tensor


def test_one_that_hides_what_it_wraps_is_refused() -> None:
    def program() -> str:
        with pytest.raises(TypeError, match="state dict of Wrapper"):
            saved(Wrapper(stepped(parts=True), "other"))
        return "refused"

    assert dtensor.simulate(2)(program) == ["refused"] * 2
