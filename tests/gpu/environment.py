"""What a case is given: the device, the world, meshes that fit it, and ways to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dtensor import DeviceMesh, DTensor, Placement, init_device_mesh

NAMES = ("x", "y", "z")
MESHES = {1: ((1,), (1, 1)), 2: ((2,), (1, 2)), 4: ((4,), (2, 2)), 8: ((8,), (2, 4), (2, 2, 2))}


class Skip(Exception):
    """A case that does not run here; the reason is a fact that all ranks share."""


@dataclass
class Environment:
    """One rank's: `device`, `rank`, `world` (how many), and whether few examples are enough (`quick`)."""

    device: torch.device
    rank: int
    world: int
    quick: bool

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def mesh(self, *shape: int) -> DeviceMesh:
        """A mesh over the world, its axes named x, y, z."""
        return init_device_mesh(self.device.type, shape, mesh_dim_names=NAMES[: len(shape)])

    def meshes(self) -> Iterator[DeviceMesh]:
        """The meshes that fit the world; a world of another size has one of one axis."""
        for shape in MESHES.get(self.world, ((self.world,),)):
            yield self.mesh(*shape)

    def same_everywhere(self, *values: torch.Tensor) -> None:
        """AssertionError, on all ranks, unless all ranks hold the same values, bit for bit."""
        for value in values:
            mine = value.detach().cpu().contiguous().view(-1)
            bits = mine.view(torch.uint8).numpy().tobytes() if mine.numel() else b""
            every: list[Any] = [None] * self.world
            dist.all_gather_object(every, hashlib.sha1(bits).hexdigest())
            assert all(other == every[0] for other in every), "the ranks hold different values"


def rand(env: Environment, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that are the same on all ranks and devices."""
    g = torch.Generator().manual_seed(100 + seed)
    if dtype.is_floating_point or dtype.is_complex:
        real = torch.randn(shape, generator=g)
        made = torch.complex(real, torch.randn(shape, generator=g)) if dtype.is_complex else real
        return made.to(dtype).to(env.device)
    high = 2 if dtype == torch.bool else 7
    return torch.randint(0, high, shape, generator=g).to(dtype).to(env.device)


def close(got: torch.Tensor, want: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-5, what: object = "") -> None:
    """AssertionError unless shapes, dtypes and, within the tolerance, values agree. NaN equals NaN."""
    got, want = got.detach(), want.detach()
    assert got.shape == want.shape and got.dtype == want.dtype, (what, got.shape, got.dtype, want.shape, want.dtype)
    if not got.is_complex():
        got, want = got.double(), want.double()
    if not torch.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True):
        worst = (got - want).abs().max().item()
        raise AssertionError(f"{what}: differs by up to {worst:.3g} (rtol {rtol}, atol {atol})")


def placed(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], grad: bool = False) -> DTensor:
    """A DTensor of value `full`, in any layout (pending ones too), without communication."""
    from helpers.laws import make

    return make(full, mesh, placements, requires_grad=grad)


@contextmanager
def swapped(module: Any, **values: object) -> Iterator[None]:
    """Attributes of a module, replaced inside."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
