"""Measure the links once: a `CostModel` for this machine.

    torchrun --nproc-per-node 8 -m dtensor.calibrate --mesh 2,4              prints the model, as Python
    torchrun --nproc-per-node 8 -m dtensor.calibrate --mesh 2,4 --save model.json

    >>> set_cost_model(load("model.json"))        # on all ranks

Along each axis of a mesh an all-gather of little data is timed (its launch) and one of much (its bandwidth); hops are
what a longer axis adds to the launch, `pairwise` what an all-to-all of little data takes more than the gather. All
ranks take the slowest rank's medians, so that all decide alike. The model decides by seconds alone (`slack` is
infinite).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from dtensor.comm import Communicator
from dtensor.cost import CostModel
from dtensor.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["load", "measure", "save"]

_SMALL, _LARGE = 64, 1 << 20


def measure(mesh: DeviceMesh, large: int = _LARGE, repeats: int = 15) -> CostModel:
    """The model of `mesh`'s links. All its ranks must call it; all get the same. `large`: elements of 4 bytes."""
    device = torch.device(mesh.device_type)
    delays: dict[int, float] = {}
    speeds: dict[int, float] = {}
    more = 0.0
    for axis, k in enumerate(mesh.shape):
        if k == 1:
            continue
        comm = mesh.comm(axis)
        shapes = lambda n, k=k: [(n,)] * k  # noqa: E731
        small, much = torch.ones(_SMALL, device=device), torch.ones(large, device=device)
        delay = _median(comm, lambda c=comm, x=small, s=shapes: c.all_gather(x, s(_SMALL)), repeats, device)  # type: ignore[misc]
        long = _median(comm, lambda c=comm, x=much, s=shapes: c.all_gather(x, s(large)), repeats, device)  # type: ignore[misc]
        swap = _median(comm, lambda c=comm, x=small, s=shapes: c.all_to_all([x] * c.size, s(_SMALL)), repeats, device)  # type: ignore[misc]
        more = max(more, swap / delay - 1)
        delays[axis] = delay
        speeds[axis] = much.numel() * 4 * (k - 1) / max(long - delay, delay / 10, 1e-9)
    whole = mesh.comm(tuple(range(mesh.ndim)))
    values = [*delays.values(), *speeds.values(), _copy_speed(large, repeats, device), -more]
    signed = [*values[: len(delays)], *(-v for v in values[len(delays) :])]
    slowest = whole.all_reduce(torch.tensor(signed, dtype=torch.float64, device=device), "max")
    agreed = slowest.abs().tolist()
    *agreed, more = agreed
    found_delays, found_speeds = agreed[: len(delays)], agreed[len(delays) : -1]
    axes = list(delays)
    if not axes:
        return CostModel(copy_bandwidth=agreed[-1], slack=math.inf)
    latency, hop = _line([mesh.shape[a] for a in axes], found_delays)
    own = [max(d - hop * (mesh.shape[a] - 1), d / 10) for a, d in zip(axes, found_delays)]
    return CostModel(
        latency=latency,
        hop=hop,
        pairwise=more,
        bandwidth=max(found_speeds),
        copy_bandwidth=agreed[-1],
        axis_latency=dict(zip(axes, own)),
        axis_bandwidth=dict(zip(axes, found_speeds)),
        slack=math.inf,
    )


def _line(sizes: Sequence[int], delays: Sequence[float]) -> tuple[float, float]:
    """Launch and seconds a hop, from the delays of axes of different sizes; an eleventh of the delay without these."""
    low, high = min(zip(sizes, delays)), max(zip(sizes, delays))
    hop = (high[1] - low[1]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    if hop <= 0:
        hop = min(delays) / 11
    return max(low[1] - hop * (low[0] - 1), low[1] / 10), hop


def _median(comm: Communicator, call: Callable[[], object], repeats: int, device: torch.device) -> float:
    times = []
    for i in range(repeats + 2):
        comm.all_reduce(torch.zeros(1, device=device))
        _finish(device)
        start = time.perf_counter()
        call()
        _finish(device)
        if i >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _copy_speed(large: int, repeats: int, device: torch.device) -> float:
    x, times = torch.ones(large, device=device), []
    for _ in range(repeats):
        start = time.perf_counter()
        x.clone()
        _finish(device)
        times.append(time.perf_counter() - start)
    return large * 4 / max(statistics.median(times), 1e-9)


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
