"""What does cross entropy over sharded classes cost: time, memory and collectives, forward and backward?

    python benchmarks/loss_parallel.py [--ranks 4] [--rounds 9]

Logits whose classes 4 ranks share, as rank 0 of a group in which collectives return at once: what is left is this
rank's work. Four programs take turns in one process:

    torch    F.cross_entropy inside torch's loss_parallel
    ours     the same inside ours
    hand     an autograd function on plain tensors with torch.distributed calls, the usual vocabulary-parallel
             one (Megatron-LM, 2019): three all-reduces, the softmax kept for backward
    fused    for the second table: linear_cross_entropy, which makes no logits

Memory is the most that tensors hold at one time beside the inputs, in multiples of this rank's logits.
"""

from __future__ import annotations

import argparse
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

CONTEXTS = {"torch": "torch.distributed.tensor.parallel", "ours": "dtensor.loss"}
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


def of_logits(
    rows: int, classes: int, dtype: str, ranks: int, device: str = "cpu"
) -> tuple[dict[str, Step], list[torch.Tensor]]:
    """A step of every program on logits, and the inputs that they share."""
    torch.manual_seed(0)
    local = torch.randn(rows, classes // ranks, device=device).to(getattr(torch, dtype))
    target = torch.randint(0, classes, (rows,), device=device)
    steps: dict[str, Step] = {}
    for name, module in CONTEXTS.items():
        e, context = bench.engine(name), import_module(module).loss_parallel
        mesh = e.init_device_mesh(device.partition(":")[0], (ranks,), mesh_dim_names=("tp",))
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
    rows: int, features: int, classes: int, dtype: str, ranks: int, device: str = "cpu"
) -> tuple[dict[str, Step], list[torch.Tensor]]:
    """A step of every program on the layer that makes the logits."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = torch.randn(rows, features, device=device).to(kind)
    weight = (torch.randn(classes // ranks, features, device=device) * 0.05).to(kind)
    target = torch.randint(0, classes, (rows,), device=device)
    steps: dict[str, Step] = {}
    for name, module in CONTEXTS.items():
        e, losses = bench.engine(name), import_module(module)
        mesh = e.init_device_mesh(device.partition(":")[0], (ranks,), mesh_dim_names=("tp",))
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


def tables(title: str, found: dict[str, dict[str, dict[str, Any]]], names: tuple[str, ...]) -> str:
    """Three tables: time, memory, collectives."""
    times, memory, collectives = [], [], []
    for label, of in found.items():
        ours = of["ours"]["ms"][0]
        ratios = [f"{ours / of[other]['ms'][0]:.2f}" for other in ("torch", "hand")]
        times.append([label, *(bench.Spread(*of[n]["ms"]) for n in names), *ratios])
        memory.append([label, *(f"{of[n]['memory']:.2f}" for n in names)])
        collectives.append([label, *(of[n]["collectives"] for n in names)])
    return "\n\n".join((
        f"{title}: milliseconds of a step, median (quartiles)",
        bench.markdown(["sizes", *names, "ours / torch", "ours / hand"], times),
        f"{title}: memory beside the inputs, in multiples of the logits",
        bench.markdown(["sizes", *names], memory),
        f"{title}: collectives",
        bench.markdown(["sizes", *names], collectives),
    ))  # fmt: skip


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    bench.start_fake_world(given.ranks)
    for title, cases, make, names in (
        ("Logits [rows, classes]", LOGITS, of_logits, ("torch", "ours", "hand")),
        ("Linear layer [rows, features, classes]", LINEAR, of_linear, ("torch", "ours", "fused", "hand")),
    ):
        found = {}
        for case in cases:
            *sizes, dtype = case
            steps, inputs = make(*case, given.ranks)  # type: ignore[operator]
            logits = int(sizes[0]) * int(sizes[-1]) // given.ranks * getattr(torch, str(dtype)).itemsize
            rounds = given.rounds if logits > 1 << 20 else 8 * given.rounds
            found[f"{sizes} {dtype}"] = measured(steps, inputs, logits, rounds)
        print(tables(title, found, names) + "\n")


if __name__ == "__main__":
    main()
