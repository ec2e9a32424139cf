"""What does a training step of a transformer block cost on GPUs, tensor-parallel over all of them?

Two sizes, a small one, in which the host is all, and a large one; each with the activations between the halves whole
on every rank, and sharded along the sequence. Four programs: both engines, ours lowered, and the same model by hand on
plain tensors with `torch.distributed` calls. Activations are [sequence, batch, features], as a cut of the first dim is
gathered and reduced without copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import block_steps
import gpu_timing as timing
import side_by_side as bench
import torch
import torch.distributed as dist
import torch.nn.functional as F
from block_steps import SPLIT

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """The block's sizes; `cut`: activations between the halves are sharded along the sequence."""

    cut: bool
    length: int
    batch: int
    width: int
    heads: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.length} x {self.batch} x {self.width}, {'sequence sharded' if self.cut else 'whole'}"


def sizes(at: timing.Rank) -> list[Sizes]:
    """What is measured."""
    small = {"length": 8, "batch": 2, "width": 32, "heads": 8, "hidden": 64}
    large = {"length": 2048, "batch": 2, "width": 4096, "heads": 32, "hidden": 16384}
    return [Sizes(cut, **s) for s in ([small] if at.tiny else [small, large]) for cut in (False, True)[at.tiny :]]


def parameters(s: Sizes, at: timing.Rank) -> dict[str, torch.Tensor]:
    """The whole parameters, the same everywhere."""
    made = block_steps.made(s.width, s.hidden, 0.02)
    return {n: t.to(at.device, at.dtype) for n, t in made.items()}


def part(n: str, t: torch.Tensor, at: timing.Rank) -> torch.Tensor:
    """This rank's part of a parameter."""
    return t.chunk(at.world, SPLIT[n])[at.rank].clone() if n in SPLIT else t


def batch(s: Sizes, at: timing.Rank) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and its targets, this rank's rows of the sequence where it is sharded."""
    torch.manual_seed(1)
    whole = (torch.randn(s.length, s.batch, s.width).to(at.device, at.dtype) for _ in range(2))
    x, y = (t.chunk(at.world)[at.rank].clone() if s.cut else t for t in whole)
    return x, y


def attention(h: torch.Tensor, p: dict[str, Any], heads: int, width: int) -> torch.Tensor:
    """Causal attention of `heads` heads, `width` features together; by hand on CPU, as torch's engine has no other."""
    t, b = h.shape[:2]
    q, k, v = (F.linear(h, p[n]).view(t, b, heads, -1).permute(1, 2, 0, 3) for n in ("wq", "wk", "wv"))
    if h.device.type == "cuda":
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mixed = torch.softmax(q @ k.transpose(-2, -1) * (width // heads) ** -0.5, -1) @ v
    return mixed.permute(2, 0, 1, 3).reshape(t, b, width)


def block(x: Any, p: dict[str, Any], s: Sizes, heads: int, width: int, enter: Any, leave: Any) -> Any:
    """The forward pass; `enter` brings activations to where the parts of a weight are, `leave` brings results back."""
    h = enter(F.layer_norm(x, (s.width,), p["g1"], p["c1"]))
    x = x + leave(F.linear(attention(h, p, heads, width), p["wo"])) + p["bo"]
    h = enter(F.layer_norm(x, (s.width,), p["g2"], p["c2"]))
    return x + leave(F.linear(F.gelu(F.linear(h, p["w1"], p["b1"])), p["w2"])) + p["b2"]


def finished(loss: torch.Tensor, opt: torch.optim.Optimizer) -> torch.Tensor:
    """Backward and the optimizer's step."""
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def of_engine(name: str, s: Sizes, at: timing.Rank) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """The step of one engine, and its arguments."""
    e = bench.engine(name)
    mesh = e.init_device_mesh(at.device.type, (at.world,), mesh_dim_names=("tp",))
    whole, between = [e.Replicate()], [e.Shard(0)] if s.cut else [e.Replicate()]

    def make(n: str, t: torch.Tensor) -> Any:
        layout = [e.Shard(SPLIT[n])] if n in SPLIT else whole
        return e.DTensor.from_local(part(n, t, at), mesh, layout).detach().requires_grad_()

    p = {n: make(n, t) for n, t in parameters(s, at).items()}
    opt = torch.optim.AdamW(list(p.values()), lr=1e-3, foreach=True)
    args = tuple(e.DTensor.from_local(t, mesh, between) for t in batch(s, at))

    def step(x: Any, y: Any) -> torch.Tensor:
        out = block(
            x, p, s, s.heads, s.width,
            lambda t: t.redistribute(placements=whole), lambda t: t.redistribute(placements=between),
        )  # fmt: skip
        return finished(F.mse_loss(out, y), opt)

    return step, args


class Enter(torch.autograd.Function):
    """All ranks use the activations on their parts of a weight: gathered if sharded, and their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: bool) -> torch.Tensor:
        """The whole activations."""
        ctx.cut = cut
        if not cut:
            return x.view_as(x)
        out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The sum of the gradients, or this rank's rows of it."""
        return summed(grad, ctx.cut), None


class Leave(torch.autograd.Function):
    """The sum of what the ranks computed, or this rank's rows of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: bool) -> torch.Tensor:
        """The sum."""
        ctx.cut = cut
        return summed(x, cut)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Every rank gets the whole gradient."""
        if not ctx.cut:
            return grad, None
        out = grad.new_empty(grad.shape[0] * dist.get_world_size(), *grad.shape[1:])
        dist.all_gather_into_tensor(out, grad.contiguous())
        return out, None


def summed(x: torch.Tensor, cut: bool) -> torch.Tensor:
    """The sum over the ranks, or this rank's rows of it; x is left alone."""
    if not cut:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


def by_hand(s: Sizes, at: timing.Rank) -> Step:
    """The same model on plain tensors."""
    p = {n: part(n, t, at).requires_grad_() for n, t in parameters(s, at).items()}
    opt = torch.optim.AdamW(list(p.values()), lr=1e-3, foreach=True)
    x, y = batch(s, at)
    shared = [
        t for n, t in p.items() if n not in SPLIT
    ]  # used on sharded activations: each rank has a part of the gradient

    def step() -> torch.Tensor:
        out = block(
            x, p, s, s.heads // at.world, s.width // at.world,
            lambda t: Enter.apply(t, s.cut), lambda t: Leave.apply(t, s.cut),
        )  # fmt: skip
        loss = F.mse_loss(out, y) / (at.world if s.cut else 1)
        loss.backward()
        if s.cut:
            flat = torch.cat([t.grad.flatten() for t in shared])  # type: ignore[union-attr]
            dist.all_reduce(flat)
            for t, g in zip(shared, flat.split([t.numel() for t in shared])):
                t.grad.copy_(g.view_as(t))  # type: ignore[union-attr]
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def lowered(s: Sizes, at: timing.Rank) -> Step:
    """Our engine's step, lowered."""
    import dtensor

    step, args = of_engine("ours", s, at)
    program = dtensor.lower(step, *args)
    return lambda: program(*args)


def on_engine(name: str, s: Sizes, at: timing.Rank) -> Step:
    """The step of one engine as a call without arguments."""
    step, args = of_engine(name, s, at)
    return lambda: step(*args)


PROGRAMS: dict[str, Callable[[Sizes, timing.Rank], Step]] = {
    "torch": lambda s, at: on_engine("torch", s, at),
    "ours": lambda s, at: on_engine("ours", s, at),
    "lowered": lowered,
    "by hand": by_hand,
}


def loss_of(step: Step, s: Sizes, name: str) -> float:
    """The whole loss of the next step."""
    loss: Any = step()
    if hasattr(loss, "full_tensor"):
        return float(loss.full_tensor())
    if s.cut and name == "by hand":
        dist.all_reduce(loss)
    return float(loss)


def begun(s: Sizes, at: timing.Rank) -> tuple[dict[str, Step], dict[str, float], list[str]]:
    """The programs, their first losses, and what is to be said of those that do not run."""
    steps: dict[str, Step] = {}
    first: dict[str, float] = {}
    notes = []
    for name, make in PROGRAMS.items():
        try:
            step = make(s, at)
            first[name] = loss_of(step, s, name)
            steps[name] = step
        except Exception as error:  # noqa: BLE001 - a benchmark shows what fails and goes on
            notes.append(f"{s}: {name} fails: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
    if max(first.values()) - min(first.values()) > 0.02 * max(first.values()):
        notes.append(f"{s}: the programs disagree: {first}")
    return steps, first, notes


def run(at: timing.Rank) -> str:
    """Tables: host time, time until the device is done, kernels and memory."""
    hosts, whole, counts, notes = [], [], [], []
    for s in sizes(at):
        if s.heads % at.world:
            notes.append(f"{s}: {s.heads} heads are not sharded over {at.world} ranks")
            continue
        steps, _, said = begun(s, at)
        notes += said
        found = dict.fromkeys(PROGRAMS, timing.FAILED) | timing.measure(steps, at)
        for table, times in ((hosts, [f.host for f in found.values()]), (whole, [f.step for f in found.values()])):
            theirs, ours, program, hand = (t.median for t in times)
            table.append([
                str(s), *map(timing.milliseconds, times), timing.ratio(ours, theirs), timing.ratio(program, hand)
            ])  # fmt: skip
        counts.append([
            str(s), *(f"{f.kernels}, {timing.number(f.busy * 1e3)} ms, {f.memory >> 10} KiB" for f in found.values())
        ])  # fmt: skip
    head = ["length x batch x width", *PROGRAMS]
    return "\n".join((
        "A step (forward, backward, AdamW): host ms, median (quartiles)\n",
        bench.markdown([*head, "ours / torch", "lowered / by hand"], hosts),
        "\nThe same until the device is done: ms, median (quartiles)\n",
        bench.markdown([*head, "ours / torch", "lowered / by hand"], whole),
        "\nThe same: kernels, time they run, memory\n",
        bench.markdown(head, counts),
        "\n" + "\n".join(notes or ["All programs give the same loss."]),
    ))  # fmt: skip
