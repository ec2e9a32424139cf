"""Measure the links once: a `CostModel` for this machine.

    torchrun --nproc-per-node 8 -m dtensor.calibrate --mesh 2,4              prints the model, as Python
    torchrun --nproc-per-node 8 -m dtensor.calibrate --mesh 2,4 --save model.json

    >>> set_cost_model(load("model.json"))        # on all ranks

Along each axis of a mesh an all-gather of little data is timed (its launch) and one of much (its bandwidth); hops are
what a longer axis, or all axes flattened, add to the launch. Over all axes together the other collectives are timed:
`kinds` holds how many times the delay and the transfer of each are what the gather's would make them. All ranks take
the slowest rank's lower quartiles, so that all decide alike. The model decides by seconds alone (`slack` is infinite).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from dtensor.comm.communicator import Communicator
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.redistribute.cost_model import CostModel

__all__ = ["load", "measure", "save"]

_SMALL, _LARGE = 64, 1 << 20


def measure(mesh: DeviceMesh, large: int = _LARGE, repeats: int = 15) -> CostModel:
    """The model of `mesh`'s links. All its ranks must call it; all get the same. `large`: elements of 4 bytes."""
    device = torch.device(mesh.device_type)
    axes = [a for a, k in enumerate(mesh.shape) if k > 1]
    whole = mesh.comm(tuple(range(mesh.ndim)))
    calls = [(mesh.comm(a), _CALLS["all_gather"], n) for a in axes for n in (_SMALL, large)]
    if axes:
        calls += [(whole, call, n) for call in _CALLS.values() for n in (_SMALL, max(large // whole.size, _SMALL + 1))]
    own = [_quick(comm, call(comm, n, device), repeats, device) for comm, call, n in calls]
    own += [_copied(n, repeats, device) for n in (_SMALL, large)]
    slowest = whole.all_reduce(torch.tensor(own, dtype=torch.float64, device=device), "max")
    *took, kernel, copied = [max(t, 1e-9) for t in slowest.tolist()]
    copy_bandwidth = large * 4 / copied
    if not axes:
        return CostModel(copy_bandwidth=copy_bandwidth, kernel=kernel, slack=math.inf)
    by_axis, by_kind = _pairs(took[: 2 * len(axes)]), dict(zip(_CALLS, _pairs(took[2 * len(axes) :])))
    delays, sizes = [short for short, _ in by_axis], [mesh.shape[a] for a in axes]
    speeds = [large * 4 * (k - 1) / max(long - short, short / 10) for k, (short, long) in zip(sizes, by_axis)]
    latency, hop = _line([*sizes, whole.size], [*delays, by_kind["all_gather"][0]])
    launches = [max(delay - hop * (k - 1), delay / 10) for k, delay in zip(sizes, delays)]
    plain = CostModel(latency=max(launches), hop=hop, pairwise=0.0)
    return CostModel(
        latency=latency,
        hop=hop,
        pairwise=0.0,
        bandwidth=max(speeds),
        copy_bandwidth=copy_bandwidth,
        kernel=kernel,
        axis_latency=dict(zip(axes, launches)),
        axis_bandwidth=dict(zip(axes, speeds)),
        kinds=_kinds(plain, whole.size, by_kind),
        slack=math.inf,
    )


Call = Callable[[Communicator, int, torch.device], Callable[[], object]]
_CALLS: dict[str, Call] = {
    "all_gather": lambda c, n, d: partial(c.all_gather, torch.ones(n, device=d), [(n,)] * c.size),
    "all_reduce": lambda c, n, d: partial(c.all_reduce, torch.ones(n * c.size, device=d)),
    "all_to_all": lambda c, n, d: partial(c.all_to_all, [torch.ones(n, device=d)] * c.size, [(n,)] * c.size),
    "reduce_scatter": lambda c, n, d: partial(c.reduce_scatter, [torch.ones(n, device=d)] * c.size),
}
"""Collectives in which every position sends or keeps n elements for each."""


def _pairs(times: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(times[::2], times[1::2]))


def _kinds(plain: CostModel, size: int, took: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """How many times the delay and the transfer of each kind are what those of the gather make them."""
    short, long = took["all_gather"]
    gather, pace = plain.all_gather(size, 0), max(long - short, short / 10)
    found = {}
    for kind, (delay, whole) in took.items():
        if kind == "all_gather":
            continue
        expected = getattr(plain, kind)(size, 0) / gather
        twice = 2 if kind == "all_reduce" else 1
        often, more = delay / short / expected, max(whole - delay, delay / 10) / pace / twice
        found[kind] = min(max(often, 0.1), 10.0), min(max(more, 0.1), 10.0)
    return found


def _line(sizes: Sequence[int], delays: Sequence[float]) -> tuple[float, float]:
    """Launch and seconds a hop, from the delays of axes of different sizes; an eleventh of the delay without these."""
    low, high = min(zip(sizes, delays)), max(zip(sizes, delays))
    hop = (high[1] - low[1]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    if hop <= 0:
        hop = min(delays) / 11
    return max(low[1] - hop * (low[0] - 1), low[1] / 10), hop


def _quick(comm: Communicator, call: Callable[[], object], repeats: int, device: torch.device) -> float:
    times = []
    for i in range(repeats + 2):
        comm.all_reduce(torch.zeros(1, device=device))
        _finish(device)
        start = time.perf_counter()
        call()
        _finish(device)
        if i >= 2:
            times.append(time.perf_counter() - start)
    return _fast(times)


def _copied(large: int, repeats: int, device: torch.device) -> float:
    x, times = torch.ones(large, device=device), []
    for _ in range(repeats):
        start = time.perf_counter()
        x.clone()
        _finish(device)
        times.append(time.perf_counter() - start)
    return _fast(times)


def _fast(times: Sequence[float]) -> float:
    """The lower quartile: what else the machine does makes times longer, never shorter."""
    return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def save(model: CostModel, file: str | Path) -> None:
    """Write a model as JSON."""
    plain = {f.name: getattr(model, f.name) for f in fields(model)}
    for name in ("axis_latency", "axis_bandwidth"):
        plain[name] = {str(a): v for a, v in plain[name].items()}
    plain["slack"] = None if model.by_seconds else model.slack
    plain["wire"] = {_name(own): _name(other) for own, other in model.wire.items()}
    Path(file).write_text(json.dumps(plain, indent=2) + "\n")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load(file: str | Path) -> CostModel:
    """The model that `save` wrote. Raises ValueError for numbers that no machine has."""
    plain = json.loads(Path(file).read_text())
    for name in ("axis_latency", "axis_bandwidth"):
        plain[name] = {int(a): v for a, v in plain.get(name, {}).items()}
    plain["kinds"] = {kind: tuple(times) for kind, times in plain.get("kinds", {}).items()}
    plain["slack"] = math.inf if plain.get("slack") is None else plain["slack"]
    plain["wire"] = {getattr(torch, own): getattr(torch, other) for own, other in plain.get("wire", {}).items()}
    return CostModel(**plain)


def main(arguments: Sequence[str] | None = None) -> CostModel:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m dtensor.calibrate", description="measure the links of a mesh")
    parser.add_argument("--mesh", required=True, help="sizes of the axes, e.g. 2,4")
    parser.add_argument("--device", default="cpu", help="device type, cpu unless given")
    parser.add_argument("--elements", type=int, default=_LARGE, help="of the large transfer, 4 bytes each")
    parser.add_argument("--save", default="", help="a JSON file for `load`")
    given = parser.parse_args(arguments)
    mesh = init_device_mesh(given.device, tuple(int(n) for n in given.mesh.split(",")))
    model = measure(mesh, given.elements)
    if mesh.get_rank() == 0:
        sys.stdout.write(f"{model!r}\n")
        if given.save:
            save(model, given.save)
    return model


if __name__ == "__main__":
    main()
