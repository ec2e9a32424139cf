"""A lowered program as a CUDA graph: one launch for the whole step, the collectives of NCCL included.

    step = dtensor.lower(train_step, model, optimizer, x)
    fast = step.capture(model, optimizer, x)          # runs on copies to warm up, then captures; changes nothing
    loss = fast(model, optimizer, x)                  # replays: on new inputs, the same parameters

A graph repeats the same kernels on the same addresses, and the host takes no part. So what must hold is checked before:
every input is on one CUDA device, nothing that the program does to generators, to containers or to the memory of its
inputs needs the host, and its collectives belong to NCCL groups. At a call the arguments' tensors are copied to where
the graph reads them; parameters, buffers and optimizer state must lie where they lay. Results and gradients are copies,
so that the next call does not overwrite them.

All that `dtensor.lower` compares is compared here too; where another program would be needed, a call is an error, not a
new capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtensor.dispatch import random as rng
from dtensor.lowering.guards import Variant, flatten, surroundings
from dtensor.lowering.program import Program
from dtensor.lowering.record import LowerError, refuse

__all__ = ["Captured"]


class Graph:
    """A CUDA graph: `warm` runs outside of it, `record` captures, `replay` repeats what was captured."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def warm(self, run: Callable[[], Any], times: int) -> None:
        """Run on another stream, as capturing does, so that libraries have their workspaces."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(times):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def record(self, run: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """Capture `run()`; what it gives is filled at every replay."""
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            return run()

    def replay(self) -> None:
        """Queue what was captured on the current stream."""
        self._graph.replay()


class Captured:
    """What `Lowered.capture` gives: call it with the arguments of the function."""

    def __init__(self, name: str, variant: Variant, leaves: Sequence[Any], warmup: int, graph: Any = None) -> None:
        self._name, self._variant, self._program = name, variant, variant.program
        with variant.placed(leaves) as (objects, plain):
            given = self._program.given(objects, plain)
        self._fed = _fed(self._program, variant)
        _check(self._program, given, self._fed, name)
        self._graph = Graph() if graph is None else graph
        self._static = [_copied(t) if i in self._fed else t for i, t in enumerate(given)]
        self._graph.warm(lambda: self._program.compute([_copied(t) for t in self._static]), warmup)
        self._values: tuple[torch.Tensor, ...] = self._graph.record(lambda: self._program.compute(self._static))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = flatten(args, kwargs)
        if not self._variant.suits(leaves, structure, surroundings()):
            raise LowerError(
                f"{self._name} was captured for other arguments or another state: "
                f"{self._variant.difference(leaves, structure)}; capture it again, or call the lowered function"
            )
        with self._variant.placed(leaves) as (objects, plain):
            for i, (now, static) in enumerate(zip(self._program.given(objects, plain), self._static, strict=True)):
                if now is static or now.data_ptr() == static.data_ptr():
                    continue
                if i not in self._fed:
                    raise LowerError(
                        f"{self._name}: {self._input(i)} lies elsewhere than when the graph was captured (it was "
                        "replaced, or its data was); capture the function again"
                    )
                static.copy_(now)
            self._graph.replay()
            values = [v.clone(memory_format=torch.preserve_format) for v in self._values]
            return self._program.settle(objects, plain, values)

    def _input(self, at: int) -> str:
        return next(n for n, (kind, i) in _inputs(self._program) if (kind, i) == self._program.used[at])


def _inputs(program: Program) -> list[tuple[str, tuple[str, Any]]]:
    """Name and source of every placeholder that is used."""
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    return [(node.name, source) for node, source in zip(nodes, program.inputs, strict=True) if node.users]


def _fed(program: Program, variant: Variant) -> frozenset[int]:
    """The inputs of the graph that are tensors among the arguments."""
    objects, plain = variant.arguments
    return frozenset(
        i for i, (kind, at) in enumerate(program.used) if (at in plain if kind == "plain" else at in objects)
    )


def _copied(t: torch.Tensor) -> torch.Tensor:
    """A copy of `t` that lies in memory as `t` does: strides and offset."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    out = torch.empty(t.storage_offset() + span, dtype=t.dtype, device=t.device)
    return out.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)


# ------------------------------------------------------------ what must hold
_HOST = ("seeded_begin", "get_rng_state", "set_rng_state", "manual_seed")


def device_of(given: Sequence[torch.Tensor]) -> torch.device | None:
    """The CUDA device that all inputs are on."""
    found = {t.device for t in given}
    return found.pop() if len(found) == 1 and next(iter(found)).type == "cuda" else None


def _check(program: Program, given: Sequence[torch.Tensor], fed: frozenset[int], name: str) -> None:
    """LowerError for a program whose replay would not be what a call is; the same on all ranks."""
    call = f"{name}.capture"
    if device_of(given) is None:
        elsewhere = [n for (n, _), t in zip(_inputs(program), given, strict=True) if t.device.type != "cuda"]
        raise refuse(
            call, f"inputs on {sorted({str(t.device) for t in given})}, {', '.join(elsewhere[:4])} among them",
            "a CUDA graph runs on one device, and reads nothing from the host",
            "keep all inputs there; an optimizer's step counts too: Adam(..., capturable=True)",
        )  # fmt: skip
    if program.boxes or program.locals:
        what = "puts something new into a container" if program.boxes else "gives an input other memory"
        raise refuse(
            f"{call}: a program that {what}", "", "a replay does the same to the same memory",
            "call the step once before, as an optimizer's first step makes its state; write in place",
        )  # fmt: skip
    renewed = {at for at, template in program.grads if template is not None}
    if any(kind in ("grad", "own grad") and at in renewed for kind, at in program.used):
        raise refuse(
            f"{call}: a program that reads a gradient and puts another in its place", "",
            "a replay reads the same memory", "zero_grad(set_to_none=False), or leave no gradient behind",
        )  # fmt: skip
    written = {("plain", at) for at in program.plain_written} | {("object", at) for at in program.written}
    for i in fed:
        kind, at = program.used[i]
        if ((kind if kind == "plain" else "object"), at) in written:
            raise refuse(
                f"{call}: a program that writes to an argument", _inputs(program)[i][0],
                "arguments are copied to where the graph reads them", "keep what is written in a module",
            )  # fmt: skip
    for node in program.graph.nodes:
        if node.op == "call_function":
            _check_node(node, call)


def _check_node(node: Any, call: str) -> None:
    target = node.target
    named = getattr(target, "__name__", "")
    if named in _HOST or (named == "common_stream_begin" and not rng.seeded_alike()):
        raise refuse(
            f"{call}: random numbers", str(node.meta.get("call") or named), "the generator would be seeded by the host",
            "draw outside and pass the numbers, or, ranks seeded alike, `with dtensor.random.equal_seeds():`",
        )  # fmt: skip
    if getattr(target, "__module__", "") == "communicator":
        raise refuse(f"{call}: collectives of simulated ranks", named, "they are made by the host", "run on NCCL")
    schema = getattr(target, "_schema", None)
    if schema is None:
        return
    if schema.name.startswith("_c10d_functional::") and not schema.name.endswith("wait_tensor"):
        group = next((a for a in reversed(node.args) if isinstance(a, str)), "")
        backend = dist.get_backend_config(dist.distributed_c10d._resolve_process_group(group))  # type: ignore[arg-type]
        if "nccl" not in str(backend):
            raise refuse(f"{call}: a collective of {backend}", str(node), "the host takes part in it", "run on NCCL")
    made = node.meta.get("val")
    sources = [n.meta.get("val") for n in node.all_input_nodes]
    crosses = isinstance(made, torch.Tensor) and made.device.type == "cpu"
    if crosses and any(isinstance(s, torch.Tensor) and s.device.type != "cpu" for s in sources):
        raise refuse(
            f"{call}: a copy to the host", str(node), "the host takes no part in a replay", "return the tensor"
        )
