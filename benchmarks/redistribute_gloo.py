"""How long does a redistribution take on real processes? Both engines in one run, gloo, median milliseconds.

    python benchmarks/redistribute_gloo.py                                        4 and 8 ranks, 1 KiB to 16 MiB
    python benchmarks/redistribute_gloo.py --ranks 8 --sizes 268435456 --json benchmarks/results/redistribute_large.json
                                                                256 MiB, 8 ranks: 12 GiB of memory, most of an hour
    python benchmarks/redistribute_gloo.py --json redistribute.json --plot redistribute.png

Every pair of layouts is timed with both engines in turn, between barriers, the order reversed every time; a time is
that of the slowest rank. `received` are the bytes that the rank receives which receives most. Sizes are bytes of the
global tensor, 4-byte numbers. Small transfers take as long as the system takes to wake processes up: their quartiles
say how much a median means. What was measured of 256 MiB before is printed after it, as it was. The verdict counts a
pair as slower where its ratio is above 1.1 and the quartiles do not overlap.

`ours` decides by the default cost model, which asks for the fewest bytes; `measured` is ours by the model that
`dtensor.calibrate` measures of the same processes before, by seconds alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import side_by_side as bench
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LARGE = Path(__file__).parent / "results" / "redistribute_large.json"
"""Rows of sizes that take too long to be measured every time."""
PAIRS = [
    ("S0", "R"), ("S1", "R"), ("R", "S0"), ("S0", "S1"), ("S1", "S0"), ("P", "R"), ("P", "S0"), ("P", "S1"),
    ("S0,S0", "S1,S1"), ("S0,S1", "S1,S0"), ("S0,R", "R,S0"), ("S0,S0", "R,S0"), ("S0,S1", "R,R"),
    ("P,P", "S0,R"), ("P,P", "R,R"), ("S0,P", "R,S0"), ("P,S0", "S0,S0"),
]  # fmt: skip


def placements(e: Any, text: str) -> list[Any]:
    """Placements of an engine from "S0,R,P"."""
    kinds = {"R": e.Replicate, "P": e.Partial}
    return [kinds[p]() if p in kinds else e.Shard(int(p[1:])) for p in text.split(",")]


def repeats(nbytes: int) -> int:
    """How often a pair is timed."""
    return 31 if nbytes <= 1 << 17 else 15 if nbytes <= 1 << 21 else 9 if nbytes <= 1 << 25 else 3


def received(call: Any) -> int:
    """Bytes that arrive at the rank that receives most, by the collectives that `call` issues."""
    from dtensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        call()
    most = torch.tensor(float(sum(mode.get_comm_bytes().values())))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def under(model: Any, call: Any) -> None:
    """`call` by a cost model."""
    from dtensor.redistribute.cost_model import use_cost_model

    with use_cost_model(model):
        call()


def measure_links(mesh: Any) -> Any:
    """The cost model of a mesh of ours."""
    from dtensor.calibrate import measure

    return measure(mesh)


def timed(calls: dict[str, Any], times: int) -> dict[str, list[float]]:
    """Milliseconds of the slowest rank, by engine."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for i in range(times + 2):
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            calls[name]()
            mine = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if i >= 2:
                took[name].append(float(mine) * 1e3)
        order.reverse()
    return took


def worker(rank: int, ranks: int, sizes: Sequence[int], pairs: Sequence[tuple[str, str]], store: str, out: Any) -> None:
    """One rank: time all pairs, rank 0 reports."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    engines = {name: bench.engine(name) for name in bench.ENGINES}
    meshes = {}
    for name, e in engines.items():
        meshes[name, 1] = e.init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))
        meshes[name, 2] = e.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("y", "z"))
    models = {n: measure_links(meshes["ours", n]) for n in (1, 2)}
    rows = []
    for size in sizes:
        columns = 64 if size >= 1 << 14 else 16
        for src, dst in pairs:
            shape = [max(size // 4 // columns, 16), columns]
            for a, p in enumerate(src.split(",")):
                if p[0] == "S":
                    shape[int(p[1:])] //= meshes["ours", src.count(",") + 1].size(a)
            local, calls = torch.ones(shape), {}
            for name, e in engines.items():
                x = e.DTensor.from_local(local, meshes[name, src.count(",") + 1], placements(e, src), run_check=False)
                target = placements(e, dst)
                calls[name] = lambda x=x, target=target: x.redistribute(placements=target).to_local()
            axes = src.count(",") + 1
            calls["measured"] = lambda call=calls["ours"], model=models[axes]: under(model, call)
            moved = {name: received(call) for name, call in calls.items()}
            took = {name: bench.Spread.of(found) for name, found in timed(calls, repeats(size)).items()}
            row: dict[str, Any] = {"ranks": ranks, "bytes": size, "layouts": f"{src} -> {dst}"}
            row["ratio"] = took["ours"].median / took["torch"].median
            row["measured ratio"] = took["measured"].median / took["torch"].median
            row |= {f"{name} received": moved[name] for name in moved}
            rows.append(row | {f"{name} ms": [s.median, s.low, s.high] for name, s in took.items()})
    if rank == 0:
        out.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, sizes: Sequence[int], pairs: Sequence[tuple[str, str]] = PAIRS) -> list[dict[str, Any]]:
    """The rows of one number of ranks."""
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [context.Process(target=worker, args=(r, ranks, sizes, pairs, store, out)) for r in range(ranks)]
        for p in processes:
            p.start()
        rows: list[dict[str, Any]] = out.get(timeout=3600)
        for p in processes:
            p.join()
    return rows


def slower(row: dict[str, Any], name: str = "ours") -> bool:
    """True where ours is more than a tenth slower, beyond the spread of the measurement."""
    return bool(ratio(row, name) > 1.1 and row[f"{name} ms"][1] > row["torch ms"][2])


def ratio(row: dict[str, Any], name: str) -> float:
    """Median time over torch's."""
    return float(row["ratio" if name == "ours" else f"{name} ratio"])


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A table and a verdict."""
    spread = lambda found: f"{found[0]:.2f} ({found[1]:.2f}-{found[2]:.2f})"  # noqa: E731
    names = ["ours", *(["measured"] if all("measured ms" in r for r in rows) else [])]
    head = [
        "ranks", "bytes", "layouts", *(f"{name} received" for name in ("torch", *names)),
        *(f"{name} ms" for name in ("torch", *names)), *(f"{name} / torch" for name in names),
    ]  # fmt: skip
    body = [
        [r["ranks"], r["bytes"], r["layouts"], *(r[f"{name} received"] for name in ("torch", *names)),
         *(spread(r[f"{name} ms"]) for name in ("torch", *names)), *(f"{ratio(r, name):.2f}" for name in names)]
        for r in rows
    ]  # fmt: skip
    lines = [bench.markdown(head, body), ""]
    for name in names:
        late = [r for r in rows if slower(r, name)]
        more = [r for r in rows if r["torch received"] > 1.05 * r[f"{name} received"]]
        lines += [
            f"Geometric mean of {name} / torch: {bench.geometric_mean([ratio(r, name) for r in rows]):.2f}; "
            f"slower than 1.1: {len(late)} of {len(rows)}.",
            f"Where torch receives more ({len(more)}): geometric mean "
            f"{bench.geometric_mean([ratio(r, name) for r in more]):.2f}, "
            f"{sum(ratio(r, name) < 1 for r in more)} faster.",
        ]
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], file: str) -> None:
    """Ratio of the engines by size, one line a pair, one picture a number of ranks. Needs the extra `plot`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    worlds = list(dict.fromkeys(r["ranks"] for r in rows))
    figure, pictures = pyplot.subplots(1, len(worlds), figsize=(8 * len(worlds), 6), squeeze=False, sharey=True)
    for ranks, axes in zip(worlds, pictures[0], strict=True):
        some = [r for r in rows if r["ranks"] == ranks]
        for n, pair in enumerate(dict.fromkeys(r["layouts"] for r in some)):
            line = [(r["bytes"], r["ratio"]) for r in some if r["layouts"] == pair]
            style = ("-", "--", ":")[n // 10 % 3]
            axes.plot(*zip(*line, strict=True), style, marker="o", markersize=4, label=pair)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.axhline(1.1, color="red", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="bytes of the tensor", title=f"{ranks} gloo ranks")
        axes.set_yticks([0.125, 0.25, 0.5, 1.0, 2.0], ["1/8", "1/4", "1/2", "1", "2"])
    pictures[0][0].set_ylabel("time, ours / torch")
    pictures[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main() -> None:
    """Print one row a pair and size, and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", default="4,8", help="numbers of ranks, even, comma separated")
    parser.add_argument("--sizes", default="1024,65536,1048576,16777216", help="bytes, comma separated")
    parser.add_argument("--json", default="", help="a file for the rows; those of other sizes and ranks in it are kept")
    parser.add_argument("--plot", default="", help="a file for a picture of all rows, those of 256 MiB among them")
    parser.add_argument("--pairs", default="", help='some of the pairs, e.g. "P->R P,P->S0,R"; all unless given')
    given = parser.parse_args()
    some = given.pairs.split()
    pairs = [pair for pair in PAIRS if not some or "->".join(pair) in some]
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    rows = [row for ranks in numbers(given.ranks) for row in measure(ranks, numbers(given.sizes), pairs)]
    sys.stdout.write("On processes, ms of the slowest rank, median (quartiles)\n\n" + report(rows) + "\n")
    if not given.json and LARGE.exists():
        kept = json.loads(LARGE.read_text())
        sys.stdout.write(f"\nMeasured by itself, {kept['date']}, load average {kept['load']}\n\n")
        sys.stdout.write(report(kept["rows"]) + "\n")
    if given.json:
        file = Path(given.json)
        place = [f"{src} -> {dst}" for src, dst in PAIRS].index
        new = {(r["ranks"], r["bytes"], r["layouts"]) for r in rows}
        kept = json.loads(file.read_text())["rows"] if file.exists() else []
        rows = sorted(
            [r for r in kept if (r["ranks"], r["bytes"], r["layouts"]) not in new] + rows,
            key=lambda r: (r["ranks"], r["bytes"], place(r["layouts"])),
        )
        made = {"torch": torch.__version__, "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
        made["load"] = f"{os.getloadavg()[0]:.0f}"
        file.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n")
    if given.plot:
        new = {(r["ranks"], r["bytes"], r["layouts"]) for r in rows}
        large = json.loads(LARGE.read_text())["rows"] if LARGE.exists() else []
        plot(rows + [r for r in large if (r["ranks"], r["bytes"], r["layouts"]) not in new], given.plot)


if __name__ == "__main__":
    main()
