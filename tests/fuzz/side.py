"""What a program's lines call, on plain tensors (`Side()`) and on DTensors (`Side(mesh)`).

A layout is a word for each axis of the mesh: `R`, `S0`, `S1/3` (a shard of dim 1 with split factor 3), `P(max)`.
This file needs nothing beside the engine: it is the head of every printed program.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

import dtensor
from dtensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard, init_device_mesh
from dtensor.propagation_rules.proof.parts import part_of
from dtensor.spec import Spec

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
          "i64": torch.int64, "i32": torch.int32, "u8": torch.uint8, "flag": torch.bool}  # fmt: skip


def placement(word: str) -> Placement:
    """The placement that a word of a layout stands for."""
    kind, first, second = re.fullmatch(r"([RSP])(?:\((\w+)\)|(\d+)(?:/\d+)?)?", word).groups()  # type: ignore[union-attr]
    if kind == "S":
        split = word.partition("/")[2]
        return StridedShard(int(second), split_factor=int(split)) if split else Shard(int(second))
    return Partial(first) if kind == "P" else Replicate()


def numbers(kind: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """`normal`, all different; `positive`, from 0.5; `mask`; `below N`, indices; `from -N`, integers of both signs."""
    g = torch.Generator().manual_seed(seed)
    if kind == "mask":
        return torch.rand(shape, generator=g) < 0.6
    word, _, n = kind.partition(" ")
    if word in ("below", "from"):
        low, high = (0, int(n)) if word == "below" else (int(n), 1 - int(n))
        return torch.randint(low, high, tuple(shape), generator=g)
    values = torch.randn(shape, generator=g, dtype=torch.float64)
    return values.abs() + 0.5 if kind == "positive" else values


class Side:
    """The names that a program's lines use. `disturbed` is how far values are moved off, relative to themselves."""

    def __init__(self, mesh: Any = None, disturbed: float = 0.0, seed: int = 0) -> None:
        self.mesh, self.disturbed = mesh, disturbed
        self.noise = torch.Generator().manual_seed(seed)
        own = {name: getattr(self, name) for name in ("leaf", "moved", "relocal", "grads", "scaled")}
        self.names: dict[str, Any] = {"torch": torch, "F": F, **own, **DTYPES}

    def run(self, line: str) -> None:
        """Run one line of the program."""
        before = set(self.names)
        exec(line, self.names)
        if self.disturbed:
            for name in set(self.names) - before:
                self.disturb(self.names[name])

    def disturb(self, t: Any) -> None:
        """Move the values of `t` as rounding might, unseen by autograd."""
        if isinstance(t, torch.Tensor) and t.is_floating_point() and 0 not in t.stride():
            noise = torch.randn(t.shape, generator=self.noise, dtype=torch.float64)
            with torch.no_grad():
                t.data.copy_(t.data.double() * (1 + self.disturbed * noise))

    def leaf(self, kind: str, shape: Sequence[int], dtype: str, seed: int, layout: str, grad: bool = False) -> Any:
        """A tensor of the caller's, in a layout."""
        full = numbers(kind, shape, seed).to(DTYPES[dtype])
        if self.mesh is None:
            return full.requires_grad_(grad)
        placements = tuple(placement(word) for word in layout.split())
        spec = Spec.make(self.mesh, placements, full.shape, full.stride(), full.dtype)
        return DTensor(part_of(full, spec), spec, requires_grad=grad)

    def moved(self, x: Any, layout: str) -> Any:
        """`x` in another layout."""
        if self.mesh is None:
            return x.clone()
        return x.redistribute(placements=[placement(word) for word in layout.split()])

    def relocal(self, x: Any) -> Any:
        """`x` as a program of local tensors sees it, and back."""
        if self.mesh is None:
            return x.view_as(x) if torch.is_grad_enabled() else x.detach()
        local = x.to_local()
        return DTensor.from_local(local, self.mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())

    def scaled(self, x: Any) -> Any:
        """Twice the sum along the last dim of what a rank has, where all of a row is on the rank."""
        if self.mesh is None:
            return x.sum(-1) * 2
        whole = [Replicate() if getattr(p, "dim", None) == x.ndim - 1 or p.is_partial() else p for p in x.placements]
        x = x.redistribute(placements=whole)
        local = x.to_local().sum(-1) * 2
        shape, stride = x.shape[:-1], torch.empty(x.shape[:-1], device="meta").stride()
        return DTensor.from_local(local, self.mesh, x.placements, run_check=False, shape=shape, stride=stride)

    def grads(self, y: Any, xs: Sequence[Any], create_graph: bool = False) -> list[Any]:
        """The gradients of `y`, zeros where it does not depend on an input."""
        found = torch.autograd.grad(y, xs, create_graph=create_graph, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, found)]


def show(program: str, mesh_shape: tuple[int, ...]) -> None:
    """Run a program on plain tensors and on simulated ranks; print what there is at the end, side by side."""

    def run(mesh: Any = None) -> dict[str, tuple[Any, ...]]:
        side, seen = Side(mesh), {}
        for line in program.strip().split("\n"):
            side.run(line)
        for name, t in side.names.items():
            if isinstance(t, torch.Tensor):
                for what, u in ((name, t), (f"{name}.grad", t.grad if t.is_leaf else None)):
                    if u is not None:
                        whole = u.detach().full_tensor() if isinstance(u, DTensor) else u.detach().clone()
                        seen[what] = (u.dtype, whole, getattr(u, "placements", ""))
            elif name[0] == "v" and name[1:].isdigit():
                seen[name] = (type(t), torch.tensor(float(t)), "")
        return seen

    want = run()
    got = dtensor.simulate(torch.Size(mesh_shape).numel())(lambda: run(init_device_mesh("cpu", mesh_shape)))
    for name, (dtype, value, _) in want.items():
        print(f"{name}: {dtype} {list(value.shape)} plain {value.tolist()}")
        for rank, (other, found, layout) in enumerate(seen[name] for seen in got):
            near = {"rtol": 1e-2 if dtype is torch.bfloat16 else 1e-4, "atol": 1e-4}
            alike = (other, found.shape) == (dtype, value.shape)
            if not alike or not torch.allclose(found.double(), value.double(), **near):
                print(f"    rank {rank}: {other} {list(found.shape)} {found.tolist()} {layout}")
