"""What does a redistribution cost the host when its plan is new? Milliseconds, over all kinds of pairs of layouts.

The plans are those of all pairs over {R, S(0), S(1), split-factor S(0), P} on one and two axes, and of pairs drawn at
random on three and four, for even, uneven and large shapes; with the default cost model, and with one that decides by
seconds on links of different speed, as measured models do. Each plan is made three times and its best time counts. The
first calls are whole ones, on shapes that were not seen before, by both engines; communicators of several axes, which a
mesh makes once, are there before.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import random
import statistics
import time
from typing import Any

import side_by_side as bench
import torch

MESHES = {1: (16,), 2: (4, 4), 3: (2, 2, 4), 4: (2, 2, 2, 2)}
SHAPES = ((16, 16, 16), (13, 9, 11), (1024, 512, 64))
PAIRS = 250
"""Pairs a mesh and shape, at most."""
CALLS, WARM = 80, 16
"""First calls that count, and those before."""


def plan_times(axes: int, model: Any) -> list[float]:
    """Milliseconds of all plans on a mesh of so many axes."""
    from dtensor.mesh.device_mesh import init_device_mesh
    from dtensor.placement import Partial, Replicate, Shard, StridedShard
    from dtensor.redistribute.plan import _plan
    from dtensor.spec import Spec, contiguous_stride

    mesh = init_device_mesh("cpu", MESHES[axes])
    kinds = [Replicate(), Shard(0), Shard(1), StridedShard(0, split_factor=2), Partial()]
    layouts = list(itertools.product(kinds, repeat=axes))
    draw, times = random.Random(0), []
    for shape in SHAPES:
        pairs = [(draw.choice(layouts), draw.choice(layouts)) for _ in range(PAIRS)]
        if len(layouts) ** 2 <= 2 * PAIRS:
            pairs = list(itertools.product(layouts, layouts))
        for pair in pairs:
            src, dst = (Spec.make(mesh, p, shape, contiguous_stride(shape), torch.float32) for p in pair)
            if src is dst:
                continue
            found = []
            for _ in range(3):
                began = time.perf_counter()
                _plan.__wrapped__(src, dst, model)
                found.append((time.perf_counter() - began) * 1e3)
            times.append(min(found))
    return sorted(times)


def first_calls(axes: int) -> dict[str, list[float]]:
    """Milliseconds of the first redistribution of a shape, by engine, over some pairs."""
    times: dict[str, list[float]] = {name: [] for name in bench.ENGINES}
    for name in bench.ENGINES:
        e = bench.engine(name)
        mesh = e.init_device_mesh("cpu", MESHES[axes], mesh_dim_names=tuple("abcd"[:axes]))
        if name == "ours":
            for some in (some for n in range(2, axes + 1) for some in itertools.combinations(range(axes), n)):
                mesh.comm(some)
        one = {"R": e.Replicate(), "0": e.Shard(0), "1": e.Shard(1), "P": e.Partial()}
        draw = random.Random(1)
        gc.collect()
        gc.disable()
        for new in range(CALLS + WARM):
            text = ["".join(draw.choice(kinds) for _ in range(axes)) for kinds in ("R01P", "R01")]
            src, dst = ([one[kind] for kind in layout] for layout in text)
            shape = [64 * (new % 24 + 1), 64 * (new // 24 + 1)]
            for a, kind in enumerate(text[0]):
                if kind in "01":
                    shape[int(kind)] //= mesh.size(a)
            x = e.DTensor.from_local(torch.ones(shape), mesh, src, run_check=False)
            began = time.perf_counter()
            x.redistribute(placements=dst)
            if new >= WARM:
                times[name].append((time.perf_counter() - began) * 1e3)
        gc.enable()
    return {name: sorted(found) for name, found in times.items()}


def main() -> None:
    """Print two tables."""
    bench.start_fake_world(16)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    from dtensor.redistribute.cost_model import CostModel

    unlike = CostModel(hop=4e-6, axis_bandwidth={0: 1e9, 1: 2e9, 2: 2e9, 3: 3e9}, slack=math.inf)
    rows = []
    for name, model in (("default", CostModel()), ("by seconds, links unlike", unlike)):
        for axes in MESHES:
            times = plan_times(axes, model)
            at = [times[int(len(times) * share)] for share in (0.5, 0.9, 0.99)]
            rows.append([name, axes, len(times), *(f"{t:.3f}" for t in (*at, times[-1]))])
    print("Plans, cold, ms\n")
    print(bench.markdown(["cost model", "axes", "plans", "median", "90 %", "99 %", "slowest"], rows))
    rows = []
    for axes in MESHES:
        found = first_calls(axes)
        medians = {name: statistics.median(times) for name, times in found.items()}
        ratio = f"{medians['ours'] / medians['torch']:.2f}"
        rows.append([axes, *(f"{medians[n]:.3f} ({statistics.mean(found[n]):.3f})" for n in found), ratio])
    print("\nFirst calls on new shapes, ms, median (mean)\n")
    print(bench.markdown(["axes", *bench.ENGINES, "ours / torch"], rows))


if __name__ == "__main__":
    main()
