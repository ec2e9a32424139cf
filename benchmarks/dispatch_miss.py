"""What does the first call of an op on new shapes cost? Milliseconds, ours and torch's, on 1 to 4 mesh axes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import side_by_side as bench
import torch
import torch.nn.functional as F

MESHES = {1: (16,), 2: (4, 4), 3: (2, 2, 4), 4: (2, 2, 2, 2)}


def cases(e: Any, mesh: Any, new: int) -> dict[str, Callable[[], object]]:
    """The ops on shapes that only this value of `new` has: batch on the first axis, columns on the last."""
    axes = mesh.ndim
    whole = [e.Replicate()] * axes
    batch = [e.Shard(0), *whole[1:]]
    both = [e.Shard(0), *whole[2:], e.Shard(2)] if axes > 1 else [e.Shard(2)]
    columns, rows = [*whole[1:], e.Shard(1)], [*whole[1:], e.Shard(0)]

    def make(*shape: int, layout: list[object]) -> torch.Tensor:
        return e.DTensor.from_local(torch.randn(*shape), mesh, layout)

    n = 16 * (new + 1)
    x, y, z = (make(4, n, 16, layout=layout) for layout in (both, both, batch))
    bias, scale = make(16, layout=whole), make(16, layout=whole)
    flat, weight = make(n, 16, layout=batch), make(16, 8, layout=columns if axes > 1 else whole)
    tokens = e.DTensor.from_local(torch.randint(0, 8, (4, n)), mesh, batch)
    table = make(32, 16, layout=columns)
    parameters = [make(n + j, 16, layout=rows) for j in range(10)]
    return {
        "add": lambda: x + y,
        "add a bias": lambda: z + bias,
        "mm, weight by columns": lambda: torch.mm(flat, weight),
        "gelu": lambda: F.gelu(x),
        "layer_norm": lambda: F.layer_norm(z, (16,), scale, scale),
        "embedding": lambda: F.embedding(tokens, table),
        "softmax": lambda: torch.softmax(z, -1),
        "view": lambda: z.view(z.shape[0], n, 4, 4),
        "foreach_add, 10 tensors": lambda: torch._foreach_add(parameters, 1.0),
    }


def first_calls(axes: int, repeats: int) -> dict[str, dict[str, bench.Spread]]:
    """Seconds of a first call, by op and engine. The first repeat warms up what is not shape-dependent."""
    meshes = {}
    for name in bench.ENGINES:
        e = bench.engine(name)
        meshes[name] = e, e.init_device_mesh("cpu", MESHES[axes], mesh_dim_names=tuple("abcd"[:axes]))
    times: dict[tuple[str, str], list[float]] = {}
    for new in range(repeats + 1):
        for name, (e, mesh) in meshes.items():
            if name == "torch" and axes == 4 and new > 3:
                continue  # seconds a call
            for op, call in cases(e, mesh, new).items():
                began = time.perf_counter()
                try:
                    call()
                    took = time.perf_counter() - began
                except Exception:  # noqa: BLE001 - a benchmark shows what fails and goes on
                    took = math.inf
                times.setdefault((op, name), []).append(took)
    ops = dict.fromkeys(op for op, _ in times)
    return {op: {name: bench.Spread.of(times[op, name][1:]) for name in meshes} for op in ops}


def main() -> None:
    """Print one table."""
    bench.start_fake_world(16)
    found = {"x".join(map(str, MESHES[axes])): first_calls(axes, repeats=7) for axes in MESHES}
    rows: list[list[str]] = [[op] for op in next(iter(found.values()))]
    summary = []
    for mesh, table in found.items():
        for row in rows:
            ours, torchs = (bench.scaled(table[row[0]][name], 1e3) for name in ("ours", "torch"))
            row.append(f"{ours} / {torchs}")
        ratio = bench.geometric_mean([by["ours"].median / by["torch"].median for by in table.values()])
        worst = max(by["ours"].median for by in table.values()) * 1e3
        summary.append(f"- {mesh}: ours / torch {ratio:.3f}, our slowest {worst:.2f} ms")
    print("First call on new shapes, by mesh, ours / torch in ms, median (quartiles)\n")
    print(bench.markdown(["op", *found], rows))
    print("\nGeometric means:\n\n" + "\n".join(summary) + "\n")


if __name__ == "__main__":
    main()
