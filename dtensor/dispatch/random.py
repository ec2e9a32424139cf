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

**In `torch.compile`** a generator cannot be seeded: it is state that a graph does not see. A graph draws a number,
makes it common, and hands it to every random op inside a draw as an argument of one op of this package's
(`dtensor::seeded`), which seeds the generator while it runs. So replicas agree, shards differ, and what is computed
again in backward is the same; the numbers are others than outside of a graph. A graph outlives `equal_seeds()`, so it
sends its number all the same.

    n = randint(2**62)    n = broadcast(n, tp)    dtensor::seeded(n, [shard, 1], "aten.native_dropout.default", [x], ..)

**CUDA.** A generator there is a seed and an offset into the seed's stream, both kept on the host. Seeded draws take
their number from the two and move the offset on, so that where no axis replicates, or inside `equal_seeds()`, the
host does not wait for the device. Otherwise the number travels through the group, and the host waits for it, once an
op. While a graph is captured generators cannot be seeded: seeded draws, and draws that have to agree, are refused then;
whole draws inside `equal_seeds()` can be captured, and are other numbers at every replay.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor.comm.communicator import traced
from dtensor.per_thread import PerThread
from dtensor.placement import Shard, StridedShard
from dtensor.spec import Spec

__all__ = ["WHOLE_DRAW", "draw_part", "equal_seeds", "part_of", "run_seeded", "seeded_alike", "shard_number"]

WHOLE_DRAW = 1 << 24
"""Elements of the largest tensor that is drawn as a whole."""

_equal_seeds = PerThread(False)


def equal_seeds(enabled: bool = True) -> AbstractContextManager[None]:
    """Inside, the ranks are taken to be seeded alike, and random ops on replicated axes send nothing."""
    return _equal_seeds.set_to(enabled)


def seeded_alike() -> bool:
    """Whether the ranks are taken to be seeded alike here: inside `equal_seeds`."""
    return _equal_seeds.value


def _agreeing_axes(spec: Spec) -> list[int]:
    """Axes along which positions must draw the same and may be seeded differently."""
    if spec.mesh.coord is None or (_equal_seeds.value and not _in_graph()):
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
        _agree_as_shapes(spec, _state if spec.numel <= WHOLE_DRAW else _number, device)
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
        _agree_as_shapes(spec, _state, device)
        axes = []
    if axes and _in_graph():
        with _Seeded(spec, None, generator, device):
            yield
        return
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


_state, _number = (torch.Size([5056]), torch.uint8), (torch.Size([]), torch.int64)
"""What ranks make common: the state of a CPU generator, or a number of one."""


def _agree_as_shapes(spec: Spec, what: tuple[torch.Size, torch.dtype], device: torch.device) -> None:
    """Send what tensors with values would, for those that count it."""
    shape, dtype = what
    for axis in _agreeing_axes(spec):
        spec.mesh.comm(axis).broadcast(torch.empty(shape, dtype=dtype, device=device), 0)


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
    if device.type == "meta":
        _agree_as_shapes(spec, _number, device)
        return run()
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
        _agree_as_shapes(spec, _number, device)
        yield
        return
    if _in_graph():
        with _Seeded(spec, shard_number(spec), generator, device):
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


# ------------------------------------------------------------ inside a compiler's trace
def _in_graph() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0 and traced(torch.empty(0))


class _Seeded(TorchDispatchMode):
    """Inside, in a trace, random ops take their numbers from a number that the graph draws, and the shard's."""

    def __init__(self, spec: Spec, shard: int | None, generator: torch.Generator, device: torch.device) -> None:
        super().__init__()
        if generator is not default_generator(device):
            raise RuntimeError(
                f"random numbers for {spec} inside torch.compile, from a generator of the program's: a graph draws "
                "from the default one only; draw outside of it and pass the numbers, or leave generator= out"
            )
        number = torch.randint(1 << 62, (1,), dtype=torch.int64, device=device)
        for axis in _agreeing_axes(spec):
            number = spec.mesh.comm(axis).broadcast(number, 0)
        self.number, self.salt = number, [0 if shard is None else shard + 1, 0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        tensors: list[torch.Tensor] = []
        given = {k: v for k, v in (kwargs or {}).items() if k != "generator"}
        text = json.dumps([_as_text(args, tensors), {k: _as_text(v, tensors) for k, v in given.items()}])
        self.salt[1] += 1
        got = list(torch.ops.dtensor.seeded(self.number, list(self.salt), str(func), tensors, text))
        written = [args[i] for i in _written(func)]
        for target in reversed(written):
            target.copy_(got.pop())
        returns = func._schema.returns
        if not all(str(r.type) == "Tensor" for r in returns):
            raise RuntimeError(f"{func} inside torch.compile draws random numbers and gives more than tensors")
        results = [written.pop(0) if r.alias_info is not None else got.pop(0) for r in returns]
        return results[0] if len(results) == 1 else tuple(results)


def _written(func: Any) -> list[int]:
    return [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]


def _as_text(x: Any, tensors: list[torch.Tensor]) -> Any:
    """An argument as JSON has it; tensors are put into `tensors`, torch's constants go by their names."""
    if isinstance(x, torch.Tensor):
        tensors.append(x)
        return "tensor"
    if isinstance(x, (list, tuple)):
        return [_as_text(y, tensors) for y in x]
    return x if x is None or isinstance(x, (bool, int, float)) else f"{type(x).__name__} {x}"


def _from_text(x: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(x, list):
        return [_from_text(y, tensors) for y in x]
    if not isinstance(x, str):
        return x
    kind, _, name = x.partition(" ")
    if kind == "tensor":
        return next(tensors)
    return torch.device(name) if kind == "device" else name if kind == "str" else getattr(torch, name[len("torch.") :])


def _drawn(op: str, tensors: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
    """The new tensors that a random op gives, and what becomes of those that it writes."""
    _, packet, overload = op.split(".")
    func = getattr(getattr(torch.ops.aten, packet), overload)
    args, kwargs = json.loads(text)
    left = iter(tensors)
    args, kwargs = _from_text(args, left), {k: _from_text(v, left) for k, v in kwargs.items()}
    for i in _written(func):
        args[i] = args[i].clone()
    out = func(*args, **kwargs)
    written = [args[i] for i in _written(func)]
    many = out if isinstance(out, (list, tuple)) else [out]
    return [t for t in many if isinstance(t, torch.Tensor) and not any(t is w for w in written)] + written


def _run_in_graph(
    number: torch.Tensor, salt: Sequence[int], op: str, tensors: Sequence[torch.Tensor], text: str
) -> list[torch.Tensor]:
    generator = default_generator(number.device)
    state = generator.get_state()
    generator.manual_seed(_mix(_mix(int(number.item()), salt[0]), salt[1]))
    try:
        return _drawn(op, tensors, text)
    finally:
        generator.set_state(state)


_library = torch.library.Library("dtensor", "FRAGMENT")
_library.define(
    "seeded(Tensor number, int[] salt, str op, Tensor[] tensors, str arguments) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("seeded", _run_in_graph, "CompositeExplicitAutograd")
torch.library.register_fake(
    "dtensor::seeded", lambda number, salt, op, tensors, arguments: _drawn(op, tensors, arguments), lib=_library
)
