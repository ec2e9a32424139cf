"""The questions about GPUs that are smaller than a block: single ops, redistributions, losses, overlap.

Each function measures on all ranks and gives Markdown, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_timing as timing
import loss_parallel as losses
import side_by_side as bench
import torch
import torch.distributed as dist

Call = Callable[[], Any]


def ops(at: timing.Rank) -> str:
    """What does an op on small tensors cost the host, whose plan is cached, and how many kernels does it launch?"""
    rows, ratios = [], []
    tables: dict[str, dict[str, Call]] = {"plain": _ops(lambda t: t, at)}
    for name in bench.ENGINES:
        e = bench.engine(name)
        mesh = e.init_device_mesh(at.device.type, (at.world,))
        tables[name] = _ops(lambda t, e=e, mesh=mesh: e.DTensor.from_local(t, mesh, [e.Shard(0)]), at)  # type: ignore[misc]
    for op in tables["plain"]:
        found = timing.measure({name: table[op] for name, table in tables.items()}, at, rounds=12, loops=100)
        ratios.append(found["ours"].host.median / found["torch"].host.median)
        rows.append([
            op, *(bench.scaled(f.host, 1e6) for f in found.values()), timing.number(ratios[-1]),
            f"{found['plain'].kernels}, {found['torch'].kernels}, {found['ours'].kernels}",
        ])  # fmt: skip
    return "\n".join((
        "Host time of an op, us a call, median (quartiles); kernels of plain tensors, torch's engine, ours\n",
        bench.markdown(["op", *tables, "ours / torch", "kernels"], rows),
        f"\nGeometric mean of ours / torch: {bench.geometric_mean(ratios):.2f}",
    ))  # fmt: skip


def _ops(make: Callable[[torch.Tensor], Any], at: timing.Rank) -> dict[str, Call]:
    """The ops, on tensors of 16 rows a rank."""
    a, b = (make(torch.randn(16, 32, device=at.device)) for _ in range(2))
    f = torch.nn.functional
    return {
        "a + b": lambda: a + b,
        "a * 2.0": lambda: a * 2.0,
        "a.add_(b)": lambda: a.add_(b),
        "gelu": lambda: f.gelu(a),
        "softmax": lambda: torch.softmax(a, 1),
        "sum": lambda: a.sum(1),
        "transpose": lambda: a.t(),
        "cat": lambda: torch.cat([a, b], 1),
    }


SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
"""Bytes of the global tensor."""


def redistribution(at: timing.Rank) -> str:
    """How near to the links' bandwidth is a redistribution? Beside one plain collective that does the same."""
    if at.world == 1:
        return "Left out: nothing is sent on one rank."
    rows, best = [], 0.0
    for size in (1 << 14,) if at.tiny else SIZES:
        columns = 1 << (5 if size < 1 << 20 else 10)
        count = size // at.dtype.itemsize // columns // at.world * at.world
        for pair, plain in _plain(count, columns, at).items():
            calls: dict[str, Call] = {"plain": plain}
            src, dst = pair.split(" -> ")
            for name in bench.ENGINES:
                e = bench.engine(name)
                mesh = e.init_device_mesh(at.device.type, (at.world,))
                lay = {"R": e.Replicate(), "P": e.Partial(), "S0": e.Shard(0), "S1": e.Shard(1)}
                shape = (count // at.world if src == "S0" else count, columns)
                x = e.DTensor.from_local(torch.ones(shape, device=at.device, dtype=at.dtype), mesh, [lay[src]])
                calls[name] = lambda x=x, to=[lay[dst]]: x.redistribute(placements=to).to_local()  # type: ignore[misc]
            found = timing.measure(calls, at, loops=10 if size <= 1 << 20 else 3)
            moved = count * columns * at.dtype.itemsize * (at.world - 1) / at.world * (2 if pair == "P -> R" else 1)
            moved /= at.world if pair == "S0 -> S1" else 1
            speed = {name: moved / f.step.median / 1e9 for name, f in found.items()}
            best = max(best, speed["plain"])
            rows.append([
                f"{pair}, {size >> 10} KiB", *(timing.milliseconds(f.step) for f in found.values()),
                *(timing.number(s) for s in speed.values()), timing.ratio(speed["ours"], speed["plain"]),
                timing.ratio(found["ours"].step.median, found["torch"].step.median),
            ])  # fmt: skip
    return "\n".join((
        "Redistribution: ms, median (quartiles), and GB/s that a rank receives in it\n",
        bench.markdown(["layouts, bytes", *calls, *(f"{n} GB/s" for n in calls), "speed, ours / plain",
                        "ours / torch"], rows),
        f"\nThe most that a plain collective receives: {best:.2f} GB/s a rank.",
    ))  # fmt: skip


def _plain(count: int, columns: int, at: timing.Rank) -> dict[str, Call]:
    """One plain collective for each pair of layouts of a tensor of `count` rows, with the memory for its result."""
    n = at.world
    cut, whole = (torch.ones(c, columns, device=at.device, dtype=at.dtype) for c in (count // n, count))

    def gather() -> None:
        dist.all_gather_into_tensor(torch.empty_like(whole), cut)

    def scatter() -> None:
        dist.reduce_scatter_tensor(torch.empty_like(cut), whole)

    def reduce() -> None:
        dist.all_reduce(whole.clone())

    def exchange() -> None:
        sent = torch.cat([t.contiguous().view(-1) for t in cut.chunk(n, 1)])
        dist.all_to_all_single(torch.empty_like(sent), sent)

    return {"S0 -> R": gather, "P -> S0": scatter, "P -> R": reduce, "S0 -> S1": exchange}


def loss(at: timing.Rank) -> str:
    """What does cross entropy over sharded classes cost, forward and backward, in time and memory?"""
    kind = str(at.dtype).removeprefix("torch.")
    tiny = at.tiny
    logits = [(16, 256, "float32")] if tiny else [(64, 32768, kind), (8192, 131072, kind), (8192, 131072, "float32")]
    linear = [(16, 8, 256, "float32")] if tiny else [(4096, 4096, 131072, kind)]
    parts = []
    for title, cases, make, names in (
        ("Logits [rows, classes]", logits, losses.of_logits, (*bench.ENGINES, "hand")),
        ("Linear layer [rows, features, classes]", linear, losses.of_linear, (*bench.ENGINES, "fused", "hand")),
    ):
        rows = []
        for case in cases:
            *sizes, dtype = case
            steps, _ = make(*sizes, dtype, at.world, str(at.device))  # type: ignore[arg-type]
            found = timing.measure(steps, at)
            size = int(sizes[0]) * int(sizes[-1]) // at.world * getattr(torch, dtype).itemsize
            rows.append([
                f"{sizes} {dtype}", *(timing.milliseconds(found[n].step) for n in names),
                *(f"{found[n].memory / size:.2f}" for n in names),
                timing.ratio(found["ours"].step.median, found["torch"].step.median),
                timing.ratio(found["ours"].step.median, found["hand"].step.median),
            ])  # fmt: skip
        head = ["sizes", *names, *(f"{n} memory" for n in names), "ours / torch", "ours / hand"]
        parts += [f"{title}: ms, median (quartiles); memory beside the inputs in multiples of this rank's logits\n",
                  bench.markdown(head, rows) + "\n"]  # fmt: skip
    return "\n".join(parts)


def overlap(at: timing.Rank) -> str:
    """How much of an asynchronous redistribution is hidden behind compute that does not need it?

    Hidden is what both took one after the other, less what they take together, as a share of the shorter one.
    """
    if at.world == 1:
        return "Left out: nothing is sent on one rank."
    side, count = (32, 1 << 9) if at.tiny else (4096, 1 << 14)
    a = torch.ones(side, side, device=at.device, dtype=at.dtype) / side
    shape = (count // at.world, 1 << (4 if at.tiny else 12))

    def compute() -> torch.Tensor:
        x = a
        for _ in range(8):
            x = x @ a
        return x

    programs: dict[str, tuple[Call, Call]] = {"plain": _gather_by_hand(shape, at)}
    for name in bench.ENGINES:
        e = bench.engine(name)
        mesh = e.init_device_mesh(at.device.type, (at.world,))
        x = e.DTensor.from_local(torch.ones(shape, device=at.device, dtype=at.dtype), mesh, [e.Shard(0)])
        whole = [e.Replicate()]
        programs[name] = (
            lambda x=x, whole=whole: x.redistribute(placements=whole, async_op=True),
            lambda y: y.to_local() + 0,
        )
    rows = []
    for name, (start, use) in programs.items():
        found = timing.measure({
            "compute": compute,
            "redistribution": lambda start=start, use=use: use(start()),  # type: ignore[misc]
            "together": lambda start=start, use=use: (lambda y: (compute(), use(y)))(start()),  # type: ignore[misc]
        }, at)  # fmt: skip
        alone, moved, both = (f.step.median for f in found.values())
        hidden = (alone + moved - both) / min(alone, moved)
        rows.append([name, *(timing.milliseconds(f.step) for f in found.values()), timing.number(hidden)])
    return "\n".join((
        "Compute, a gather started before it, and both: ms, median (quartiles)\n",
        bench.markdown(["program", "compute", "redistribution", "together", "hidden"], rows),
    ))  # fmt: skip


def _gather_by_hand(shape: tuple[int, ...], at: timing.Rank) -> tuple[Call, Call]:
    """Start a gather; use its result."""
    part = torch.ones(shape, device=at.device, dtype=at.dtype)

    def start() -> tuple[torch.Tensor, Any]:
        out = part.new_empty(shape[0] * at.world, *shape[1:])
        return out, dist.all_gather_into_tensor(out, part, async_op=True)

    def use(y: tuple[torch.Tensor, Any]) -> torch.Tensor:
        y[1].wait()
        return y[0] + 0

    return start, use
