"""Random numbers of distributed tensors.

Promises, op by op: positions that replicate a tensor draw the same numbers, positions that shard it draw different
ones, and the same seed gives the same numbers again. Ranks need not be seeded alike: along replicating axes
position 0's generator counts, which costs one small broadcast; where a program seeds all ranks alike,
`equal_seeds()` saves it.

Two ways to keep them:

*Whole draws* (`draw_part`), for ops that read no values (`uniform_`, `rand_like`, dropout's mask, ...) and tensors of
up to `WHOLE_DRAW` elements, on CPU and on CUDA. A rank draws the numbers of the whole tensor, as a program on one
device would, and keeps its part. So with ranks seeded alike numbers do not depend on the layout: they are those of one
device (on CUDA: of the same model), for the tensor and for everything drawn after it.

    seed 5, f32[4@x,2]       one device draws a b c d e f g h        rank 0 keeps a b c d, rank 1 keeps e f g h

*Seeded draws* (`run_seeded`), for the rest. The op takes one number from the generator, makes it common along the
axes that replicate, mixes it with the shard's place in the tensor, and runs on the generator seeded so. Then the
generator goes on where it was after that one number.

    mesh (2, 2), placements (Replicate, Shard(0))      axis 0 ->   position 0      position 1
        seed of a rank = mix(number, shard)                        mix(n, 0)       mix(n, 0)      shard 0
                                                                   mix(n, 1)       mix(n, 1)      shard 1

A pending tensor counts as replicated here: what is drawn for it must be the same on all positions.

**CUDA.** A generator there is a seed and an offset into the seed's stream, both kept on the host. Seeded draws take
their number from the two and move the offset on, so that where no axis replicates, or inside `equal_seeds()`, the
host does not wait for the device. Otherwise the number travels through the group, and the host waits for it, once an
op. While a graph is captured generators cannot be seeded: seeded draws, and draws that have to agree, are refused then;
whole draws inside `equal_seeds()` can be captured, and are other numbers at every replay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from dtensor.comm import traced
from dtensor.placement import Shard, StridedShard
from dtensor.spec import Spec

__all__ = ["WHOLE_DRAW", "draw_part", "equal_seeds", "part_of", "run_seeded", "shard_number"]

WHOLE_DRAW = 1 << 24
"""Elements of the largest tensor that is drawn as a whole."""

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


def _agreeing_axes(spec: Spec) -> list[int]:
    """Axes along which positions must draw the same and may be seeded differently."""
    if getattr(_flags, "equal", False) or spec.mesh.coord is None:
        return []
    return [
        axis for axis, p in enumerate(spec.placements)
        if not isinstance(p, (Shard, StridedShard)) and spec.mesh.shape[axis] > 1
    ]  # fmt: skip


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch's ops on `device` draw from when they are given none."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        if not torch.cuda.is_available():  # tensors without values, as of a machine that is not here
            return torch.default_generator
        torch.cuda.init()
        return torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]
    raise NotImplementedError(f"random numbers on device type {device.type!r} are not supported; use cpu or cuda")


# ------------------------------------------------------------ whole draws
def draw_part(
    draw: Callable[[Sequence[int]], torch.Tensor], spec: Spec, generator: torch.Generator | None, device: torch.device
) -> torch.Tensor:
    """This rank's part, laid out as `spec`, of what `draw(shape)` gives; `draw` reads no tensor's values.

    The result is the drawn tensor itself, a view of it, or a new tensor.
    """
    if device.type == "meta":
        return draw(spec.local_shape)
    if device.type not in ("cpu", "cuda") or spec.numel > WHOLE_DRAW or spec.mesh.coord is None:
        got = run_seeded(lambda: draw(spec.local_shape), spec, generator, device)
        assert isinstance(got, torch.Tensor)
        return got
    with _common_stream(spec, default_generator(device) if generator is None else generator, device):
        whole = draw(spec.shape)
    return part_of(whole, spec)


@contextlib.contextmanager
def _common_stream(spec: Spec, generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Inside, `generator` stands where position 0's does, on every axis that does not shard.

    A rank whose generator stood elsewhere goes on from there, one number later.
    """
    axes = _agreeing_axes(spec)
    if axes and _without_values(spec):
        axes = []
    if axes and torch._C._len_torch_dispatch_stack() and traced(torch.empty(0)):
        raise RuntimeError(
            f"random numbers for {spec} inside torch.compile: the ranks make their generators agree at every call, "
            "which a graph cannot; draw outside of it, or, ranks seeded alike, `with dtensor.random.equal_seeds():`"
        )
    if axes:
        _refuse_capture(spec, device)
    own = common = generator.get_state() if axes else None
    for axis in axes:
        assert common is not None
        common = spec.mesh.comm(axis).broadcast(common.to(device), 0).to("cpu")
    if own is None or common is None or torch.equal(own, common):
        yield
        return
    generator.set_state(common)
    try:
        yield
    finally:
        generator.set_state(own)
        _next_number(generator)


def _without_values(spec: Spec) -> bool:
    """True for tensors without values in a world that does not exist: nothing is drawn, nothing must agree."""
    world = spec.mesh._world
    return world is not None and world.kind == "fake" and traced(torch.empty(0))


def _refuse_capture(spec: Spec, device: torch.device) -> None:
    """RuntimeError while a CUDA graph is captured: generators cannot be seeded, and no number can reach the host."""
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"random numbers for {spec} while a CUDA graph is captured: the generator would have to be seeded for this "
            "rank, which a graph cannot; draw before the capture and pass the numbers, or, ranks seeded alike and what "
            "is drawn of at most dtensor.random.WHOLE_DRAW elements, `with dtensor.random.equal_seeds():`"
        )


def part_of(whole: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's part of a whole tensor: a view where every dim is one interval."""
    coord = spec.mesh.coord
    if coord is None or whole.shape == spec.local_shape:
        return whole
    for d, runs in enumerate(spec.intervals_of(coord)):
        parts = [whole.narrow(d, start, length) for start, length in runs]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, d) if parts else whole.narrow(d, 0, 0)
    return whole


# ------------------------------------------------------------ seeded draws
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


def run_seeded(
    run: Callable[[], object], spec: Spec, generator: torch.Generator | None, device: torch.device
) -> object:
    """Run a local random op for a tensor laid out as `spec`, keeping the promises above."""
    with _seeded(spec, default_generator(device) if generator is None else generator, device):
        return run()


def _next_number(generator: torch.Generator) -> int:
    """One number of the generator, which goes on; read on the host."""
    if generator.device.type == "cpu":
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    offset = generator.get_offset()
    generator.set_offset(offset + PHILOX_STEP)
    return _mix(generator.initial_seed(), offset)


PHILOX_STEP = 4
"""What the offset of a CUDA generator moves on by for one number; it must stay a multiple of 4."""


@contextlib.contextmanager
def _seeded(spec: Spec, generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Inside, `generator` is seeded for this rank's shard; afterwards it is where one number took it."""
    if _without_values(spec):
        yield
        return
    _refuse_capture(spec, device)
    number, axes = _next_number(generator), _agreeing_axes(spec)
    if axes:
        common = torch.tensor(number, dtype=torch.int64, device=device)
        for axis in axes:
            common = spec.mesh.comm(axis).broadcast(common, 0)
        number = int(common.item())
    state = generator.get_state()
    generator.manual_seed(_mix(number, shard_number(spec)))
    try:
        yield
    finally:
        generator.set_state(state)
