"""How long does a redistribution take on real processes? Both engines in one run, gloo, median milliseconds.

    python benchmarks/redistribute_gloo.py [--ranks 4] [--sizes 1024,1048576] [--repeats 9] [--plot file.png]

Every pair of layouts is timed with both engines in turn, between barriers; a time is that of the slowest rank.
Sizes are bytes of the global tensor, 4-byte numbers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PAIRS = [
    ("S0", "R"), ("S1", "R"), ("R", "S0"), ("S0", "S1"), ("S1", "S0"), ("P", "R"), ("P", "S0"), ("P", "S1"),
    ("S0,S0", "S1,S1"), ("S0,S1", "S1,S0"), ("S0,R", "R,S0"), ("S0,S0", "R,S0"), ("P,P", "S0,R"), ("S0,P", "R,S0"),
]  # fmt: skip
ENGINES = ("torch", "ours")


def engine(name: str) -> Any:
    """The modules of one engine."""
    if name == "ours":
        import dtensor

        return dtensor
    import torch.distributed.tensor as theirs
    from torch.distributed.device_mesh import init_device_mesh

    theirs.init_device_mesh = init_device_mesh  # type: ignore[attr-defined]
    return theirs


def placements(e: Any, text: str) -> list[Any]:
    """Placements of an engine from "S0,R,P"."""
    kinds = {"R": e.Replicate, "P": e.Partial}
    return [kinds[p]() if p in kinds else e.Shard(int(p[1:])) for p in text.split(",")]


def worker(rank: int, given: argparse.Namespace, store: str, out: Any) -> None:
    """One rank: time all pairs, rank 0 reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=given.ranks)
    meshes = {}
    for name in ENGINES:
        e = engine(name)
        meshes[name, 1] = e.init_device_mesh("cpu", (given.ranks,), mesh_dim_names=("x",))
        meshes[name, 2] = e.init_device_mesh("cpu", (2, given.ranks // 2), mesh_dim_names=("y", "z"))
    rows = []
    for size in given.sizes:
        columns = 64 if size >= 1 << 14 else 16
        for src, dst in PAIRS:
            inputs = {}
            for name in ENGINES:
                e, mesh = engine(name), meshes[name, src.count(",") + 1]
                shape = [max(size // 4 // columns, 16), columns]
                for a, p in enumerate(src.split(",")):
                    if p[0] == "S":
                        shape[int(p[1:])] //= mesh.size(a)
                inputs[name] = e.DTensor.from_local(torch.ones(shape), mesh, placements(e, src), run_check=False)
            times: dict[str, list[float]] = {name: [] for name in ENGINES}
            for i in range(given.repeats + 2):
                for name in ENGINES:
                    target = placements(engine(name), dst)
                    dist.barrier()
                    start = time.perf_counter()
                    inputs[name].redistribute(placements=target).to_local()
                    took = torch.tensor(time.perf_counter() - start)
                    dist.all_reduce(took, dist.ReduceOp.MAX)
                    if i >= 2:
                        times[name].append(float(took) * 1e3)
            rows.append((size, f"{src} -> {dst}", *(statistics.median(times[name]) for name in ENGINES)))
    if rank == 0:
        out.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def plot(rows: list[tuple[int, str, float, float]], file: str) -> None:
    """Ratio of the engines by size, one line a pair."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for pair in dict.fromkeys(r[1] for r in rows):
        some = [r for r in rows if r[1] == pair]
        axes.plot([r[0] for r in some], [r[3] / r[2] for r in some], marker="o", label=pair)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="bytes of the tensor", ylabel="time, ours / torch")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main() -> None:
    """Print one row a pair and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", default="1024,65536,1048576,16777216", help="bytes, comma separated")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--plot", default="")
    given = parser.parse_args()
    given.sizes = [int(n) for n in given.sizes.split(",")]
    context = mp.get_context("spawn")
    out = context.Queue()
    store = os.path.join(tempfile.mkdtemp(), "store")
    ranks = [context.Process(target=worker, args=(r, given, store, out)) for r in range(given.ranks)]
    for p in ranks:
        p.start()
    rows = out.get(timeout=3600)
    for p in ranks:
        p.join()
    sys.stdout.write(f"{'bytes':>10}  {'layouts':16} {'torch ms':>9} {'ours ms':>9} {'ratio':>6}\n")
    for size, pair, theirs, ours in rows:
        sys.stdout.write(f"{size:>10}  {pair:16} {theirs:9.3f} {ours:9.3f} {ours / theirs:6.2f}\n")
    if given.plot:
        plot(rows, given.plot)


if __name__ == "__main__":
    main()
