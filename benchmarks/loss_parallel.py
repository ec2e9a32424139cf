"""What does cross entropy over sharded classes cost: time, memory and collectives, forward and backward?

    python benchmarks/loss_parallel.py [--ranks 4] [--results FOLDER]

Logits whose classes 4 ranks share, as rank 0 of a group in which collectives return at once: what is left is this
rank's work. Four programs take turns in one process:

    torch    F.cross_entropy inside torch's loss_parallel
    ours     the same inside ours
    hand     an autograd function on plain tensors with torch.distributed calls, the usual vocabulary-parallel
             one (Megatron-LM, 2019): three all-reduces, the softmax kept for backward
    fused    for the second table: linear_cross_entropy, which makes no logits

Memory is the most that tensors hold at one time beside the inputs, in multiples of this rank's logits. The results go
to loss_parallel.json, and a plot beside it where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import side_by_side as bench
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))
from meter import Meter  # noqa: E402

CONTEXTS = {"torch": "torch.distributed.tensor.parallel", "ours": "loss"}
# rows, classes of all ranks, dtype
LOGITS = [(16, 4096, "float32"), (512, 32768, "float32"), (512, 32768, "bfloat16"), (2048, 32768, "float32")]
# rows, features, classes of all ranks, dtype
LINEAR = [(256, 256, 32768, "float32"), (1024, 256, 32768, "float32")]
Step = Callable[[], object]


class ByHand(torch.autograd.Function):
    """Cross entropy, one number a row, of this rank's logits [rows, classes / ranks]; target [rows] of all classes."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Three all-reduces of one number a row."""
        n = logits.shape[1]
        x = logits.float() if logits.dtype != torch.float32 else logits
        top = x.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        x = x - top.unsqueeze(1)
        index = target - dist.get_rank() * n
        elsewhere = (index < 0) | (index >= n)
        index = index.masked_fill(elsewhere, 0)
        picked = x.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0.0)
        dist.all_reduce(picked)
        softmax = x.exp_()
        total = softmax.sum(1)
        dist.all_reduce(total)
        softmax.div_(total.unsqueeze(1))
        ctx.dtype = logits.dtype
        ctx.save_for_backward(softmax, index, elsewhere)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The softmax that was kept becomes the gradient."""
        softmax, index, elsewhere = ctx.saved_tensors
        rows = torch.arange(len(index), device=index.device)
        softmax[rows, index] -= (~elsewhere).to(softmax.dtype)
        return softmax.mul_(grad.unsqueeze(1)).to(ctx.dtype), None


def of_logits(rows: int, classes: int, dtype: str, ranks: int) -> tuple[dict[str, Step], list[torch.Tensor]]:
    """A step of every program on logits, and the inputs that they share."""
    torch.manual_seed(0)
    local, target = torch.randn(rows, classes // ranks).to(getattr(torch, dtype)), torch.randint(0, classes, (rows,))
    steps: dict[str, Step] = {}
    for name, module in CONTEXTS.items():
        e, context = bench.engine(name), import_module(module).loss_parallel
        mesh = e.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        x = e.DTensor.from_local(local, mesh, [e.Shard(1)]).detach().requires_grad_()
        goal = e.DTensor.from_local(target, mesh, [e.Replicate()])

        def step(x: Any = x, goal: Any = goal, context: Any = context) -> None:
            x.grad = None
            with context():
                F.cross_entropy(x, goal).backward()

        steps[name] = step
    plain = local.detach().requires_grad_()

    def by_hand() -> None:
        plain.grad = None
        ByHand.apply(plain, target).mean().backward()

    steps["hand"] = by_hand
    return steps, [local, target]


def of_linear(
    rows: int, features: int, classes: int, dtype: str, ranks: int
) -> tuple[dict[str, Step], list[torch.Tensor]]:
    """A step of every program on the layer that makes the logits."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    hidden, weight = torch.randn(rows, features).to(kind), (torch.randn(classes // ranks, features) * 0.05).to(kind)
    target = torch.randint(0, classes, (rows,))
    steps: dict[str, Step] = {}
    for name, module in CONTEXTS.items():
        e, losses = bench.engine(name), import_module(module)
        mesh = e.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        h = e.DTensor.from_local(hidden, mesh, [e.Replicate()]).detach().requires_grad_()
        w = e.DTensor.from_local(weight, mesh, [e.Shard(0)]).detach().requires_grad_()
        goal = e.DTensor.from_local(target, mesh, [e.Replicate()])

        def step(h: Any = h, w: Any = w, goal: Any = goal, context: Any = losses.loss_parallel) -> None:
            h.grad = w.grad = None
            with context():
                F.cross_entropy(F.linear(h, w), goal).backward()

        steps[name] = step
        if name == "ours":

            def fused(h: Any = h, w: Any = w, goal: Any = goal, loss: Any = losses.linear_cross_entropy) -> None:
                h.grad = w.grad = None
                loss(h, w, goal).backward()

            steps["fused"] = fused
    h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()

    def by_hand() -> None:
        h.grad = w.grad = None
        ByHand.apply(F.linear(h, w), target).mean().backward()  # the gradient of h is left a pending sum, as in ours

    steps["hand"] = by_hand
    return steps, [hidden, weight, target]


def measured(steps: dict[str, Step], inputs: list[torch.Tensor], logits: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Per program: milliseconds (median, quartiles), memory in multiples of `logits` bytes, collectives."""
    times = bench.in_turns(steps, rounds=rounds, loops=1, warmup=2)
    found = {}
    for name, step in steps.items():
        step()
        held = sum(t.nbytes for t in inputs)
        with Meter(inputs) as meter:
            step()
        spread = bench.scaled(times[name], 1e3)
        found[name] = {
            "ms": [spread.median, spread.low, spread.high],
            "memory": (meter.peak - held) / logits,
            "collectives": sum(calls for calls, _ in meter.traffic.values()),
        }
    return found


def row(label: str, found: dict[str, dict[str, Any]], names: tuple[str, ...]) -> list[object]:
    """A line of a table: per program its time, memory and collectives; then ours against two others, in time."""
    cells: list[object] = [label]
    for name in names:
        f = found[name]
        cells.append(f"{bench.Spread(*f['ms'])}; {f['memory']:.2f}; {f['collectives']}")
    ours = found["ours"]["ms"][0]
    return [*cells, *(f"{ours / found[other]['ms'][0]:.2f}" for other in ("torch", "hand"))]


def plot(results: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Bars of time and memory, relative to torch's, where matplotlib is installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    names = ("torch", "ours", "hand", "fused")
    for axis, (what, title) in zip(axes, (("ms", "time"), ("memory", "memory beside the inputs")), strict=True):
        for i, name in enumerate(names):
            values = [
                (f[name][what][0] if what == "ms" else f[name][what])
                / (f["torch"][what][0] if what == "ms" else f["torch"][what])
                if name in f
                else 0.0
                for f in results.values()
            ]
            axis.bar([at + 0.2 * i for at in range(len(values))], values, 0.18, label=name)
        axis.set_xticks([at + 0.3 for at in range(len(results))], list(results), rotation=20, ha="right", fontsize=7)
        axis.set_title(f"{title}, torch = 1")
        axis.axhline(1.0, color="grey", linewidth=0.6)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Print the two tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parent / "results")
    given = parser.parse_args()
    bench.start_fake_world(given.ranks)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    print("Each cell: milliseconds of a step, median (quartiles); memory in multiples of the logits; collectives.\n")
    for title, cases, make, names in (
        ("[rows, classes] of logits", LOGITS, of_logits, ("torch", "ours", "hand")),
        ("[rows, features, classes] of a linear layer", LINEAR, of_linear, ("torch", "ours", "fused", "hand")),
    ):
        lines = []
        for case in cases:
            *sizes, dtype = case
            steps, inputs = make(*case, given.ranks)  # type: ignore[operator]
            logits = int(sizes[0]) * int(sizes[-1]) // given.ranks * getattr(torch, str(dtype)).itemsize
            rounds = given.rounds if logits > 1 << 20 else 8 * given.rounds
            label = f"{sizes} {dtype}"
            results[label] = measured(steps, inputs, logits, rounds)
            lines.append(row(label, results[label], names))
        print(f"{title} and the loss, classes over {given.ranks} ranks\n")
        print(bench.markdown(["sizes", *names, "ours / torch", "ours / hand"], lines) + "\n")
    facts = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
             "machine": platform.processor() or platform.machine(), "ranks": given.ranks}  # fmt: skip
    given.results.mkdir(exist_ok=True)
    (given.results / "loss_parallel.json").write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    plot(results, given.results / "loss_parallel.svg")


if __name__ == "__main__":
    main()
