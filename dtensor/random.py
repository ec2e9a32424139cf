"""Random numbers of distributed tensors.

Three promises: positions that replicate a tensor draw the same numbers, positions that shard it draw
different ones, and the same seed gives the same numbers again. They are kept op by op. Every random op takes
one number from the generator it was given (the default one of the device, usually), makes it common along
the axes that replicate, mixes it with the shard's place in the tensor, and runs the local op on the
generator seeded so. Afterwards the generator goes on where it was after that one number.

    mesh (2, 2), placements (Replicate, Shard(0))      axis 0 ->   position 0      position 1
        seed of a rank = mix(number, shard)                        mix(n, 0)       mix(n, 0)      shard 0
                                                                   mix(n, 1)       mix(n, 1)      shard 1

Ranks need not be seeded alike: along replicating axes the number of position 0 is broadcast (8 bytes). Where a
program seeds all ranks alike, `equal_seeds()` saves that. Numbers depend on the layout, as torch's do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from dtensor.placement import Replicate, Shard, StridedShard
from dtensor.spec import Spec

__all__ = ["equal_seeds", "run_seeded"]

_flags = threading.local()


@contextlib.contextmanager
def equal_seeds(enabled: bool = True) -> Iterator[None]:
    """Inside, the ranks are taken to be seeded alike, and random ops on replicated axes send nothing."""
    before = getattr(_flags, "equal", False)
    _flags.equal = enabled
    try:
        yield
    finally:
        _flags.equal = before


def _mix(number: int, shard: int) -> int:
    """A well-spread 63-bit seed (splitmix64)."""
    z = (number + 0x9E3779B97F4A7C15 * (shard + 1)) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


def shard_number(spec: Spec) -> int:
    """Row-major number of this rank's shard, counting the axes that shard only."""
    number = 0
    for p, k, r in zip(spec.placements, spec.mesh.shape, spec.mesh.coord or (), strict=False):
        if isinstance(p, (Shard, StridedShard)):
            number = number * k + r
    return number


def run_seeded(run: Callable[[], object], spec: Spec, generator: torch.Generator | None, device: torch.device) -> object:
    """Run a local random op for a tensor laid out as `spec`, keeping the promises above."""
    if generator is None:
        generator = _default_generator(device)
    seed = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
    if not getattr(_flags, "equal", False):
        for axis, p in enumerate(spec.placements):
            if isinstance(p, Replicate) and spec.mesh.shape[axis] > 1:
                seed = spec.mesh.comm(axis).broadcast(seed.to(device), 0)
    state = generator.get_state()
    generator.manual_seed(_mix(int(seed.item()), shard_number(spec)))
    try:
        return run()
    finally:
        generator.set_state(state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]
    raise NotImplementedError(f"random numbers on device type {device.type!r} are not supported; use cpu or cuda")
